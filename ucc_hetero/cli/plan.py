"""``python -m ucc_hetero plan``: the algorithm for a collective and size, and the bytes on each link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import counted
from ..planner.collectives import Call
from ..planner.plan import KINDS, Plan, Step, regions
from ..planner.select import Choice, Tuning, candidates, choose, example_call, make_plan, reason
from ..planner.topology import Topology

_LINKS = {"native": "inside islands", "bridge": "between islands", "local": "in a rank's memory"}
#: Bytes of an element: float32.
_ITEM = 4
#: Maximum number of teams whose ranks are listed; of more only the number is printed.
_SHOWN = 4


def size_text(nbytes: float) -> str:
    """Format bytes, such as ``1.5 MiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _span(step: Step) -> int:
    """Elements of the largest operand of any member."""
    return max(sum(r.count for r in regions(o)) for side in (step.src, step.dst) for o in side)


def _stages(plan: Plan) -> list[dict[str, Any]]:
    """For each stage of the first fragment and kind of step: link, kind, teams, bytes of the largest operand."""
    out: list[dict[str, Any]] = []
    for number, stage in enumerate(plan.fragments[0].stages if plan.fragments else ()):
        groups: dict[tuple[str, str], list[Step]] = {}
        for step in stage:
            groups.setdefault((step.link, step.kind), []).append(step)
        for (link, kind), steps in groups.items():
            ranks = [list(step.ranks) for step in steps]
            nbytes = max(map(_span, steps)) * _ITEM
            out.append({"stage": number + 1, "link": link, "kind": kind, "teams": ranks, "bytes": nbytes})
    return out


