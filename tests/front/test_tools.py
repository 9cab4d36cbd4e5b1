"""Developer tools run to the end: measurements of torch jobs, and churn."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")

TRAIN = "--ranks 2 --backends mixed --size 100k --length 16 --batch 4 --steps 1 --rounds 1 --seconds 0.1 --ways"


def run(folder, *words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCCH_")}
    command = [sys.executable, *words, "--json", str(folder / "out.json")]
    job = subprocess.run(
        command, env=env | {"CUDA_VISIBLE_DEVICES": ""}, cwd=folder, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout, json.loads((folder / "out.json").read_text())


def test_trainings(tmp_path):
    """The figures themselves are not tested."""
    program = str(ROOT / "tools" / "torch_train.py")
    _, found = run(tmp_path, program, *TRAIN.split(), "ddp,fsdp2,pp2 x dp,calls,alone,beside", "--limit", "250")
    (ways,) = (each["ways"] for each in found["backends"].values())
    units = {"calls": "calls/s", "alone": "TFLOP/s", "beside": "TFLOP/s"}
    assert ways.keys() == {"ddp", "fsdp2", "pp2 x dp", *units}
    assert all(row[units.get(way, "tokens/s")] > 0 for way, row in ways.items())


def test_parity(tmp_path):
    """tests/mpi/test_torch_strategies.py tests it in more ways to train."""
    program = str(ROOT / "tools" / "torch_parity.py")
    words = "--ranks 2 --steps 3 --batch 8 --length 32 --jobs single,mixed,control --ways ddp --limit 250"
    said, found = run(tmp_path, program, *words.split())
    assert "parity holds" in said and found["runs"].keys() == {"single", "mixed", "control"}


def test_costs_of_calls(tmp_path):
    program = str(ROOT / "tools" / "call_cost.py")
    _, found = run(tmp_path, program, *"--sizes 8 --calls 5 --rounds 1 --limit 250".split())
    assert all({"mpi4py", "gloo"} & row.keys() and row["ours"]["time"] > 0 for row in found["rows"])
    assert {row["through"] for row in found["rows"]} == {"torch", ""}


def test_churn():
    """Replicas that are killed and restarted stay equal; `make churn` runs longer."""
    words = [sys.executable, "-m", "tests.churn", "--faults", "1", "--ranks", "3"]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and "right: " in done.stdout, done.stdout + done.stderr
