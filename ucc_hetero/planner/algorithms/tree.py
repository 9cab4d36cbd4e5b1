"""Traversal of a topology's tree: inward through groups of groups, and outward again.

``Hierarchy`` divides a block on the way inward: a group of ranks among its ranks; a group of groups by the common
refinement of its children's divisions, each segment being shared among its owners. So every rank ends up with a part of
its own, data crosses each level on rails that work concurrently, and the way outward is the reverse. Islands on hosts
are a tree of two levels; deeper trees work the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..collectives import Block, Shape
from ..plan import Operand, Region, Step
from ..topology import Group, Topology
from .builders import Place, allgather_steps, each, reduce_scatter_steps, region, stages
from .partition import Division, Segment, cuts, divisions, group_blocks, merge, owned_blocks, refine
from .registry import Piece, Stages


class Hierarchy:
    """Division of ``block`` by the groups of a topology on the way inward, and the steps inward and outward.

    ``place`` tells where a rank keeps what it owns. Groups of one rank reduce nothing: their data is in ``send``.
    """

    def __init__(self, topology: Topology, block: Block, piece: Piece, place: Place) -> None:
        self.topology, self.block, self.piece, self.place = topology, block, piece, place
        key = "hierarchy", block.count
        if key not in piece.memo:
            piece.memo[key] = _divided(topology, block.count)
        #: By group: the final owners of its parts, and for a group of groups the segments that it begins with.
        self._divisions: dict[int, Division]
        self._segments: dict[int, list[Segment]]
        self._divisions, self._segments = piece.memo[key]

    def division(self, group: Group) -> Division:
        """Which rank owns which part of the block after the way inward, relative to the block."""
        return self._divisions[id(group)]

    def blocks(self, leaf: Group) -> list[list[Block]]:
        return owned_blocks([self.block], self.division(leaf), leaf.ranks)

    def segments(self, group: Group) -> Iterator[Segment]:
        """The segments that a group of groups exchanges, only those of this plan's rank."""
        for part in self._segments[id(group)]:
            if self.piece.wants(part.owners):
                yield Segment(self.block.offset + part.offset, part.count, part.owners)

    def across(self, divided: Sequence[Division]) -> Iterator[Segment]:
        """The segments of any divisions of the block, only those of this plan's rank."""
        for part in refine([self.block], divided):
            if self.piece.wants(part.owners):
                yield part

    def sources(self, group: Group, part: Segment, blocks: Sequence[Block]) -> tuple[Operand, ...]:
        """Each owner's contribution to ``blocks`` of a segment."""
        dense: dict[str, Operand] = {}
        out: list[Operand] = []
        # Of equal blocks libucc's ranks would choose by whether theirs are in place, which a lone rank's are not.
        mixed = len({child.size == 1 for child in group.children}) > 1
        for child, rank in zip(group.children, part.owners, strict=True):
            buffer = "send" if child.size == 1 else self.place(rank, blocks[0]).buffer
            if buffer == "tmp" or mixed:
                out.append(tuple([region("send", b) if child.size == 1 else self.place(rank, b) for b in blocks]))
                continue
            if buffer not in dense:
                dense[buffer] = each(buffer, blocks)
            out.append(dense[buffer])
        return tuple(out)

    def scatter(self, group: Group) -> list[Step]:
        """One group's way inward: each owner gets the sum of its part."""
        if not group.children:
            if not self.piece.wants(group.ranks):
                return []
            return reduce_scatter_steps(group.ranks, self.blocks(group), self.place)
        out = []
        for part in self.segments(group):
            shares, kept = self._kept(part)
            out.append(Step("reduce_scatter", part.owners, self.sources(group, part, shares), kept))
        return out

    def _kept(self, part: Segment) -> tuple[list[Block], tuple[Region, ...]]:
        """The owners' shares of a segment, and where each keeps its own."""
        owners, shares = part.owners, cuts(part, len(part.owners))
        return shares, self.piece.members(owners, lambda i: self.place(owners[i], shares[i]))

    def gather(self, group: Group) -> list[Step]:
        """One group's way outward, into ``recv``: its ranks' blocks go back to their previous owners."""
        if not group.children:
            if not self.piece.wants(group.ranks):
                return []
            return allgather_steps(group.ranks, self.blocks(group), self.place)
        out = []
        for part in self.segments(group):
            shares, kept = self._kept(part)
            out.append(Step("allgather", part.owners, kept, (each("recv", shares),) * len(kept)))
        return out


