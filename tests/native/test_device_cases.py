"""Calls, messages, one-sided transfers and pages on fake GPUs of one host: real UCC, UCX, plans and engine."""

import json
import os
import random
from pathlib import Path

import pytest
from settings import FEW_QUEUES, OWN_QUEUES

FAKEGPU = Path(__file__).resolve().parents[1] / "fakegpu"

pytestmark = pytest.mark.mpi


BY_HOSTS = {"UCCH_CHANNELS": "n"}
WAYS = [("nvidia:2", {}), ("nvidia:1,amd:2", {}), ("nvidia:1,amd:2", BY_HOSTS)]
#: Through pinned memory. A job that waits for the calls' deadline is killed before it.
STAGED = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", "UCCH_TIMEOUT": "1000"}
#: libucp decides, and streams do not pass messages to each other.
PLAIN = {**STAGED, "UCCH_STAGING": "auto", **BY_HOSTS}
LANES = {"FAKEGPU_DELAY_US": "20", "UCCH_TIMEOUT": "1000"}
#: Each of thousands of pieces is a separate copy.
SOON = {"FAKEGPU_DELAY_US": "20"}
QUICK = {"FAKEGPU_DELAY_US": "10"}
#: All streams share one queue.
ONE_QUEUE = {"UCCH_TIMEOUT": "20", "FAKEGPU_CONNECTIONS": "1", **SOON}
#: CUDA's own: eight queues, which go on behind a kernel that runs.
GOES_ON = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "GPU_MAX_HW_QUEUES": "99", "FAKEGPU_CONNECTIONS": ""}
GOES_ON |= {"FAKEGPU_GOES_ON": "1", "UCCH_WIRE_SLOT": "65536"}
MATCHING = "run_module message_cases"
#: One of these is drawn.
OWN, FEW, EITHER = (OWN_QUEUES,), (FEW_QUEUES,), (OWN_QUEUES, FEW_QUEUES)
INSTALLED = os.pathsep.join([str(FAKEGPU), *filter(None, [os.environ.get("PYTHONPATH")])])

