"""Compares this package's calls with mpi4py's and plain UCC's, in one job.

Each round measures every series once, in turn, so that disturbances hit all of them; ratios use paired rounds. A sample
is the mean of back-to-back calls that together take about a millisecond. Results are checked against numpy before
anything is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import counted
from .cases import Call, Case, Pool, in_place_only, longest
from .interleave import turns
from .memory import dtype_of, open_memory
from .options import PEERS, BadUsage, ProgramParser, number, sizes_of, value
from .peers import open_peer
from .result_file import write_job
from .stats import NOISY, Floats, Interval, ratio, relative_spread, sizes, verdict
from .table import COLLECTIVES
from .validate import proven_call
from .world import Peer, World, open_world, prepare

#: Seconds of a sample, and maximum number of calls in it.
_SAMPLE_SECONDS, _MOST_CALLS = 1e-3, 2000


@dataclass(frozen=True, slots=True)
class Series:
    """A column of the comparison: a peer's call in one form."""

    peer: Peer
    form: str  # "blocking" or "persistent"

    @property
    def label(self) -> str:
        return self.peer.name + ("*" if self.form == "persistent" else "")


@dataclass(slots=True)
class Bound:
    """A series ready to be timed at one size, and its number of calls per sample."""

    call: Call
    calls: int = 1


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser("compare", description=__doc__)
    spans = value(sizes_of) | {"default": "8:16M", "metavar": "MIN:MAX", "help": "sizes in bytes (8:16M)"}
    parser.add_argument("-m", "--message-size", **spans)
    parser.add_argument("-r", "--rounds", default="30", **value(number, 2), help="rounds (30)")
    parser.add_argument("-T", "--type", default="float32", **value(dtype_of), dest="dtype", help="dtype (float32)")
    parser.add_argument("--step", default="2", **value(number, 2), help="factor between sizes (2)")
    parser.add_argument("--collective", default="allreduce", choices=sorted(set(COLLECTIVES) - {"barrier"}))
    parser.add_argument("--peers", default="ours,mpi4py,ucc", help="the first is the reference")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    found = parser.read(words)
    least, most = found.message_size
    found.least, found.most = least or 8, most or 16 << 20
    if found.least > found.most:
        raise BadUsage(f"compare: option -m: the minimum {found.least} is above the maximum {found.most}")
    found.peers = found.peers.split(",")
    unknown = set(found.peers) - set(PEERS)
    if unknown or not found.peers:
        raise BadUsage(f"compare: --peers {','.join(sorted(unknown))}: known are {', '.join(PEERS)}")
    return found


def _series(peers: Sequence[Peer]) -> list[Series]:
    """Blocking and persistent calls of each peer; of plain UCC only persistent ones."""
    found = []
    for peer in peers:
        if peer.name != "ucc" or len(peers) == 1:
            found.append(Series(peer, "blocking"))
        if peer.name not in ("gloo", "nccl", "mpi4py"):
            found.append(Series(peer, "persistent"))
    return found


def _sample(bound: Bound, world: World) -> float:
    """Seconds per call of this rank."""
    call = bound.call.run
    world.barrier()
    start = perf_counter()
    for _ in range(bound.calls):
        call()
    return (perf_counter() - start) / bound.calls


def _calibrate(bound: Bound, world: World) -> None:
    """Warm up, and choose the number of calls per sample, equal on every rank."""
    for calls in (1, 10, 100):
        bound.calls = calls
        mean, _, _ = world.spread(_sample(bound, world))
        if mean * calls > _SAMPLE_SECONDS:
            break
    bound.calls = int(min(max(_SAMPLE_SECONDS / max(mean, 1e-9), 1), _MOST_CALLS))


def measure(
    series: Sequence[Series], case: Case, dtype: np.dtype[Any], pools: Sequence[Pool], rounds: int, world: World
) -> list[Floats]:
    """For each series the µs of each round, as means over ranks; equal on every rank."""
    bounds = []
    for one, pool in zip(series, pools, strict=True):
        own = replace(case, in_place=in_place_only(one.peer, case.row))
        bounds.append(Bound(proven_call(one.peer, own, dtype, pool, world, one.form)))
    for bound in bounds:
        _calibrate(bound, world)
    mine = np.empty((len(bounds), rounds))
    for r, k in turns(len(bounds), rounds):
        mine[k, r] = _sample(bounds[k], world)
    for bound in bounds:
        bound.call.free()
    means = world.gather(mine.ravel()).mean(axis=0).reshape(mine.shape) * 1e6
    return list(means)


