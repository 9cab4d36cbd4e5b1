"""What algorithms are made of: rails, native steps over an island's shares, bridge steps over a rail.

A piece of data is a list of *runs*, ``Block``s of a dense buffer. Each island divides it among its ranks; the common
refinement of all these divisions gives the *segments*, each with one owner per island: its rail. Islands of any number
and size, one-rank islands and unequal links need no case of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucc_hetero.algorithms.registry import Piece, Stages, cut_at
from ucc_hetero.collectives import Block, Shape
from ucc_hetero.plan import Blocks, Operand, Region, Step
from ucc_hetero.topology import Island, Topology

__all__ = [
    "Dense",
    "Division",
    "Owned",
    "Place",
    "Segment",
    "Window",
    "alike",
    "copy",
    "divide",
    "each",
    "island_blocks",
    "island_segments",
    "link",
    "merge",
    "message",
    "native_allgather",
    "native_reduce_scatter",
    "one_each",
    "only",
    "rails",
    "region",
    "rounds",
    "segments",
    "shifted",
    "stages",
    "step",
    "uniform",
    "without",
]

#: How an island divides a piece: (virtual end, owner), ascending; virtual = counted along the runs from 0.
Division = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a dense buffer and its owners, one rank per island, in the order of the islands."""

    offset: int
    count: int
    owners: tuple[int, ...]


# --- building steps ---------------------------------------------------------------------------------------------------


def stages(*parts: Iterable[Step]) -> Stages:
    """Stages in order, without those that turned out empty."""
    whole = (tuple(part) for part in parts)
    return tuple(part for part in whole if part)


def link(topology: Topology, ranks: Sequence[int]) -> str:
    """``native`` when one island holds all ``ranks``, else ``bridge``."""
    islands = topology.island_of
    first = islands[ranks[0]]
    return "native" if all(islands[rank] == first for rank in ranks) else "bridge"


def step(
    topology: Topology,
    kind: str,
    ranks: Sequence[int],
    src: Iterable[Operand],
    dst: Iterable[Operand],
    root: int = -1,
) -> Step:
    """A collective step over the link that its ranks need."""
    return Step(kind, tuple(ranks), link(topology, ranks), tuple(src), tuple(dst), root)


def message(topology: Topology, sender: int, receiver: int, src: Region, dst: Region) -> list[Step]:
    """One message, or none if it is empty."""
    if not src.count:
        return []
    islands = topology.island_of
    way = "native" if islands[sender] == islands[receiver] else "bridge"
    return [Step("message", (sender, receiver), way, (src, None), (None, dst))]


def copy(rank: int, src: Region, dst: Region) -> list[Step]:
    """One local copy, or none if it is empty."""
    return [Step("copy", (rank,), "local", (src,), (dst,))] if src.count else []


def region(buffer: str, block: Block) -> Region:
    return Region(buffer, block.offset, block.count)


def each(buffer: str, blocks: Sequence[Block]) -> Operand:
    """One region per member: ``Blocks`` if they are equal and evenly spaced, else a tuple."""
    return uniform(buffer, blocks) or tuple([Region(buffer, b.offset, b.count) for b in blocks])


def uniform(buffer: str, blocks: Sequence[Block | Region]) -> Blocks | None:
    """``Blocks`` for equal and evenly spaced blocks, else None."""
    start, count, n = blocks[0].offset, blocks[0].count, len(blocks)
    stride = blocks[1].offset - start if n > 1 else count
    if stride < count or [b.count for b in blocks].count(count) < n:
        return None
    if [b.offset for b in blocks] != [start + i * stride for i in range(n)]:
        return None
    return Blocks(buffer, start, count, stride, n)


def only(root: int, n: int, operand: Operand) -> tuple[Operand, ...]:
    """An operand that only the root has."""
    return (None,) * root + (operand,) + (None,) * (n - root - 1)


def without(root: int, n: int, operand: Operand) -> tuple[Operand, ...]:
    """An operand that everybody but the root has."""
    return (operand,) * root + (None,) + (operand,) * (n - root - 1)


# --- dividing data ----------------------------------------------------------------------------------------------------


def merge(runs: Iterable[Block]) -> list[Block]:
    """Runs in the same order, empty ones dropped and neighbours joined."""
    out: list[Block] = []
    for run in runs:
        if not run.count:
            continue
        if out and out[-1].offset + out[-1].count == run.offset:
            out[-1] = Block(out[-1].offset, out[-1].count + run.count)
        else:
            out.append(run)
    return out


def divide(topology: Topology, island: Island, count: int) -> Division:
    """Divide ``count`` elements among an island's ranks in proportion to the weights of their links."""
    weights = topology.weights
    if not weights:
        size = island.size
        return [(cut_at(count, i + 1, size), rank) for i, rank in enumerate(island.ranks)]
    ends = list(accumulate(weights[rank] for rank in island.ranks))
    return [(cut_at(count, end, ends[-1]), rank) for end, rank in zip(ends, island.ranks, strict=True)]


