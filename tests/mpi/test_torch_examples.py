"""The training examples and the documentation of the PyTorch backend work as described."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIXED = "nvidia:1,amd:1"


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")
def test_convolutional_network(crew):
    job = crew("examples/train_cnn.py", 2, args=["--check", "--epochs", "2"], layout=MIXED, timeout=120)
    assert "identical on all 2 ranks: yes" in job.stdout


def test_hybrid_sharding(crew):
    args = ["--check", "--steps", "3", "--batch", "48"]
    job = crew("examples/train_hsdp.py", 4, args=args, layout="nvidia:2,amd:2", timeout=120)
    assert job.stdout.startswith("2 replicas of 2 shards") and "replicas agree: yes" in job.stdout


def test_language_model(crew, tmp_path):
    """A run restored from another run's checkpoint, with the work divided differently, has the same losses."""
    common = ["--size", "100k", "--steps", "4", "--length", "32", "--batch", "8", "--losses"]
    args = [*common, str(tmp_path / "whole"), "--save", str(tmp_path), "--save-every", "2"]
    drift = ["--drift", "raise", "--drift-every", "2", "--every", "3"]
    job = crew("examples/train_llm.py", 2, args=[*args, *drift], layout=MIXED, timeout=120)
    lines = re.findall(r"^step +(\d)  loss [\d.]+ +\d+ tokens/s  communication +[\d.]+%$", job.stdout, re.M)
    assert lines == ["3", "4"]
    args = [*common, str(tmp_path / "rest"), "--resume", str(tmp_path / "step-000002"), "--balanced"]
    crew("examples/train_llm.py", 2, args=args, layout=MIXED, timeout=120)
    whole, rest = (list(map(float, (tmp_path / name).read_text().split())) for name in ("whole", "rest"))
    assert len(whole) == 4 and rest == pytest.approx(whole[2:], rel=1e-5)


def test_decoding(crew):
    job = crew("examples/decode_llm.py", 2, args=["--tokens", "12", "--check"], layout=MIXED, timeout=120)
    assert re.search(r"^called: [1-9]\d* tokens/s$", job.stdout, re.M) and job.stdout.count(": yes") == 2


SERVE = str(ROOT / "examples" / "serve_two_vendors.py")


def test_serving_by_two_processes(pythons, request, tmp_path):
    command = [*pythons.of(request.path, {}), SERVE, "--cache", "float8", "--prompt", "83", "--seed", str(os.getpid())]
    job = subprocess.run(
        command, env=mpi_free(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert (
        len(re.findall(r"^[NH]\w+ \w+ to HND \w+(?:, as it is)?: first token after [\d.]+ ms$", job.stdout, re.M)) == 2
    )
    assert "the same tokens as in one process: yes" in job.stdout


@pytest.mark.parametrize("way", [[], ["--fixed"]], ids=["counted", "fixed"])
def test_mixture_of_experts(crew, way):
    args = ["--check", "--steps", "5", "--experts", "4", *way]
    job = crew("examples/train_moe.py", 2, args=args, layout=MIXED, timeout=60)
    assert "difference of the loss from a single process" in job.stdout


@pytest.mark.parametrize(("page", "said"), [
    ("README.md", "tensor([4.])"), ("docs/torch.md", "tensor([2.])"), ("docs/tutorial.md", "tensor([2.])"),
])  # fmt: skip
def test_code_of_the_documentation(crew, page, said):
    codes = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    job = crew(next(code for code in codes if "import torch" in code), 2, layout=MIXED)
    assert job.stdout.count(said) == 2, job.output


def mpi_free():
    return {name: value for name, value in os.environ.items() if not name.startswith("UCCH_")}
