"""Communicators, neighbourhoods and requests under a real mpirun."""

import random

import pytest

#: Of each module of cases a layout is drawn: one vendor, or two one behind the other, or three in turn, of which two
#: have a rank each.
MIXED, IN_TURN = (4, "nvidia:2,amd:2"), (4, "nvidia:1,amd:1,nvidia:1,host:1")
LAYOUTS = {"communicator": [(3, ""), IN_TURN], "neighbour": [(3, ""), MIXED], "request": [(2, ""), IN_TURN]}


@pytest.mark.parametrize("what", LAYOUTS)
def test_cases(crew, what: str) -> None:
    ranks, vendors = random.choice(LAYOUTS[what])
    env = {"UCCH_TIMEOUT": "1000"}  # what waits for that is killed before
    job = crew("cases:run_module", ranks, args=[f"{what}_cases"], layout=vendors, env=env, timeout=150)
    assert "WARN" not in job.stderr and "ERROR" not in job.stderr, job.output
