"""Messages of a torch group on device memory, over the fake GPU library: batches that repeat, change and fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch_scripts
from device_scripts import FEW_QUEUES, OWN_QUEUES

pytestmark = pytest.mark.usefixtures("with_torch")
LAYOUTS = [("nvidia:1,amd:1", OWN_QUEUES), ("nvidia:2", {}), ("amd:2", FEW_QUEUES)]


@pytest.mark.parametrize(("layout", "env"), LAYOUTS, ids=[layout for layout, _ in LAYOUTS])
def test_messages_repeat_and_change(fakes: Callable[..., Any], layout: str, env: dict[str, str]) -> None:
    result = fakes(torch_scripts.REPEATED, layout, DICE="5", **env)
    assert result.said("right") == result.ranks, result.output


def test_mistakes_between_messages_that_repeat(fakes: Callable[..., Any]) -> None:
    result = fakes(torch_scripts.MISTAKES, "nvidia:1,amd:1", **OWN_QUEUES)
    assert result.said("right") == result.ranks, result.output
