"""Ends of torch jobs where one rank does not come to the end: at once, with its status, under mpirun and torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("wait", ["dist.all_reduce(t)", ASYNC, "dist.destroy_process_group()"])
@pytest.mark.parametrize(
    "how, status, said",
    [("sys.exit(3)", 3, "rank 1 has failed (status 3) and ends the job"), ("raise KeyError('mine')", 1, "mine")],
)
def test_mpirun(mpirun, wait: str, how: str, status: int, said: str) -> None:
    job = mpirun(SCRIPT.format(how=how, wait=wait), 2, check=False)
    assert job.returncode == status and said in job.stderr, job.output


@pytest.mark.parametrize("raises", ["fails(bucket)", "sum_up().get_future().then(fails)"], ids=["hook", "future"])
def test_an_exception_in_a_hook_comes_out_of_backward(mpirun, raises: str) -> None:
    """On the rank whose hook it is; the others, who may be done, do not wait for it."""
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


def torchrun(folder: Path, how: str, wait: str) -> subprocess.CompletedProcess[str]:
    script = folder / "job.py"
    script.write_text(SCRIPT.format(how=how, wait=wait))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)


def test_torchrun(tmp_path: Path) -> None:
    """The others hear of it, whether torchrun ends them first or not."""
    job = torchrun(tmp_path, "sys.exit(3)", "dist.all_reduce(t)")
    assert job.returncode == 1, job.stderr
    assert "exitcode  : 3" in job.stderr or "rank 1 has left the job or died" in job.stderr


def test_torchrun_and_a_rank_that_skips_the_end(tmp_path: Path) -> None:
    """``os._exit(0)`` is what scripts do that want no clean-up; the others' clean-up does not wait for them."""
    job = torchrun(tmp_path, "os._exit(0)", "print('end', flush=True)")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("end") == 1


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
print("all good")
"""


def test_a_failed_gradient_and_barriers(mpirun) -> None:
    """DDP's reducer, in C++, gets the failure of a call and does not crash; a barrier waits for earlier calls."""
    assert mpirun(CALLS, 2, env={"UCCH_TIMEOUT": "200"}, timeout=120).said("all good") == 2
