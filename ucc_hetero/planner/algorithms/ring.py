"""``ring``: data goes from neighbour to neighbour along every rail, for many islands and long data.

Like ``split_rail``, but data crosses in m - 1 messages between neighbours of m groups instead of one collective of
theirs: no rank sends anything twice, as a library's broadcast to m - 1 ranks may. Fragments are pipelined. For short
data the library's exchanges of log2(m) rounds are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..collectives import Block, Call, Shape
from ..plan import Region, Step
from ..topology import Group, Topology
from . import ranking
from .allgather import Down
from .bcast import along_rails
from .builders import LocalSteps, Place, copy, message, region
from .reduce_scatter import Up
from .registry import Case, Piece, Stages, algorithm
from .tree import levels


def _bcast_is_best(case: Case) -> int:
    """It takes m - 2 fragments longer than the data itself between m islands, so there must be many fragments."""
    least = 8 * (len(case.topology.islands) - 2) * ranking.LEAST_FRAGMENT
    return ranking.passed_along(case, case.nbytes >= least)


def _blocks_are_best(case: Case) -> int:
    """Equal islands use the library's own ring; between unequal ones that would take a call per block."""
    return ranking.passed_along(case, len({island.size for island in case.topology.islands}) > 1)


@algorithm("bcast", "ring", suits=_bcast_is_best, most=ranking.hops)
def bcast(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Inside the root's island, then along every rail from island to island, then allgather elsewhere.

    Stages: m + 1 for m islands. Every island sends the data to one other, the last one to none.
    """

    def cross(owners: tuple[int, ...], where: int, held: Region, at: Region) -> list[list[Step]]:
        out: list[list[Step]] = []
        for i, (one, other) in enumerate(pairwise(owners[where:] + owners[:where])):
            out.append(message(one, other, at if i else held, at) if piece.wants((one, other)) else [])
        return out

    return along_rails(topology, call, piece, cross, lambda m: m - 1)


@algorithm(("allgather", "allgatherv"), "ring", suits=_blocks_are_best, most=ranking.hops)
def allgather(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Each island's blocks go around the rails, and are allgathered in every island.

    Stages: m for m islands. Every island receives the blocks of all other islands once, from its neighbour.
    """
    return _Down(topology, Shape(call), piece).run()


def _longest(topology: Topology) -> list[int]:
    """By height, the most children of a group: the number of stages must not depend on the rank."""
    return [max(len(group.children) for group in groups) for groups in levels(topology.tree)]


class _Down(Down):
    def __init__(self, topology: Topology, shape: Shape, piece: Piece) -> None:
        super().__init__(topology, shape, piece)
        self.stages = [[[] for _ in range(max(m - 1, 1))] for m in _longest(topology)]

    def cross(
        self, owners: tuple[int, ...], blocks: Sequence[tuple[int, Block]], height: int
    ) -> Sequence[tuple[int, Block]]:
        m, out = len(owners), self.stages[height]
        for home, block in blocks:
            for t in range(m - 1):
                one, other = owners[(home + t) % m], owners[(home + t + 1) % m]
                if self.piece.wants((one, other)):
                    src = region("recv", block) if t else self.place(one, block)
                    out[t] += message(one, other, src, region("recv", block))
        return ()


@algorithm(("reduce_scatter_block", "reduce_scatter"), "ring", suits=_blocks_are_best, most=ranking.hops)
def reduce_scatter(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Blocks are reduce-scattered in every island, then go around the rails to their owner, each rank adding its own.

    Stages: 2m for m islands, of which m - 1 cross. Every island sends the blocks of the other islands to its neighbour.
    """
    return _Up(topology, Shape(call), piece).run()


class _Up(Up):
    def __init__(self, topology: Topology, shape: Shape, piece: Piece) -> None:
        super().__init__(topology, shape, piece)
        # copies, then m - 1 times messages and additions
        self.stages = [
            [LocalSteps(), *(stage for _ in range(m - 1) for stage in (list[Step](), LocalSteps()))] if m else [[]]
            for m in _longest(topology)
        ]

    def cross(self, group: Group, owners: tuple[int, ...], blocks: Sequence[tuple[int, Block, list[Place]]]) -> None:
        m, out, wants = len(owners), self.stages[group.height], self.piece.wants
        alone = [child.size == 1 for child in group.children]
        for home, block, places in blocks:
            own = [
                region("send", block) if alone[i] or not wants((rank,)) else places[i](rank, block)
                for i, rank in enumerate(owners)
            ]
            target, sent = places[home](owners[home], block), own[(home + 1) % m]
            if alone[home] and wants((owners[home],)):
                out[0] += copy(owners[home], own[home], target)
            for t in range(m - 1):
                i, j = (home + 1 + t) % m, (home + 2 + t) % m
                held = self._spare(owners[j], block.count)
                if wants((owners[i], owners[j])):
                    out[2 * t + 1] += message(owners[i], owners[j], sent, held)
                if wants((owners[j],)) and block.count:
                    src, dst = (held, target) if j == home else (own[j], held)
                    out[2 * t + 2].append(Step("combine", (owners[j],), (src,), (dst,)))
                sent = held

    def _spare(self, rank: int, count: int) -> Region:
        return self.piece.tmp(rank, count) if self.piece.wants((rank,)) else Region("tmp", 0, count)
