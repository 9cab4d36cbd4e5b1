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
    """A pipeline and data parallelism come to the same losses."""
    losses = {}
    for way in ("ddp", "pp"):
        path = tmp_path / way
        args = ["--parallel", way, "--steps", "4", "--length", "32", "--batch", "4", "--losses", str(path)]
        job = mpirun("examples/train_llm.py", 2, args=args, env=MIXED, timeout=120)
        assert re.search(r"^step +4  loss [\d.]+ .* tokens/s  communication", job.stdout, re.M)
        losses[way] = [float(line) for line in path.read_text().split()]
    assert len(losses["ddp"]) == 4
    assert losses["pp"] == pytest.approx(losses["ddp"], rel=1e-5)


def test_code_of_the_documentation(mpirun) -> None:
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "torch.md").read_text(), re.M | re.S)[0]
    job = mpirun(code, 2, env=MIXED)
    assert job.stdout.count("tensor([2.])") == 2