def _pairs(series: Sequence[Series]) -> list[tuple[int, int]]:
    """(theirs, ours) to compare: the base's call of the same form, or of the form that it has."""
    base = series[0].peer.name
    own = {s.form: k for k, s in enumerate(series) if s.peer.name == base}
    return [(k, own.get(s.form, next(iter(own.values())))) for k, s in enumerate(series) if s.peer.name != base]


def _header(series: Sequence[Series], pairs: Sequence[tuple[int, int]], title: str) -> str:
    base = series[0].peer.name
    lines = [f"# {title}", f"# name: blocking call, name*: persistent Start + Wait; verdict: is {base} faster?"]
    columns = "".join(f"{s.label + '(us)':>14}" for s in series)
    columns += "".join(f"{f'{series[a].label}/{series[b].label} [95 %]':>26}  {'':9}" for a, b in pairs)
    return "\n".join([*lines, f"{'# Size':<10}{columns.rstrip()}", ""])


def _line(size: int, medians: Sequence[float], ratios: Sequence[Interval]) -> str:
    text = f"{size:<10}" + "".join(f"{value:14.2f}" for value in medians)
    return text + "".join(f"{interval!s:>26}  {verdict(interval):<9}" for interval in ratios).rstrip() + "\n"


def run(words: Sequence[str], command: list[str]) -> int:
    """Measure and print. Returns the exit status."""
    arguments = _arguments(words)
    prepare(arguments.peers)
    world = open_world()
    if world.size < 2:
        raise BadUsage("compare needs at least two ranks: mpirun -n 2 python -m ucc_hetero.bench compare")
    peers: list[Peer] = []
    try:
        for name in arguments.peers:
            peers.append(open_peer(name, world))
        rows = _sweep(arguments, peers, world)
        world.say(_noise(rows))
        if arguments.json:
            plans = {p.name: p.comm.plan_summary() for p in peers if p.name == "ours"}.get("ours")
            more = {"rows": rows, "rounds": arguments.rounds, "plans": plans}
            more |= {"collective": arguments.collective, "dtype": arguments.dtype.name, "unit": "us"}
            write_job(arguments.json, "compare", command, world, more)
    finally:
        for peer in peers:
            peer.close()
    return 0


def _sweep(arguments: argparse.Namespace, peers: Sequence[Peer], world: World) -> list[dict[str, Any]]:
    """The table over sizes, and its rows as data."""
    row, dtype = COLLECTIVES[arguments.collective], arguments.dtype
    series = _series(peers)
    pairs = _pairs(series)
    title = f"{row.method}, {dtype.name}, {counted(world.size, 'rank')}, {counted(arguments.rounds, 'round')}, medians"
    world.say(_header(series, pairs, title))
    elements = longest(row, max(arguments.most // dtype.itemsize, 1), world.size)
    memory = open_memory("host", 0)
    pools = [Pool(memory, dtype, elements) for _ in series]
    rows: list[dict[str, Any]] = []
    for size in sizes(arguments.least, arguments.most, dtype.itemsize, arguments.step):
        case = Case(row, world.rank, world.size, size // dtype.itemsize, 0, False)
        times = measure(series, case, dtype, pools, arguments.rounds, world)
        ratios = [ratio(times[a], times[b]) for a, b in pairs]
        world.say(_line(size, [float(np.median(t)) for t in times], ratios))
        rows.append(_row(size, series, times, pairs, ratios))
    return rows


def _row(
    size: int,
    series: Sequence[Series],
    times: Sequence[Floats],
    pairs: Sequence[tuple[int, int]],
    ratios: Sequence[Interval],
) -> dict[str, Any]:
    return {
        "size": size,
        "series": [
            {"peer": s.peer.name, "form": s.form, "us": float(np.median(t)), "spread": relative_spread(t),
             "rounds": [round(float(v), 3) for v in t]}
            for s, t in zip(series, times, strict=True)
        ],
        "ratios": [
            {"of": series[a].label, "to": series[b].label, **asdict(interval), "verdict": verdict(interval)}
            for (a, b), interval in zip(pairs, ratios, strict=True)
        ],
    }  # fmt: skip


def _noise(rows: Sequence[dict[str, Any]]) -> str:
    """A line about how noisy the measurements were."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    unclear = [str(row["size"]) for row in rows if any(r["verdict"] == "too noisy" for r in row["ratios"])]
    restless = [str(row["size"]) for row in rows if any(s["spread"] > NOISY for s in row["series"])]
    text = f"# machine: {counted(cores, 'core')}, load {load:.1f}\n"
    if unclear:
        text += (
            f"# too noisy to compare at sizes {', '.join(unclear)}: repeat on a quiet machine or with more --rounds\n"
        )
    elif restless:
        text += f"# rounds vary by more than {NOISY:.0%} at sizes {', '.join(restless)}\n"
    return text
