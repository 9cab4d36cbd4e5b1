"""The command that kills replicas and starts them again, for a moment."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")


def test_churn() -> None:
    """Replicas that are killed and started again stay alike; `make churn` goes on for longer."""
    words = ["-m", "tests.churn", "--faults", "1", "--ranks", "3"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, *words], cwd=root, text=True, capture_output=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "right: " in done.stdout
