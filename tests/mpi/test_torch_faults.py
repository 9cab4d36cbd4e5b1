"""``rebuild()``: PyTorch's default group after the death of ranks, under MPI and over a separate store."""

import os
import re
import signal
import subprocess

import pytest
from crews import program


def test_under_mpi(mpirun, ulfm):
    """Two of four ranks die, one after the other, the first rank among them."""
    env = {"UCCH_EMULATE": "nvidia:2,amd:2"}
    job = mpirun("torch_faults_cases:survivors", 4, args=[[2, 0]], env=env, mpi_args=ulfm)
    assert job.stdout.count("right: ") == 2, job.output


@pytest.fixture
def port():
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.fixture
def launch(tmp_path, pythons, request):
    """Call as ``launch(case, layout, *args, **how)``: starts a rank of a job without MPI. It ends with the test, and
    writes its output into the file ``said``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    started = []

    def start(case, layout, *args, **how):
        own = env | {"UCCH_EMULATE": layout, "OMP_NUM_THREADS": "1"}
        words = program(tmp_path, f"torch_faults_cases:{case}", args, request.path)
        with (tmp_path / "said").open("ab") as said:
            how = {"stdout": said, "stderr": subprocess.STDOUT, "env": own} | how
            started.append(subprocess.Popen([*pythons.of(request.path, own), *words], **how))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def ends(ranks, room):
    return [rank.wait(60 * room) for rank in ranks]


def test_over_a_store(port, launch, tmp_path, room):
    """The first rank is killed in a job without MPI; the survivors succeed."""
    ranks = [launch("survivors", "nvidia:2,amd:1", [0], rank, 3, port) for rank in range(3)]
    ended, said = ends(ranks, room), (tmp_path / "said").read_text()
    assert ended == [-signal.SIGKILL, 0, 0] and said.count("right: ") == 2, said


def test_the_store_is_gone(launch, tmp_path, room):
    with launch("serve", "", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as store:
        port = int(store.stdout.readline())
        ranks = [launch("the_store_is_gone", "nvidia:2,amd:1", rank, port, store.pid) for rank in range(3)]
        ended, said = ends(ranks, room), (tmp_path / "said").read_text()
    assert ended == [0, 0, -signal.SIGKILL] and said.count("right: ") == 3, said
    for rank in range(2):
        assert re.search(f"^rank {rank}: .*rank 2 has left the job or died", said, re.M), said


@pytest.fixture
def come_back(launch, tmp_path, room):
    """Call as ``come_back(case, killed, *args)``: three ranks, each started with its number, 0, and the arguments. The
    ranks in ``killed`` are killed in this order and restarted with another number instead of 0; then all succeed."""

    def run(case, killed, *args):
        def start(rank, number):
            return launch(case, "nvidia:1,amd:2", rank, number, *args)

        ranks, said = [start(rank, 0) for rank in range(3)], tmp_path / "said"
        for rank, again in killed.items():
            assert ranks[rank].wait(60 * room) == -signal.SIGKILL, said.read_text()
            ranks[rank] = start(rank, again)
        assert ends(ranks, room) == [0, 0, 0] and said.read_text().count("right: ") == 3, said.read_text()

    return run


@pytest.mark.parametrize("how", ["process_group", "torchft"])
def test_ranks_that_are_started_again_join(port, come_back, how):
    """Rank 0 dies and returns, and then rank 1 does; groups of the present ranks are recreated, without MPI."""
    if how == "torchft":
        pytest.importorskip("torchft", reason="needs torchft: pip install torchft")
    come_back("comes_back", {0: 1, 1: 2}, port, how)


def test_libraries_that_are_not_closed_in_time(port, come_back, tmp_path):
    come_back("not_closed_in_time", {}, port)
    assert (tmp_path / "said").read_text().count("after all") == 3


def test_torchfts_manager(come_back):
    pytest.importorskip("torchft", reason="needs torchft: pip install torchft")
    from torchft.coordination import LighthouseServer

    light = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000)
    come_back("managed", {1: 1}, light.address())
    light.shutdown()
