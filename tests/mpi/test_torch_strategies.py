"""Data, sharded, tensor and pipeline parallel training through the backend, each compared with a single process."""

import importlib.util
import random
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def drawn(script):
    names = re.findall(r"^@case\ndef (\w+)", (HERE / script).read_text(), re.M)
    chosen = random.sample(names, (len(names) + 1) // 2)
    return [name for name in names if name in chosen]


def test_strategies(crew):
    """The vendor boundary lies inside every group of four, and between groups of two."""
    names, env = drawn("torch_strategies.py"), {"CASES_LIMIT": "640"}
    job = crew(HERE / "torch_strategies.py", 4, args=names, layout="nvidia:2,amd:2", env=env, timeout=170)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == names


def test_unequal_devices(crew):
    names = drawn("torch_unequal.py")
    job = crew(HERE / "torch_unequal.py", 2, args=names, layout="nvidia:1,amd:1", timeout=150)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == names


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "transformers"))),
    reason="needs both: pip install accelerate transformers",
)
def test_hugging_face(crew):
    """accelerate and Trainer use the backend because they request gloo, which it replaces."""
    names = drawn("torch_hf.py")
    job = crew(HERE / "torch_hf.py", 2, args=names, layout="nvidia:1,amd:1", timeout=150)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == names
