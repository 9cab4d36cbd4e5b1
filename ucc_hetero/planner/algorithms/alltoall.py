"""alltoall and alltoallv: every rank sends every rank a block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..collectives import Block, Call, Shape
from ..plan import EqualRegions, Operand, Region, Step, regions
from ..topology import Island, Topology
from . import ranking
from .builders import LocalSteps, adjacent, copies, copy, each, message, only, region, stages
from .partition import merge
from .registry import Case, Piece, Stages, algorithm

#: Number of messages leaving an island from which on short ones are bundled.
MANY_MESSAGES = 64
#: Most messages with which irregular islands send bundles.
MOST_ALLTOALL = 2048

#: From this many messages on, regular islands exchange their bundles by an alltoall on each rail: one step for many
#: messages.
MOST_MESSAGES = 1024


class _Bundle(NamedTuple):
    """Data from one rank for another island, at the rank there that distributes it."""

    sender: int
    at: Region
    #: Elements for each rank of the island, in order.
    counts: list[int]


def suits(case: Case, level: int) -> int:
    """``level`` for algorithms that send bundles between islands; 0 if there would be too many messages, each a
    step."""
    topology = case.topology
    many = topology.size * (len(topology.islands) - 1) > MOST_ALLTOALL
    return 0 if many and (case.collective == "alltoallv" or not regular(topology)) else level


def _suits(case: Case) -> int:
    """Rails are better for few long messages; many short ones should go through leaders."""
    most = max(island.size for island in case.topology.islands)
    bundled = most * (len(case.topology.islands) - 1) >= MANY_MESSAGES and case.nbytes * most <= ranking.LATENCY_LIMIT
    return suits(case, ranking.rails(case) if bundled else ranking.BEST)


@algorithm(("alltoall", "alltoallv"), "split_rail", suits=_suits, most=ranking.overlapped)
def split_rail(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Each rank sends all its data for an island in one message to one rank there, which distributes it.

    Stages: 2, and one of copies before if an island's ranks are not consecutive. Every byte crosses the bridge once, in
    P * (m-1) messages rather than nearly P * P for m islands. The senders of an island are spread evenly over the ranks
    of the other. If there are very many messages, equal islands of consecutive ranks exchange them by an alltoall on
    each rail, in one fragment.
    """
    shape = Shape(call)
    if shape.layout == "equal" and call.ranks * (len(topology.islands) - 1) > MOST_MESSAGES and regular(topology):
        block = call.counts[0]
        whole = [[Block(rank * block, block) for rank in island.ranks] for island in topology.islands]
        return () if piece.index else _by_rails(topology, whole, piece)
    pack = LocalSteps()
    across: list[Step] = []
    last: list[Step] = []
    for island in topology.islands:
        across += _inside(island, shape, piece) if piece.wants(island.ranks) else []
        for other in topology.islands:
            if other is island or not (piece.wants(island.ranks) or piece.wants(other.ranks)):
                continue
            held: list[list[_Bundle]] = [[] for _ in range(other.size)]
            for p, sender in enumerate(island.ranks):
                q = p * other.size // island.size
                if not piece.wants((sender, other.ranks[q])):
                    held[q].append(_Bundle(sender, Region("tmp", 0, 1), []))
                    continue
                steps, bundle = _send(topology, shape, piece, sender, other, other.ranks[q])
                pack += steps[0] if piece.wants((sender,)) else []
                across += steps[1] if piece.wants((sender, other.ranks[q])) else []
                held[q].append(bundle)
            last += _hand_out(other, held, shape, piece) if piece.wants(other.ranks) else []
    return stages(pack, across, last)


def regular(topology: Topology) -> bool:
    """True if islands have equal size and consecutive ranks: bundles are then contiguous in ``send``."""
    islands = topology.islands
    sizes = {island.size for island in islands}
    return len(sizes) == 1 and all(i.ranks[-1] - i.ranks[0] == i.size - 1 for i in islands)


