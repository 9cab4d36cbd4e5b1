"""Rows as files: JSON with everything needed to repeat the run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from . import system
from .options import Options
from .output import Row
from .stats import verdict
from .table import BENCHES, Bench
from .world import Peer, World

#: Version of the JSON layout; ``report`` refuses others.
FORMAT = "ucc_hetero.bench/1"
_PLAIN = ("size", "value", "least", "most", "iterations", "wrong", "rate")


def origin(benchmark: str, command: list[str]) -> dict[str, Any]:
    """The part of every result file that says on what machine and by what it was made."""
    return {
        "format": FORMAT,
        "benchmark": benchmark,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": system.machine(),
        "versions": system.versions(),
        "source": system.commit(),
    }


def header(benchmark: str, command: list[str], world: World, accelerators: list[str], nodes: int) -> dict[str, Any]:
    """The part of a job's result file that says where it comes from."""
    job = {"ranks": world.size, "nodes": nodes, "memory": accelerators}
    return {**origin(benchmark, command), "settings": system.settings(), "job": job}


def write_job(
    path: str, benchmark: str, command: list[str], world: World, data: dict[str, Any], accelerators: Sequence[str] = ()
) -> None:
    """Write a job's result file from rank 0; all memory is the host's unless said. Collective."""
    nodes = world.nodes()
    if world.rank == 0:
        kinds = list(accelerators) or ["host"] * world.size
        write_json(path, {**header(benchmark, command, world, kinds, nodes), **data})


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write a result file whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(target)


class Results:
    """Collects the rows of one benchmark on rank 0 and writes them at the end."""

    def __init__(self, benchmark: str, command: list[str], world: World, accelerator: str) -> None:
        self._rank = world.rank
        self._accelerators: list[str] = world.comm.allgather(accelerator)
        nodes = world.nodes()
        self._head = header(benchmark, command, world, self._accelerators, nodes) if world.rank == 0 else {}
        self._rates = benchmark in BENCHES and BENCHES[benchmark].unit == "bandwidth"
        self.rows: list[dict[str, Any]] = []
        #: Links as measured by --limit.
        self.links: dict[str, Any] | None = None

    def mix_line(self) -> str:
        """A comment naming the kinds of memory, where the ranks differ in it; empty otherwise."""
        if len(set(self._accelerators)) == 1:
            return ""
        runs = [f"{len(list(group))}x {kind}" for kind, group in groupby(self._accelerators)]
        short = [f"{n}x {kind}" for kind, n in sorted(Counter(self._accelerators).items())]
        return f"# Clusters: {', '.join(runs if len(runs) <= len(short) else short)}\n"

    def add(self, dtype: str, row: Row, **more: Any) -> None:
        """Keep one row."""
        data: dict[str, Any] = {"dtype": dtype, **{name: getattr(row, name) for name in _PLAIN}, **more}
        data["percentiles"] = list(row.percentiles)
        if row.overlap is not None:
            data["overlap"] = asdict(row.overlap)
        if row.limit is not None:
            data["limit"], data["of_limit"] = row.limit, row.of_limit(rates=self._rates)
        for peer, (value, interval) in row.ratios.items():
            entry = {"value": value, "ratio": asdict(interval), "verdict": verdict(interval)}
            data.setdefault("peers", {})[peer] = entry
        self.rows.append(data)

    def finish(self, bench: Bench, options: Options, peer: Peer) -> None:
        """Write the files that ``options`` ask for, ``peer`` being who was measured. Only rank 0 does anything."""
        if self._rank != 0:
            return
        if options.json:
            plans = getattr(peer.comm, "plan_summary", None)
            more = {
                "family": bench.family,
                "unit": "us" if bench.unit == "time" else "MB/s",
                "backend": options.backend,
                "percentiles": list(options.percentiles),
                "topology": peer.comm.topology.describe() if peer.name == "ours" else None,
                "plans": plans() if plans else None,
                "links": self.links,
            }
            write_json(options.json, {**self._head, **more, "rows": self.rows})
