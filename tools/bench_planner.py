"""``python tools/bench_planner.py``: the planner alone, without MPI, from 2 to 16,384 ranks.

For each shape and collective: the algorithm that is chosen, the time and memory of making a rank's plan from nothing
(the slowest of the first, a middle and the last rank), how many teams it is in, and the time that the cost model
predicts against the least that the hosts' links allow. At the end what a call pays for the choice and the plan that
were made before.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

from bench_cluster import Test, limit

from ucc_hetero.bench.drawings import Drawing, render
from ucc_hetero.bench.files import origin, write_json
from ucc_hetero.bench.options import BadUsage
from ucc_hetero.planner import algorithms
from ucc_hetero.planner.collectives import Call
from ucc_hetero.planner.cost import Links, predicted_time
from ucc_hetero.planner.plan import Plan
from ucc_hetero.planner.select import Choice, candidates, choose, example_call, make_plan
from ucc_hetero.planner.topology import Link, Topology

__all__ = ["SHAPES", "curves", "main", "measure", "shape"]

#: Ranks and islands. Each island is a host with one link.
SHAPES = ((2, 2), (4, 2), (16, 4), (64, 8), (256, 16), (1024, 32), (4096, 64), (16384, 64))
_PLACEMENTS = ("block", "cyclic", "uneven", "racks")
_COLLECTIVES = ("allreduce", "bcast", "reduce", "allgather", "reduce_scatter_block", "alltoall", "gather", "scan")
_NAMES = {"reduce_scatter_block": "reduce_scatter"}
#: 100 Gbit/s between hosts, 400 Gbit/s inside; microseconds of start.
_NET = Link(10e-6, 8 / 100e9)
_INSIDE = Link(3e-6, 8 / 400e9)
_LOCAL = Link(1e-6, 1 / 200e9)
#: Predicting walks through every message: beyond this it takes minutes; for alltoall there are P * P of them.
_PREDICTED_RANKS = 1024
_PREDICTED_PAIRS = 64


def shape(ranks: int, islands: int, placement: str) -> Topology:
    """Islands of equal size in rank order (``block``) or in turn (``cyclic``), or of sizes 1, 2, 3, … (``uneven``).

    ``racks``: as ``block``, with eight hosts to a rack and four racks to a site.
    """
    if placement in ("block", "racks"):
        hosts = [r * islands // ranks for r in range(ranks)]
    elif placement == "cyclic":
        hosts = [r % islands for r in range(ranks)]
    else:
        mean = ranks // islands
        sizes = [1 + 2 * (mean - 1) * i // max(islands - 1, 1) for i in range(islands)]
        sizes[-1] += ranks - sum(sizes)
        hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    levels = [[host // 32 for host in hosts], [host // 8 for host in hosts]] if placement == "racks" else []
    return Topology.group(["host"] * ranks, hosts, (), levels)


def _teams(plan: Plan, rank: int) -> int:
    steps = (step for _, _, _, step in plan.program(rank))
    return len({(s.ranks, s.link) for s in steps if s.link != "local" and s.kind != "message" and len(s.ranks) > 1})


def _own(topology: Topology, call: Call, choice: Choice, rank: int) -> tuple[float, int, int, int]:
    """Seconds and bytes of planning one rank's part, its teams and its steps."""
    gc.collect()
    start = process_time()
    plan = make_plan.__wrapped__(topology, call, choice, rank)
    took = process_time() - start
    steps = sum(len(stage) for fragment in plan.fragments for stage in fragment.stages)
    teams = _teams(plan, rank)
    del plan
    tracemalloc.start()
    again = make_plan.__wrapped__(topology, call, choice, rank)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del again
    return took, held, teams, steps


