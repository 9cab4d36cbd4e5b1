"""Data, sharded, tensor and pipeline parallel training through the backend, each compared with a single process."""

import importlib
import importlib.util
import json
import random
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TOOLS = Path(__file__).resolve().parents[2] / "tools"
PARITY = ["--steps", "3", "--batch", "8", "--length", "32"]


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


def test_parity(crew, tmp_path, monkeypatch):
    """Two vendors and a single process have equal losses, for some of the strategies; another seed does not."""
    monkeypatch.syspath_prepend(TOOLS)
    parity = importlib.import_module("torch_parity")
    ways = random.sample([*parity.WAYS], 2)
    jobs = {"single": (1, "", ways, "0"), "mixed": (4, "nvidia:2,amd:2", ways, "0"), "control": (4, "", ways[:1], "1")}
    losses = {}
    for name, (ranks, layout, those, seed) in jobs.items():
        args = ["--child", str(tmp_path / name), *PARITY, "--ways", ",".join(those), "--seed", seed]
        crew(TOOLS / "torch_parity.py", ranks, args=args, layout=layout, timeout=100)
        losses[name] = json.loads((tmp_path / name).read_text())["losses"]
        assert [*losses[name]] == those and all(len(each) == 3 for each in losses[name].values())
    report, _, holds = parity.judge(losses, "fp32")
    assert holds, "\n".join(report)
