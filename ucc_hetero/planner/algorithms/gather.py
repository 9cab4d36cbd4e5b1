"""gather and gatherv: the root gets the blocks of all ranks."""

from __future__ import annotations

from ucc_hetero.planner.algorithms import fitness
from ucc_hetero.planner.algorithms.division import group_blocks, merge
from ucc_hetero.planner.algorithms.parts import Aside, copy, each, message, only, region, shifted, stages
from ucc_hetero.planner.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.planner.collectives import Block, Call, Shape
from ucc_hetero.planner.plan import Region, Step
from ucc_hetero.planner.topology import Island, Topology

__all__: list[str] = []

_BOTH = ("gather", "gatherv")


def _home(topology: Topology, call: Call, shape: Shape, piece: Piece) -> list[Step]:
    """Gather the blocks of the root's island to it."""
    island = topology.islands[topology.island_of[call.root]]
    if not piece.wants(island.ranks):
        return []
    blocks = group_blocks(island, shape, piece)
    own = shifted("send", lambda rank: shape.own(rank).offset)
    src = tuple(own(rank, block) for rank, block in zip(island.ranks, blocks, strict=True))
    if island.size == 1:
        return copy(call.root, src[0], region("recv", blocks[0]))
    if not any(block.count for block in blocks):
        return []
    i = island.ranks.index(call.root)
    return [Step("gather", island.ranks, "native", src, only(i, island.size, each("recv", blocks)), i)]


@algorithm(_BOTH, "tree", suits=fitness.tree)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather to a leader in each island, one message from each leader to the root, which puts the blocks in place.

    Stages: 2, and a third of copies where an island's ranks are not consecutive. Every block crosses the bridge once.
    """
    shape = Shape(call)
    inside = _home(topology, call, shape, piece)
    across: list[Step] = []
    unpack = Aside()
    for island in topology.islands:
        if not piece.wants((call.root, *island.ranks)):
            continue
        blocks = group_blocks(island, shape, piece)
        total = sum(block.count for block in blocks)
        if island.index == topology.island_of[call.root] or not total:
            continue
        inside += (packed := _pack(island, blocks, total, shape, piece))[0]
        runs = merge(blocks)
        to = region("recv", runs[0]) if len(runs) == 1 else piece.tmp(call.root, total)
        if piece.wants((island.ranks[0], call.root)):
            across += message(topology, island.ranks[0], call.root, packed[1], to)
        at = to.offset
        for run in runs if len(runs) > 1 and piece.wants((call.root,)) else ():
            unpack += copy(call.root, Region("tmp", at, run.count), region("recv", run))
            at += run.count
    return stages(inside, across, unpack)


def _pack(island: Island, blocks: list[Block], total: int, shape: Shape, piece: Piece) -> tuple[list[Step], Region]:
    """Gather an island's blocks to its leader, one after the other; the steps and where they then lie."""
    own = shifted("send", lambda rank: shape.own(rank).offset)
    src = tuple(own(rank, block) for rank, block in zip(island.ranks, blocks, strict=True))
    if island.size == 1:
        return [], src[0]
    held = piece.tmp(island.ranks[0], total)
    at, places = held.offset, []
    for block in blocks:
        places.append(Block(at, block.count))
        at += block.count
    to = only(0, island.size, each("tmp", places))
    return ([Step("gather", island.ranks, "native", src, to, 0)] if piece.wants(island.ranks) else []), held


@algorithm(_BOTH, "split_rail", suits=fitness.rails)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather inside the root's island, while every other rank sends its block straight to the root.

    Stages: 1. Every block crosses the bridge once, by its own rank's link.
    """
    shape = Shape(call)
    own = shifted("send", lambda rank: shape.own(rank).offset)
    out = _home(topology, call, shape, piece)
    for rank in range(call.ranks):
        if topology.island_of[rank] != topology.island_of[call.root] and piece.wants((rank, call.root)):
            block = piece.cut(shape.own(rank))
            out += message(topology, rank, call.root, own(rank, block), region("recv", block))
    return stages(out)
