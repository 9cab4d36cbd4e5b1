"""Requests under a real mpirun: waiting for many, giving up, dropping, freeing."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = Path(__file__).with_name("request_cases.py")


@pytest.mark.parametrize(
    ("ranks", "env"), [(2, {}), (4, {"UCCH_EMULATE": "nvidia:1,amd:2,host:1"})], ids=["flat", "mixed"]
)
def test_requests(mpirun, ranks: int, env: dict[str, str]) -> None:
    job = mpirun(CASES, ranks, env={"UCCH_TIMEOUT": "200", **env}, timeout=120)
    assert job.stdout.count("all good") == ranks
    assert "WARN" not in job.stderr and "ERROR" not in job.stderr, job.output
