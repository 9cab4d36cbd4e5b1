"""Places of data and its paths over bridges, for collectives and messages: judged from the facts of all ranks."""

from dataclasses import replace

import pytest
from test_bootstrap import FACTS, HERE, THERE

from ucc_hetero.cli.finding import Finding
from ucc_hetero.cli.tune import pair_rules, pairs_of
from ucc_hetero.errors import AgreementError
from ucc_hetero.machine.discover import HostIdentity
from ucc_hetero.machine.facts import Facts
from ucc_hetero.planner.rules import PairRule
from ucc_hetero.planner.select import Tuning
from ucc_hetero.planner.topology import Topology
from ucc_hetero.transport.paths import Device, MessagePaths, crowded_hosts, path_of
from ucc_hetero.types import Transport

DIRECT, STAGED = Transport


def rank(memory: str, host: HostIdentity = HERE, moves: tuple[str, ...] = ("host", "cuda")) -> Facts:
    return replace(
        FACTS, host=host, device_memory=memory, memory_types=moves, vendor={"rocm": "amd"}.get(memory, "nvidia")
    )


CUDA, ROCM = rank("cuda"), rank("rocm", moves=("host", "rocm"))
FAR = rank("rocm", THERE, ("host", "rocm"))
BOTH = ("host", "cuda", "rocm")


@pytest.mark.parametrize("ranks, wanted, path", [
    ([CUDA, CUDA], "auto", DIRECT),
    ([CUDA, FAR], "auto", DIRECT),  # each host has devices of one kind: the network reads both
    ([CUDA, ROCM], "auto", STAGED),
    ([CUDA, FAR, rank("cuda", THERE)], "auto", STAGED),
    ([CUDA, rank("")], "auto", DIRECT),
    ([CUDA, rank("", moves=("host",))], "auto", STAGED),  # it could not receive from the other's device
    ([CUDA, rank("", THERE, ("host",))], "auto", DIRECT),
    ([CUDA, rank("cuda", moves=("host",))], "auto", STAGED),
    ([CUDA, ROCM], DIRECT, DIRECT),
    ([CUDA, CUDA], STAGED, STAGED),
])  # fmt: skip
def test_path(ranks: list[Facts], wanted: str, path: str) -> None:
    assert path_of(ranks, wanted) == path


@pytest.mark.parametrize("ranks, reason", [
    ([replace(CUDA, board="01:00.0"), replace(CUDA, board="02:00.0")], ""),
    ([replace(CUDA, board="01:00.0"), replace(rank("cuda", THERE), board="01:00.0")], ""),
    ([replace(CUDA, board="01:00.0")] * 2, "share a device"),  # NCCL has none of both
    ([CUDA, rank("cuda", moves=("host",))], "cannot move"),
])  # fmt: skip
def test_an_island_whose_devices_no_library_serves(ranks: list[Facts], reason: str) -> None:
    found = Device.of(0, range(2), ranks, None).by_host
    assert reason in found and bool(reason) == bool(found)
    assert not Device.of(0, [0], ranks, None).by_host


def test_places_that_cannot_be_or_are_crowded() -> None:
    with pytest.raises(AgreementError, match=r"rank\(s\) \[1\] cannot move"):
        path_of([CUDA, rank("cuda", moves=("host",))], DIRECT)
    two = Topology.group(["nvidia", "amd"], [0, 0])
    assert crowded_hosts(two, [CUDA, ROCM]) == {HERE.memory}
    assert not crowded_hosts(two, [CUDA, FAR])
    assert not crowded_hosts(Topology.group(["nvidia", "nvidia"], [0, 0]), [CUDA, CUDA])


ROCM = rank("rocm", moves=BOTH)
NONE = rank("", moves=("host", "cuda"))
BETWEEN = PairRule(("amd", "nvidia"), False, 4096, 65536, STAGED)


def message_paths(everyone: list[Facts], path: Transport = DIRECT, *rules: PairRule, me: int = 0) -> MessagePaths:
    hosts = [0 if f.host == CUDA.host else 1 for f in everyone]
    topology = Topology.group([f.vendor for f in everyone], hosts)
    return MessagePaths(me, everyone, topology, Tuning(path=path, messages=rules))