#: Rails per rank of the largest island that unlike divisions may lead to; beyond, cuts are moved onto a grid.
MOST_RAILS = 4


def _divisions(topology: Topology, total: int, fixed: dict[int, Division]) -> list[Division]:
    """How each island divides ``total`` elements.

    Many islands of different sizes would refine each other into nearly as many rails as there are ranks, each a team
    of its own. So where that threatens, the free ones cut on a grid of a few cells for each rank of the largest.
    """
    divisions = [fixed.get(i.index) or divide(topology, i, total) for i in topology.islands]
    cells = MOST_RAILS * max(island.size for island in topology.islands)
    if len({end for division in divisions for end, _ in division}) <= cells:
        return divisions
    grid = [cut_at(total, cell, cells) for cell in range(cells + 1)]
    return [
        division if index in fixed else [(grid[round(end * cells / total)], rank) for end, rank in division]
        for index, division in enumerate(divisions)
    ]


def segments(topology: Topology, runs: Iterable[Block], fixed: dict[int, Division] | None = None) -> list[Segment]:
    """The common refinement of all islands' divisions of ``runs``.

    ``fixed`` gives the division of islands where the owners are not free (the ranks that hold or need the blocks).
    """
    runs = merge(runs)
    total = sum(run.count for run in runs)
    if not total:
        return []
    current: list[int] = []
    changes: list[tuple[int, int, int]] = []  # (virtual position, island, owner from there on)
    for index, division in enumerate(_divisions(topology, total, fixed or {})):
        start = 0
        for end, rank in division:
            if start:
                changes.append((start, index, rank))
            elif len(current) == index:
                current.append(rank)
            else:  # the owners before had nothing
                current[index] = rank
            start = end
    changes.sort(key=lambda change: change[0])
    return _sweep(runs, total, current, changes)


def _sweep(runs: list[Block], total: int, current: list[int], changes: list[tuple[int, int, int]]) -> list[Segment]:
    out: list[Segment] = []
    run_at, run_left = runs[0].offset, runs[0].count
    following = iter(runs[1:])
    position = 0
    for at, island, rank in [*changes, (total, -1, -1)]:
        owners = tuple(current) if at > position else ()
        while position < at:
            count = min(at - position, run_left)
            last = out[-1] if out else None
            if last and last.owners == owners and last.offset + last.count == run_at:
                out[-1] = Segment(last.offset, last.count + count, owners)
            else:
                out.append(Segment(run_at, count, owners))
            position, run_at, run_left = position + count, run_at + count, run_left - count
            if not run_left and position < total:
                run = next(following)
                run_at, run_left = run.offset, run.count
        if island >= 0:
            current[island] = rank
    return out


def rounds(owned: Sequence[Sequence[Block]]) -> list[list[Block]]:
    """Members' lists of blocks, one of each member per round; who has fewer brings nothing to the later rounds."""
    return [[blocks[i] if i < len(blocks) else Block(0, 0) for blocks in owned] for i in range(max(map(len, owned)))]


class Owned:
    """What the ranks of each island own of some segments. Islands that divide them alike share one answer."""

    def __init__(self, parts: Sequence[Segment]) -> None:
        self.parts = parts
        self._keys: dict[int, tuple[int, ...]] = {}
        self._shares: dict[tuple[int, ...], list[list[Block]]] = {}
        self._rounds: dict[tuple[int, ...], list[list[Block]]] = {}
        self._regions: dict[tuple[int, str], tuple[Region, ...]] = {}
        self._each: dict[tuple[int, str], Operand] = {}

    def _key(self, island: Island) -> tuple[int, ...]:
        """The owner of each segment, as an index in the island; the island's size goes with it."""
        index = island.index
        if index not in self._keys:
            position = {rank: i for i, rank in enumerate(island.ranks)}
            self._keys[index] = (island.size, *[position[part.owners[index]] for part in self.parts])
        return self._keys[index]

    def shares(self, island: Island) -> list[list[Block]]:
        """The blocks of each rank, in team order, neighbours joined."""
        key = self._key(island)
        if key not in self._shares:
            mine: list[list[Block]] = [[] for _ in island.ranks]
            for position, part in zip(key[1:], self.parts, strict=True):
                mine[position].append(Block(part.offset, part.count))
            self._shares[key] = [merge(blocks) for blocks in mine]
        return self._shares[key]

    def rounds(self, island: Island) -> list[list[Block]]:
        """``rounds`` of the shares."""
        key = self._key(island)
        if key not in self._rounds:
            self._rounds[key] = rounds(self.shares(island))
        return self._rounds[key]

    def each(self, buffer: str, blocks: Sequence[Block]) -> Operand:
        """``each`` of one round."""
        key = (id(blocks), buffer)
        if key not in self._each:
            self._each[key] = each(buffer, blocks)
        return self._each[key]

    def places(self, place: Place, island: Island, blocks: Sequence[Block]) -> tuple[Region, ...]:
        """Where the members of an island keep their blocks of one round."""
        if not isinstance(place, Dense):
            return tuple(place(rank, block) for rank, block in zip(island.ranks, blocks, strict=True))
        key = (id(blocks), place.buffer)
        if key not in self._regions:
            self._regions[key] = tuple(region(place.buffer, block) for block in blocks)
        return self._regions[key]


