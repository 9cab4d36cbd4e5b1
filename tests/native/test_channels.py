"""Calls queued in streams whole, over the fake GPU library: real windows, plans and processes; asynchronous devices.

Every script asserts that its calls were queued, or that they were not.
"""

import re
from collections.abc import Callable
from typing import Any

import channel_failure_scripts
import channel_life_scripts
import channel_scripts
import pytest
from device_scripts import FEW_QUEUES, LATE_KERNELS, OWN_QUEUES

pytestmark = pytest.mark.mpi

PAIR, THREE, FOUR = "nvidia:1,amd:1", "nvidia:1,amd:2", "nvidia:2,amd:2"


@pytest.fixture
def run(fakes: Callable[..., Any]) -> Callable[..., Any]:
    """Run a script on fake devices that are quick, all of its collectives as messages."""

    def start(script: str, layout: str, **env: str) -> Any:
        usual = {"UCCH_TUNE": channel_scripts.FLAT, "FAKEGPU_DELAY_US": "20"}
        return fakes(script, layout, timeout=90, **usual | env)

    return start


def ranks(layout: str) -> int:
    return sum(int(part[-1]) for part in layout.split(","))


@pytest.mark.parametrize("layout, env", [
    (PAIR, {"FAKEGPU_CONNECTIONS": "1"}),
    (THREE, {"UCCH_WIRE_SLOT": "64K", **FEW_QUEUES}),
    (FOUR, {"FAKEGPU_CONNECTIONS": "3"}),
    (PAIR, LATE_KERNELS),
], ids=["2", "3", "4", "kernels loaded late"])  # fmt: skip
def test_every_collective_in_every_form(run: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    assert run(channel_scripts.EVERY, layout, **env).stdout.count("right") == ranks(layout)


@pytest.mark.parametrize("layout", [PAIR, THREE])
def test_other_data(run: Callable[..., Any], layout: str) -> None:
    assert run(channel_scripts.OTHER_DATA, layout, **FEW_QUEUES).stdout.count("right") == ranks(layout)


@pytest.mark.parametrize("layout, env", [
    (PAIR, {"UCCH_WIRE_SLOT": "16K"}),
    (PAIR, {**FEW_QUEUES, "FAKEGPU_CONNECTIONS": "1"}),
    (THREE, {**FEW_QUEUES, "FAKEGPU_CONNECTIONS": "2", "UCCH_WIRE_SLOT": "64K"}),
], ids=["small rings", "one connection", "two connections"])  # fmt: skip
def test_many_calls_in_many_streams(run: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    assert run(channel_scripts.CROWD, layout, DICE="7", **env).stdout.count("right") == ranks(layout)


def test_messages_go_on_while_the_driver_waits(run: Callable[..., Any]) -> None:
    env = OWN_QUEUES | LATE_KERNELS
    assert run(channel_life_scripts.KEPT, PAIR, **env).stdout.count("right") == 2


def test_several_communicators(run: Callable[..., Any]) -> None:
    # Threads use them in any order, which devices that run out of queues do not allow (docs/gpu-inside.md).
    env = {"UCCH_WINDOW": "64M", **OWN_QUEUES}
    assert run(channel_life_scripts.SEVERAL, PAIR, **env).stdout.count("right") == 2


@pytest.mark.parametrize("layout", [PAIR, FOUR])
def test_many_groups(run: Callable[..., Any], layout: str) -> None:
    env = {"UCCH_WIRE_SLOT": "64K", **OWN_QUEUES}
    assert run(channel_life_scripts.MANY, layout, **env).stdout.count("right") == ranks(layout)


def test_rings_come_with_calls(run: Callable[..., Any]) -> None:
    out = run(channel_life_scripts.GROWS, THREE).stdout
    assert out.count("right rings: rank") == 3 and "shared" in out and "wire" not in out, out


def test_no_pinned_memory_is_left(run: Callable[..., Any]) -> None:
    assert run(channel_life_scripts.PINNED_OUT, PAIR, UCCH_WINDOW="16M").stdout.count("right") == 2


@pytest.mark.parametrize("layout", [PAIR, FOUR])
def test_replicas_are_equal(run: Callable[..., Any], layout: str) -> None:
    assert run(channel_scripts.REPLICAS, layout).stdout.count("right") == ranks(layout)


@pytest.mark.parametrize("layout", [PAIR, THREE])
def test_data_that_comes_late(run: Callable[..., Any], layout: str) -> None:
    assert run(channel_scripts.LATE, layout).stdout.count("right") == ranks(layout)


def test_a_rank_that_never_calls(run: Callable[..., Any]) -> None:
    out = run(channel_failure_scripts.MISSING, PAIR, UCCH_TIMEOUT="200").stdout
    assert out.count("waited for: ['CollectiveTimeout', ") == 2 and "nothing" not in out, out
    assert out.count("next: CollectiveError") == 2


def test_a_rank_that_never_calls_what_others_wait_for(run: Callable[..., Any]) -> None:
    out = run(channel_failure_scripts.MISSING_TOO, PAIR, UCCH_TIMEOUT="200").stdout
    assert "blocking: CollectiveTimeout" in out and "later: CollectiveError" in out
    assert out.count("right") == 2


def test_nobody_takes_garbage_for_a_result(run: Callable[..., Any]) -> None:
    # Two threads, each with a communicator of its own: in one order for each, in none for both (docs/gpu-inside.md).
    out = run(channel_failure_scripts.GARBAGE, THREE, UCCH_TIMEOUT="200", **OWN_QUEUES).stdout
    assert out.count("outcome") == 6 and "outcome nothing" not in out, out


def test_ranks_that_call_different_things(run: Callable[..., Any]) -> None:
    out = run(channel_failure_scripts.DIFFERENT, PAIR, UCCH_TIMEOUT="200").stdout
    assert len(re.findall("MismatchError before .* after CollectiveError", out)) == 4, out


def test_a_rank_that_dies(run: Callable[..., Any], flavour: tuple[Any, ...], fakes: Callable[..., Any]) -> None:
    recover = ["--enable-recovery"] if flavour >= ("openmpi", 5) and flavour[0] == "openmpi" else []
    env = {"UCCH_TUNE": channel_scripts.FLAT, "UCCH_TIMEOUT": "200"}
    result = fakes(channel_failure_scripts.KILLED, THREE, mpi={"check": False, "mpi_args": recover}, **env)
    if not recover and "PeerError" not in result.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    assert result.stdout.count("died: PeerError CollectiveError") == 2, result.output


def test_calls_under_way_at_the_end(run: Callable[..., Any]) -> None:
    assert run(channel_life_scripts.LEFT, THREE).stdout.count("right") == 3


@pytest.mark.parametrize("layout, env", [
    (PAIR, {"UCCH_CHANNELS": "n", **OWN_QUEUES}),  # a stream is held until hosts have copied in others
    (PAIR, {"FAKEGPU_NO_FLAGS": "1"}),
    (THREE, {"FAKEGPU_DEVICES": "1", **FEW_QUEUES}),  # two ranks of one vendor share it
], ids=["unwanted", "no memory waits", "a device for two"])  # fmt: skip
def test_without_channels(run: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    assert run(channel_life_scripts.WITHOUT, layout, **env).stdout.count("right") == ranks(layout)


def test_short_calls_are_one_kernel(run: Callable[..., Any]) -> None:
    assert run(channel_life_scripts.SHORT, FOUR, UCCH_TUNE="", **FEW_QUEUES).stdout.count("right") == 4


def test_a_device_without_a_compiler(run: Callable[..., Any]) -> None:
    assert run(channel_life_scripts.NO_COMPILER, PAIR).stdout.count("right") == 2
