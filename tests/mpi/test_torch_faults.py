"""``rebuild()``: PyTorch's default group after the death of ranks, under MPI and over a separate store."""

import functools
import os
import re
import signal
import subprocess
from typing import NamedTuple

import pytest

JOB = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import ucc_hetero.torch

dying = [int(word) for word in sys.argv[1].split(",")]
if len(sys.argv) > 2:
    rank, size, port = map(int, sys.argv[2:])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("ucch", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=200))
else:
    dist.init_process_group("ucch", timeout=timedelta(seconds=200))
me, size = dist.get_rank(), dist.get_world_size()
other = dist.new_group(list(range(size)))
for round, victim in enumerate(dying):
    try:
        for step in range(1_000_000):
            x = torch.full((1000,), float(me + step))
            if me == victim and step == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 3:
                dist.all_reduce(x)
            else:
                dist.all_reduce(x, async_op=True).wait()
    except RuntimeError as error:
        print(f"rank {me}: {error}", flush=True)
    ucc_hetero.torch.rebuild()
    left = [r for r in range(size) if r not in dying[: round + 1]]
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(me), len(left))
    x = torch.tensor([float(me)])
    dist.all_reduce(x)
    assert x.item() == sum(left), (x, left)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.full((2, 4), float(me))).sum().backward()
want = torch.full((4, 4), 2.0 * sum(left) / len(left))
assert torch.allclose(model.module.weight.grad, want), model.module.weight.grad
group = dist.new_group(list(range(len(left))))
dist.barrier(group)
print(f"right: {me}", flush=True)
dist.destroy_process_group()
"""


def test_under_mpi(mpirun, ulfm):
    """Two of four ranks die, one after the other, the first rank among them."""
    job = mpirun(JOB, 4, args=["2,0"], env={"UCCH_EMULATE": "nvidia:2,amd:2"}, mpi_args=ulfm)
    assert job.stdout.count("right: ") == 2, job.output


class Server(NamedTuple):
    port: int
    pid: int


@pytest.fixture
def port():
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.fixture
def store(tmp_path, pythons, request):
    program = tmp_path / "store.py"
    program.write_text(
        "import torch.distributed as d, sys; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    words = [*pythons.of(request.path, {}), str(program)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Server(int(process.stdout.readline()), process.pid)
        process.kill()


@pytest.fixture
def launch(tmp_path, pythons, request):
    """Call as ``launch(script, layout, *words)``: starts a rank of a job without MPI. It ends with the test, and writes
    its output into the file ``said``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    started = []

    def start(script, layout, *words):
        path, own = tmp_path / "job.py", env | {"UCCH_EMULATE": layout, "OMP_NUM_THREADS": "1"}
        path.write_text(script)
        command = [*pythons.of(request.path, own), str(path), *map(str, words)]
        with (tmp_path / "said").open("ab") as said:
            started.append(subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=own))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def ends(ranks, room):
    return [rank.wait(60 * room) for rank in ranks]


def test_over_a_store(port, launch, tmp_path, room):
    """The first rank is killed in a job without MPI; the survivors succeed."""
    ranks = [launch(JOB, "nvidia:2,amd:1", 0, rank, 3, port) for rank in range(3)]
    ended, said = ends(ranks, room), (tmp_path / "said").read_text()
    assert ended == [-signal.SIGKILL, 0, 0] and said.count("right: ") == 2, said


STORE_GONE = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import ucc_hetero.torch

rank, port, server = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("ucch", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=200))
other = dist.new_group([0, 1, 2])
def reduce(step):
    for group in (other, None):
        x = torch.full((1000,), float(rank + step))
        dist.all_reduce(x, group=group)
        assert (x == 3 + 3 * step).all(), x
reduce(0)
if rank == 0:
    os.kill(server, signal.SIGKILL)
for step in range(1, 4):
    if rank == step - 1:
        time.sleep(1.5)  # the others look at the store meanwhile
    reduce(step)
print(f"right: {rank}", flush=True)
try:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        reduce(0)
except RuntimeError as error:
    print(f"rank {rank}: {error}", flush=True)
os._exit(0)  # groups cannot be left without their store
"""


def test_the_store_is_gone(store, launch, tmp_path, room):
    """Calls continue without it, and the death of a rank is reported."""
    ranks = [launch(STORE_GONE, "nvidia:2,amd:1", rank, store.port, store.pid) for rank in range(3)]
    ended, said = ends(ranks, room), (tmp_path / "said").read_text()
    assert ended == [0, 0, -signal.SIGKILL] and said.count("right: ") == 3, said
    for rank in range(2):
        assert re.search(f"^rank {rank}: .*rank 2 has left the job or died", said, re.M), said


#: torchft recreates its groups with this backend.
TORCHFT = """
from datetime import timedelta
import torchft
import ucc_hetero.torch

class Group(torchft.process_group.ProcessGroupWrapper):
    def _create_pg(self, store, rank, world_size):
        return ucc_hetero.torch.process_group(store, rank, world_size, self._timeout)

    def getBackendName(self):
        return "torchft-ucch"