def _by_rails(topology: Topology, blocks: list[list[Block]], piece: Piece) -> Stages:
    """Rail p exchanges the data from p-th ranks to whole islands, which then distribute it; in one fragment, without
    packing."""
    islands, count = topology.islands, blocks[0][0].count
    m, s = len(islands), islands[0].size
    if not count:
        return ()
    out = EqualRegions("send", 0, s * count, s * count, m)
    into = EqualRegions("recv", 0, count, count, m)
    held = 0
    if s > 1:
        held = piece.tmp_everywhere(m * s * count).offset
        into = EqualRegions("tmp", held, s * count, s * count, m)
    rails = [tuple([island.ranks[p] for island in islands]) for p in range(s)]
    across = [Step("alltoall", rail, (out,) * m, (into,) * m) for rail in rails if piece.wants(rail)]
    last: list[Step] = []
    for home, of in enumerate(blocks) if s > 1 else ():
        src = (EqualRegions("tmp", held + home * s * count, count, count, s),) * s
        dst = (each("recv", of),) * s
        last += [Step("alltoall", island.ranks, src, dst) for island in islands if piece.wants(island.ranks)]
    return stages(across, last)


def _inside(island: Island, shape: Shape, piece: Piece) -> list[Step]:
    ranks = island.ranks
    src = [[piece.cut(shape.send(rank, peer)) for peer in ranks] for rank in ranks]
    dst = [[piece.cut(shape.recv(rank, peer)) for peer in ranks] for rank in ranks]
    if island.size == 1:
        return copy(ranks[0], region("send", src[0][0]), region("recv", dst[0][0]))
    if not any(block.count for blocks in src for block in blocks):
        return []
    return [
        Step(
            "alltoall",
            ranks,
            tuple(each("send", blocks) for blocks in src),
            tuple(each("recv", blocks) for blocks in dst),
        )
    ]


def _send(
    topology: Topology, shape: Shape, piece: Piece, sender: int, island: Island, to: int
) -> tuple[tuple[list[Step], list[Step]], _Bundle]:
    """Send the data from ``sender`` for ``island`` to rank ``to``. Returns (steps that pack, steps that send), and the
    bundle."""
    blocks = [piece.cut(shape.send(sender, rank)) for rank in island.ranks]
    total = sum(block.count for block in blocks)
    runs = merge(blocks)
    pack: list[Step] = []
    if len(runs) > 1:
        src = piece.tmp(sender, total)
        pack += copies(sender, "send", runs, "tmp", adjacent(src.offset, [run.count for run in runs]))
    else:
        src = region("send", runs[0]) if runs else Region("tmp", 0, 0)
    dst = region("recv", piece.cut(shape.recv(to, sender))) if island.size == 1 else piece.tmp(to, total)
    return (pack, message(sender, to, src, dst)), _Bundle(sender, dst, [block.count for block in blocks])


def _hand_out(island: Island, held: Sequence[Sequence[_Bundle]], shape: Shape, piece: Piece) -> list[Step]:
    """Exchanges in an island that distribute bundles, one of each rank at a time."""
    if island.size == 1:
        return []
    out = []
    for i in range(max(map(len, held))):
        bundles = [of[i] if i < len(of) else None for of in held]
        into = partial(_handed, island, bundles, shape, piece)
        if not any(region.count for i in range(island.size) for region in regions(into(i))):
            continue
        src = piece.members(island.ranks, partial(_bundled, bundles))
        out.append(Step("alltoall", island.ranks, src, piece.members(island.ranks, into)))
    return out


def _bundled(bundles: Sequence[_Bundle | None], i: int) -> Operand:
    """The part of its bundle that the i-th rank of an island distributes."""
    bundle = bundles[i]
    return each("tmp", adjacent(bundle.at.offset, bundle.counts) if bundle else [Block(0, 0)] * len(bundles))


def _handed(island: Island, bundles: Sequence[_Bundle | None], shape: Shape, piece: Piece, i: int) -> Operand:
    """Where the i-th rank of an island receives its parts of the bundles."""
    rank = island.ranks[i]
    return each("recv", [piece.cut(shape.recv(rank, b.sender)) if b else Block(0, 0) for b in bundles])


class _Leader:
    """One island's data in its leader's scratch."""

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
        """Elements from one island to another; 0 within an island."""
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
        """Steps that pack the data for each other island, ordered by sender."""
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
        """Steps that sort the received data, and data that stayed, by receiver."""
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
    islands, where ``split_rail`` takes P * (m - 1); but all of an island's data goes through one rank. In one fragment.
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