@pytest.mark.parametrize("everyone, path, detour, either", [
    ([CUDA, CUDA], DIRECT, False, True),
    ([CUDA, FAR], DIRECT, False, True),
    ([CUDA, FAR], STAGED, True, True),
    ([CUDA, ROCM], STAGED, True, False),  # bridge and messages would open the same memory
    ([rank("cuda", moves=("host",)), FAR], DIRECT, True, False),  # its own libucp cannot move it
    ([CUDA, rank("cuda", THERE, moves=("host",))], DIRECT, False, False),  # the other's cannot
    ([CUDA, NONE], DIRECT, False, True),
    ([CUDA, rank("", moves=("host",))], DIRECT, False, False),
    ([NONE, NONE], DIRECT, False, False),
])  # fmt: skip
def test_without_measured_rules(everyone: list[Facts], path: str, detour: bool, either: bool) -> None:
    found = message_paths(everyone, path)
    assert found.wanted(1, 1 << 20) is detour
    assert found.either(0, 1) is found.either(1, 0) is either


@pytest.mark.parametrize("there, rules, undecided", [
    (THERE, (), True),
    (THERE, (BETWEEN,), False),  # measured: that rule says which way
    (HERE, (), False),
])  # fmt: skip
def test_messages_that_nothing_decides(there: HostIdentity, rules: tuple[PairRule, ...], undecided: bool) -> None:
    ranks = [rank("cuda", moves=BOTH), rank("rocm", there, BOTH)]
    assert message_paths(ranks, DIRECT, *rules).undecided(1, 4096) is undecided


def test_whoever_it_comes_from_on_a_crowded_host() -> None:
    found = message_paths([CUDA, ROCM, FAR])
    assert found.wanted(-1, 8) and found.wanted(1, 8) and not found.wanted(2, 8)
    assert not message_paths([CUDA, FAR]).wanted(-1, 8)


@pytest.mark.parametrize("path", [DIRECT, STAGED])
def test_measured_rules_hold_for_their_pair_and_sizes(path: Transport) -> None:
    other = PairRule(("amd", "nvidia"), False, 65536, 1 << 30, DIRECT)
    found = message_paths([CUDA, FAR, rank("cuda", THERE)], path, BETWEEN, other)
    usual = path == STAGED
    assert [found.wanted(1, n) for n in (8, 4096, 65535, 65536)] == [usual, True, True, False]
    assert [found.wanted(2, n) for n in (8, 4096, 65536)] == [usual] * 3  # no rule speaks of these two
    assert found.wanted(-1, 4096) is usual
    assert found.wanted(1, 65536, in_stream=True)  # streams copy themselves, whatever is faster for hosts


@pytest.mark.parametrize("wanted", [DIRECT, STAGED])
def test_what_the_user_wants_comes_before_what_was_measured(monkeypatch: pytest.MonkeyPatch, wanted: Transport) -> None:
    monkeypatch.setenv("UCCH_STAGING", wanted)
    found = message_paths([CUDA, FAR], wanted, BETWEEN)
    assert not found.either(0, 1)
    assert found.wanted(1, 4096) is (wanted == STAGED)
    found = message_paths([CUDA, FAR, ROCM], DIRECT, BETWEEN)
    found.forced = DIRECT  # while it is measured
    assert not found.wanted(1, 4096)
    assert found.wanted(2, 4096)  # these must


def test_pairs_that_are_measured() -> None:
    far = rank("cuda", THERE)
    everyone = [CUDA, CUDA, CUDA, NONE, far, rank("", THERE)]
    hosts = [0, 0, 0, 0, 1, 1]
    #: nvidia-nvidia and nvidia-host, each on one host and on two; two ranks without devices have nothing to choose.
    assert list(pairs_of(message_paths(everyone), hosts)) == [(0, 1), (0, 3), (0, 4), (0, 5)]
    assert list(pairs_of(message_paths([CUDA, ROCM]), [0, 0])) == []
    assert list(pairs_of(message_paths([CUDA, CUDA, FAR, FAR]), [0, 0, 1, 1])) == [(0, 1), (2, 3), (0, 2)]


def test_rules_end_halfway_between_sizes() -> None:
    def one(nbytes: int, direct: float, staged: float) -> Finding:
        return Finding((("amd", "nvidia"), False), nbytes, DIRECT, {DIRECT: direct, STAGED: staged})

    found = [one(64, 1.0, 2.0), one(4096, 1.0, 0.97), one(65536, 3.0, 1.0), one(1 << 20, 30.0, 10.0)]
    assert pair_rules(found) == (PairRule(("amd", "nvidia"), False, 16384.0, 2.0 * (1 << 20), STAGED),)
    assert pair_rules(found[:2]) == ()
    assert pair_rules([*found, one(1 << 23, 1.0, 2.0)])[0].high == round((1 << 43) ** 0.5)
