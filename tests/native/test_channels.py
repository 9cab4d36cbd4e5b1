"""Calls queued in streams completely, over the fake GPU library: real rings, plans and processes; asynchronous devices.

Every case asserts that its calls were queued, or that they were not.
"""

import random

import pytest
from channel_jobs import OF_ITS_OWN, environment
from settings import FEW_QUEUES, LATE_KERNELS, OWN_QUEUES

pytestmark = pytest.mark.mpi

PAIR, THREE, FOUR = "nvidia:1,amd:1", "nvidia:1,amd:2", "nvidia:2,amd:2"
BY_HOSTS = {"UCCH_CHANNELS": "n", **OWN_QUEUES}

CASES = [
    ("collective_cases:on_devices", THREE, {"UCCH_WIRE_SLOT": "64K", **FEW_QUEUES}),
    ("collective_cases:on_devices", PAIR, LATE_KERNELS),
    ("channel_cases:crowd", THREE, {**FEW_QUEUES, "FAKEGPU_CONNECTIONS": "1", "UCCH_WIRE_SLOT": "16K"}),
    ("channel_cases:kept", PAIR, LATE_KERNELS), ("channel_cases:several", PAIR, {}), ("channel_cases:many", FOUR, {}),
    ("channel_cases:pinned_out", PAIR, {}), ("channel_cases:replicas", FOUR, {}), ("channel_cases:left", THREE, {}),
    ("channel_cases:no_compiler", PAIR, {}), ("channel_cases:grows", THREE, {}),
    ("channel_failure_cases:missing", PAIR, {}), ("channel_failure_cases:garbage", THREE, {}),
    ("channel_failure_cases:different", PAIR, {}), ("channel_failure_cases:fails_often", PAIR, {}),
    ("graph_cases:replays 1 1000 60000", PAIR, FEW_QUEUES), ("graph_cases:replays 3000", FOUR, FEW_QUEUES),
    ("graph_cases:replays 3 5000", FOUR, {"UCCH_TUNE": "", "UCCH_WIRE_SLOT": "16K"}),
    ("graph_cases:replays 1 60000", "amd:3", OWN_QUEUES), ("graph_cases:messages", THREE, FEW_QUEUES),
    ("graph_cases:messages", FOUR, {"UCCH_WIRE_SLOT": "64K"}), ("graph_cases:refused UCCH_CHANNELS=n", PAIR, BY_HOSTS),
    ("graph_cases:refused make such a call once before", PAIR, {}),
    *((f"graph_cases:unlike_messages {way}", PAIR, {}) for way in ("tag", "length", "missing")),
    *((f"graph_cases:broken {way} 1000 300000", PAIR, {}) for way in ("missing", "different", "overlap")),
]  # fmt: skip


@pytest.fixture
def run(fakes, fake_crew):
    def start(case, layout, args=(), **more):
        name, *words = case.split()
        on = fakes if name in OF_ITS_OWN and "UCCH_CHANNELS" not in more else fake_crew
        return on(name, layout, [*words, *args], timeout=90, **environment(name, more))

    return start


@pytest.mark.parametrize(("case", "layout", "env"), CASES, ids=[f"{case}, {layout}" for case, layout, _ in CASES])
def test_on_one_host(run, case, layout, env):
    run(case, layout, **env)


def test_a_rank_that_dies(fakes, recovery):
    case, after = "channel_failure_cases:halfway", random.choice([0, random.uniform(0, 0.1)])
    mpi = {"check": False, "mpi_args": recovery}
    done = fakes(case, THREE, [after], timeout=90, mpi=mpi, **environment(case, {}))
    assert done.said("died") == 2 or not recovery, done.output  # else the launcher ends every rank when one dies
