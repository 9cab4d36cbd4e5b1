"""Training on two vendors compared with a single process."""

import importlib
import json
import random
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PARITY = ["--steps", "3", "--batch", "8", "--length", "32"]


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
