"""The comparison of mixed plans with flat UCC and MPI."""

import json
from pathlib import Path

import pytest

from ucc_hetero.bench.__main__ import main

MAIN = """
import sys
from ucc_hetero.bench.__main__ import main
sys.exit(main())
"""


def test_mixed(mpirun, tmp_path: Path) -> None:
    file = tmp_path / "mixed.json"
    words = ["mixed", "-r", "2", "-s", "8,1000", "-c", "allreduce,bcast,alltoallv", "--json", str(file)]
    job = mpirun(MAIN, 4, args=words, env={"UCCH_EMULATE": "nvidia:2,amd:2"}, timeout=120)
    table = [line.split() for line in job.stdout.splitlines() if line and not line.startswith("#")]
    assert [(row[0], row[1]) for row in table] == [
        (name, size) for name in ("allreduce", "bcast", "alltoallv") for size in ("8", "1000")
    ]
    rows = json.loads(file.read_text())["rows"]
    assert all(set(row["us"]) == {"plan", "flat", "mpi4py"} and min(row["us"].values()) > 0 for row in rows)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixed", "--help"]) == 0
    assert "--collectives" in capsys.readouterr().out
    assert main(["mixed", "--nothing"]) != 0
    assert "unrecognized arguments: --nothing; --help lists the options" in capsys.readouterr().err


def test_one_island_has_nothing_to_compare(mpirun) -> None:
    job = mpirun(MAIN, 2, args=["mixed"], check=False)
    assert job.returncode != 0 and "UCCH_EMULATE=nvidia:2,amd:2" in job.stderr
