"""Runs buffers_mpi_cases.py in a process of its own: initialising MPI alters the environment of later ``mpirun`` s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("buffers_mpi_cases.py")


def test_against_mpi4py() -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py")
    probe = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, text=True, timeout=240)
    if probe.returncode:
        pytest.skip(f"MPI does not start without mpirun here: {probe.stderr[-300:]}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
