"""``ucch-run … --check``: the doctor on every rank of a real job."""

import json
import os
import subprocess
import sys

import pytest

from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.launch import launcher
from ucc_hetero.native.libraries import load


def check(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        load()
        launcher.find()
    except (LibraryNotFound, launcher.LauncherError) as error:
        pytest.skip(str(error).splitlines()[0])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [sys.executable, "-m", "ucc_hetero.launch", *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UCCH_", "UCX_", "UCC_"))}
    return subprocess.run(
        command, env={**kept, **root, **(env or {})}, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_job_of_two_vendors() -> None:
    """Looked at, compared, and measured: collectives with known results, and every pair."""
    emulated = {"UCCH_EMULATE": "nvidia:2,amd:1", "UCCH_TIMEOUT": "100"}
    done = check("-np", "3", "--check", "--", "--json", "--seconds", "20", env=emulated)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["code"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["job"]["text"].startswith("3 ranks on 1 host agree")
    assert found["collectives"]["level"] == "ok"
    assert "pair-slow" in found or found["pairs"]["text"].startswith("3 pairs within hosts")


def test_ranks_that_differ_are_named() -> None:
    script = "import os, runpy, sys; r = os.environ['RANK']; os.environ.update({'UCC_TLS': 'ucp'} if r == '1' else {})"
    script += "; sys.argv = ['ucch-doctor', '--job']; runpy.run_module('ucc_hetero.launch.doctor', run_name='__main__')"
    done = check("-np", "2", sys.executable, "-c", script)
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "none: rank 0" in lines and "ucp: rank 1" in lines and any("UCC_TLS differs" in line for line in lines)
    assert "cure: export the same values on every rank (mpirun or ucch-run: -x NAME=value), or unset them" in lines
