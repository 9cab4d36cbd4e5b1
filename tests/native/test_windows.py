"""Messages through windows, over the fake GPU library: real libucp, real shared memory, asynchronous devices."""

from collections.abc import Callable
from typing import Any

import pytest
import queued_scripts
import window_scripts
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.mpi

#: Layouts, and bytes of windows and arenas: between vendors, also beside two of one vendor, and within one.
QUEUED = [("nvidia:1,amd:1", "64M"), ("nvidia:2,amd:1", "32M"), ("nvidia:2", "32M"), ("amd:3", "32M")]


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:2,amd:1", "nvidia:2"])
def test_matching(fakes: Callable[..., Any], layout: str) -> None:
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", **FEW_QUEUES}
    result = fakes(window_scripts.MATCHING, layout, **env)
    assert result.stdout.count("right") == ranks


@pytest.mark.parametrize("layout", ["nvidia:1,amd:2", "amd:3"])
@pytest.mark.parametrize("window", ["2M", "6M", "64M"])
def test_many_at_a_time(fakes: Callable[..., Any], window: str, layout: str) -> None:
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": window, "UCCH_ARENA": window, "FAKEGPU_DELAY_US": "50"}
    env |= FEW_QUEUES if window == "6M" else {}
    assert fakes(window_scripts.CROWD, layout, **env).stdout.count("right") == 3


@pytest.mark.parametrize(
    "layout, arena", [("nvidia:1,amd:1", "128M"), ("nvidia:2,amd:1", "128M"), ("nvidia:2", "0"), ("amd:2", "32M")]
)
def test_messages_start_in_streams(fakes: Callable[..., Any], layout: str, arena: str) -> None:
    """By windows, by pinned memory, by libucp alone, and by arenas."""
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"UCCH_STAGING": "auto" if ranks == 2 else "staged", "UCCH_ARENA": arena, "FAKEGPU_DELAY_US": "50"}
    env |= OWN_QUEUES  # it holds streams until hosts have received what others were to carry
    assert fakes(window_scripts.STREAMS, layout, **env).stdout.count("right") == ranks


@pytest.mark.parametrize("layout, window", QUEUED)
def test_streams_do_all_of_a_message(fakes: Callable[..., Any], layout: str, window: str) -> None:
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": window, "UCCH_ARENA": window, "FAKEGPU_DELAY_US": "50"}
    env |= OWN_QUEUES  # it holds a sender's stream until others have gone on, and lets one run into its time
    result = fakes(queued_scripts.QUEUED, layout, **env)
    assert result.stdout.count("right") == ranks


@pytest.mark.parametrize("layout, window", QUEUED)
def test_streams_wait_for_what_is_not_sent_yet(fakes: Callable[..., Any], layout: str, window: str) -> None:
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": window, "UCCH_ARENA": window, "FAKEGPU_DELAY_US": "50"}
    env |= OWN_QUEUES  # ten streams wait for what is sent in any order (test_hip.py has the same with HIP's queues)
    assert fakes(queued_scripts.EARLY, layout, **env).stdout.count("right") == ranks


def test_messages_after_many_groups(fakes: Callable[..., Any]) -> None:
    env = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "5", "FAKEGPU_AHEAD": "150"}
    env |= OWN_QUEUES  # streams wait for what has not been sent
    assert fakes(queued_scripts.GROUPS, "nvidia:1,amd:1", **env).stdout.count("right") == 2


def test_none(fakes: Callable[..., Any]) -> None:
    result = fakes(window_scripts.OFF, "nvidia:1,amd:1", UCCH_STAGING="staged", UCCH_WINDOW="0")
    assert result.stdout.count("right") == 2
    assert "slow way" not in result.stderr


def test_devices_that_do_not_reach_each_other(fakes: Callable[..., Any]) -> None:
    """Messages within a vendor are left to libucp then."""
    script = """
from arrays import Array, runtime
from ucc_hetero import Communicator
Communicator._arenas = True
with Communicator() as comm:
    assert not comm._messages._near and not comm._messages._windows
    x, y = Array(100_000).set(comm.rank), Array(100_000).set(-1)
    comm.Sendrecv(x, 1 - comm.rank, 1, y, 1 - comm.rank, 1)
    assert (y.peek == 1 - comm.rank).all()
print("right")
"""
    for env in ({"FAKEGPU_NO_PEERS": "1"}, {"UCCH_ARENA": "0"}):
        assert fakes(script, "nvidia:2", **env).stdout.count("right") == 2


def test_short_messages_wait_for_nobody(fakes: Callable[..., Any]) -> None:
    """Send returns once the data has left its buffer, as it does with libucp alone; Ssend does not."""
    script = """
import time
from arrays import Array, runtime
from ucc_hetero import Communicator
Communicator._arenas = True
with Communicator() as comm:
    assert comm._messages._near == {1 - comm.rank}
    other, arrays = 1 - comm.rank, [Array(1000).set(10 * comm.rank + k) for k in range(20)]
    for k, x in enumerate(arrays):
        comm.Send(x, other, 5)
        x.set(-7)
    for k in range(20):
        y = Array(1000).set(-1)
        comm.Recv(y, other, 5)
        assert (y.peek == 10 * other + k).all(), (k, y.peek[:3])
    request = comm.Issend(arrays[0].set(3), other, 6)
    comm.mpi.Barrier()
    time.sleep(0.1)
    assert not request.Test()
    comm.mpi.Barrier()
    comm.Recv(y, other, 6)
    assert (y.peek == 3).all()
    request.Wait()
print("right")
"""
    assert fakes(script, "nvidia:2").stdout.count("right") == 2


def test_given_up(fakes: Callable[..., Any]) -> None:
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": "2M", "FAKEGPU_DELAY_US": "50"}
    assert fakes(window_scripts.GIVEN_UP, "nvidia:1,amd:1", **env).stdout.count("right") == 2


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:2"])
@pytest.mark.parametrize(
    "script, heard",
    [(window_scripts.DEATH, 2), (queued_scripts.DEATH, 1), (queued_scripts.EARLY_DEATH, 1)],
    ids=["host", "queued", "early"],
)
def test_a_sender_that_dies(
    fakes: Callable[..., Any], flavour: tuple[Any, ...], script: str, heard: int, layout: str
) -> None:
    recover = ["--enable-recovery"] if flavour >= ("openmpi", 5) and flavour[0] == "openmpi" else []
    env = {"UCCH_STAGING": "staged", "UCCH_TIMEOUT": "200", "FAKEGPU_DELAY_US": "20000"}
    env |= OWN_QUEUES  # the dying sender's stream is held, and so would be what shared its queue
    mpi = {"check": False, "mpi_args": recover}
    result = fakes(script, layout, mpi=mpi, **env)
    if not recover and "PeerError" not in result.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    # Of two calls the last is a collective, of which within one vendor a library tells in its own way.
    failures = [line for line in result.stdout.splitlines() if line in ("PeerError", "CollectiveError")]
    assert failures[0] == "PeerError" and len(failures) == heard, result.stdout + result.stderr
