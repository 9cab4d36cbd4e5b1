"""The tool that compares trainings by two vendors with those of a single process (tools/torch_parity.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("with_torch")


def test_parity(tmp_path: Path) -> None:
    """Two vendors and a single process come to the same losses; another seed does not.

    Other ways to train are in torch_strategies.py.
    """
    out, script = tmp_path / "out.json", str(ROOT / "tools" / "torch_parity.py")
    small = ["--ranks", "2", "--ways", "ddp", "--steps", "3", "--batch", "8", "--length", "32"]
    small += ["--jobs", "single,mixed,control"]
    command = [sys.executable, script, *small, "--limit", "300", "--json", str(out)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCCH_")}
    job = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "parity holds" in job.stdout
    runs = json.loads(out.read_text())["runs"]
    assert {name: len(run["losses"]) for name, run in runs.items()} == {"single": 1, "mixed": 1, "control": 1}
