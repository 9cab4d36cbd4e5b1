"""The training examples and the documentation of the PyTorch backend do what they say."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIXED = {"UCCH_EMULATE": "nvidia:1,amd:1"}


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")
def test_convolutional_network(mpirun) -> None:
    job = mpirun("examples/train_cnn.py", 2, args=["--check", "--epochs", "2"], env=MIXED, timeout=120)
    assert "identical on all 2 ranks: yes" in job.stdout


@pytest.mark.parametrize(
    ("vendors", "mesh"), [("nvidia:2,amd:2", "2 replicas of 2 shards"), ("amd:1,nvidia:2", "3 replicas of 1 shards")]
)
def test_hybrid_sharding(mpirun, vendors: str, mesh: str) -> None:
    n = sum(int(part[-1]) for part in vendors.split(","))
    args = ["--check", "--steps", "5", "--batch", str(12 * n)]
    job = mpirun("examples/train_hsdp.py", n, args=args, env={"UCCH_EMULATE": vendors}, timeout=120)
    assert job.stdout.startswith(mesh) and "replicas agree: yes" in job.stdout


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


def test_decoding(mpirun) -> None:
    job = mpirun("examples/decode_llm.py", 2, args=["--tokens", "12", "--check"], env=MIXED, timeout=120)
    assert re.search(r"^called: [1-9]\d* tokens/s$", job.stdout, re.M) and job.stdout.count(": yes") == 2


SERVE = str(ROOT / "examples" / "serve_two_vendors.py")


@pytest.mark.parametrize("cache", ["float32", "float8"])
def test_serving_by_two_processes(program, cache: str) -> None:
    job = program(
        [sys.executable, SERVE, "--cache", cache, "--prompt", "83", "--seed", str(os.getpid())], 120, mpi_free()
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert (
        len(re.findall(r"^[NH]\w+ \w+ to HND \w+(?:, as it is)?: first token after [\d.]+ ms$", job.stdout, re.M)) == 2
    )
    assert "the same tokens as in one process: yes" in job.stdout


def test_serving_notices_wrong_pages(program) -> None:
    """The example's own check has teeth: pages in another order give other tokens."""
    script = f"""
        import runpy, sys
        from ucc_hetero import rma
        right = rma.PageTable.recv_pages
        rma.PageTable.recv_pages = lambda table, pages, sources: right(table, pages[::-1], sources)
        sys.path.insert(0, {str(Path(SERVE).parent)!r})
        sys.argv[0] = {SERVE!r}
        runpy.run_path({SERVE!r}, run_name="__main__")
        """
    env = mpi_free() | {"SERVE_SECRET": os.urandom(32).hex()}
    with subprocess.Popen(
        [sys.executable, SERVE, "--role", "prefill"], env=env, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        words = ["--role", "decode", "--address", one.stdout.readline().strip(), "--requests", "2"]
        job = program([sys.executable, "-c", textwrap.dedent(script), *words], 120, env)
        one.wait(30)
    assert job.returncode == 1 and "the same tokens as in one process: NO" in job.stdout, job.stdout + job.stderr


@pytest.mark.parametrize("way", [[], ["--fixed"]], ids=["counted", "fixed"])
def test_mixture_of_experts(mpirun, way: list[str]) -> None:
    args = ["--check", "--steps", "20", "--experts", "4", *way]
    job = mpirun("examples/train_moe.py", 2, args=args, env=MIXED, timeout=60)
    assert "difference of the loss from a single process" in job.stdout


def test_code_of_the_documentation(mpirun) -> None:
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "torch.md").read_text(), re.M | re.S)[0]
    job = mpirun(code, 2, env=MIXED)
    assert job.stdout.count("tensor([2.])") == 2


def test_parity(program, tmp_path: Path) -> None:
    """One vendor, two, and a single process come to the same losses in every way to train; another seed does not."""
    out, drawing = tmp_path / "out.json", tmp_path / "out.png"
    ways = "ddp,zero,fsdp2,hsdp,tp,cp,pp"  # others are in torch_strategies.py
    small = ["--ranks", "2", "--ways", ways, "--steps", "3", "--batch", "8", "--length", "32"]
    more = ["--plot", str(drawing)] if importlib.util.find_spec("matplotlib") else []
    script = str(ROOT / "tools" / "torch_parity.py")
    command = [sys.executable, script, *small, "--limit", "300", "--json", str(out), *more]
    job = program(command, 600, mpi_free())
    assert job.returncode == 0, job.stdout + job.stderr
    assert "parity holds" in job.stdout
    runs = json.loads(out.read_text())["runs"]
    assert {name: len(run["losses"]) for name, run in runs.items()} == {
        "single": 7, "homogeneous": 7, "mixed": 7, "control": 1,
    }  # fmt: skip
    assert not more or drawing.stat().st_size > 1000


@pytest.mark.parametrize("script", ["torch_train", "torch_busy", "host_cost"])
def test_benchmarks(program, tmp_path: Path, script: str) -> None:
    """They run to their ends and leave their figures; how large these are is no matter of a test."""
    small = {
        "torch_train": "--ranks 2 --backends mixed --size 100k --length 16 --batch 4 --steps 1 --rounds 1".split(),
        "host_cost": "--sizes 8 --calls 5 --rounds 1".split(),
        "torch_busy": "--ranks 2 --backends mixed --seconds 0.1".split(),
    }
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tools" / f"{script}.py"), *small[script]]
    job = program([*command, "--limit", "250", "--json", str(out)], 600, {**mpi_free(), "CUDA_VISIBLE_DEVICES": ""})
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads(out.read_text())
    if script == "host_cost":
        assert {row["beside"] for row in found["rows"]} == {"torch, gloo", "mpi4py"}
        assert all(row[name]["issue"] > 0 for row in found["rows"] for name in ("ours", "peer"))
    elif script == "torch_busy":
        assert all(found["backends"]["mixed"][row] > 0 for row in ("calls/s", "TFLOP/s alone", "TFLOP/s beside"))
    else:
        rates = {
            name: {way: row["tokens/s"] for way, row in b["ways"].items()} for name, b in found["backends"].items()
        }
        assert set(rates) == {"mixed"} and set(rates["mixed"]) == {"ddp", "fsdp2", "pp2 x dp"}


def mpi_free() -> dict[str, str]:
    """The environment without this package's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UCCH_")}
