"""Torch jobs in which one rank ends early: the job ends at once, with its status, under mpirun and torchrun."""

import os
import subprocess

import pytest
from processes import python

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import ucc_hetero.torch
dist.init_process_group("ucch")
t = torch.ones(4)
dist.all_reduce(t)
if dist.get_rank() == 1:
    {how}
{wait}
"""

ASYNC = "torch.futures.Future.wait(dist.all_reduce(t, async_op=True).get_future())"


@pytest.mark.parametrize("wait", [ASYNC, "dist.destroy_process_group()"], ids=["in a future", "at the end"])
def test_mpirun(mpirun, wait):
    job = mpirun(SCRIPT.format(how="sys.exit(3)", wait=wait), 2, check=False)
    assert job.returncode == 3 and "rank 1 has failed (status 3) and ends the job" in job.stderr, job.output


@pytest.mark.parametrize("raises", ["fails(bucket)", "sum_up().get_future().then(fails)"], ids=["hook", "future"])
def test_an_exception_in_a_hook_comes_out_of_backward(mpirun, raises):
    """On the hook's rank; the other ranks, which may have finished, do not wait for it."""
    script = f"""
def fails(_):
    raise KeyError("mine alone")
def hook(_, bucket):
    sum_up = lambda: dist.all_reduce(bucket.buffer(), async_op=True)
    return {raises} if dist.get_rank() == 1 else sum_up().get_future().then(lambda f: f.value()[0])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model.register_comm_hook(None, hook)
try:
    model(torch.ones(4)).sum().backward()
except Exception as error:
    assert dist.get_rank() == 1 and "mine alone" in str(error), error
    raise
dist.all_reduce(t)
print("went on", flush=True)
"""
    job = mpirun(SCRIPT.partition("if dist")[0] + script, 2, check=False)
    assert job.returncode == 1 and "KeyError: 'mine alone'" in job.stderr and "went on" not in job.stdout, job.output


@pytest.mark.parametrize("asked, emulated, said", [
    ("nccl", "", ["unknown variable UCCH_TORCH_REPLAC: did you mean UCCH_TORCH_REPLACE?",
                  "(rank 1; the backend of ucc_hetero is 'ucch': UCCH_TORCH_REPLACE=nccl,gloo gives it"]),
    ("nccl", "nvidia:1,amd:1",
     ["but this job has nvidia on rank 0 and amd on rank 1: set UCCH_TORCH_REPLACE=nccl"]),
    ("uchh", "", ["Unknown backend type uchh (rank 1; the backend of ucc_hetero is 'ucch'"]),
])  # fmt: skip
def test_a_script_that_asks_for_another_backend(mpirun, asked, emulated, said):
    """Without UCCH_TORCH_REPLACE; torch has no NCCL where these tests run."""
    script = f"""
import torch.distributed as dist
dist.init_process_group({asked!r})
"""
    job = mpirun(script, 2, env={"UCCH_EMULATE": emulated, "UCCH_TORCH_REPLAC": "nccl"}, check=False)
    assert job.returncode != 0 and all(words in job.stderr for words in said), job.output


def test_replaced_on_some_ranks_only(mpirun):
    """The error names the other ranks and the variable, and no rank waits for ever."""
    script = """
import os
if os.environ["OMPI_COMM_WORLD_RANK"] != "1":
    os.environ["UCCH_TORCH_REPLACE"] = "gloo"
import _ucc_hetero_autoload
_ucc_hetero_autoload.register()  # as torch's import does, which the process has behind it
import torch.distributed as dist
dist.init_process_group("gloo")
"""
    job = mpirun(script, 2, env={"UCCH_TIMEOUT": "4"}, check=False)
    assert job.returncode != 0, job.output
    assert "rank(s) [1] did not come to the backend ucch within 4 s: UCCH_TORCH_REPLACE=gloo" in job.stderr


