"""Data, sharded, tensor and pipeline parallel training through the backend, each against a single process."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def wanted(script: str) -> list[str]:
    """Names of a job's cases, in order."""
    return re.findall(r"^@case\ndef (\w+)", (HERE / script).read_text(), re.M)


def test_strategies(crew) -> None:
    """The vendor boundary falls inside every group of four, and between those of two."""
    job = crew(HERE / "torch_strategies.py", 4, layout="nvidia:2,amd:2", env={"CASES_LIMIT": "640"}, timeout=170)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == wanted("torch_strategies.py")


def test_unequal_devices(crew) -> None:
    """Work balanced between ranks of unequal speed, and replicas that drift apart."""
    job = crew(HERE / "torch_unequal.py", 2, layout="nvidia:1,amd:1", timeout=150)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == wanted("torch_unequal.py")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "transformers"))),
    reason="needs both: pip install accelerate transformers",
)
def test_hugging_face(crew) -> None:
    """accelerate and Trainer train over the backend because they ask for gloo, which it takes the place of."""
    job = crew(HERE / "torch_hf.py", 2, layout="nvidia:1,amd:1", timeout=150)
    assert re.findall(r"^ok (\w+)", job.stdout, re.M) == wanted("torch_hf.py")
