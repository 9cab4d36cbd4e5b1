"""Communicators, neighbourhoods and requests under a real mpirun, and hundreds of communicators."""

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


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "count"), [("", 320), ("nvidia:1,amd:1", 100)], ids=["flat", "mixed"])
def test_many_are_created_and_freed(crew, layout: str, count: int) -> None:
    crew("communicator_cases:many", args=[count], layout=layout, timeout=150)