"""

COMING = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import ucc_hetero.torch

rank, first, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
limit = timedelta(seconds=200)

def together(generation):
    if "Group" in globals():
        made = globals().setdefault("made", Group(limit))
        address = f"127.0.0.1:{port}/{generation}"
        if hasattr(made, "configure"):
            made.configure(address, f"replica {rank}", rank, 3, generation)
        else:  # after 0.2.0
            torchft.process_group.reconfigure_with_store(made, address, rank, 3, limit)
        return made
    prefix = dist.PrefixStore(f"generation {generation}", store)
    return ucc_hetero.torch.process_group(prefix, rank, 3, limit)

for generation in range(first, 3):
    group = together(generation)
    try:
        for step in range(1000):
            x = torch.full((1000,), float(rank + step))
            if rank == generation and step == 20 and generation < 2:
                os.kill(os.getpid(), signal.SIGKILL)
            group.allreduce([x], dist.AllreduceOptions()).wait()
            assert x[0] == 3 + 3 * step, (x[0], step)
    except RuntimeError as error:
        print(f"rank {rank}: {error}", flush=True)
        group.abort()
print(f"right: {rank}", flush=True)
"""

#: Libraries that are not closed in time: the closing thread is stuck in torch's store, or in libucc.
LATE = """
import atexit, sys, threading
atexit.register(print, "after all")
from datetime import timedelta
import torch, torch.distributed as dist
import ucc_hetero.torch
from ucc_hetero.bootstrap import exit, process
from ucc_hetero.native.libraries import lib

def never():
    if rank == 2:
        lib.ucch_lock()
        threading.Event().wait()
    while True:
        store.add("looks", 0)

rank, _, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
group = ucc_hetero.torch.process_group(store, rank, 3, timedelta(seconds=200))
group.allreduce([torch.ones(5)], dist.AllreduceOptions()).wait()
process.close_all, exit._PATIENCE = never, 0.3
print(f"right: {rank}", flush=True)
"""

#: A script of torchft's: a replica dies in a step and returns; the others continue, and it receives their state.
MANAGED = """
import os, signal, sys
import torch, torch.distributed as dist
from torchft import Manager

replica, again, lighthouse = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit, steps = timedelta(seconds=200), 60
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
state = {"w": torch.zeros(1000)}
manager = Manager(
    Group(limit), state.update, lambda: {"w": state["w"].clone()}, min_replica_size=2, use_async_quorum=False,
    timeout=limit, quorum_timeout=limit, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
    lighthouse_addr=lighthouse, replica_id=f"replica{replica}", hostname="127.0.0.1")
all_there = 0
while manager.current_step() < steps or not all_there:  # the one that comes back is waited for
    manager.start_quorum()
    step = manager.current_step()
    if replica == 1 and not again and step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    gradient = torch.full((1000,), float(step))
    manager.allreduce(gradient).wait()
    if manager.should_commit():
        assert (gradient == step).all(), (gradient, step)
        state["w"] += gradient
        all_there += step > 8 and manager.num_participants() == 3
done = manager.current_step()
assert (state["w"] == sum(range(done))).all(), (state["w"][0], done)
print(f"right: {replica}", flush=True)
manager.shutdown()
os._exit(0)
"""


@pytest.fixture
def come_back(launch, tmp_path, room):
    """Call as ``come_back(script, word, killed)``: three ranks, each started with its number, 0, and the word. The
    ranks in ``killed`` are killed in this order and restarted with another number instead of 0; then all succeed."""

    def run(script, word, killed):
        start = functools.partial(launch, script, "nvidia:1,amd:2")
        ranks, said = [start(rank, 0, word) for rank in range(3)], tmp_path / "said"
        for rank, again in killed.items():
            assert ranks[rank].wait(60 * room) == -signal.SIGKILL, said.read_text()
            ranks[rank] = start(rank, again, word)
        assert ends(ranks, room) == [0, 0, 0] and said.read_text().count("right: ") == 3, said.read_text()

    return run


@pytest.mark.parametrize("how", ["process_group", "torchft"])
def test_ranks_that_are_started_again_join(port, come_back, how):
    """Rank 0 dies and returns, and then rank 1 does; groups of the present ranks are recreated, without MPI."""
    if how == "torchft":
        pytest.importorskip("torchft", reason="needs torchft: pip install torchft")
    come_back(TORCHFT * (how == "torchft") + COMING, str(port), {0: 1, 1: 2})


def test_libraries_that_are_not_closed_in_time(port, come_back, tmp_path):
    come_back(LATE, str(port), {})
    assert (tmp_path / "said").read_text().count("after all") == 3


def test_torchfts_manager(come_back):
    pytest.importorskip("torchft", reason="needs torchft: pip install torchft")
    from torchft.coordination import LighthouseServer

    light = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000)
    come_back(TORCHFT + MANAGED, light.address(), {1: 1})
    light.shutdown()