# --- where ranks keep what they own -----------------------------------------------------------------------------------

#: (rank, block of the dense buffer) -> where that rank keeps it. What is empty may be anywhere.
Place = Callable[[int, Block], Region]


@dataclass(frozen=True, slots=True)
class Dense:
    """At its own place in ``send`` or ``recv``."""

    buffer: str

    def __call__(self, rank: int, block: Block) -> Region:
        return Region(self.buffer, block.offset, block.count)


def shifted(buffer: str, start: Callable[[int], int]) -> Place:
    """In a buffer that begins at element ``start(rank)`` of the dense one (a rank's own block)."""
    return lambda rank, block: Region(buffer, block.offset - start(rank) if block.count else 0, block.count)


class Window:
    """Scratch for some blocks of the dense buffer, one after the other."""

    def __init__(self, piece: Piece, rank: int, blocks: Sequence[Block]) -> None:
        self.blocks = sorted(blocks, key=lambda block: block.offset)
        self.at = [piece.tmp(rank, block.count).offset for block in self.blocks]
        self.starts = [block.offset for block in self.blocks]

    def __call__(self, block: Block) -> Region:
        if not block.count:
            return Region("tmp", 0, 0)
        i = bisect_right(self.starts, block.offset) - 1
        return Region("tmp", self.at[i] + block.offset - self.starts[i], block.count)


# --- native steps over shares -----------------------------------------------------------------------------------------


def native_reduce_scatter(island: Island, owned: Owned, dst: Place) -> list[Step]:
    """Reduce the segments of ``send`` inside an island; each rank gets what it owns, where ``dst`` says."""
    if island.size == 1:
        return []
    out = []
    for blocks in owned.rounds(island):
        src, mine = owned.each("send", blocks), owned.places(dst, island, blocks)
        out.append(Step("reduce_scatter", island.ranks, "native", (src,) * island.size, mine))
    return out


def native_allgather(island: Island, owned: Owned, src: Place) -> list[Step]:
    """Each rank of an island brings what it owns of the segments and gets all of them in ``recv``."""
    if island.size == 1:
        return []
    out = []
    for blocks in owned.rounds(island):
        mine, dst = owned.places(src, island, blocks), owned.each("recv", blocks)
        out.append(Step("allgather", island.ranks, "native", mine, (dst,) * island.size))
    return out


# --- blocks of many ranks ---------------------------------------------------------------------------------------------


def island_blocks(island: Island, shape: Shape, piece: Piece) -> list[Block]:
    """This fragment's slice of the block of each rank of an island."""
    return [piece.cut(shape.own(rank)) for rank in island.ranks]


def island_segments(topology: Topology, shape: Shape, piece: Piece) -> list[Owned]:
    """For each island the segments of its ranks' blocks; the owner inside the island is the block's rank."""
    out = []
    for island in topology.islands:
        blocks = island_blocks(island, shape, piece)
        ends = accumulate(block.count for block in blocks)
        fixed = {island.index: list(zip(ends, island.ranks, strict=True))}
        out.append(Owned(segments(topology, blocks, fixed)))
    return out


def alike(topology: Topology, shape: Shape, piece: Piece) -> list[list[Block]] | None:
    """``island_blocks`` of all islands if these are equally large and all blocks equal, else None.

    Then rail p is the p-th rank of every island, and one operand serves many steps: of m islands of s ranks a plan has
    some m * m steps with a few operands each, where the general way makes m * m * s of them.
    """
    islands = topology.islands
    if len({island.size for island in islands}) > 1 or len(set(topology.weights)) > 1:
        return None
    counts = shape.call.counts
    if shape.layout == "ranks" and counts.count(counts[0]) < len(counts):
        return None
    if shape.layout not in ("equal", "ranks"):
        return None
    part = piece.cut(Block(0, counts[0]))
    block = counts[0]
    return [[Block(rank * block + part.offset, part.count) for rank in island.ranks] for island in islands]


def rails(by_island: Sequence[Owned]) -> dict[tuple[int, ...], list[tuple[int, Block]]]:
    """Owners -> (the island that the data belongs to, block), for the segments of all islands."""
    out: dict[tuple[int, ...], list[tuple[int, Block]]] = {}
    for index, owned in enumerate(by_island):
        for part in owned.parts:
            out.setdefault(part.owners, []).append((index, Block(part.offset, part.count)))
    return out


def one_each(owners: Sequence[int], blocks: Sequence[tuple[int, Block]]) -> bool:
    """Whether a rail carries exactly one block of each island, so that one collective step moves them all."""
    return [index for index, _ in blocks] == list(range(len(owners)))
