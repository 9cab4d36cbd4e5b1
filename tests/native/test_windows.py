"""Messages through windows, over the fake GPU library: real libucp, real shared memory, asynchronous devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import queued_scripts
import window_scripts

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:2,amd:1"])
def test_matching(fakes: Callable[..., Any], layout: str) -> None:
    ranks = sum(int(part[-1]) for part in layout.split(","))
    result = fakes(window_scripts.MATCHING, layout, UCCH_STAGING="staged", FAKEGPU_DELAY_US="50")
    assert result.stdout.count("right") == ranks


@pytest.mark.parametrize("window", ["2M", "6M", "64M"])
def test_many_at_a_time(fakes: Callable[..., Any], window: str) -> None:
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": window, "FAKEGPU_DELAY_US": "50"}
    assert fakes(window_scripts.CROWD, "nvidia:1,amd:2", **env).stdout.count("right") == 3


@pytest.mark.parametrize("layout", ["nvidia:1,amd:1", "nvidia:2,amd:1", "nvidia:2"])
def test_messages_start_in_streams(fakes: Callable[..., Any], layout: str) -> None:
    """By windows, by pinned memory, and by libucp alone."""
    ranks = sum(int(part[-1]) for part in layout.split(","))
    result = fakes(
        window_scripts.STREAMS, layout, UCCH_STAGING="auto" if ranks == 2 else "staged", FAKEGPU_DELAY_US="50"
    )
    assert result.stdout.count("right") == ranks


@pytest.mark.parametrize("layout, window", [("nvidia:1,amd:1", "64M"), ("nvidia:2,amd:1", "32M")])
def test_streams_do_all_of_a_message(fakes: Callable[..., Any], layout: str, window: str) -> None:
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": window, "FAKEGPU_DELAY_US": "50"}
    result = fakes(queued_scripts.QUEUED, layout, **env)
    assert result.stdout.count("right") == ranks


@pytest.mark.parametrize("layout, window", [("nvidia:1,amd:1", "64M"), ("nvidia:2,amd:1", "32M")])
def test_streams_wait_for_what_is_not_sent_yet(fakes: Callable[..., Any], layout: str, window: str) -> None:
    ranks = sum(int(part[-1]) for part in layout.split(","))
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": window, "FAKEGPU_DELAY_US": "50"}
    assert fakes(queued_scripts.EARLY, layout, **env).stdout.count("right") == ranks


def test_none(fakes: Callable[..., Any]) -> None:
    result = fakes(window_scripts.OFF, "nvidia:1,amd:1", UCCH_STAGING="staged", UCCH_WINDOW="0")
    assert result.stdout.count("right") == 2
    assert "slow way" not in result.stderr


def test_given_up(fakes: Callable[..., Any]) -> None:
    env = {"UCCH_STAGING": "staged", "UCCH_WINDOW": "2M", "UCCH_TIMEOUT": "1", "FAKEGPU_DELAY_US": "50"}
    assert fakes(window_scripts.GIVEN_UP, "nvidia:1,amd:1", **env).stdout.count("right") == 2


@pytest.mark.parametrize(
    "script, heard",
    [(window_scripts.DEATH, 2), (queued_scripts.DEATH, 1), (queued_scripts.EARLY_DEATH, 1)],
    ids=["host", "queued", "early"],
)
def test_a_sender_that_dies(fakes: Callable[..., Any], flavour: tuple[Any, ...], script: str, heard: int) -> None:
    recover = ["--enable-recovery"] if flavour >= ("openmpi", 5) and flavour[0] == "openmpi" else []
    env = {"UCCH_STAGING": "staged", "UCCH_TIMEOUT": "20", "FAKEGPU_DELAY_US": "20000"}
    mpi = {"check": False, "mpi_args": recover}
    result = fakes(script, "nvidia:1,amd:1", mpi=mpi, **env)
    if not recover and "PeerError" not in result.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    assert result.stdout.count("PeerError") == heard, result.stdout + result.stderr
