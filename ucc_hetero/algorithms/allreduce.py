"""allreduce: every rank gets the reduction of all vectors.

One owner reduces a segment and all receive its result, so that replicas are equal to the last bit: between two islands
an allreduce of two operands is that (a + b is b + a), between more it is a reduction to an owner and its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ucc_hetero.algorithms.parts import (
    Dense,
    Owned,
    Segment,
    each,
    native_allgather,
    native_reduce_scatter,
    only,
    region,
    segments,
    stages,
    uniform,
    without,
)
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm, cut_at
from ucc_hetero.collectives import Block, Call
from ucc_hetero.plan import Operand, Region, Step
from ucc_hetero.topology import Topology

__all__: list[str] = []


def _sources(topology: Topology) -> tuple[str, ...]:
    """The buffer that holds an island's own contribution after the first stage: untouched in one-rank islands."""
    return tuple("recv" if island.size > 1 else "send" for island in topology.islands)


def _bridge_allreduce(owners: tuple[int, ...], sources: Sequence[str], at: Block) -> Step:
    src = tuple(region(buffer, at) for buffer in sources)
    return Step("allreduce", owners, "bridge", src, (region("recv", at),) * len(owners))


@algorithm("allreduce", "tree")
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, exchange between the leaders, broadcast in each island.

    Stages: 3 with two islands, else 4 (reduce to the first leader and broadcast from it). Each leader sends the vector
    over the bridge once (the first one, with m islands, as often as the broadcast's tree makes it), every other rank
    sends it once inside its island.
    """
    at = piece.vector(call)
    if not at.count:
        return ()
    leaders = tuple(island.ranks[0] for island in topology.islands)
    sources, recv, m = _sources(topology), region("recv", at), len(leaders)
    large = [island for island in topology.islands if island.size > 1]
    up = [Step("reduce", i.ranks, "native", (region("send", at),) * i.size, only(0, i.size, recv), 0) for i in large]
    down = [Step("bcast", i.ranks, "native", only(0, i.size, recv), without(0, i.size, recv), 0) for i in large]
    if m == 1:
        return stages(up, down)
    if m == 2:
        return stages(up, [_bridge_allreduce(leaders, sources, at)], down)
    src = tuple(region(buffer, at) for buffer in sources)
    inward = Step("reduce", leaders, "bridge", src, only(0, m, recv), 0)
    outward = Step("bcast", leaders, "bridge", only(0, m, recv), without(0, m, recv), 0)
    return stages(up, [inward], [outward], down)


def _scatter_gather(parts: Sequence[Segment], sources: Sequence[str]) -> tuple[list[Step], list[Step]]:
    """Reduce-scatter and allgather over each rail: every owner reduces one share of the segment."""
    inward, outward = [], []
    m = len(sources)
    for part in parts:
        cuts = [part.offset + cut_at(part.count, i, m) for i in range(m + 1)]
        mine = tuple([Region("recv", a, b - a) for a, b in pairwise(cuts)])
        recv: Operand = uniform("recv", mine) or mine
        src: tuple[Operand, ...] = (recv,) * m
        if "send" in sources:
            shares = [Block(share.offset, share.count) for share in mine]
            operands = {buffer: each(buffer, shares) for buffer in ("send", "recv")}
            src = tuple([operands[buffer] for buffer in sources])
        inward.append(Step("reduce_scatter", part.owners, "bridge", src, mine))
        outward.append(Step("allgather", part.owners, "bridge", mine, (recv,) * m))
    return inward, outward


@algorithm("allreduce", "split_rail")
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, reduce across on every rail, allgather in each island.

    Stages: 3 with two islands, else 4 (reduce-scatter and allgather on the rail). With n bytes and m islands, an
    island of s ranks sends 2(m-1)/m * n over the bridge, spread over all its ranks' links, and each of its ranks sends
    2(s-1)/s * n inside.
    """
    parts = segments(topology, [piece.vector(call)])
    if not parts:
        return ()
    sources, owned, recv = _sources(topology), Owned(parts), Dense("recv")
    inside = [s for island in topology.islands for s in native_reduce_scatter(island, owned, recv)]
    outside = [s for island in topology.islands for s in native_allgather(island, owned, recv)]
    if len(sources) == 1:
        return stages(inside, outside)
    if len(sources) == 2:
        across = [_bridge_allreduce(p.owners, sources, Block(p.offset, p.count)) for p in parts]
        return stages(inside, across, outside)
    inward, outward = _scatter_gather(parts, sources)
    return stages(inside, inward, outward, outside)
