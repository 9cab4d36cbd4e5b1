"""Messages that the streams of two ranks hand each other, over the fake GPU library."""

import random
from collections.abc import Callable
from typing import Any

import lane_scripts
import pytest
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.mpi

_S = lane_scripts
#: As HIP comes: streams wait for what has been queued before, and for no more.
CAREFUL = {**FEW_QUEUES, "UCCH_HOLD": "n"}
#: One of the two, drawn.
EITHER: dict[str, str] = {}
NAMES = {id(CAREFUL): "few queues", id(EITHER): "any queues"}
CASES: list[tuple[str, str, str, dict[str, str]]] = [
    ("random", _S.RANDOM, "nvidia:2,amd:2", EITHER),
    ("held", _S.HELD, "nvidia:2,amd:1", OWN_QUEUES),
    ("by copies", _S.COPIES, "nvidia:2,amd:1", EITHER),
    ("mistakes", _S.MISTAKES, "nvidia:1,amd:1", EITHER), ("late", _S.LATE, "nvidia:1,amd:1", EITHER),
    ("after many groups", _S.GROUPS, "nvidia:1,amd:1", {"FAKEGPU_AHEAD": "150", **OWN_QUEUES}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "layout", "env"), [case[1:] for case in CASES],
    ids=[f"{what}, {layout}, {NAMES.get(id(env), 'own queues')}" for what, _, layout, env in CASES],
)  # fmt: skip
def test_messages(
    fakes: Callable[..., Any], fake_crew: Callable[..., Any], script: str, layout: str, env: dict[str, str]
) -> None:
    env = env or random.choice((OWN_QUEUES, CAREFUL))
    on = fakes if script == _S.HELD else fake_crew  # ranks that have no pinned memory and no kernels yet
    job = on(script, layout, **{"FAKEGPU_DELAY_US": "20", "UCCH_TIMEOUT": "1000", **env})
    assert job.said("right") == job.ranks, (env, job.output)


def test_a_sender_that_dies(fakes: Callable[..., Any], recovery: list[str]) -> None:
    env = {"UCCH_TIMEOUT": "200", **OWN_QUEUES}
    result = fakes(_S.DEATH, "nvidia:1,amd:1", mpi={"check": False, "mpi_args": recovery}, **env)
    if not recovery and "PeerError" not in result.stdout:
        pytest.skip("this launcher ends every rank when one dies")
    assert "PeerError" in result.stdout and "went on" in result.stdout, result.stdout + result.stderr