def _divided(topology: Topology, count: int) -> tuple[dict[int, Division], dict[int, list[Segment]]]:
    """Divisions and segments by id of groups, for a block of ``count`` elements at 0."""
    tree, block = topology.tree, Block(0, count)
    leaves = [group for group in tree.walk() if not group.children]
    out: dict[int, Division] = {id(g): d for g, d in zip(leaves, divisions(topology, leaves, count), strict=True)}
    parts: dict[int, list[Segment]] = {}
    for group in tree.walk():
        if not group.children:
            continue
        found = parts[id(group)] = refine([block], [out[id(child)] for child in group.children])
        if group is not tree:
            of = ((b, rank) for p in found for b, rank in zip(cuts(p, len(p.owners)), p.owners, strict=True))
            out[id(group)] = [(b.offset + b.count, rank) for b, rank in of]
    return out, parts


def levels(tree: Group) -> list[list[Group]]:
    """Groups by height: groups of ranks first, the root last."""
    out: list[list[Group]] = [[] for _ in range(tree.height + 1)]
    for group in tree.walk():
        out[group.height].append(group)
    return out


def chain(tree: Group, rank: int) -> list[Group]:
    """The groups that contain a rank, the smallest first."""
    out = [tree]
    while out[-1].children:
        out.append(next(child for child in out[-1].children if rank in child.ranks))
    return out[::-1]


def place(tree: Group, root: int) -> dict[int, int]:
    """Where a rank is, by height: its index in its group of ranks, and that of a child in each group above; empty for
    -1."""
    if root < 0:
        return {}
    leaf, *above = found = chain(tree, root)
    at = {group.height: group.children.index(child) for child, group in zip(found, above, strict=False)}
    return {0: leaf.ranks.index(root), **at}


def leader(group: Group, at: Mapping[int, int]) -> int:
    """The leader of a group: the rank at this place in it. A root leads its own groups, and groups that are alike have
    the leaders of a rail, so that other roots need no other teams."""
    while group.children:
        group = group.children[at.get(group.height, 0) % len(group.children)]
    return group.ranks[at.get(0, 0) % group.size]


class Team:
    """The leaders of a group's children (of a group of ranks: all ranks), and the index of its own leader."""

    __slots__ = ("first", "group", "ranks")

    def __init__(self, group: Group, at: Mapping[int, int]) -> None:
        self.group = group
        self.ranks = tuple([leader(c, at) for c in group.children]) if group.children else group.ranks
        self.first = self.ranks.index(leader(group, at))

    def __len__(self) -> int:
        return len(self.ranks)

    def sole(self, i: int) -> bool:
        """True if member i stands for itself only, so no rank has sent it anything yet."""
        return not self.group.children or self.group.children[i].size == 1


def up_and_down(topology: Topology, piece: Piece, make: Callable[[Team], tuple[list[Step], list[Step]]]) -> Stages:
    """Stages of the teams from the lowest to the highest, and back; ``make`` gives a team's steps for each
    direction."""
    up: list[list[Step]] = []
    down: list[list[Step]] = []
    for of in teams(topology, piece):
        made = [make(team) for team in of]
        up.append([step for there, _ in made for step in there])
        down.append([step for _, back in made for step in back])
    return stages(*up, *reversed(down))


def teams(topology: Topology, piece: Piece, root: int = -1) -> list[list[Team]]:
    """The teams of leaders by height: those of two or more ranks that include this plan's rank."""
    out, at = [], place(topology.tree, root)
    for groups in levels(topology.tree):
        of = [Team(group, at) for group in groups if group.size > 1]
        out.append([team for team in of if piece.wants(team.ranks)])
    return out


class Item(NamedTuple):
    """Data that the ranks of a group have, or want: merged runs of the dense buffer, and their division among the
    ranks.

    In a group of groups, the part of an item that one child has crosses to (or comes from) the other children over
    rails, divided among all their ranks; inside each child it is an item again. So nothing crosses a level twice.
    """

    runs: list[Block]
    division: Division


class Crossing(NamedTuple):
    """The part of an item that one child of a group has: the owners of its segments, and the item that it is to each
    child."""

    home: int
    segments: list[Segment]
    #: The item inside each child.
    items: list[Item]


def everything(topology: Topology, shape: Shape, piece: Piece) -> Item:
    """This fragment's slice of all blocks, each owned by its rank."""
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