def test_groups_leave_nothing(crew):
    others = ("collectives", "communicators", "transfers", "refusals", "failures")
    job = crew("tools/soak.py", 2, args=[*(f"--{kind}=0" for kind in others), "--groups=20"])
    assert "groups: 18 more rounds" in job.stdout and "grown" not in job.stdout, job.output


MISTAKES = """
import torch
import torch.distributed as dist
import ucc_hetero.torch
dist.init_process_group("ucch")
rank, three = dist.get_rank(), torch.zeros(3)
calls = [
    lambda bad, **group: dist.all_gather([torch.zeros(3)] * 2, torch.zeros(3 + bad), async_op=True, **group),
    lambda bad, **group: dist.all_to_all_single(
        torch.zeros(4), torch.zeros(4), [2, 2], [2, 2 + bad], async_op=True, **group),
    lambda bad, **group: dist.all_reduce(torch.zeros(3, device="meta") if bad else three, async_op=True, **group),
    lambda bad, **group: dist.all_reduce(
        three.bool() if bad else three, dist.ReduceOp.AVG if bad else dist.ReduceOp.SUM, async_op=True, **group),
]
for call in calls:
    try:
        call(True)
    except Exception as error:
        print("alike", error, flush=True)
    dist.all_reduce(three)
groups = [dist.new_group() for _ in calls]
for group, call in zip(groups, calls):
    try:
        print(rank, call(rank == 1, group=group).wait(), flush=True)
    except Exception as error:
        print(rank, error, flush=True)
    try:
        while True:
            dist.barrier(group=group)
    except dist.DistBackendError as error:
        assert "rank 1 refused" in str(error) and "make a new one" in str(error), error
        print("ended", flush=True)
dist.all_reduce(three)
print("went on", flush=True)
"""


def test_a_refused_call_keeps_its_reason(crew):
    """Mistakes on all ranks end nothing; a mistake on one rank ends the group on all ranks, and no other group."""
    job = crew(MISTAKES, 2, env={"UCCH_TIMEOUT": "60"}, timeout=100)
    reasons = ["input has 4 elements", "split sizes [2, 3] of input", "tensors on rank {} are on device", "AVG on bool"]
    for rank in "01":
        lines = [line for line in job.stdout.splitlines() if line.startswith(rank)]
        assert len(lines) == len(reasons), job.output
        assert all(reason.format(1) in line for reason, line in zip(reasons, lines, strict=True)), job.output
    alike = [line for line in job.stdout.splitlines() if line.startswith("alike")]
    assert len(alike) == 8 and all(any(r.partition(" {")[0] in line for line in alike) for r in reasons), job.output
    assert job.stdout.count("ended") == 8 and job.stdout.count("went on") == 2, job.output


def test_a_misspelt_replacement(pythons, request, tmp_path):
    """An error, not a warning: otherwise the script would silently train with the backend that it requests."""
    script, env = tmp_path / "script.py", {**os.environ, "UCCH_TORCH_REPLACE": "ncll"}
    script.write_text("import _ucc_hetero_autoload as a; a.register(); print('went on')")
    command = [*pythons.of(request.path, {}), str(script)]
    job = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert job.returncode != 0 and "UCCH_TORCH_REPLACE: 'ncll' is not one of nccl" in job.stderr, job.stderr
    assert "went on" not in job.stdout


CALLS = """
import pytest
import torch
import torch.distributed as dist
import ucc_hetero.torch
from torch.nn.parallel import DistributedDataParallel
from ucc_hetero.torch.work import Work
dist.init_process_group("ucch")
for count in (10, 1 << 20):
    tensors = [torch.ones(count) for _ in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.barrier()
    assert all(work.is_completed() for work in works), "a barrier ended before calls that were made before it"
    assert all((tensor == dist.get_world_size()).all() for tensor in tensors)
model, publish = DistributedDataParallel(torch.nn.Linear(4, 4)), Work.publish
Work.publish = lambda self, failure=None: publish(self, dist.DistBackendError("a rank has died"))
with pytest.raises(RuntimeError, match="DistBackendError: a rank has died"):
    model(torch.ones(2, 4)).sum().backward()
Work.publish = publish
dist.destroy_process_group()
"""


