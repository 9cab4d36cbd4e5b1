"""reduce_scatter and reduce_scatter_block: rank r gets block r of the reduction of all vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..collectives import Block, Call, Shape
from ..plan import EqualRegions, Operand, Region, Step
from ..topology import Group, Topology
from . import ranking
from .builders import Place, Windows, each, only, reduce_scatter_steps, region, shifted, stages
from .partition import alike, group_blocks, member_blocks, merge, one_each, owned_blocks, rounds
from .registry import Piece, Stages, algorithm
from .tree import Item, Team, crossings, everything, levels, up_and_down

_BOTH = ("reduce_scatter_block", "reduce_scatter")


@algorithm(_BOTH, "tree", suits=ranking.tree_of_blocks)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, reduce-scatter between the leaders, scatter in each island.

    Stages: 3, and 2 for each further level. Each leader sends the data for other islands over the bridge once.
    """
    shape = Shape(call)
    runs = merge(sorted(group_blocks(topology.tree, shape, piece), key=lambda block: block.offset))
    held = _Leaders(piece, lambda rank: runs)
    own = _own(shape)

    def steps(team: Team) -> tuple[list[Step], list[Step]]:
        n, i, up, down = len(team), team.first, list[Step](), list[Step]()
        wanted = member_blocks(team.group, shape, piece) if runs else [[]]
        if team.group is topology.tree and team.group.children:
            return _between(team, wanted, held, own), []
        for run in runs:
            src = tuple([held.at(team, k, run) for k in range(n)])
            up.append(Step("reduce", team.ranks, src, only(i, n, held(team.ranks[i], run)), i))
        for blocks in rounds(wanted):
            out = tuple([held(team.ranks[i], block) for block in blocks])
            dst = tuple([own(r, b) if team.sole(k) else held(r, b) for k, (r, b) in _both(team, blocks)])
            down.append(Step("scatter", team.ranks, only(i, n, out), dst, i))
        return up, down

    return up_and_down(topology, piece, steps)


def _both(team: Team, blocks: Sequence[Block]) -> enumerate[tuple[int, Block]]:
    return enumerate(zip(team.ranks, blocks, strict=True))


class _Leaders(Windows):
    """Scratch of leaders for the whole vector."""

    def each(self, team: Team, blocks: Sequence[Block], i: int) -> tuple[Region, ...]:
        return tuple([self.at(team, i, block) for block in blocks])

    def at(self, team: Team, i: int, block: Block) -> Region:
        """Operand of member i of a team: its own vector if it stands for itself only."""
        return region("send", block) if team.sole(i) else self(team.ranks[i], block)


def _between(team: Team, runs: list[list[Block]], held: _Leaders, own: Place) -> list[Step]:
    """Leaders reduce-scatter the runs of their groups, one run of each group at a time."""
    out = []
    for blocks in rounds(runs):
        src = held.piece.members(team.ranks, partial(held.each, team, blocks))
        dst = tuple([own(r, b) if team.sole(i) else held(r, b) for i, (r, b) in _both(team, blocks)])
        out.append(Step("reduce_scatter", team.ranks, src, dst))
    return out


def _own(shape: Shape) -> Place:
    return shifted("recv", lambda rank: shape.own(rank).offset)


@algorithm(_BOTH, "split_rail", suits=ranking.rails, most=ranking.overlapped)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """The blocks of each island are reduce-scattered in every island, then reduced over rails to their ranks.

    Stages: 2, and 1 for each further level. Every island sends the data for other islands over the bridge once, spread
    over all its ranks' links; between islands of equal size each rail is one reduce-scatter.
    """
    shape = Shape(call)
    equal = None if topology.flat else alike(topology, shape, piece)
    if equal is not None:
        return _alike(topology, equal, piece.cut(Block(0, call.counts[0])), piece)
    return Up(topology, shape, piece).run()


class _Wanted(NamedTuple):
    """An item that a group is to reduce, and where its owners get it."""

    item: Item
    place: Place


