"""allgather and allgatherv: every rank gets the blocks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives import Block, Call, Shape
from ..plan import Region, Step
from ..topology import Group, Topology
from . import ranking
from .builders import allgather_steps, copy, dense, each, only, region, shifted, stages, without
from .partition import alike, group_blocks, member_blocks, merge, one_each, owned_blocks, rounds
from .registry import Piece, Stages, algorithm
from .tree import Item, Team, crossings, everything, levels, up_and_down

_BOTH = ("allgather", "allgatherv")


@algorithm(_BOTH, "tree", suits=ranking.tree_of_blocks)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather to a leader in each island, allgather between the leaders, broadcast in each island.

    Stages: 3, and 2 for each further level. Each island's blocks cross the bridge once to every other island.
    """
    shape = Shape(call)
    own = shifted("send", lambda rank: shape.own(rank).offset)
    runs = merge(sorted(group_blocks(topology.tree, shape, piece), key=lambda block: block.offset))

    def steps(team: Team) -> tuple[list[Step], list[Step]]:
        n, i, group, up = len(team), team.first, team.group, list[Step]()
        last = group is topology.tree and group.children
        brought = member_blocks(group, shape, piece)
        for mine in rounds(brought) if any(b.count for of in brought for b in of) else ():
            src = tuple((own if team.sole(k) else dense("recv"))(team.ranks[k], b) for k, b in enumerate(mine))
            dst = each("recv", mine)
            if last:
                up.append(Step("allgather", team.ranks, src, (dst,) * n))
            else:
                up.append(Step("gather", team.ranks, src, only(i, n, dst), i))
        down = [] if last else [region("recv", run) for run in runs]
        return up, [Step("bcast", team.ranks, only(i, n, at), without(i, n, at), i) for at in down]

    return up_and_down(topology, piece, steps)


@algorithm(_BOTH, "split_rail", suits=ranking.rails, most=ranking.overlapped)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Each island's blocks cross to every other island, spread over its ranks, and are allgathered there.

    Stages: 2, and 1 for each further level. Every island receives the blocks of the others over the bridge once, each
    rank a share; between islands of equal size each rail is one allgather.
    """
    shape = Shape(call)
    equal = None if topology.flat else alike(topology, shape, piece)
    if equal is not None:
        return _alike(topology, equal, piece.cut(Block(0, call.counts[0])), piece)
    return Down(topology, shape, piece).run()


class Down:
    """The general case: stages of groups of one height follow those of all higher groups."""

    def __init__(self, topology: Topology, shape: Shape, piece: Piece) -> None:
        self.topology, self.shape, self.piece = topology, shape, piece
        self.stages: list[list[list[Step]]] = [[[]] for _ in levels(topology.tree)]
        self.own = shifted("send", lambda rank: shape.own(rank).offset)

    def run(self) -> Stages:
        self.walk(self.topology.tree, [everything(self.topology, self.shape, self.piece)])
        return stages(*[stage for of in reversed(self.stages) for stage in of])

    def brought(self, rank: int, block: Block) -> bool:
        """True if a block is part of the rank's own data, not received from another rank."""
        mine = self.shape.own(rank)
        return mine.offset <= block.offset < mine.offset + mine.count

    def place(self, rank: int, block: Block) -> Region:
        """A rank's copy of a block: its own data in ``send``, received data in ``recv``."""
        return self.own(rank, block) if self.brought(rank, block) else region("recv", block)

    def walk(self, group: Group, items: Sequence[Item], settled: bool = False) -> None:
        """Distribute the blocks of a group's ranks to all of them; ``settled``: their own blocks are in ``recv``
        already."""
        if not self.piece.wants(group.ranks):
            return
        if not group.children:
            self._inside(group, items, settled)
            return
        within: list[list[Item]] = [[] for _ in group.children]
        rails: dict[tuple[int, ...], list[tuple[int, Block]]] = {}
        for crossing in crossings(self.topology, group, items):
            for part in crossing.segments:
                if self.piece.wants(part.owners):
                    rails.setdefault(part.owners, []).append((crossing.home, Block(part.offset, part.count)))
            for of, item in zip(within, crossing.items, strict=True):
                of.append(item)
        place: dict[int, int] = {}
        for owners, blocks in rails.items():
            for i, block in self.cross(owners, blocks, group.height):
                if self.brought(owners[i], block):  # it may also forward blocks from further away
                    place[owners[i]] = place.get(owners[i], 0) + block.count
        for child, of in zip(group.children, within, strict=True):
            alone = child.ranks[0]
            done = child.size == 1 and place.get(alone, 0) == self.piece.cut(self.shape.own(alone)).count
            self.walk(child, of, settled or done)

    def cross(
        self, owners: tuple[int, ...], blocks: Sequence[tuple[int, Block]], height: int
    ) -> Sequence[tuple[int, Block]]:
        """Steps of a rail; returns the blocks that they have also put into their owner's ``recv``."""
        n, out = len(owners), self.stages[height][0]
        if one_each(owners, blocks):
            src = tuple([self.place(owners[i], block) for i, block in blocks])
            dst = each("recv", [block for _, block in blocks])
            out.append(Step("allgather", owners, src, (dst,) * n))
            return blocks
        for i, block in blocks:
            to = without(i, n, region("recv", block))
            out.append(Step("bcast", owners, only(i, n, self.place(owners[i], block)), to, i))
        return ()

    def _inside(self, group: Group, items: Sequence[Item], settled: bool) -> None:
        out = self.stages[0][0]
        if group.size == 1:
            rank = group.ranks[0]
            block = self.piece.cut(self.shape.own(rank))
            out += [] if settled else copy(rank, self.own(rank, block), region("recv", block))
            return
        for item in items:
            owned = owned_blocks(item.runs, item.division, group.ranks)
            out += allgather_steps(group.ranks, owned, self.place)


def _alike(topology: Topology, blocks: list[list[Block]], part: Block, piece: Piece) -> Stages:
    """Islands and blocks of equal size: rail p carries the block of the p-th rank of every island."""
    islands, own = topology.islands, region("send", part)
    m, s = len(islands), islands[0].size
    if not part.count:
        return ()
    across: list[Step] = []
    for p in range(s):
        owners = tuple([i.ranks[p] for i in islands])
        if piece.wants(owners):
            dst = each("recv", [of[p] for of in blocks])
            across.append(Step("allgather", owners, (own,) * m, (dst,) * m))
    inside: list[Step] = []
    near = [island for island in islands if piece.wants(island.ranks)]
    for home, of in enumerate(blocks) if s > 1 else ():
        arrived, dsts = tuple([region("recv", block) for block in of]), (each("recv", of),) * s
        for island in near:
            src = (own,) * s if island.index == home else arrived
            inside.append(Step("allgather", island.ranks, src, dsts))
    return stages(across, inside)
