"""Bytes of plans on the wire: what ranks and hosts send and receive.

A step that a library carries out is counted as a ring or chain in team order for bcast, reduce, allreduce,
reduce_scatter and allgather (no algorithm sends less per member), and as direct messages for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .plan import KINDS, Operand, Plan, Region, Step
from .topology import Topology


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each rank sends over native and bridge links, and that leave and enter each host."""

    native: tuple[int, ...]
    bridge: tuple[int, ...]
    host_out: tuple[int, ...]
    host_in: tuple[int, ...]


def _counts(operand: Operand) -> list[int]:
    if operand is None:
        return []
    return [operand.count] if isinstance(operand, Region) else [region.count for region in operand]


def flows(step: Step) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, elements), senders and receivers as indices in ``step.ranks``."""
    n, kind, root = len(step.ranks), step.kind, step.root
    ring = [(i, (i + 1) % n) for i in range(n)]
    if kind in ("bcast", "reduce"):
        chain = [((root + i) % n, (root + i + 1) % n) for i in range(n - 1)]
        count = float(_counts(step.src[root])[0])
        yield from ((a, b, count) if kind == "bcast" else (b, a, count) for a, b in chain)
    elif kind == "allreduce":
        count = _counts(step.src[0])[0]
        yield from ((a, b, 2 * count * (n - 1) / n) for a, b in ring)
    elif kind == "reduce_scatter":
        shares = [_counts(operand)[0] for operand in step.dst]
        yield from ((a, b, float(sum(shares) - shares[a])) for a, b in ring)
    elif kind == "allgather":
        shares = [_counts(operand)[0] for operand in step.src]
        yield from ((a, b, float(sum(shares) - shares[b])) for a, b in ring)
    else:
        each = "each" in KINDS[kind].src
        pairs = [(i, j) for i, src in enumerate(step.src) for j, dst in enumerate(step.dst) if i != j and src and dst]
        yield from ((i, j, float(_counts(step.src[i])[j if each else 0])) for i, j in pairs)


def traffic_of(plan: Plan, topology: Topology, itemsize: int = 1) -> Traffic:
    """Bytes that a plan sends, for elements of ``itemsize`` bytes."""
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
