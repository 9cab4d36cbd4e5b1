"""Messages through windows, over the fake GPU library: real libucp, real shared memory, asynchronous devices."""

from collections.abc import Callable
from typing import Any

import pytest
import queued_scripts
import window_scripts
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.mpi

#: A job that waits for the deadline of calls is killed before that.
STAGED = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", "UCCH_TIMEOUT": "1000"}
#: Layouts, and bytes of windows and arenas: between vendors, also beside two of one vendor, and within one.
QUEUED = [("nvidia:1,amd:1", "64M"), ("nvidia:2,amd:1", "32M"), ("nvidia:2", "32M"), ("amd:3", "32M")]


def _sized(nbytes: str) -> dict[str, str]:
    return {"UCCH_WINDOW": nbytes, "UCCH_ARENA": nbytes}


_W, _Q = window_scripts, queued_scripts
#: A case by its name, its script, its layout, and its environment beside `STAGED`.
CASES: list[tuple[str, str, str, dict[str, str]]] = [
    *[("matching", _W.MATCHING, each, FEW_QUEUES) for each in ("nvidia:1,amd:1", "nvidia:2,amd:1", "nvidia:2")],
    *[("many at a time", _W.CROWD, each, _sized(size) | (FEW_QUEUES if size == "6M" else {}))
      for each in ("nvidia:1,amd:2", "amd:3") for size in ("2M", "6M", "64M")],
    # By windows, by pinned memory, by libucp alone, and by arenas; streams are held until hosts have received what
    # others were to carry.
    ("begun in streams", _W.STREAMS, "nvidia:1,amd:1", {"UCCH_STAGING": "auto", "UCCH_ARENA": "128M", **OWN_QUEUES}),
    ("begun in streams", _W.STREAMS, "nvidia:2,amd:1", {"UCCH_ARENA": "128M", **OWN_QUEUES}),
    ("begun in streams", _W.STREAMS, "nvidia:2", {"UCCH_STAGING": "auto", "UCCH_ARENA": "0", **OWN_QUEUES}),
    ("begun in streams", _W.STREAMS, "amd:2", {"UCCH_STAGING": "auto", "UCCH_ARENA": "32M", **OWN_QUEUES}),
    # A sender's stream is held until others have gone on, and one runs into its time.
    *[("all done by streams", _Q.QUEUED, each, _sized(size) | OWN_QUEUES) for each, size in QUEUED],
    # Ten streams wait for what is sent in any order (test_hip.py has the same with HIP's queues).
    *[("waited for before they are sent", _Q.EARLY, each, _sized(size) | OWN_QUEUES) for each, size in QUEUED],
    ("after many groups", _Q.GROUPS, "nvidia:1,amd:1", {"FAKEGPU_DELAY_US": "5", "FAKEGPU_AHEAD": "150", **OWN_QUEUES}),
    ("given up", _W.GIVEN_UP, "nvidia:1,amd:1", {"UCCH_WINDOW": "2M"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "layout", "env"), [case[1:] for case in CASES], ids=[f"{what}, {layout}" for what, _, layout, _ in CASES]
)
def test_messages(fakes: Callable[..., Any], script: str, layout: str, env: dict[str, str]) -> None:
    job = fakes(script, layout, **{**STAGED, **env})
    assert job.said("right") == job.ranks


def test_none(fakes: Callable[..., Any]) -> None:
    result = fakes(window_scripts.OFF, "nvidia:1,amd:1", UCCH_STAGING="staged", UCCH_WINDOW="0")
    assert result.said("right") == 2
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
        assert fakes(script, "nvidia:2", **env).said("right") == 2


def test_short_messages_wait_for_nobody(fakes: Callable[..., Any]) -> None:
    """Send returns once the data has left its buffer, as it does with libucp alone; Ssend does not."""
    script = """
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
    assert not any(request.Test() for _ in range(1000))
    comm.mpi.Barrier()
    comm.Recv(y, other, 6)
    assert (y.peek == 3).all()
    request.Wait()
print("right")
"""
    assert fakes(script, "nvidia:2").said("right") == 2


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:2"])
@pytest.mark.parametrize(
    "script, heard",
    [(window_scripts.DEATH, 2), (queued_scripts.DEATH, 1), (queued_scripts.EARLY_DEATH, 1)],
    ids=["host", "queued", "early"],
)
def test_a_sender_that_dies(
    fakes: Callable[..., Any], recovery: list[str], script: str, heard: int, layout: str
) -> None:
    env = {"UCCH_STAGING": "staged", "UCCH_TIMEOUT": "200", "FAKEGPU_DELAY_US": "20000"}
    env |= OWN_QUEUES  # the dying sender's stream is held, and so would be what shared its queue
    mpi = {"check": False, "mpi_args": recovery}
    result = fakes(script, layout, mpi=mpi, **env)
    if not recovery and "PeerError" not in result.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    # Of two calls the last is a collective, of which within one vendor a library tells in its own way.
    failures = [line for line in result.stdout.splitlines() if line in ("PeerError", "CollectiveError")]
    assert failures[0] == "PeerError" and len(failures) == heard, result.stdout + result.stderr
