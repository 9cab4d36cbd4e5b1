"""Data, sharded, tensor and pipeline parallel training through the backend, each against a single process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs torch: pip install 'ucc-hetero[torch]'"
    ),
]

HERE = Path(__file__).parent


@pytest.mark.timeout(420)
def test_strategies(mpirun) -> None:
    """The vendor boundary falls inside every group of four, and between those of two."""
    env = {"UCCH_EMULATE": "nvidia:2,amd:2", "CASES_LIMIT": "390"}
    job = mpirun(HERE / "torch_strategies.py", 4, env=env, timeout=400)
    wanted = re.findall(r"^@case\ndef (\w+)", (HERE / "torch_strategies.py").read_text(), re.M)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == wanted
