"""alltoall and alltoallv by way of leaders: one message between any two islands, for many ranks and little data."""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives import Block, Call, Shape
from ..plan import Region, Step
from ..topology import Island, Topology
from . import ranking
from .alltoall import suits
from .builders import LocalSteps, adjacent, copies, copy, only, region, stages
from .partition import merge
from .registry import Piece, Stages, algorithm


class _Leader:
    """One island's data on its way through its leader's scratch."""

    def __init__(self, topology: Topology, shape: Shape, piece: Piece, island: Island) -> None:
        self.topology, self.shape, self.piece, self.island = topology, shape, piece, island
        self.rank = island.ranks[0]
        everybody = range(shape.call.ranks)
        self.sent = [sum(shape.send(rank, peer).count for peer in everybody) for rank in island.ranks]
        self.wanted = [sum(shape.recv(rank, peer).count for peer in everybody) for rank in island.ranks]
        self.gathered = self._take(self.sent)
        self.leaving = [self._take([self.between(island, other)]).pop() for other in topology.islands]
        self.come = [self._take([self.between(other, island)]).pop() for other in topology.islands]
        self.sorted = self._take(self.wanted)

    def between(self, one: Island, other: Island) -> int:
        """Elements that one island sends to another; none inside."""
        if one is other:
            return 0
        return sum(self.shape.send(rank, peer).count for rank in one.ranks for peer in other.ranks)

    def _take(self, counts: Sequence[int]) -> list[Region]:
        at = self.piece.tmp(self.rank, sum(counts)).offset if self.piece.wants((self.rank,)) else 0
        return [region("tmp", block) for block in adjacent(at, counts)]

    def gather(self) -> list[Step]:
        ranks, n = self.island.ranks, self.island.size
        src = tuple([region("send", Block(0, count)) for count in self.sent])
        if n == 1:
            return copy(self.rank, src[0], self.gathered[0])
        if not any(self.sent):
            return []
        return [Step("gather", ranks, src, only(0, n, tuple(self.gathered)), 0)]

    def scatter(self) -> list[Step]:
        ranks, n = self.island.ranks, self.island.size
        dst = tuple([region("recv", Block(0, count)) for count in self.wanted])
        if n == 1:
            return copy(self.rank, self.sorted[0], dst[0])
        if not any(self.wanted):
            return []
        return [Step("scatter", ranks, only(0, n, tuple(self.sorted)), dst, 0)]

    def pack(self) -> list[Step]:
        """Data for each other island, sender by sender, one after the other."""
        out: list[Step] = []
        for other, bundle in zip(self.topology.islands, self.leaving, strict=True):
            runs = [
                Block(held.offset + run.offset, run.count)
                for rank, held in zip(self.island.ranks, self.gathered, strict=True)
                if bundle.count
                for run in merge(self.shape.send(rank, peer) for peer in other.ranks)
            ]
            out += copies(self.rank, "tmp", runs, "tmp", adjacent(bundle.offset, [run.count for run in runs]))
        return out

    def unpack(self) -> list[Step]:
        """Data that has come, or stayed, receiver by receiver."""
        out: list[Step] = []
        for other, bundle in zip(self.topology.islands, self.come, strict=True):
            at = bundle.offset
            for i, sender in enumerate(other.ranks):
                for rank, to in zip(self.island.ranks, self.sorted, strict=True):
                    block = self.shape.recv(rank, sender)
                    if other is self.island:
                        src = Region("tmp", self.gathered[i].offset + self.shape.send(sender, rank).offset, block.count)
                    else:
                        src = Region("tmp", at, block.count)
                        at += block.count
                    out += copy(self.rank, src, Region("tmp", to.offset + block.offset, block.count))
        return out


@algorithm(("alltoall", "alltoallv"), "tree", suits=lambda case: suits(case, ranking.tree(case)))
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Gather to a leader in each island, one alltoall between the leaders, scatter in each island.

    Stages: 3, and two of copies at the leaders. Every byte crosses the bridge once, in m * (m - 1) messages for m
    islands where ``split_rail`` takes P * (m - 1); but all of an island's data goes through one rank. In one piece.
    """
    shape = Shape(call)
    if piece.index:
        return ()
    near = [island for island in topology.islands if piece.wants(island.ranks)]
    ranks = tuple([island.ranks[0] for island in topology.islands])
    among = piece.wants(ranks)
    leaders = {i.index: _Leader(topology, shape, piece, i) for i in (topology.islands if piece.only is None else near)}
    inside = [s for island in near for s in leaders[island.index].gather()]
    last = [s for island in near for s in leaders[island.index].scatter()]
    mine = [leaders[island.index] for island in near if piece.wants((island.ranks[0],))]
    across: list[Step] = []
    if len(ranks) > 1 and among:
        src = piece.members(ranks, lambda i: tuple(leaders[i].leaving))
        dst = piece.members(ranks, lambda i: tuple(leaders[i].come))
        across.append(Step("alltoall", ranks, src, dst))
    packed = LocalSteps(s for one in mine for s in one.pack())
    return stages(inside, packed, across, LocalSteps(s for one in mine for s in one.unpack()), last)
