"""Collectives of a torch group on device memory, over the fake GPU library."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_scripts import FEW_QUEUES, OWN_QUEUES

JOB = Path(__file__).parents[1] / "fakegpu" / "torch_calls_job.py"


@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize(("layout", "env"), [
    ("nvidia:1,amd:2", {"QUEUED": "y", **OWN_QUEUES}), ("nvidia:2", OWN_QUEUES),
    ("nvidia:1,amd:1", {"UCCH_CHANNELS": "n", **FEW_QUEUES}),
], ids=["queued", "one vendor", "by hosts"])  # fmt: skip
def test_collectives(fakes: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    job = fakes(JOB, layout, DICE=str(random.randrange(1000)), mpi={"check": False}, **env)
    assert job.said("right") == job.ranks, job.output
