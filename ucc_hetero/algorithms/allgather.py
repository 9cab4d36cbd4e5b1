"""allgather and allgatherv: every rank gets the blocks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ucc_hetero.algorithms.parts import (
    Dense,
    Owned,
    alike,
    copy,
    each,
    island_blocks,
    island_segments,
    merge,
    native_allgather,
    one_each,
    only,
    rails,
    region,
    rounds,
    shifted,
    stages,
    without,
)
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.collectives import Block, Call, Shape
from ucc_hetero.plan import Step
from ucc_hetero.topology import Topology

__all__: list[str] = []

_BOTH = ("allgather", "allgatherv")


@algorithm(_BOTH, "tree")
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather to a leader in each island, allgather between the leaders, broadcast in each island.

    Stages: 3. Each island's blocks cross the bridge once to every other island.
    """
    shape = Shape(call)
    blocks = [island_blocks(island, shape, piece) for island in topology.islands]
    runs = merge(sorted((b for of in blocks for b in of), key=lambda block: block.offset))
    own = shifted("send", lambda rank: shape.own(rank).offset)
    inside, last = [], []
    for island, of in zip(topology.islands, blocks, strict=True):
        if island.size == 1 or not runs:
            continue
        if any(block.count for block in of):
            src = tuple(own(rank, block) for rank, block in zip(island.ranks, of, strict=True))
            inside.append(Step("gather", island.ranks, "native", src, only(0, island.size, each("recv", of)), 0))
        for at in (region("recv", run) for run in runs):
            last.append(Step("bcast", island.ranks, "native", only(0, island.size, at), without(0, island.size, at), 0))
    across = []
    if not topology.flat:
        leaders = tuple(island.ranks[0] for island in topology.islands)
        for mine in rounds([merge(of) for of in blocks]):
            places = [own if island.size == 1 else Dense("recv") for island in topology.islands]
            src = tuple(place(rank, b) for place, rank, b in zip(places, leaders, mine, strict=True))
            across.append(Step("allgather", leaders, "bridge", src, (each("recv", mine),) * len(leaders)))
    return stages(inside, across, last)


@algorithm(_BOTH, "split_rail")
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Each island's blocks cross to every other island, spread over its ranks, and are allgathered there.

    Stages: 2. Every island receives the blocks of the others over the bridge once, each rank its share; between islands
    of equal size each rail is one allgather.
    """
    shape = Shape(call)
    alike_blocks = None if topology.flat else alike(topology, shape, piece)
    if alike_blocks is not None:
        return _alike(topology, alike_blocks, piece.cut(Block(0, call.counts[0])))
    by_island = island_segments(topology, shape, piece)
    own = shifted("send", lambda rank: shape.own(rank).offset)
    across: list[Step] = []
    settled = [0] * call.ranks  # elements of each rank's own block that a rail has put into recv
    for owners, blocks in rails(by_island).items() if not topology.flat else ():
        if one_each(owners, blocks):
            for i, block in blocks:
                settled[owners[i]] += block.count
            src = tuple(own(owners[i], block) for i, block in blocks)
            dst = each("recv", [block for _, block in blocks])
            across.append(Step("allgather", owners, "bridge", src, (dst,) * len(owners)))
            continue
        for i, block in blocks:
            to = without(i, len(owners), region("recv", block))
            across.append(Step("bcast", owners, "bridge", only(i, len(owners), own(owners[i], block)), to, i))
    last = [s for parts in _foreign(topology, by_island) for s in parts]
    for island, owned in zip(topology.islands, by_island, strict=True):
        if island.size > 1:
            last += native_allgather(island, owned, own)
            continue
        rank = island.ranks[0]
        block = piece.cut(shape.own(rank))
        if settled[rank] != block.count:
            last += copy(rank, own(rank, block), region("recv", block))
    return stages(across, last)


def _alike(topology: Topology, blocks: list[list[Block]], part: Block) -> Stages:
    """Equal islands and blocks: rail p carries the block of the p-th rank of every island."""
    islands, own = topology.islands, region("send", part)
    m, s = len(islands), islands[0].size
    if not part.count:
        return ()
    across: list[Step] = []
    for p in range(s):
        dst = each("recv", [of[p] for of in blocks])
        across.append(Step("allgather", tuple([i.ranks[p] for i in islands]), "bridge", (own,) * m, (dst,) * m))
    inside: list[Step] = []
    for home, of in enumerate(blocks) if s > 1 else ():
        arrived, dsts = tuple(region("recv", block) for block in of), (each("recv", of),) * s
        for index, island in enumerate(islands):
            src = (own,) * s if index == home else arrived
            inside.append(Step("allgather", island.ranks, "native", src, dsts))
    return stages(across, inside)


def _foreign(topology: Topology, by_island: Sequence[Owned]) -> list[list[Step]]:
    """Allgathers, in every island, of what came from each other island."""
    return [
        native_allgather(island, owned, Dense("recv"))
        for index, owned in enumerate(by_island)
        for island in topology.islands
        if island.index != index and owned.parts
    ]
