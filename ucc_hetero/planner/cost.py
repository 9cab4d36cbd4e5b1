"""Cost of plans: bytes per rank and per host's link, and an alpha-beta model.

A step that a library carries out is counted as a ring or chain in team order for bcast, reduce, allreduce,
reduce_scatter and allgather (no algorithm sends less per member), and as direct messages for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ucc_hetero.planner.plan import Operand, Plan, Region, Step
from ucc_hetero.planner.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Links:
    """Costs of the links of a topology.

    ``native`` and ``bridge`` are those of one rank's port inside and between islands, ``local`` of a copy or
    combination in one rank's memory. ``hosts`` gives the link of each host, shared by its ranks, each way; empty where
    the ports are the limit.
    """

    native: Link
    bridge: Link
    local: Link
    hosts: tuple[Link, ...] = ()


#: Orders of magnitude for a node of today, where nothing was measured.
GUESS = Links(Link(5e-6, 1 / 150e9), Link(20e-6, 1 / 20e9), Link(4e-6, 1 / 500e9))


@dataclass(frozen=True, slots=True)
class Wire:
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
    elif kind == "message":
        yield 0, 1, float(_counts(step.src[0])[0])
    elif kind == "allreduce":
        count = _counts(step.src[0])[0]
        yield from ((a, b, 2 * count * (n - 1) / n) for a, b in ring)
    elif kind == "reduce_scatter":
        shares = [_counts(operand)[0] for operand in step.dst]
        yield from ((a, b, float(sum(shares) - shares[a])) for a, b in ring)
    elif kind == "allgather":
        shares = [_counts(operand)[0] for operand in step.src]
        yield from ((a, b, float(sum(shares) - shares[b])) for a, b in ring)
    elif kind == "gather":
        yield from ((i, root, float(_counts(step.src[i])[0])) for i in range(n) if i != root)
    elif kind == "scatter":
        yield from ((root, i, float(_counts(step.dst[i])[0])) for i in range(n) if i != root)
    elif kind == "alltoall":
        for i, operand in enumerate(step.src):
            yield from ((i, j, float(count)) for j, count in enumerate(_counts(operand)) if i != j)


class _Load:
    """Elements on every port and link."""

    def __init__(self, topology: Topology) -> None:
        self.hosts = topology.hosts
        self.sent = {"native": [0.0] * topology.size, "bridge": [0.0] * topology.size}
        self.received = {"native": [0.0] * topology.size, "bridge": [0.0] * topology.size}
        self.out = [0.0] * (max(topology.hosts) + 1)
        self.into = [0.0] * (max(topology.hosts) + 1)
        self.local = [0.0] * topology.size

    def add(self, step: Step) -> None:
        if step.link == "local":
            self.local[step.ranks[0]] += sum(_counts(step.src[0]))
            return
        sent, received = self.sent[step.link], self.received[step.link]
        for i, j, count in flows(step):
            a, b = step.ranks[i], step.ranks[j]
            sent[a] += count
            received[b] += count
            if self.hosts[a] != self.hosts[b]:
                self.out[self.hosts[a]] += count
                self.into[self.hosts[b]] += count


def wire_bytes(plan: Plan, topology: Topology, itemsize: int = 1) -> Wire:
    """Bytes that a plan sends, for elements of ``itemsize`` bytes."""
    load = _Load(topology)
    for fragment in plan.fragments:
        for stage in fragment.stages:
            for step in stage:
                load.add(step)
    amounts = (load.sent["native"], load.sent["bridge"], load.out, load.into)
    return Wire(*(tuple(round(count * itemsize) for count in counts) for counts in amounts))


def _busy(steps: Iterable[Step], topology: Topology, links: Links, itemsize: int) -> dict[str, float]:
    """Seconds that steps side by side keep native ports, bridges and local copies busy; each way by itself."""
    load = _Load(topology)
    rounds = {"native": 0, "bridge": 0, "local": 0}
    for step in steps:
        load.add(step)
        n = len(step.ranks)
        many = step.kind not in ("bcast", "reduce", "allreduce", "barrier")  # rings, or a message per peer; not trees
        rounds[step.link] = max(rounds[step.link], 1 if n < 3 else n - 1 if many else (n - 1).bit_length())
    ports = {"native": links.native, "bridge": links.bridge}
    busy = {"local": rounds["local"] * links.local.alpha + max(load.local) * itemsize * links.local.beta}
    for name, link in ports.items():
        most = max(max(load.sent[name]), max(load.received[name]))
        busy[name] = rounds[name] * link.alpha + most * itemsize * link.beta
    for i, link in enumerate(links.hosts):
        busy["bridge"] = max(busy["bridge"], max(load.out[i], load.into[i]) * itemsize * link.beta)
    return busy


def predicted_time(plan: Plan, topology: Topology, links: Links = GUESS, itemsize: int = 1) -> float:
    """Seconds that a plan takes by the alpha-beta model.

    The first fragment goes through all stages, one after the other; each further one adds what it keeps the busiest
    port, link or memory busy in all of its stages, as those of different fragments overlap, in both directions.
    """
    total = 0.0
    for index, fragment in enumerate(plan.fragments):
        if index == 0:
            total += sum(max(_busy(stage, topology, links, itemsize).values()) for stage in fragment.stages)
        else:
            steps = (step for stage in fragment.stages for step in stage)
            total += max(_busy(steps, topology, links, itemsize).values())
    return total
