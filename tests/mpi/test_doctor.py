"""The doctor on every rank of a real job."""

import os
import subprocess
import sys

import pytest

from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.launch import launcher
from ucc_hetero.native.libraries import load


def test_ranks_that_differ_are_named() -> None:
    """Of a job that is right, and measured, tests/cluster/test_run.py."""
    try:
        load()
        launcher.find()
    except (LibraryNotFound, launcher.LauncherError) as error:
        pytest.skip(str(error).splitlines()[0])
    script = "import os, runpy, sys; r = os.environ['RANK']; os.environ.update({'UCC_TLS': 'ucp'} if r == '1' else {})"
    script += "; sys.argv = ['ucch-doctor', '--job']; runpy.run_module('ucc_hetero.launch.doctor', run_name='__main__')"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCCH_", "UCX_", "UCC_"))}
    words = [sys.executable, "-m", "ucc_hetero.launch", "-np", "2", sys.executable, "-c", script]
    done = subprocess.run(words, env=kept | root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert any("job-disagrees" in line for line in lines), done.stdout
    assert {"UCC_TLS:", "rank 0  (unset)", "rank 1  ucp"} <= {*lines}, done.stdout
    assert "cure: export the same values on every rank (mpirun or ucch-run: -x NAME=value), or unset them" in lines
