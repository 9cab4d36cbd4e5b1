"""Minimum time of a collective over given links. Pure functions.

A collective cannot end before one message has arrived from another rank (from another island, if there are several),
nor before every port and every island's bridges have moved what must cross them. That amount does not depend on the
algorithm: it is what a rank or island needs and lacks, or has and others need. For allreduce there is also the bound
over all ports: 2(P-1)/P of the vector each (Patarasu and Yuan, Bandwidth Optimal All-reduce Algorithms, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .table import Kind


@dataclass(frozen=True, slots=True)
class Links:
    """Links of a job: seconds and bytes per second, one way.

    ``port``: maximum rate of a rank that sends and receives. ``cuts``: for each island the rate at which all its ranks
    together send to other islands while they receive as much; empty if there is one island, and then ``bridge_latency``
    is None.
    """

    latency: float
    bridge_latency: float | None
    port: float
    cuts: tuple[float, ...]


def port_bytes(kind: Kind, size: int, ranks: int) -> float:
    """Bytes that the busiest port must carry one way. ``size``: as OSU counts it for this kind."""
    others = ranks - 1
    table: dict[Kind, float] = {
        "reduce_all": 2 * others / ranks * size,
        "reduce_root": size,
        "reduce_scatter": others / ranks * size,
        "gather_all": others * size,
        "gather_root": others * size,
        "scatter_root": others * size,
        "exchange": others * size,
        "bcast": size,
        "barrier": 0,
    }
    return table[kind]


def crossing_bytes(kind: Kind, size: int, inside: int, ranks: int, *, has_root: bool) -> float:
    """Bytes that must leave or enter (the larger counts) an island with ``inside`` of the ranks.

    ``has_root``: the root of a rooted collective is in the island.
    """
    outside = ranks - inside
    table: dict[Kind, float] = {
        "reduce_all": size,
        "reduce_root": size,
        "reduce_scatter": max(inside, outside) / ranks * size,
        "gather_all": max(inside, outside) * size,
        "gather_root": (outside if has_root else inside) * size,
        "scatter_root": (outside if has_root else inside) * size,
        "exchange": inside * outside * size,
        "bcast": size,
        "barrier": 0,
    }
    return table[kind]


def least_seconds(kind: Kind, size: int, links: Links, islands: Sequence[Sequence[int]], root: int = 0) -> float:
    """Minimum seconds of a collective of ``size`` bytes over these links."""
    ranks = sum(map(len, islands))
    busy = [port_bytes(kind, size, ranks) / links.port]
    if links.cuts:
        for island, rate in zip(islands, links.cuts, strict=True):
            busy.append(crossing_bytes(kind, size, len(island), ranks, has_root=root in island) / rate)
        if kind == "reduce_all":  # all islands together: reduce all vectors but one, and distribute as many results
            busy.append(2 * (len(islands) - 1) * size / sum(links.cuts))
    start = links.latency if links.bridge_latency is None else links.bridge_latency
    return start + max(busy)