def test_a_failed_gradient_and_barriers(crew):
    """DDP's reducer, in C++, receives a call's failure without a crash; a barrier waits for earlier calls."""
    crew(CALLS, 2, env={"UCCH_TIMEOUT": "200"}, timeout=120)


BOUND = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch.distributed as dist
import ucc_hetero.torch

def groups():
    dist.init_process_group("ucch")
    dist.new_group()
    dist.destroy_process_group()

groups()  # torch has one thread, as it was told
print("no longer", file=sys.stderr, flush=True)
del os.environ["OMP_NUM_THREADS"]
groups()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_that_is_bound_to_one_core_is_told_once(mpirun):
    job = mpirun(BOUND, 1)
    before, _, after = job.stderr.partition("no longer")
    assert "bound to one core" not in before and after.count("bound to one core") == 1, job.output


def test_a_forked_child_ends_no_group(torchrun, tmp_path):
    """It used to tell the other ranks that its parent had left. A child that waits for its parent's call, or makes a
    group, gets an error: it used to take its parent's messages, and groups hung at random."""
    script = tmp_path / "forks.py"
    script.write_text(
        SCRIPT.partition("if dist")[0]
        + """
if not (child := os.fork()):
    dist.destroy_process_group()
    os._exit(0)
if not (other := os.fork()):
    sys.exit()
assert os.waitpid(child, 0)[1] == os.waitpid(other, 0)[1] == 0
call = dist.irecv(came := torch.zeros(9), 1 - dist.get_rank())
if not (third := os.fork()):
    dist.destroy_process_group()
    for begin in call.wait, lambda: dist.init_process_group("ucch", store=dist.HashStore(), rank=0, world_size=1):
        try:
            begin()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(third, 0)[1] == 0
dist.send(torch.full([9], 5.0), 1 - dist.get_rank())
call.wait()
assert (came == 5).all()
for _ in range(2):  # the first one may have been posted ahead of the others' end
    dist.barrier()
dist.all_reduce(t)
print("went on", t[0].item(), flush=True)
dist.destroy_process_group()
"""
    )
    assert torchrun(script, []).count("went on 4.0") == 2


CHILD = """
import os, sys
import torch
import torch.distributed as dist

def add(meeting, rank, size):
    dist.init_process_group("ucch", init_method=meeting, rank=rank, world_size=size)
    dist.all_reduce(total := torch.ones(1))
    dist.destroy_process_group()
    return int(total)

rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
assert add(f"{meeting}-{rank}", 0, 1) == 1
children = []
for i in range(3):
    if not (child := os.fork()):
        os._exit(add(f"{meeting}-{rank}-forked", i, 3) != 3)
    children.append(child)
assert not any(os.waitpid(child, 0)[1] for child in children)
print(f"{add(meeting, rank, size)} children", flush=True)
"""


def test_processes_that_ranks_start_make_a_group(mpirun, tmp_path):
    """They are not MPI ranks, whatever their environment says: torch saves checkpoints in such processes.

    Before that each makes a group by itself, and forks processes that make one: their first call used to hang.
    """
    script = f"""
import subprocess, sys
import torch
import torch.distributed as dist
import ucc_hetero.torch
dist.init_process_group("ucch")
place = [str(dist.get_rank()), str(dist.get_world_size()), "file://{tmp_path}/meeting"]
subprocess.run([sys.executable, "-c", {CHILD!r}, *place], check=True)
dist.all_reduce(total := torch.ones(1))
assert total == 2
dist.destroy_process_group()
"""
    assert mpirun(script, 2).stdout.count("2 children") == 2


