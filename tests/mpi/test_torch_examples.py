"""The training examples and the documentation of the PyTorch backend do what they say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIXED = {"UCCH_EMULATE": "nvidia:1,amd:1"}

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="needs torch: pip install 'ucc-hetero[torch]'"
    ),
]


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")
def test_convolutional_network(mpirun) -> None:
    job = mpirun("examples/train_cnn.py", 2, args=["--check", "--epochs", "2"], env=MIXED, timeout=120)
    assert "identical on all 2 ranks: yes" in job.stdout


def test_language_model(mpirun, tmp_path: Path) -> None:
    """A run that goes on from another one's checkpoint, with the work dealt out anew, comes to the same losses."""
    common = ["--size", "100k", "--steps", "4", "--length", "32", "--batch", "8", "--losses"]
    args = [*common, str(tmp_path / "whole"), "--save", str(tmp_path), "--save-every", "2"]
    drift = ["--drift", "raise", "--drift-every", "2", "--every", "3"]
    job = mpirun("examples/train_llm.py", 2, args=[*args, *drift], env=MIXED, timeout=120)
    lines = re.findall(r"^step +(\d)  loss [\d.]+ +\d+ tokens/s  communication +[\d.]+%$", job.stdout, re.M)
    assert lines == ["3", "4"]
    args = [*common, str(tmp_path / "rest"), "--resume", str(tmp_path / "step-000002"), "--balanced"]
    mpirun("examples/train_llm.py", 2, args=args, env=MIXED, timeout=120)
    whole, rest = (list(map(float, (tmp_path / name).read_text().split())) for name in ("whole", "rest"))
    assert len(whole) == 4 and rest == pytest.approx(whole[2:], rel=1e-5)


def test_code_of_the_documentation(mpirun) -> None:
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "torch.md").read_text(), re.M | re.S)[0]
    job = mpirun(code, 2, env=MIXED)
    assert job.stdout.count("tensor([2.])") == 2