def facts(
    topology: Topology,
    collective: str,
    nbytes: int,
    *,
    tuning: Tuning | None = None,
    wanted: Choice | None = None,
) -> dict[str, Any]:
    """Describe the plan of a call of ``nbytes`` (of the vector, or of all blocks together).

    ``wanted`` replaces the choice. ``ValueError`` if it does not exist.
    """
    tune = tuning or Tuning()
    call: Call = example_call(topology, collective, nbytes // _ITEM)
    choice = wanted or choose(topology, collective, nbytes, tune)
    plan = make_plan(topology, call, choice)
    wire: Traffic = traffic_of(plan, topology, _ITEM)
    return {
        "collective": collective,
        "bytes": nbytes,
        "ranks": topology.size,
        "islands": topology.describe(),
        "fingerprint": topology.fingerprint(),
        "weights": list(topology.weights),
        "algorithm": choice.algorithm,
        "fragments": len(plan.fragments),
        "queued": choice.queued,
        "by": "command line" if wanted else reason(topology, collective, nbytes, tune),
        "stages": _stages(plan),
        "wire": {way: list(getattr(wire, way)) for way in ("native", "bridge", "host_out", "host_in")},
        "scratch": max((tmp for _, _, tmp in plan.sizes), default=0) * _ITEM,
        "others": [short_name(other) for other in candidates(topology, collective, nbytes)],
    }


def short_name(choice: Choice) -> str:
    """``ring/4``: the algorithm, and the number of fragments if more than one."""
    return choice.algorithm + (f"/{choice.fragments}" if choice.fragments > 1 else "")


def _teams(teams: Sequence[Sequence[int]]) -> str:
    shown = " ".join("{" + ",".join(map(str, t[:8])) + (",…" if len(t) > 8 else "") + "}" for t in teams[:_SHOWN])
    return f"{shown}{' …' if len(teams) > _SHOWN else ''}"


def render(found: dict[str, Any]) -> str:
    wire = found["wire"]
    ranks = counted(found["ranks"], "rank")
    lines = [
        f"{found['collective']} of {size_text(found['bytes'])} over {ranks}: {found['islands']}",
        f"topology   {found['fingerprint']}" + (f", weights {found['weights']}" if found["weights"] else ""),
        f"runs       {found['algorithm']} in {counted(found['fragments'], 'fragment')}"
        f"{', queued in streams' if found['queued'] else ''} (chosen by: {found['by']})",
        "stages     of one fragment",
    ]
    for row in found["stages"]:
        what = counted(len(row["teams"]), "team")
        lines.append(
            f"  {row['stage']:>2}  {row['kind']:<15}{_LINKS[row['link']]:<20}{what:<10}"
            f"{size_text(row['bytes']):>10} each  {_teams(row['teams'])}"
        )
    lines.append(f"sends      inside islands: at most {size_text(max(wire['native']))} by a rank")
    lines.append(f"           between islands: at most {size_text(max(wire['bridge']))} by a rank")
    if len(wire["host_out"]) > 1:
        for host, (out, into) in enumerate(zip(wire["host_out"], wire["host_in"], strict=True)):
            if host == 8:
                lines.append(f"           … {counted(len(wire['host_out']) - 8, 'more host')}")
                break
            lines.append(f"           host {host}: {size_text(out)} leave, {size_text(into)} enter")
    lines.append(f"scratch    at most {size_text(found['scratch'])} by a rank")
    lines.append("others     " + ", ".join(found["others"]))
    if "measured" in found:
        measured = found["measured"]
        lines.append(
            f"measured   {_time_text(measured['median'])}, median of {measured['calls']}; "
            f"best {_time_text(measured['best'])}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each rank sends over native and bridge links, and that leave and enter each host.

    Steps that a library executes count as a ring or chain in team order for bcast, reduce, allreduce, reduce_scatter
    and allgather (no algorithm sends less per member), and as direct messages otherwise.
    """

    native: tuple[int, ...]
    bridge: tuple[int, ...]
    host_out: tuple[int, ...]
    host_in: tuple[int, ...]


def flows(step: Step) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, elements) of a step; sender and receiver are indices in ``step.ranks``."""
    n, kind, root = len(step.ranks), step.kind, step.root
    ring = [(i, (i + 1) % n) for i in range(n)]
    if kind in ("bcast", "reduce"):
        chain = [((root + i) % n, (root + i + 1) % n) for i in range(n - 1)]
        count = float(regions(step.src[root])[0].count)
        yield from ((a, b, count) if kind == "bcast" else (b, a, count) for a, b in chain)
    elif kind == "allreduce":
        count = regions(step.src[0])[0].count
        yield from ((a, b, 2 * count * (n - 1) / n) for a, b in ring)
    elif kind == "reduce_scatter":
        shares = [regions(operand)[0].count for operand in step.dst]
        yield from ((a, b, float(sum(shares) - shares[a])) for a, b in ring)
    elif kind == "allgather":
        shares = [regions(operand)[0].count for operand in step.src]
        yield from ((a, b, float(sum(shares) - shares[b])) for a, b in ring)
    else:
        each = "each" in KINDS[kind].src
        pairs = [(i, j) for i, src in enumerate(step.src) for j, dst in enumerate(step.dst) if i != j and src and dst]
        yield from ((i, j, float(regions(step.src[i])[j if each else 0].count)) for i, j in pairs)


def traffic_of(plan: Plan, topology: Topology, itemsize: int = 1) -> Traffic:
    """Bytes that a plan sends if elements have ``itemsize`` bytes."""
    hosts = topology.hosts
    sent = {"native": [0.0] * topology.size, "bridge": [0.0] * topology.size}
    out, into = ([0.0] * (max(hosts) + 1) for _ in range(2))
    for step in (step for fragment in plan.fragments for stage in fragment.stages for step in stage):
        for i, j, count in flows(step) if step.link != "local" else ():
            a, b = step.ranks[i], step.ranks[j]
            sent[step.link][a] += count
            if hosts[a] != hosts[b]:
                out[hosts[a]] += count
                into[hosts[b]] += count
    amounts = (sent["native"], sent["bridge"], out, into)
    return Traffic(*(tuple(round(count * itemsize) for count in counts) for counts in amounts))
