"""``python -m ucc_hetero.bench mixed``: per collective the mixed plan, flat UCC and mpi4py, in one process start.

    UCCH_EMULATE=nvidia:2,amd:2 mpirun -np 4 python -m ucc_hetero.bench mixed

``plan`` is what a communicator of several islands chooses by itself, ``flat`` one call of libucc over all ranks
(``UCCH_TUNE=<collective>:@flat``), ``mpi4py`` the MPI in use. Blocking calls on host memory, checked against numpy
before they are timed; measured as by ``compare``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from .calls import Case, Pool, longest
from .compare import Series, measure
from .files import write_job
from .meanings import number
from .memory import open_memory
from .options import BadUsage, ProgramParser
from .peers import NotOffered, Peer, World, open_peer, open_world, prepare
from .stats import ratio, verdict
from .table import COLLECTIVES

__all__ = ["run"]

_DTYPE = np.dtype("float32")
_NAMES = sorted(set(COLLECTIVES) - {"barrier"})


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("mixed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-s", "--sizes", default="8,64K,4M", help="sizes in bytes (8,64K,4M)")
    parser.add_argument("-r", "--rounds", default="20", help="rounds (20)")
    parser.add_argument("-c", "--collectives", default=",".join(_NAMES), help="which (all)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    found = parser.read(words)  # before MPI starts: whoever asks for help need not be under mpirun
    try:
        found.sizes = [number(size, _DTYPE.itemsize) for size in found.sizes.split(",")]
        found.rounds = number(found.rounds, 2)
    except ValueError as why:
        raise BadUsage(f"mixed: {why}") from None
    found.collectives = found.collectives.split(",")
    unknown = set(found.collectives) - set(_NAMES)
    if unknown:
        raise BadUsage(f"mixed: {', '.join(sorted(unknown))}: known are {', '.join(_NAMES)}")
    return found


@contextmanager
def _tuned(text: str) -> Iterator[None]:
    """UCCH_TUNE while a communicator is made; every rank sets the same."""
    before = os.environ.get("UCCH_TUNE")
    os.environ["UCCH_TUNE"] = text
    try:
        yield
    finally:
        os.environ.pop("UCCH_TUNE")
        if before is not None:
            os.environ["UCCH_TUNE"] = before


def _peers(world: World) -> list[Peer]:
    """The three, in the order of the columns."""
    from ucc_hetero.planner import algorithms
    from ucc_hetero.planner.collectives import ROWS

    plan = replace(open_peer("ours", world), name="plan")
    if len(plan.comm.topology.islands) < 2:
        plan.close()
        raise NotOffered(
            "mixed needs a job of several islands: UCCH_EMULATE=nvidia:2,amd:2 mpirun -np 4 … emulates one"
        )
    with _tuned("#".join(f"{name}:@flat" for name in ROWS if "flat" in algorithms.names(name))):
        flat = replace(open_peer("ours", world), name="flat")
    return [plan, flat, open_peer("mpi4py", world)]


def run(words: Sequence[str], command: list[str]) -> int:
    """Measure and print; returns the exit status."""
    arguments = _arguments(words)
    prepare(["ours"])
    world = open_world()
    peers = _peers(world)
    try:
        series = [Series(peer, "blocking") for peer in peers]
        head = f"# {peers[0].comm.topology.describe()}, {_DTYPE.name}, {arguments.rounds} rounds, medians in us"
        columns = "".join(f"{s.label:>12}" for s in series) + "".join(f"{f'{s.label}/plan':>24}" for s in series[1:])
        world.say(f"{head}\n{'# Collective':<24}{'Size':>10}{columns}\n")
        rows = []
        for name in arguments.collectives:
            for size in arguments.sizes:
                row = _row(name, size, series, arguments.rounds, world)
                rows.append(row)
                world.say(_line(row))
        if arguments.json:
            more = {"dtype": _DTYPE.name, "unit": "us", "rows": rows}
            write_job(arguments.json, "mixed", command, world, more)
    finally:
        for peer in peers:
            peer.close()
    return 0


def _row(name: str, size: int, series: Sequence[Series], rounds: int, world: World) -> dict[str, Any]:
    """One collective at one size; equal on every rank. ``size`` is a rank's vector or block, as in OSU's programs."""
    row, count = COLLECTIVES[name], size // _DTYPE.itemsize
    case = Case(row, world.rank, world.size, count, 0, False)
    memory = open_memory("host", "numpy", 0)
    pools = [Pool(memory, _DTYPE, longest(row, count, world.size)) for _ in series]
    times = measure(series, case, _DTYPE, pools, rounds, world)
    ratios = {s.label: ratio(t, times[0]) for s, t in zip(series[1:], times[1:], strict=True)}
    return {
        "collective": name,
        "size": size,
        "us": {s.label: float(np.median(t)) for s, t in zip(series, times, strict=True)},
        "to_plan": {label: {**asdict(one), "verdict": verdict(one), "text": str(one)} for label, one in ratios.items()},
    }


def _line(row: dict[str, Any]) -> str:
    text = f"{row['collective']:<24}{row['size']:>10}" + "".join(f"{us:12.1f}" for us in row["us"].values())
    return text + "".join(f"{one['text']:>24}" for one in row["to_plan"].values()) + "\n"
