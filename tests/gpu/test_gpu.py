"""Collectives on real device memory; skipped on machines without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import gpus

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.mark.skipif(gpus() < 1, reason="needs an NVIDIA GPU and torch")
@pytest.mark.parametrize("channels", ["y", "n"])
@pytest.mark.parametrize("amd", ["", "1"], ids=["one vendor", "two vendors"])
def test_collectives(mpirun: Callable[..., Any], hip_over_cuda: Path, amd: str, channels: str) -> None:
    """Every one of them, and streams, on two ranks; in the second layout one takes its GPU through the HIP runtime."""
    if amd == "" and gpus() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    env = {"UCCH_CHANNELS": channels, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    result = mpirun(ROOT / "tests" / "gpu" / "collectives.py", 2, args=[amd, str(hip_over_cuda)], env=env, timeout=150)
    assert result.said("all right") == 2


LEFT = """
import time
import torch
from ucc_hetero import Communicator
from mpi4py import MPI
torch.cuda.set_device(MPI.COMM_WORLD.rank)
with Communicator() as comm:
    stream, x, y = torch.cuda.Stream(), torch.ones(2, device="cuda"), torch.full((2,), -7.0, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20_000):
        comm.Iallreduce(x, y, stream=stream)
    stream.synchronize()
    assert (y == comm.size).all(), y
    until = time.monotonic() + 5
    while (left := comm._run.launches) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, f"{left} calls that have ended are kept"
    print("all collected", flush=True)
"""


@pytest.mark.skipif(gpus() < 2, reason="needs two NVIDIA GPUs and torch")
def test_calls_that_are_not_waited_for_are_collected(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    """Libucc looks at one request in a round of progress: one round a millisecond kept thousands for seconds."""
    job = tmp_path / "job.py"
    job.write_text(LEFT)
    result = mpirun(job, 2, env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert result.said("all collected") == 2