@pytest.mark.parametrize("layout", ["", "nvidia:1,amd:1"])
def test_messages_without_their_others_do_not_hold_the_end(crew, layout):
    """A receive of no message, and a long unreceived send: both used to delay the end by torch's half hour."""
    script = """
import torch, torch.distributed as dist
dist.init_process_group("ucch")
other = 1 - dist.get_rank()
works = [dist.irecv(torch.ones(5), other, tag=3), dist.isend(torch.ones(1 << 20), other, tag=4)]
dist.destroy_process_group()
try:
    works[0].wait()
except dist.DistBackendError as error:
    print("right" if "before the message of a receive came" in str(error) else error, flush=True)
"""
    assert crew(script, 2, layout=layout).said("right") == 2


@pytest.mark.parametrize("layout", ["", "nvidia:2,amd:1"])
def test_ranks_destroy_groups_in_different_orders(crew, layout):
    """Each destroys its left group first, then its right one: this used to deadlock until the timeout of half an
    hour."""
    script = """
import torch, torch.distributed as dist
dist.init_process_group("ucch")
me, size = dist.get_rank(), dist.get_world_size()
pairs = {left: dist.new_group([left, (left + 1) % size]) for left in range(size)}
for left in sorted({me, (me - 1) % size}):
    dist.all_reduce(torch.ones(4), group=pairs[left])
for left in ((me - 1) % size, me):
    dist.destroy_process_group(pairs[left])
t = torch.ones(4)
dist.all_reduce(t)
dist.destroy_process_group()
print("right" if t[0] == size else t, flush=True)
"""
    assert crew(script, 3, layout=layout).said("right") == 3


@pytest.mark.parametrize("how", ["dist.destroy_process_group()", "sys.exit()"], ids=["destroys", "exits"])
def test_a_rank_that_is_done_leaves_all_groups_at_once(mpirun, how):
    """A rank awaited in one group used to wait for others in the previous group, until the timeout."""
    script = (
        SCRIPT.partition("t = ")[0]
        + f"""
mine = dist.new_group()
dist.barrier(group=mine)
if dist.get_rank() == 1:
    {how}
    sys.exit()
try:
    dist.all_reduce(torch.ones(4))
except dist.DistBackendError as error:
    print("right" if "rank 1 has left" in str(error) else error, flush=True)
os._exit(0)
"""
    )
    assert mpirun(script, 2, check=False).stdout.split() == ["right"]


def test_groups_end_in_torchs_order(mpirun):
    """Destroying an NCCL group waits for the other ranks, and there may be one between two ucch groups."""
    script = """
import datetime, sys
import torch.distributed as dist
import ucc_hetero.torch

class Waits(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.mine, self.all = store, f"left {rank}", [f"left {each}" for each in range(size)]

    def shutdown(self):
        self.store.set(self.mine, "")
        self.store.wait(self.all, datetime.timedelta(seconds=20))

dist.Backend.register_backend("waits", Waits, devices=["cpu"])
dist.init_process_group("ucch")
dist.new_group(backend="waits")
dist.new_group([0])  # torch ends the last ones first
dist.destroy_process_group()
"""
    mpirun(script, 2)


def test_torch_finds_the_backend_by_itself():
    """Scripts that name it need no import of the package."""
    python("import torch.distributed as dist\nassert 'ucch' in dist.Backend.backend_list")


def test_a_host_whose_name_cannot_be_looked_up(crew):
    """Its label is too long for the resolver: the store is created at the address that the message advises."""
    script = """
import socket
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock
from mpi4py import MPI
from ucc_hetero.torch import rendezvous
alone = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Free=lambda: None)
world = SimpleNamespace(
    Split_type=lambda kind: alone, Get_rank=lambda: 0, Get_size=lambda: 2, bcast=lambda what, root: what
)
with mock.patch.object(socket, "gethostname", lambda: "a" * 64):
    store, *place = rendezvous.store_over(world, timedelta(seconds=20))
store.set("key", "value")
print("right" if place == [0, 2] else place, flush=True)
"""
    assert crew(script, 1).said("right") == 1
