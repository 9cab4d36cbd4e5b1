"""Ranks that die, and survivors that go on (``Revoke``, ``Agree``, ``Shrink``): never wrong data, never a hang."""

import random
import re
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[1] / "cluster"
#: Cases -> ranks, how many lines say that results are correct, and the layout.
SURVIVORS = {
    "revocation": (4, 12, "nvidia:2,amd:2"), "fails_alone": (3, 2, ""), "does_not_come": (2, 1, ""),
    "dies_at_its_very_end": (3, 3, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SURVIVORS)
def test_survivors(mpirun, ulfm, case):
    ranks, right, layout = SURVIVORS[case]
    env = {"UCCH_TIMEOUT": "200", "UCCH_EMULATE": layout}
    job = mpirun(f"faults_cases:{case}", ranks, env=env, mpi_args=ulfm)
    assert job.said("right") == right and ("of no use any more" in job.stderr) == (case == "fails_alone"), job.output


def test_survivors_of_deaths(mpirun, ulfm):
    cases = ["deaths_are_acknowledged", "deaths_end_the_making", "a_death_while_contexts_are_made"]
    layout = "host:6," + random.choice(["nvidia:3", "nvidia:2,amd:1"])
    env = {"UCCH_TIMEOUT": "200", "UCCH_EMULATE": layout}
    job = mpirun("faults_cases:in_threes", 9, args=cases, env=env, mpi_args=ulfm)
    assert job.said("right") == 6, job.output


def test_a_rank_without_memory_for_its_peers_segments(mpirun, ulfm):
    """libucc gives a collective up with a status that is not an error: the call must raise, or have correct data.

    libucs may abort the rank without memory, in its logging, which cannot allocate, or on purpose.
    """
    more, env = random.choice([1 << 16, 1 << 20]), {"UCCH_EMULATE": "nvidia:1,amd:3"}
    job = mpirun("faults_cases:without_memory", 4, args=[more], env=env, mpi_args=ulfm, check=False)
    said = re.findall(r"^(\w+)\.$", job.stdout, re.M)
    ended = re.search("ucs_log_dispatch|Fatal: failed to", job.stderr) is not None
    assert "wrong" not in said and len(said) == 4 - ended, f"{more} bytes\n{job.output}"


def test_what_was_not_received_is_not_passed_on(mpirun, ulfm, tmp_path, compiled):
    """After a failed read from a dead peer libucc's ring passes on garbage, and the next rank's part succeeds.

    No rank dies here, but survivors make the failed connections again.
    """
    library = compiled(tmp_path / "broken.so", "-O1", "-shared", "-fPIC", CLUSTER / "broken_read.c", "-ldl")
    env = {"UCCH_EMULATE": "nvidia:2,amd:2", "LD_PRELOAD": str(library), "UCCH_TIMEOUT": "100"}
    args = [str(library), str(random.randrange(10**6)), "50000", "6", "100"]
    job = mpirun(CLUSTER / "broken_read_job.py", 4, args=args, env=env, mpi_args=ulfm)
    assert job.said("right: rank") == 4, (args, job.output)


@pytest.mark.parametrize("at", [("UCCHN", "at first"), ("UCCHB", "shrink")])
def test_a_rank_without_connections_is_refused(mpirun, ulfm, at):
    env = {"UCCH_EMULATE": "nvidia:1,amd:3", "UCCH_TIMEOUT": "1000"}
    job = mpirun("faults_cases:without_connections", 4, args=at, env=env, mpi_args=ulfm, check=False)
    assert job.said("right") == 4, job.output


def test_refused_where_mpirun_ends_the_job(crew, ulfm):
    crew("faults_cases:refused_where_mpirun_ends_the_job")
