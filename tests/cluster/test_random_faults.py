"""A sample of the random faults of tests/faults, which has a command of its own for many (docs/faults.md)."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ucc_hetero.launch.emulate import unavailable

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("libraries", "ulfm", "with_torch")
@pytest.mark.skipif(unavailable() is not None, reason="no emulated hosts here")
def test_all_who_live_have_an_answer(room: int) -> None:
    """Right or an error in time, in four jobs of other shapes, faults and moments each; others in every run."""
    seed = str(random.randrange(10**6))  # by TESTS_DRAW, as all that a test draws
    words = [sys.executable, "-m", "tests.faults", "--trials", "4", "--seed", seed, "--jobs", "3", "--details"]
    words += ["--room", str(room)]
    job = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=700, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
