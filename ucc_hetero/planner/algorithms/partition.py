"""Division of data: every group divides it among its ranks; the common refinement gives the rails.

Data is a list of *runs*, ``Block``s of a dense buffer. Each group divides it among its ranks. The common refinement of
all these divisions gives the *segments*, each with one owner per group: its rail. Groups of any number and size, groups
of one rank and unequal links need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..collectives import Block, Shape
from ..topology import Group, Island, Topology
from .registry import Piece, cut_at

#: How a group divides data: (virtual end, owner), ascending; virtual offsets count along the runs from 0.
Division = list[tuple[int, int]]
#: A set of ranks among which data is divided.
Members = Island | Group


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a dense buffer and its owners, one rank per group, in the order of the groups."""

    offset: int
    count: int
    owners: tuple[int, ...]


def merge(runs: Iterable[Block]) -> list[Block]:
    """Runs in the same order, without empty ones, adjacent ones joined."""
    out: list[Block] = []
    for run in runs:
        if not run.count:
            continue
        if out and out[-1].offset + out[-1].count == run.offset:
            out[-1] = Block(out[-1].offset, out[-1].count + run.count)
        else:
            out.append(run)
    return out


def cuts(at: Block | Segment, parts: int) -> list[Block]:
    ends = [at.offset + cut_at(at.count, i, parts) for i in range(parts + 1)]
    return [Block(a, b - a) for a, b in pairwise(ends)]


def divide(topology: Topology, group: Members, count: int) -> Division:
    """Divide ``count`` elements among a group's ranks in proportion to the weights of their links."""
    weights = topology.weights
    if not weights:
        size = group.size
        return [(cut_at(count, i + 1, size), rank) for i, rank in enumerate(group.ranks)]
    ends = list(accumulate(weights[rank] for rank in group.ranks))
    return [(cut_at(count, end, ends[-1]), rank) for end, rank in zip(ends, group.ranks, strict=True)]


#: Number of rails that different divisions may always lead to, and for each rank of the smallest group; but never more
#: for each rank of the largest. Beyond that, cuts are moved to a grid. A rank that is alone in its group is in all
#: rails.
ALWAYS_RAILS, MOST_RAILS = 64, 4


def divisions(
    topology: Topology, groups: Sequence[Members], total: int, fixed: dict[int, Division] | None = None
) -> list[Division]:
    """The division of ``total`` elements by each group; ``fixed`` has it for some, by index in the list.

    Many groups of different sizes would refine each other into nearly as many rails as there are ranks, each with a
    team of its own. If so, the other groups cut on a grid with a few cells for each rank of the largest.
    """
    fixed = fixed or {}
    whole = [fixed.get(i) or divide(topology, group, total) for i, group in enumerate(groups)]
    sizes = [group.size for group in groups]
    cells = min(MOST_RAILS * max(sizes), max(MOST_RAILS * min(sizes), ALWAYS_RAILS))
    if len({end for division in whole for end, _ in division}) <= cells:
        return whole
    grid = [cut_at(total, cell, cells) for cell in range(cells + 1)]
    return [
        division if i in fixed else [(grid[round(end * cells / total)], rank) for end, rank in division]
        for i, division in enumerate(whole)
    ]


def refine(runs: Sequence[Block], whole: Sequence[Division]) -> list[Segment]:
    """The segments of merged runs within which every division has one owner."""
    total = sum(run.count for run in runs)
    current: list[int] = []
    changes: list[tuple[int, int, int]] = []  # (virtual position, group, owner from there on)
    for index, division in enumerate(whole):
        start = 0
        for end, rank in division:
            if start:
                changes.append((start, index, rank))
            elif len(current) == index:
                current.append(rank)
            else:  # earlier owners had nothing
                current[index] = rank
            start = end
    changes.sort(key=lambda change: change[0])
    return _sweep(runs, total, current, changes) if total else []


def _sweep(runs: Sequence[Block], total: int, current: list[int], changes: list[tuple[int, int, int]]) -> list[Segment]:
    out: list[Segment] = []
    run_at, run_left = runs[0].offset, runs[0].count
    following = iter(runs[1:])
    position = 0
    for at, group, rank in [*changes, (total, -1, -1)]:
        owners = tuple(current) if at > position else ()
        while position < at:
            count = min(at - position, run_left)
            out.append(Segment(run_at, count, owners))
            position, run_at, run_left = position + count, run_at + count, run_left - count
            if not run_left and position < total:
                run = next(following)
                run_at, run_left = run.offset, run.count
        if group >= 0:
            current[group] = rank
    return out


def owned_blocks(runs: Sequence[Block], division: Division, ranks: Sequence[int]) -> list[list[Block]]:
    """Each rank's share of merged runs, adjacent blocks joined, in the order of ``ranks``."""
    mine: dict[int, list[Block]] = {rank: [] for rank in ranks}
    for part in refine(runs, [division]):
        mine[part.owners[0]].append(Block(part.offset, part.count))
    return [merge(blocks) for blocks in mine.values()]


def rounds(owned: Sequence[Sequence[Block]]) -> list[list[Block]]:
    """The members' lists of blocks by round, one block of each member; empty blocks for members with fewer."""
    return [[blocks[i] if i < len(blocks) else Block(0, 0) for blocks in owned] for i in range(max(map(len, owned)))]


def group_blocks(group: Members, shape: Shape, piece: Piece) -> list[Block]:
    """This fragment's slice of the block of each rank of a group."""
    return [piece.cut(shape.own(rank)) for rank in group.ranks]


def member_blocks(group: Group, shape: Shape, piece: Piece) -> list[list[Block]]:
    """``group_blocks`` by member of a group: of each group inside it, or of each of its ranks."""
    if group.children:
        return [merge(group_blocks(child, shape, piece)) for child in group.children]
    return [[block] for block in group_blocks(group, shape, piece)]


def alike(topology: Topology, shape: Shape, piece: Piece) -> list[list[Block]] | None:
    """``group_blocks`` of all islands if islands and blocks (one per rank) have equal sizes, else None.

    Rail p is then the p-th rank of every island, and one operand serves many steps: a plan for m islands of s ranks has
    some m * m steps with a few operands each, where the general case makes m * m * s.
    """
    islands = topology.islands
    if topology.deep or len({island.size for island in islands}) > 1 or len(set(topology.weights)) > 1:
        return None
    counts = shape.call.counts
    if shape.layout == "ranks" and counts.count(counts[0]) < len(counts):
        return None
    part = piece.cut(Block(0, counts[0]))
    block = counts[0]
    return [[Block(rank * block + part.offset, part.count) for rank in island.ranks] for island in islands]


def one_each(owners: Sequence[int], blocks: Sequence[tuple[int, Block]]) -> bool:
    """True if a rail carries exactly one block of each group, so that one collective step moves them."""
    return [index for index, _ in blocks] == list(range(len(owners)))
