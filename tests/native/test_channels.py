"""Calls queued in streams completely, over the fake GPU library: real rings, plans and processes; asynchronous devices.

Every script asserts that its calls were queued, or that they were not.
"""

import random

import pytest
from channel_jobs import JOBS, OF_ITS_OWN, judge, judge_death
from settings import FEW_QUEUES, LATE_KERNELS, OWN_QUEUES, USUAL

pytestmark = pytest.mark.mpi

PAIR, THREE, FOUR = "nvidia:1,amd:1", "nvidia:1,amd:2", "nvidia:2,amd:2"

CASES = [
    ("every collective in every form", THREE, {"UCCH_WIRE_SLOT": "64K", **FEW_QUEUES}),
    ("every collective in every form", PAIR, LATE_KERNELS),
    ("many calls in many streams", THREE, {**FEW_QUEUES, "FAKEGPU_CONNECTIONS": "1", "UCCH_WIRE_SLOT": "16K"}),
    ("the driver waits", PAIR, LATE_KERNELS), ("several communicators", PAIR, {}), ("many groups", FOUR, {}),
    ("no pinned memory is left", PAIR, {}), ("replicas are equal", FOUR, {}), ("a rank that never calls", PAIR, {}),
    ("nobody takes garbage for a result", THREE, {}), ("ranks that call different things", PAIR, {}),
    ("calls under way at the end", THREE, {}), ("no compiler", PAIR, {}),
    ("calls in graphs", PAIR, {"LENGTHS": "1,1000,60000", **FEW_QUEUES}),
    ("calls in graphs", FOUR, {"LENGTHS": "3,5000", "UCCH_TUNE": "", "UCCH_WIRE_SLOT": "16K"}),
    ("messages in graphs", THREE, FEW_QUEUES), ("messages in graphs", FOUR, {"UCCH_WIRE_SLOT": "64K"}),
    *(("messages in graphs that differ", PAIR, {"WAY": way}) for way in ("tag", "length", "missing")),
    ("several graphs", FOUR, {}), ("refused in graphs", PAIR, {"WHY": "make such a call once before"}),
    ("refused in graphs", PAIR, {"WHY": "UCCH_CHANNELS=n", "UCCH_CHANNELS": "n", **OWN_QUEUES}),
    ("calls in graphs", "amd:3", {"LENGTHS": "1,60000", **OWN_QUEUES}), ("a rank that does not replay", PAIR, {}),
    ("ranks that replay different things", PAIR, {}), ("two graphs at a time", PAIR, {}),
]  # fmt: skip


@pytest.fixture
def run(fakes, fake_crew):
    def start(name, layout, **more):
        on = fakes if name in OF_ITS_OWN and "UCCH_CHANNELS" not in more else fake_crew
        return on(JOBS[name].script, layout, timeout=90, **{**USUAL, **JOBS[name].env, **more})

    return start


@pytest.mark.parametrize(("name", "layout", "env"), CASES, ids=[f"{name}, {layout}" for name, layout, _ in CASES])
def test_on_one_host(run, name, layout, env):
    if "replay" in name:
        env = {**env, "LENGTH": random.choice(["1000", "300000"])}
    judge(name, run(name, layout, **env).stdout)


def test_rings_come_with_calls(run):
    out = run("rings come with calls", THREE).stdout
    assert out.count("right rings: rank") == 3 and "shared" in out and "wire" not in out, out


def test_a_rank_that_dies(run, recovery):
    after, mpi = random.choice([0, random.uniform(0, 0.1)]), {"check": False, "mpi_args": recovery}
    judge_death(recovery, run("a rank that dies", THREE, mpi=mpi, AFTER=str(after)).stdout)
