"""Where data is, and how it crosses bridges, for collectives and messages: decided from the facts of all ranks."""

from dataclasses import replace

import pytest
from test_bootstrap import FACTS, HERE, THERE

from ucc_hetero.errors import AgreementError
from ucc_hetero.planner.topology import Topology
from ucc_hetero.transport.paths import Device, MessagePaths, crowded_hosts, staged

DIRECT, STAGED = "direct", "staged"


def rank(memory, host=HERE, moves=("host", "cuda")):
    return replace(
        FACTS, host=host, device_memory=memory, memory_types=moves, vendor={"rocm": "amd"}.get(memory, "nvidia")
    )


CUDA, ROCM = rank("cuda"), rank("rocm", moves=("host", "rocm"))
FAR = rank("rocm", THERE, ("host", "rocm"))
BOTH = ("host", "cuda", "rocm")


@pytest.mark.parametrize("ranks, wanted, how", [
    ([CUDA, CUDA], "auto", DIRECT),
    ([CUDA, FAR], "auto", DIRECT),  # each host has devices of one kind: the network reads both
    ([CUDA, ROCM], "auto", STAGED), ([CUDA, FAR, rank("cuda", THERE)], "auto", STAGED),
    ([CUDA, rank("")], "auto", DIRECT),
    ([CUDA, rank("", moves=("host",))], "auto", STAGED),  # the first rank cannot receive from the other's device
    ([CUDA, rank("", THERE, ("host",))], "auto", DIRECT), ([CUDA, rank("cuda", moves=("host",))], "auto", STAGED),
    ([CUDA, ROCM], DIRECT, DIRECT), ([CUDA, CUDA], STAGED, STAGED),
])  # fmt: skip
def test_path(ranks, wanted, how):
    assert staged(ranks, wanted) is (how == STAGED)


@pytest.mark.parametrize("ranks, reason", [
    ([replace(CUDA, board="01:00.0"), replace(CUDA, board="02:00.0")], ""),
    ([replace(CUDA, board="01:00.0"), replace(rank("cuda", THERE), board="01:00.0")], ""),
    ([replace(CUDA, board="01:00.0")] * 2, "share a device"),  # NCCL refuses two ranks on one device
    ([CUDA, rank("cuda", moves=("host",))], "cannot move"),
])  # fmt: skip
def test_an_island_whose_devices_no_library_serves(ranks, reason):
    found = Device.of(0, range(2), ranks, None).by_host
    assert reason in found and bool(reason) == bool(found)
    assert not Device.of(0, [0], ranks, None).by_host


def test_places_that_cannot_be_or_are_crowded():
    with pytest.raises(AgreementError, match=r"rank\(s\) \[1\] cannot move"):
        staged([CUDA, rank("cuda", moves=("host",))], DIRECT)
    two = Topology.group(["nvidia", "amd"], [0, 0])
    assert crowded_hosts(two, [CUDA, ROCM]) == {HERE.memory}
    assert not crowded_hosts(two, [CUDA, FAR])
    assert not crowded_hosts(Topology.group(["nvidia", "nvidia"], [0, 0]), [CUDA, CUDA])


ROCM = rank("rocm", moves=BOTH)
NONE = rank("", moves=("host", "cuda"))


def message_paths(everyone, how=DIRECT):
    hosts = [0 if f.host == CUDA.host else 1 for f in everyone]
    topology = Topology.group([f.vendor for f in everyone], hosts)
    return MessagePaths(0, everyone, topology, how == STAGED)


@pytest.mark.parametrize("everyone, how, staged", [
    ([CUDA, CUDA], DIRECT, False), ([CUDA, FAR], DIRECT, False), ([CUDA, FAR], STAGED, True),
    ([CUDA, ROCM], STAGED, True),
    ([CUDA, ROCM], DIRECT, True),  # bridge and messages would open the same memory
    ([rank("cuda", moves=("host",)), FAR], DIRECT, True),  # its own libucp cannot move it
    ([CUDA, rank("cuda", THERE, moves=("host",))], DIRECT, False),  # the other rank's libucp cannot
    ([CUDA, NONE], DIRECT, False),
])  # fmt: skip
def test_messages(everyone, how, staged):
    assert message_paths(everyone, how).wanted(1) is staged


@pytest.mark.parametrize(
    "there, setting, undecided", [(THERE, "auto", True), (THERE, DIRECT, False), (HERE, "auto", False)]
)
def test_messages_that_no_setting_decides(there, setting, undecided, monkeypatch):
    monkeypatch.setenv("UCCH_STAGING", setting)
    found = message_paths([rank("cuda", moves=BOTH), rank("rocm", there, BOTH)])
    assert found.undecided(1) is undecided
    assert found.wanted(1, in_stream=True) is (undecided or there == HERE)  # streams copy by themselves


def test_whoever_it_comes_from_on_a_crowded_host():
    found = message_paths([CUDA, ROCM, FAR])
    assert found.wanted(-1) and found.wanted(1) and not found.wanted(2)
    assert not message_paths([CUDA, FAR]).wanted(-1)
