"""Moving the blocks of many ranks through the tree of a topology: down from the root, or up to it.

What the ranks of a group have (or want) is an *item*: runs of the dense buffer and which rank has which of it. In a
group of groups the part of an item that lies in one of them crosses to (or comes from) the others over rails, divided
among all their ranks; inside each of those it is an item like those it began with. So nothing crosses a level twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..collectives import Block, Shape
from ..topology import Group, Topology
from .partition import Division, Segment, divisions, group_blocks, merge, refine
from .registry import Piece


class Item(NamedTuple):
    """Merged runs of the dense buffer, and which rank of a group has which part, counted along the runs."""

    runs: list[Block]
    division: Division


class Crossing(NamedTuple):
    """The part of an item that one child of a group has: the owners of its segments, and what it is to each child."""

    home: int
    segments: list[Segment]
    #: The item that it is inside each child.
    items: list[Item]


def everything(topology: Topology, shape: Shape, piece: Piece) -> Item:
    """This fragment's slice of all blocks, each with its own rank."""
    group = topology.tree
    blocks = group_blocks(group, shape, piece)
    ends = accumulate(block.count for block in blocks)
    return Item(merge(blocks), list(zip(ends, group.ranks, strict=True)))


def _parts(item: Item, group: Group) -> Iterator[Item]:
    """The part of an item that each child of a group has."""
    where = {rank: i for i, child in enumerate(group.children) for rank in child.ranks}
    blocks: list[list[Block]] = [[] for _ in group.children]
    owners: list[list[tuple[int, int]]] = [[] for _ in group.children]
    for part in refine(item.runs, [item.division]):
        (rank,) = part.owners
        blocks[where[rank]].append(Block(part.offset, part.count))
        owners[where[rank]].append((part.count, rank))
    for of, by in zip(blocks, owners, strict=True):
        ends = accumulate(count for count, _ in by)
        yield Item(merge(of), [(end, rank) for end, (_, rank) in zip(ends, by, strict=True)])


def crossings(topology: Topology, group: Group, items: Sequence[Item]) -> Iterator[Crossing]:
    """The items of a group that its children exchange."""
    for item in items:
        for home, own in enumerate(_parts(item, group)):
            total = sum(run.count for run in own.runs)
            if not total:
                continue
            whole = divisions(topology, group.children, total, {home: own.division})
            yield Crossing(home, refine(own.runs, whole), [Item(own.runs, division) for division in whole])
