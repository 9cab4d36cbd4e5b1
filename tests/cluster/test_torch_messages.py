"""Messages of a torch group between devices of two hosts, repeated; ranks are forked from a process with torch."""

import pytest
from settings import OWN_QUEUES

pytestmark = pytest.mark.usefixtures("with_torch")
PAIR = "nvidia:1,amd:1", 2, 1


def test_they_repeat_and_change(alone):
    alone("torch_device_cases:repeated", *PAIR, DICE="7", **OWN_QUEUES)


def test_a_rank_dies(alone, recovery):
    done = alone("torch_device_cases:death", *PAIR, options=recovery, check=False, **OWN_QUEUES)
    assert done.said("told") == 1 or not recovery, done.output
