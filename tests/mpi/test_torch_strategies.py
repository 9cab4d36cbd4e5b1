"""Data, sharded, tensor and pipeline parallel training through the backend, each compared with a single process."""

import importlib.util
import random

import pytest

pytestmark = pytest.mark.slow


def half_of(module):
    """Arguments of a job that runs half of a module's cases."""
    return [[module], [], [], random.randrange(1 << 30)]


def test_strategies(crew):
    """The vendor boundary lies inside every group of four, and between groups of two."""
    env = {"CASES_LIMIT": "640"}
    crew("torch_cases:run", 4, args=half_of("torch_strategies"), layout="nvidia:2,amd:2", env=env, timeout=170)


def test_unequal_devices(crew):
    crew("torch_cases:run", 2, args=half_of("torch_unequal"), layout="nvidia:1,amd:1", timeout=150)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "transformers"))),
    reason="needs both: pip install accelerate transformers",
)
def test_hugging_face(crew):
    """accelerate and Trainer use the backend because they request gloo, which it replaces."""
    crew("torch_hf:run", 2, args=half_of("torch_hf"), layout="nvidia:1,amd:1", timeout=150)