class Up:
    """The general case: stages of groups of one height precede those of all higher groups."""

    def __init__(self, topology: Topology, shape: Shape, piece: Piece) -> None:
        self.topology, self.shape, self.piece = topology, shape, piece
        self.stages: list[list[list[Step]]] = [[[]] for _ in levels(topology.tree)]

    def run(self) -> Stages:
        self.walk(self.topology.tree, [_Wanted(everything(self.topology, self.shape, self.piece), _own(self.shape))])
        return stages(*[stage for of in self.stages for stage in of])

    def walk(self, group: Group, wanted: Sequence[_Wanted]) -> None:
        """Reduce the wanted items over a group."""
        if not self.piece.wants(group.ranks):
            return
        if not group.children:
            for item, place in wanted:
                owned = owned_blocks(item.runs, item.division, group.ranks)
                self.stages[0][0] += reduce_scatter_steps(group.ranks, owned, place)
            return
        within: list[list[_Wanted]] = [[] for _ in group.children]
        rails: dict[tuple[int, ...], list[tuple[int, Block, list[Place]]]] = {}
        for one in wanted:
            for crossing in crossings(self.topology, group, [one.item]):
                places = []
                for i, child in enumerate(group.children):
                    place = one.place if i == crossing.home else self._scratch(child, crossing.items[i])
                    places.append(place)
                    within[i].append(_Wanted(crossing.items[i], place))
                for part in crossing.segments:
                    if self.piece.wants(part.owners):
                        block = Block(part.offset, part.count)
                        rails.setdefault(part.owners, []).append((crossing.home, block, places))
        for child, of in zip(group.children, within, strict=True):
            self.walk(child, of)
        for owners, blocks in rails.items():
            self.cross(group, owners, blocks)

    def _scratch(self, group: Group, item: Item) -> Place:
        """Where the ranks of a group keep their parts of an item that belongs to other ranks."""
        mine: list[list[Block]] = []

        def blocks(rank: int) -> list[Block]:
            mine[:] = mine or owned_blocks(item.runs, item.division, group.ranks)
            return mine[group.ranks.index(rank)]

        return Windows(self.piece, blocks)

    def cross(self, group: Group, owners: tuple[int, ...], blocks: Sequence[tuple[int, Block, list[Place]]]) -> None:
        out = self.stages[group.height][0]
        src = []
        for _, block, places in blocks:
            members = zip(owners, group.children, places, strict=True)
            src.append([region("send", block) if c.size == 1 else place(r, block) for r, c, place in members])
        dst = [places[i](owners[i], block) for i, block, places in blocks]
        if one_each(owners, [(i, block) for i, block, _ in blocks]):
            out.append(Step("reduce_scatter", owners, tuple(zip(*src, strict=True)), tuple(dst)))
            return
        for (i, _, _), contributions, to in zip(blocks, src, dst, strict=True):
            out.append(Step("reduce", owners, tuple(contributions), only(i, len(owners), to), i))


def _alike(topology: Topology, blocks: list[list[Block]], part: Block, piece: Piece) -> Stages:
    """Islands and blocks of equal size. Partial results are in scratch, in the order of the islands they are for, so
    that the rail's reduce-scatter needs no packing."""
    islands, count = topology.islands, part.count
    m, s = len(islands), islands[0].size
    if not count:
        return ()
    at = piece.tmp_everywhere(m * count).offset if s > 1 else 0
    inside: list[Step] = []
    near = [island for island in islands if piece.wants(island.ranks)]
    for home, of in enumerate(blocks) if s > 1 else ():
        src = (each("send", of),) * s
        dst = (Region("tmp", at + home * count, count),) * s
        inside += [Step("reduce_scatter", island.ranks, src, dst) for island in near]
    own = (region("recv", part),) * m
    across: list[Step] = []
    for p in range(s):
        owners = tuple([i.ranks[p] for i in islands])
        if piece.wants(owners):
            partial: Operand = (
                EqualRegions("tmp", at, count, count, m) if s > 1 else each("send", [of[p] for of in blocks])
            )
            across.append(Step("reduce_scatter", owners, (partial,) * m, own))
    return stages(inside, across)