def measure(topology: Topology, collective: str, nbytes: int, choice: Choice | None = None) -> dict[str, Any]:
    """One row: what is chosen (unless given), seconds and bytes of planning, teams, predicted and least seconds."""
    call = example_call(topology, collective, nbytes)
    choice = choice or choose(topology, collective, nbytes)
    middle = topology.islands[len(topology.islands) // 2].ranks[0]
    own = [_own(topology, call, choice, rank) for rank in sorted({0, middle, topology.size - 1})]
    row: dict[str, Any] = {"collective": collective, "bytes": nbytes}
    row |= {"algorithm": choice.algorithm, "fragments": choice.fragments}
    row |= dict(zip(("seconds", "memory", "teams", "steps"), map(max, zip(*own, strict=True)), strict=True))
    if topology.size <= (_PREDICTED_PAIRS if collective == "alltoall" else _PREDICTED_RANKS):
        rates = [1 / _NET.beta] * (max(topology.hosts) + 1)
        links = Links(_INSIDE, Link(_NET.alpha, _INSIDE.beta), _LOCAL, (_NET,) * len(rates))
        row["predicted"] = predicted_time(make_plan.__wrapped__(topology, call, choice), topology, links)
        name = _NAMES.get(collective, collective)
        if name in ("allreduce", "bcast", "allgather", "reduce_scatter", "alltoall") and len(rates) > 1:
            # The limit's alltoall is counted by the pair.
            size = nbytes // topology.size if name == "alltoall" else nbytes
            row["limit"] = limit(Test(name, size), list(topology.hosts), rates)
    return row


def lookup(topology: Topology, times: int = 20_000) -> dict[str, float]:
    """Seconds that a call pays for its choice and its plan when it was made before."""
    call = example_call(topology, "allreduce", 1 << 20)

    def each(action: Callable[[], object]) -> float:
        action()
        start = process_time()
        for _ in range(times):
            action()
        return (process_time() - start) / times

    choice = choose(topology, "allreduce", 1 << 20)
    return {
        "choose": each(lambda: choose(topology, "allreduce", 1 << 20)),
        "make_plan": each(lambda: make_plan(topology, call, choice, 0)),
        "nothing": each(lambda: None),
    }


def _choices(topology: Topology, collective: str, nbytes: int, *, every: bool) -> list[Choice | None]:
    """Plans to time: the choice that would be made (None), or every algorithm in as many fragments."""
    if not every:
        return [None]
    fragments = max(choice.fragments for choice in candidates(topology, collective, nbytes))
    whole = {name for name in algorithms.names(collective) if algorithms.find(collective, name).most is algorithms.once}
    return [Choice(name, 1 if name in whole else fragments) for name in algorithms.names(collective)]


def _rows(
    shapes: Sequence[tuple[int, int]], placements: Sequence[str], nbytes: int, *, every: bool = False
) -> Iterator[dict[str, Any]]:
    for ranks, islands in shapes:
        for placement in placements:
            topology = shape(ranks, islands, placement)
            row = {"ranks": ranks, "islands": islands, "placement": placement}
            for collective in _COLLECTIVES:
                for choice in _choices(topology, collective, nbytes, every=every):
                    yield row | measure(topology, collective, nbytes, choice)


def _line(row: dict[str, Any]) -> str:
    text = f"{row['ranks']:>6}{row['islands']:>8} {row['placement']:<8}{row['collective']:<22}"
    text += (
        f"{row['algorithm'] + '/' + str(row['fragments']):<14}{row['seconds'] * 1e3:9.1f}{row['memory'] / 2**20:9.2f}"
    )
    text += f"{row['teams']:>7}"
    if "predicted" in row:
        text += f"{row['predicted'] * 1e3:12.2f}"
        text += f"{row['predicted'] / row['limit']:8.2f}" if "limit" in row else ""
    return text


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Collective -> (ranks, milliseconds of planning, or ``value`` where rows have one), the slowest placement."""
    out: dict[str, dict[int, float]] = {}
    for row in rows:
        of = out.setdefault(row["collective"], {})
        of[row["ranks"]] = max(of.get(row["ranks"], 0.0), row.get("value", row["seconds"] * 1e3))
    return {name: sorted(of.items()) for name, of in out.items()}


def _paint(rows: Sequence[dict[str, Any]], canvas: Any) -> None:
    """Planning time, and predicted time against the limit, over ranks."""
    ratios = [row | {"value": row["predicted"] / row["limit"]} for row in rows if "limit" in row]
    titles = (
        ("ms", "Planning from nothing, slowest placement"),
        ("predicted time / limit of the links", "64 MiB, slowest placement"),
    )
    for axes, shown, (unit, title) in zip(canvas.subplots(1, 2), (rows, ratios), titles, strict=True):
        for name, points in curves(shown).items():
            axes.semilogx(*zip(*points, strict=True), base=2, marker="o", label=name)
        axes.set(xlabel="ranks", ylabel=unit, title=title, yscale="log" if unit == "ms" else "linear")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=16384, help="ranks of the largest shape (16384)")
    parser.add_argument("--placement", choices=_PLACEMENTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of each call (67108864)")
    parser.add_argument("--every", action="store_true", help="every algorithm, not only the one that is chosen")
    parser.add_argument("--plot", metavar="FILE", help="planning and predicted time over ranks, as a picture")
    parser.add_argument("--json", metavar="FILE", help="also write everything to this file")
    return parser.parse_args(list(words))


def main(words: Sequence[str]) -> int:
    """Plan and print; returns the exit status."""
    arguments = _arguments(words)
    shapes = [pair for pair in SHAPES if pair[0] <= arguments.most]
    print("#ranks islands placed  collective            plan            ms      MiB   teams  predicted(ms)  /limit")
    rows = []
    for row in _rows(shapes, arguments.placement or _PLACEMENTS, arguments.bytes, every=arguments.every):
        rows.append(row)
        print(_line(row))
        sys.stdout.flush()
    again = lookup(shape(*shapes[-1], "block"))
    print(f"# made before: choice {again['choose'] * 1e6:.2f} us, plan {again['make_plan'] * 1e6:.2f} us, ", end="")
    print(f"of which a Python call {again['nothing'] * 1e6:.2f} us each", flush=True)
    if arguments.plot:
        drawing, target = Drawing("planner", "", (11, 4.5), partial(_paint, rows)), Path(arguments.plot)
        try:
            target.write_bytes(render(drawing, target.suffix[1:]))
        except BadUsage as why:
            raise SystemExit(f"--plot: {why}") from None
    if arguments.json:
        command = ["python", "tools/bench_planner.py", *words]
        write_json(arguments.json, {**origin("planner", command), "rows": rows, "lookup": again})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
