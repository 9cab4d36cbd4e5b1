"""The programs that measure torch jobs for the documentation's figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")


@pytest.mark.parametrize("script", ["torch_train", "call_cost"])
def test_benchmarks(tmp_path: Path, script: str) -> None:
    """They run to their ends and leave their figures; how large these are is no matter of a test."""
    small = {
        "torch_train": [
            *"--ranks 2 --backends mixed --size 100k --length 16 --batch 4 --steps 1 --rounds 1 --seconds 0.1".split(),
            *("--ways", "ddp,fsdp2,pp2 x dp,calls,alone,beside"),
        ],
        "call_cost": "--sizes 8 --calls 5 --rounds 1".split(),
    }
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tools" / f"{script}.py"), *small[script]]
    command += ["--limit", "250", "--json", str(out)]
    env = {**mpi_free(), "CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads(out.read_text())
    if script == "call_cost":
        assert all({"mpi4py", "gloo"} & row.keys() and row["ours"]["time"] > 0 for row in found["rows"])
        assert {row["through"] for row in found["rows"]} == {"torch", ""}
    else:
        (ways,) = (each["ways"] for each in found["backends"].values())
        units = {"calls": "calls/s", "alone": "TFLOP/s", "beside": "TFLOP/s"}
        assert ways.keys() == {"ddp", "fsdp2", "pp2 x dp", *units}
        assert all(row[units.get(way, "tokens/s")] > 0 for way, row in ways.items())


def mpi_free() -> dict[str, str]:
    """The environment without this package's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UCCH_")}
