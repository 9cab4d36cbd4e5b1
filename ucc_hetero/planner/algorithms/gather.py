"""gather(v) and scatter(v): the root gets the blocks of all ranks, or gives every rank its block.

A scatter is a gather backwards: its steps are those of a gather, mirrored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..collectives import Block, Call, Shape
from ..plan import Operand, Region, Step
from ..topology import Island, Topology
from . import ranking
from .builders import LocalSteps, adjacent, copies, copy, each, message, only, region, shifted, stages
from .partition import group_blocks, merge
from .registry import Piece, Stages, algorithm

_GATHERS, _SCATTERS = ("gather", "gatherv"), ("scatter", "scatterv")

_BACKWARDS = {"gather": "scatter", "send": "recv", "recv": "send"}


def _mirrored(steps: Iterable[Step]) -> list[Step]:
    """Mirrored steps: they move data back along gathers, messages and copies, from ``recv`` to ``send``."""
    out = []
    for step in steps:
        way = -1 if step.kind == "message" else 1  # a message goes from its receiver to its sender
        src, dst = (tuple([_seen(operand) for operand in side[::way]]) for side in (step.dst, step.src))
        out.append(Step(_BACKWARDS.get(step.kind, step.kind), step.ranks[::way], src, dst, step.root))
    return out


def _seen(operand: Operand) -> Operand:
    if operand is None:
        return None
    if isinstance(operand, tuple):
        return tuple([replace(part, buffer=_BACKWARDS.get(part.buffer, part.buffer)) for part in operand])
    return replace(operand, buffer=_BACKWARDS.get(operand.buffer, operand.buffer))


class _Gathered(NamedTuple):
    """Steps of a gather: in the root's island, in the other islands, from these to the root, and unpacking at the
    root."""

    home: list[Step]
    inside: list[Step]
    across: list[Step]
    unpack: LocalSteps


def _home(topology: Topology, call: Call, shape: Shape, piece: Piece) -> list[Step]:
    island = topology.islands[topology.island_of[call.root]]
    if not piece.wants(island.ranks):
        return []
    blocks = group_blocks(island, shape, piece)
    src = _own(island, blocks, shape)
    if island.size == 1:
        return copy(call.root, src[0], region("recv", blocks[0]))
    if not any(block.count for block in blocks):
        return []
    i = island.ranks.index(call.root)
    return [Step("gather", island.ranks, src, only(i, island.size, each("recv", blocks)), i)]


def _own(island: Island, blocks: list[Block], shape: Shape) -> tuple[Region, ...]:
    own = shifted("send", lambda rank: shape.own(rank).offset)
    return tuple([own(rank, block) for rank, block in zip(island.ranks, blocks, strict=True)])


def _by_leaders(topology: Topology, call: Call, piece: Piece) -> _Gathered:
    shape = Shape(call)
    out = _Gathered(_home(topology, call, shape, piece), [], [], LocalSteps())
    for island in topology.islands:
        if not piece.wants((call.root, *island.ranks)):
            continue
        blocks = group_blocks(island, shape, piece)
        total = sum(block.count for block in blocks)
        if island.index == topology.island_of[call.root] or not total:
            continue
        src = _own(island, blocks, shape)
        held, leader = src[0], island.ranks[0]
        if island.size > 1:
            held = piece.tmp(leader, total)
            to = only(0, island.size, each("tmp", adjacent(held.offset, [block.count for block in blocks])))
            if piece.wants(island.ranks):
                out.inside.append(Step("gather", island.ranks, src, to, 0))
        runs = merge(blocks)
        at = region("recv", runs[0]) if len(runs) == 1 else piece.tmp(call.root, total)
        if piece.wants((leader, call.root)):
            out.across.extend(message(leader, call.root, held, at))
        if len(runs) > 1 and piece.wants((call.root,)):
            parts = adjacent(at.offset, [run.count for run in runs])
            out.unpack.extend(copies(call.root, "tmp", parts, "recv", runs))
    return out


@algorithm(_GATHERS, "tree", suits=ranking.tree)
def gather_tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather to a leader in each island, one message from each leader to the root, which puts the blocks in place.

    Stages: 2, and a third of copies where an island's ranks are not consecutive. Every block crosses the bridge once.
    """
    home, inside, across, unpack = _by_leaders(topology, call, piece)
    return stages(home + inside, across, unpack)


@algorithm(_SCATTERS, "tree", suits=ranking.tree)
def scatter_tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """One message from the root to a leader of each island, which scatters it inside.

    Stages: 2, and one of copies before where an island's ranks are not consecutive. Every block crosses the bridge
    once.
    """
    home, inside, across, unpack = _by_leaders(topology, call, piece)
    return stages(LocalSteps(_mirrored(unpack)), _mirrored(home + across), _mirrored(inside))


@algorithm(_GATHERS, "split_rail", suits=ranking.rails)
def gather_rails(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather inside the root's island, while every other rank sends its block directly to the root.

    Stages: 1. Every block crosses the bridge once, by its own rank's link.
    """
    shape = Shape(call)
    own = shifted("send", lambda rank: shape.own(rank).offset)
    out = _home(topology, call, shape, piece)
    for rank in range(call.ranks):
        if topology.island_of[rank] != topology.island_of[call.root] and piece.wants((rank, call.root)):
            block = piece.cut(shape.own(rank))
            out += message(rank, call.root, own(rank, block), region("recv", block))
    return stages(out)


@algorithm(_SCATTERS, "split_rail", suits=ranking.rails)
def scatter_rails(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Scatter inside the root's island, while the root sends every other rank its block directly.

    Stages: 1. Every block crosses the bridge once, to its own rank's link.
    """
    return stages(*[_mirrored(stage.steps) for stage in gather_rails(topology, call, piece)])