#: Module -> its cases with their arguments; a layout, an environment, and queues to draw from.
CASES = {
    "device_cases": [
        # There, threads with one communicator each hold streams in any order.
        *((case, *way, OWN) for case in ("streams", "uneven") for way in WAYS),
        ("in_order", "nvidia:1,amd:2", BY_HOSTS, OWN), ("in_order", "nvidia:1,amd:2", BY_HOSTS, FEW),
        ("refusals", "nvidia:1,amd:1", {}, ()), ("timeout", "nvidia:1,amd:1", BY_HOSTS, ()),
        ("driver_fails cuEventRecord cuStreamWaitEvent", "nvidia:1,amd:1", {}, OWN),
        ("driver_fails cuStreamSynchronize", "nvidia:1,amd:1", BY_HOSTS, OWN),
        ("no_spare_streams 0", "nvidia:1,amd:1", {}, OWN), ("no_spare_streams 1", "amd:1,nvidia:1", {}, OWN),
        ("at_once", "nvidia:1,amd:1", {"FAKEGPU_NO_FLAGS": "1"}, ()),
        ("doctor", "nvidia:1,amd:1", {"PYTHONPATH": INSTALLED}, ()),
    ],
    "cases": [
        (MATCHING, "nvidia:1,amd:1", STAGED, FEW), (MATCHING, "nvidia:2,amd:1", {"UCCH_STAGING": "direct"}, OWN),
        (MATCHING, "nvidia:2,amd:2", {**STAGED, **QUICK}, EITHER),
        (MATCHING, "nvidia:1,amd:1", {**STAGED, **QUICK, **BY_HOSTS}, OWN),
    ],
    "device_message_cases": [
        # Streams are held until hosts have received the data that others were to carry.
        ("in_streams", "nvidia:2,amd:1", {**STAGED, **BY_HOSTS}, OWN), ("in_streams", "nvidia:1,amd:1", PLAIN, OWN),
        ("in_streams", "amd:2", {**STAGED, "UCCH_STAGING": "auto"}, OWN), ("pins", "nvidia:1,amd:1", STAGED, EITHER),
        ("copies", "nvidia:1,amd:1", STAGED, EITHER), ("early", "nvidia:1,amd:1", STAGED, ()),
        ("on_its_way", "nvidia:1,amd:1", {**STAGED, "FAKEGPU_DELAY_US": "10000"}, ()),
        ("given_up", "nvidia:1,amd:1", STAGED, ()), ("given_up", "nvidia:2", STAGED, ()),
    ],
    "random_messages": [("main", "nvidia:2,amd:2", LANES, EITHER)],
    "lane_cases": [
        *((case, "nvidia:2,amd:1", LANES, OWN) for case in ("streams_wait", "room", "refused")),
        ("copies", "nvidia:2,amd:1", LANES, EITHER), ("mistakes", "nvidia:1,amd:1", LANES, EITHER),
        ("late", "nvidia:1,amd:1", LANES, EITHER), ("crowded 40", "nvidia:1,amd:1", {**LANES, **GOES_ON}, ()),
        ("groups", "nvidia:1,amd:1", {**LANES, "FAKEGPU_AHEAD": "150"}, OWN),
    ],
    "device_rma_cases": [
        ("everything", "amd:2", SOON, ()), ("everything", "nvidia:1,host:1,amd:1", SOON, OWN),
        ("everything", "nvidia:2", {}, OWN), ("everything", "nvidia:2", {"FAKEGPU_NO_PEERS": "1"}, ()),
        ("everything", "nvidia:2,amd:1", {}, OWN), ("everything far", "nvidia:1,host:1,amd:1", SOON, ()),
        ("opened", "nvidia:3", {}, OWN), ("closing", "nvidia:2", {}, OWN), ("apart", "nvidia:1,amd:2", {}, ()),
        ("late", "nvidia:1,amd:1", {}, ()), ("beside_stopped", "nvidia:1,amd:2", {"UCCH_TIMEOUT": "20"}, ()),
        *((case, "nvidia:1,amd:1", {"FAKEGPU_DELAY_US": "2000"}, ()) for case in ("given_up", "given_up far")),
        *((case, "nvidia:1,amd:1", {"UCCH_TIMEOUT": "20"}, OWN) for case in ("driver_fails", "driver_fails far")),
        *(("behind", layout, ONE_QUEUE, ()) for layout in ("nvidia:1,amd:1", "amd:1,nvidia:1", "nvidia:2")),
        ("all_kinds", "nvidia:1,amd:1", {}, ()), ("all_kinds", "nvidia:1,host:1", {}, ()),
        ("leaving", "nvidia:2", {}, ()),
    ],
    "device_page_cases": [
        ("all_kinds 70", "nvidia:1,amd:1", {}, ()), ("all_kinds 70", "amd:1,nvidia:1", {}, ()),
        ("all_kinds 70", "nvidia:1,host:1", {}, ()), ("all_kinds 70", "amd:2", {}, ()),
        ("all_kinds 600", "nvidia:2", {}, ()), ("no_compiler", "nvidia:1,amd:1", {"UCCH_RTC_LIB": "none"}, ()),
        ("in_streams", "nvidia:1,amd:1", {}, OWN), ("in_streams", "amd:1,nvidia:1", {}, OWN),
    ],
}  # fmt: skip
#: Cases for ranks that have pinned no memory before, or with another environment.
FRESH = (
    *("device_cases:at_once", "device_cases:doctor", "device_message_cases:pins", "device_page_cases:no_compiler"),
    "device_cases:no_spare_streams",
    "lane_cases:crowded",
)
ROWS = [(module, *row) for module, rows in CASES.items() for row in rows]


