"""Collectives on real device memory; skipped on machines without a GPU.

The ranks run tools/gpu_collectives.py, which checks every collective, and streams, before it measures.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import gpus

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--no-nccl", "--sizes", "8", "--rounds", "1"]

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.mark.skipif(gpus() < 1, reason="needs an NVIDIA GPU and torch")
@pytest.mark.parametrize("channels", ["y", "n"])
@pytest.mark.parametrize("amd", ["", "1"], ids=["one vendor", "two vendors"])
def test_collectives(mpirun: Callable[..., Any], hip_over_cuda: Path, amd: str, channels: str) -> None:
    """Two ranks, on one GPU or two; in the second layout one takes its GPU through the HIP runtime."""
    if amd == "" and gpus() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    args = [*QUICK, "--amd", amd, "--hip", str(hip_over_cuda)]
    env = {"UCCH_CHANNELS": channels, "PYTHONPATH": str(ROOT)}
    result = mpirun(ROOT / "tools" / "gpu_collectives.py", 2, args=args, env=env, timeout=150)
    assert "all right" in result.stdout
