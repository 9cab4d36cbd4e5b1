"""Result files: JSON with everything that is needed to repeat the run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import system
from .output import Row
from .stats import verdict
from .world import World

#: Version of the JSON layout; ``report`` draws no curves of others.
FORMAT = "ucc_hetero.bench/1"
_PLAIN = ("size", "value", "least", "most", "iterations", "wrong", "rate")


def origin(benchmark: str, command: list[str]) -> dict[str, Any]:
    """The part of a result file about the machine and the command."""
    return {
        "format": FORMAT,
        "benchmark": benchmark,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": system.machine(),
        "versions": system.versions(),
        "source": system.commit(),
    }


def write_job(
    path: str, benchmark: str, command: list[str], world: World, data: dict[str, Any], accelerators: Sequence[str] = ()
) -> None:
    """Write a job's result file from rank 0. All memory is host memory by default. Collective."""
    nodes = world.nodes()
    if world.rank == 0:
        job = {"ranks": world.size, "nodes": nodes, "memory": list(accelerators) or ["host"] * world.size}
        write_json(path, {**origin(benchmark, command), "settings": system.settings(), "job": job, **data})


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write a result file atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(target)


def row_data(dtype: str, row: Row, *, plan: str | None) -> dict[str, Any]:
    """A row of a benchmark's table."""
    data: dict[str, Any] = {"dtype": dtype, **{name: getattr(row, name) for name in _PLAIN}, "plan": plan}
    data["percentiles"] = list(row.percentiles)
    if row.overlap is not None:
        data["overlap"] = asdict(row.overlap)
    for peer, (value, interval) in row.ratios.items():
        entry = {"value": value, "ratio": asdict(interval), "verdict": verdict(interval)}
        data.setdefault("peers", {})[peer] = entry
    return data
