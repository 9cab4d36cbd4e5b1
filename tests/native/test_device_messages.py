"""Messages by MPI's rules between devices of one host, over the fake GPU library: real libucp, asynchronous devices."""

import random
from collections.abc import Callable
from typing import Any

import message_scripts
import pytest
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.mpi

#: A job that waits for the deadline of calls is killed before that.
STAGED = {"UCCH_STAGING": "staged", "FAKEGPU_DELAY_US": "50", "UCCH_TIMEOUT": "1000"}
_S = message_scripts
#: Own queues or few, drawn; and on devices that are quicker.
EITHER: dict[str, str] = {}
QUICK = {"FAKEGPU_DELAY_US": "10"}
#: A case by its name, its script, its layout, and its environment beside `STAGED`.
CASES: list[tuple[str, str, str, dict[str, str]]] = [
    ("matching", _S.MATCHING, "nvidia:1,amd:1", FEW_QUEUES),
    # Where streams do not hand each other messages, by pinned memory and by libucp alone; streams are held until hosts
    # have received what others were to carry.
    ("begun in streams", _S.STREAMS, "nvidia:2,amd:1", {"UCCH_CHANNELS": "n", **OWN_QUEUES}),
    ("begun in streams", _S.STREAMS, "nvidia:1,amd:1", {"UCCH_STAGING": "auto", "UCCH_CHANNELS": "n", **OWN_QUEUES}),
    ("begun in streams", _S.STREAMS, "amd:2", {"UCCH_STAGING": "auto", **OWN_QUEUES}),
    ("matching", _S.MATCHING, "nvidia:2,amd:2", QUICK),
    ("matching by hosts", _S.MATCHING, "nvidia:1,amd:1", {"UCCH_CHANNELS": "n", "FAKEGPU_DELAY_US": "10"}),
    ("pinned memory", _S.PINS, "nvidia:1,amd:1", EITHER), ("by copies", _S.COPIES, "nvidia:1,amd:1", EITHER),
    ("behind a slow stream", _S.EARLY, "nvidia:1,amd:1", {}),
    ("on its way", _S.ON_ITS_WAY, "nvidia:1,amd:1", {"FAKEGPU_DELAY_US": "10000"}),
    *[("given up", _S.GIVEN_UP, each, {}) for each in ("nvidia:1,amd:1", "nvidia:2")],
]  # fmt: skip


#: Those of ranks that have no pinned memory and no kernels yet, or a device of their own.
FRESH = _S.STREAMS, _S.PINS, _S.EARLY


@pytest.mark.parametrize(
    ("script", "layout", "env"), [case[1:] for case in CASES], ids=[f"{what}, {layout}" for what, _, layout, _ in CASES]
)
def test_messages(
    fakes: Callable[..., Any], fake_crew: Callable[..., Any], script: str, layout: str, env: dict[str, str]
) -> None:
    env = env | random.choice((OWN_QUEUES, FEW_QUEUES)) if any(env is each for each in (EITHER, QUICK)) else env
    job = (fakes if script in FRESH else fake_crew)(script, layout, **{**STAGED, **env})
    assert job.said("right") == job.ranks, (env, job.output)


@pytest.mark.parametrize("before", [True, False])
def test_a_sender_that_dies(fakes: Callable[..., Any], recovery: list[str], before: bool) -> None:
    env = STAGED | {"UCCH_TIMEOUT": "200"}
    script = f"WAIT = {before}\n" + message_scripts.DEATH
    result = fakes(script, "nvidia:1,amd:1", mpi={"check": False, "mpi_args": recovery}, **env)
    said = [line for line in result.stdout.splitlines() if line in ("whole", "PeerError", "CollectiveError")]
    if not recovery and not said:
        pytest.skip("this launcher ends every rank when one dies")
    assert said[1:] == ["PeerError"] and said[0] in ("PeerError", "" if before else "whole"), result.output
