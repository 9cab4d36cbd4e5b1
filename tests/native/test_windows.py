"""Messages through windows, over the fake GPU library: real libucp, real shared memory, asynchronous devices."""

from collections.abc import Callable
from typing import Any

import pytest
import window_scripts
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.mpi

#: A job that waits for the deadline of calls is killed before that.
STAGED = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", "UCCH_TIMEOUT": "1000"}
_W = window_scripts
#: A case by its name, its script, its layout, and its environment beside `STAGED`.
CASES: list[tuple[str, str, str, dict[str, str]]] = [
    *[("matching", _W.MATCHING, each, FEW_QUEUES) for each in ("nvidia:1,amd:1", "nvidia:2,amd:1")],
    *[("many at a time", _W.CROWD, "nvidia:1,amd:2", {"UCCH_WINDOW": size} | (FEW_QUEUES if size == "6M" else {}))
      for size in ("2M", "6M", "64M")],
    # By windows, where streams do not hand each other messages, by pinned memory and by libucp alone; streams are held
    # until hosts have received what others were to carry.
    ("begun in streams", _W.STREAMS, "nvidia:2,amd:1", {"UCCH_CHANNELS": "n", **OWN_QUEUES}),
    ("begun in streams", _W.STREAMS, "nvidia:1,amd:1", {"UCCH_STAGING": "auto", "UCCH_CHANNELS": "n", **OWN_QUEUES}),
    ("begun in streams", _W.STREAMS, "amd:2", {"UCCH_STAGING": "auto", **OWN_QUEUES}),
    ("given up", _W.GIVEN_UP, "nvidia:1,amd:1", {"UCCH_WINDOW": "2M"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "layout", "env"), [case[1:] for case in CASES], ids=[f"{what}, {layout}" for what, _, layout, _ in CASES]
)
def test_messages(fake_crew: Callable[..., Any], script: str, layout: str, env: dict[str, str]) -> None:
    job = fake_crew(script, layout, **{**STAGED, **env})
    assert job.said("right") == job.ranks


def test_none(fakes: Callable[..., Any]) -> None:
    result = fakes(window_scripts.OFF, "nvidia:1,amd:1", UCCH_STAGING="staged", UCCH_WINDOW="0")
    assert result.said("right") == 2
    assert "slow way" not in result.stderr


def test_a_sender_that_dies(fakes: Callable[..., Any], recovery: list[str]) -> None:
    env = {"UCCH_STAGING": "staged", "UCCH_TIMEOUT": "200", "FAKEGPU_DELAY_US": "20000"}
    env |= OWN_QUEUES  # the dying sender's stream is held, and so would be what shared its queue
    mpi = {"check": False, "mpi_args": recovery}
    result = fakes(window_scripts.DEATH, "nvidia:1,amd:1", mpi=mpi, **env)
    if not recovery and "PeerError" not in result.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    # Of two calls the last is a collective, of which within one vendor a library tells in its own way.
    failures = [line for line in result.stdout.splitlines() if line in ("PeerError", "CollectiveError")]
    assert failures[0] == "PeerError" and len(failures) == 2, result.stdout + result.stderr
