"""scatter and scatterv: every rank gets its block of the root's ``send``."""

from __future__ import annotations

from ucc_hetero.planner.algorithms import fitness
from ucc_hetero.planner.algorithms.division import group_blocks, merge
from ucc_hetero.planner.algorithms.parts import Aside, copy, each, message, only, region, shifted, stages
from ucc_hetero.planner.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.planner.collectives import Block, Call, Shape
from ucc_hetero.planner.plan import Region, Step
from ucc_hetero.planner.topology import Island, Topology

__all__: list[str] = []

_BOTH = ("scatter", "scatterv")


def _home(topology: Topology, call: Call, shape: Shape, piece: Piece) -> list[Step]:
    """Scatter the blocks of the root's island from it."""
    island = topology.islands[topology.island_of[call.root]]
    if not piece.wants(island.ranks):
        return []
    blocks = group_blocks(island, shape, piece)
    own = shifted("recv", lambda rank: shape.own(rank).offset)
    dst = tuple(own(rank, block) for rank, block in zip(island.ranks, blocks, strict=True))
    if island.size == 1:
        return copy(call.root, region("send", blocks[0]), dst[0])
    if not any(block.count for block in blocks):
        return []
    i = island.ranks.index(call.root)
    return [Step("scatter", island.ranks, "native", only(i, island.size, each("send", blocks)), dst, i)]


@algorithm(_BOTH, "tree", suits=fitness.tree)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """One message from the root to a leader of each island, which scatters it inside.

    Stages: 2, and one of copies before where an island's ranks are not consecutive. Every block crosses the bridge
    once.
    """
    shape = Shape(call)
    pack = Aside()
    across = _home(topology, call, shape, piece)
    inside: list[Step] = []
    for island in topology.islands:
        if not piece.wants((call.root, *island.ranks)):
            continue
        blocks = group_blocks(island, shape, piece)
        total = sum(block.count for block in blocks)
        if island.index == topology.island_of[call.root] or not total:
            continue
        runs = merge(blocks)
        src = region("send", runs[0]) if len(runs) == 1 else piece.tmp(call.root, total)
        at = src.offset
        for run in runs if len(runs) > 1 and piece.wants((call.root,)) else ():
            pack += copy(call.root, region("send", run), Region("tmp", at, run.count))
            at += run.count
        steps, to = _unpack(island, blocks, total, shape, piece)
        if piece.wants((call.root, island.ranks[0])):
            across += message(topology, call.root, island.ranks[0], src, to)
        inside += steps if piece.wants(island.ranks) else []
    return stages(pack, across, inside)


def _unpack(island: Island, blocks: list[Block], total: int, shape: Shape, piece: Piece) -> tuple[list[Step], Region]:
    """Scatter an island's blocks, which lie one after the other at its leader; the steps and where they are to lie."""
    own = shifted("recv", lambda rank: shape.own(rank).offset)
    dst = tuple(own(rank, block) for rank, block in zip(island.ranks, blocks, strict=True))
    if island.size == 1:
        return [], dst[0]
    held = piece.tmp(island.ranks[0], total)
    at, places = held.offset, []
    for block in blocks:
        places.append(Block(at, block.count))
        at += block.count
    return [Step("scatter", island.ranks, "native", only(0, island.size, each("tmp", places)), dst, 0)], held


@algorithm(_BOTH, "split_rail", suits=fitness.rails)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Scatter inside the root's island, while the root sends every other rank its block straight.

    Stages: 1. Every block crosses the bridge once, to its own rank's link.
    """
    shape = Shape(call)
    own = shifted("recv", lambda rank: shape.own(rank).offset)
    out = _home(topology, call, shape, piece)
    for rank in range(call.ranks):
        if topology.island_of[rank] != topology.island_of[call.root] and piece.wants((rank, call.root)):
            block = piece.cut(shape.own(rank))
            out += message(topology, call.root, rank, region("send", block), own(rank, block))
    return stages(out)
