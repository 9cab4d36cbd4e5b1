"""Communicators, neighbourhoods and requests under a real mpirun, and many communicators."""

import pytest

#: Two vendors one behind the other; three, in turn, of which two have a rank each.
MIXED, IN_TURN = "nvidia:2,amd:2", "nvidia:1,amd:1,nvidia:1,host:1"


@pytest.mark.parametrize("what, ranks, vendors", [
    *(("communicator", 3, ""), ("communicator", 4, IN_TURN)),
    *(("neighbour", 3, ""), ("neighbour", 4, MIXED)),
    *(("request", 2, ""), ("request", 4, IN_TURN)),
])  # fmt: skip
def test_cases(crew, what: str, ranks: int, vendors: str) -> None:
    env = {"UCCH_TIMEOUT": "1000"}  # what waits for that is killed before
    job = crew("cases:run_module", ranks, args=[f"{what}_cases"], layout=vendors, env=env, timeout=150)
    assert "WARN" not in job.stderr and "ERROR" not in job.stderr, job.output


def test_many_are_created_and_freed(crew) -> None:
    """Of one vendor, test_safety.py."""
    crew("communicator_cases:many", args=[100], layout="nvidia:1,amd:1", timeout=150)