@pytest.mark.parametrize(
    ("module", "case", "layout", "env", "queues"), ROWS, ids=["{}:{}, {}".format(*row) for row in ROWS]
)
def test_every_rank_is_right(fakes, fake_crew, module, case, layout, env, queues):
    name, *args = case.split()
    where = f"{module}:{name}"
    (fakes if where in FRESH else fake_crew)(where, layout, args, **env, **random.choice(queues or ({},)))


@pytest.mark.parametrize(("layout", "env"), WAYS)
def test_random_mistakes(fake_crew, layout, env):
    job = fake_crew("refusal_cases:main", layout, [15], **{"UCCH_TIMEOUT": "300", **env, **OWN_QUEUES})
    assert job.said("15 mistakes told") == 1, job.output


@pytest.mark.parametrize("layout, env", [
    ("nvidia:2", OWN_QUEUES), ("amd:1,nvidia:2,amd:1", {}), ("nvidia:1,host:2,amd:1", {}),
    ("nvidia:1,amd:2", {**BY_HOSTS, **FEW_QUEUES}),
    ("nvidia:1,amd:2", {"FAKEGPU_DEVICES": "1", **FEW_QUEUES}),  # two ranks of one vendor share it
])  # fmt: skip
def test_collectives(fake_crew, layout, env):
    """In a vendor's library, queued in streams, and by way of host memory: with one vendor, with two, and without
    GPUs."""
    result = fake_crew("collective_cases:on_devices", layout, **env)
    by_hosts = "host" in layout or {"UCCH_CHANNELS", "FAKEGPU_DEVICES"} & env.keys()
    queued = result.ranks if "amd" in layout and not by_hosts else 0
    assert (result.said("right"), result.said("right queued")) == (result.ranks, queued)


def test_a_setting_that_is_about_messages_says_so(fakes, fake_crew):
    told = fakes("device_cases:twice", "nvidia:1,amd:1", UCCH_STAGING="direct").stderr
    assert told.count("UCCH_STAGING=direct is about messages alone") == 1
    assert "messages alone" not in fake_crew("device_cases:twice", "nvidia:2", UCCH_STAGING="direct").stderr


def test_tuning_measures_on_devices(fake_crew, tmp_path):
    table = tmp_path / "table.json"
    for env, rings in ({}, "shared"), (BY_HOSTS, "none (ranks 0, 1: UCCH_CHANNELS=n)"):
        out = fake_crew("device_cases:tune", "nvidia:1,amd:1", [str(table)], **env).stdout
        assert out.rpartition("rings between devices")[2].count(rings) == 2, out
        (measured,) = (line for line in out.splitlines() if line.startswith("allreduce"))
        assert "split_rail" in measured and "tree" in measured, out
        assert len(json.loads(table.read_text())["topologies"]) == 1


@pytest.mark.parametrize(("case", "args", "env"), [
    ("device_message_cases:death", [True], STAGED), ("device_message_cases:death", [False], STAGED),
    ("lane_cases:death", [], OWN_QUEUES),
], ids=["before", "during", "in a lane"])  # fmt: skip
def test_a_sender_that_dies(fakes, recovery, case, args, env):
    mpi = {"check": False, "mpi_args": recovery}
    job = fakes(case, "nvidia:1,amd:1", args, mpi=mpi, **{**env, "UCCH_TIMEOUT": "200"})
    assert job.said("told") == 1 or not recovery, job.output  # else the launcher ends every rank when one dies


@pytest.mark.parametrize("far", [False, True], ids=["on one host", "by wires"])
def test_a_dead_peer_fails_its_transfers_alone(fakes, far):
    layout, mpi = "nvidia:1,amd:2,nvidia:3,host:3", {"check": False, "mpi_args": ("--continuous",)}
    done = fakes("device_rma_cases:death", layout, [far], mpi=mpi)
    assert done.said("right") == 6, done.output
