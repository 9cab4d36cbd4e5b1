"""Messages of a torch group on device memory, over the fake GPU library: batches that repeat, change and fail."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch_scripts
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.usefixtures("with_torch")
LAYOUTS = {
    "lanes": ("nvidia:1,amd:1", OWN_QUEUES),
    "few queues": ("nvidia:1,amd:1", FEW_QUEUES),
    "by way of the host": ("nvidia:1,amd:1", {"UCCH_CHANNELS": "n"}),
    "one vendor": ("nvidia:2", {}),
}


@pytest.mark.parametrize("how", LAYOUTS)
def test_messages_repeat_and_change(fakes: Callable[..., Any], how: str) -> None:
    layout, env = LAYOUTS[how]
    result = fakes(torch_scripts.REPEATED, layout, DICE=str(random.randrange(1000)), **env)
    assert result.said("right") == result.ranks, result.output


def test_mistakes_between_messages_that_repeat(fakes: Callable[..., Any]) -> None:
    result = fakes(torch_scripts.MISTAKES, "nvidia:1,amd:1", **OWN_QUEUES)
    assert result.said("right") == result.ranks, result.output


@pytest.mark.parametrize("how", ["lanes", "few queues"])
def test_a_tensor_may_be_filled_once_its_send_was_waited_for(fakes: Callable[..., Any], how: str) -> None:
    layout, env = LAYOUTS[how]
    job = fakes(torch_scripts.REFILLED, layout, **env)
    assert job.said("right") == job.ranks, job.output


@pytest.mark.parametrize("vendor", ["y", "n"], ids=["the vendor's library", "lanes"])
def test_messages_inside_a_vendor(fakes: Callable[..., Any], vendor: str) -> None:
    """In a group of two vendors: which way is taken, order, tags, batches with both, and errors."""
    job = fakes(torch_scripts.FABRIC, "nvidia:3,amd:1", UCCH_TORCH_VENDOR=vendor, **OWN_QUEUES)
    assert job.said("right") == job.ranks, job.output
