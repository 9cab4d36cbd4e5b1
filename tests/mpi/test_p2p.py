"""Messages in jobs of their own: interruptions, dead peers, sizes. test_cases.py has MPI's rules, and failures."""

import os
import random

import pytest

TIME = {"UCCH_TIMEOUT": "200"}


def test_interrupted_anywhere(mpirun):
    assert mpirun("p2p_cases:interrupted_anywhere", args=[random.random()], env=TIME).said("end") == 2


def test_messages_of_mpi(mpirun):
    env = {"UCCH_TIMEOUT": "20", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}
    assert mpirun("p2p_cases:messages_of_mpi", args=[random.randrange(10**6)], env=env).said("end") == 2


def test_a_peer_ends(mpirun):
    mpirun("p2p_cases:a_peer_ends", 3, env={"UCCH_TIMEOUT": "1000"})


@pytest.mark.parametrize(("case", "ranks"), [("a_peer_dies", 3), ("a_sender_dies", 2)])
def test_deaths(mpirun, recovery, case, ranks):
    """Where mpirun lets the other ranks live; otherwise they may end before they can print anything."""
    if not recovery:
        pytest.skip("needs Open MPI 5")
    job = mpirun(f"p2p_cases:{case}", ranks, env=TIME, mpi_args=recovery, check=False)
    assert (job.returncode, job.said("end")) == (0, ranks - 1), job.output


@pytest.mark.slow
def test_two_gib_and_more(mpirun):
    """UCCH_TEST_GIB sets another size (4 GiB was tried)."""
    args = [float(os.environ.get("UCCH_TEST_GIB", "2.0625")), random.randrange(10**6)]
    mpirun("p2p_cases:two_gib_and_more", args=args, env={"UCCH_TIMEOUT": "120"}, timeout=170)
