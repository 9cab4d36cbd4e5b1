"""What algorithms are made of: rails, native steps over an island's shares, bridge steps over a rail.

A piece of data is a list of *runs*, ``Block``s of a dense buffer. Each island divides it among its ranks; the common
refinement of all these divisions gives the *segments*, each with one owner per island: its rail. Islands of any number
and size, one-rank islands and unequal links need no case of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ucc_hetero.algorithms.registry import Stages
from ucc_hetero.collectives import Block
from ucc_hetero.plan import Blocks, Operand, Region, Step
from ucc_hetero.topology import Island, Topology

__all__ = [
    "Division",
    "Segment",
    "copy",
    "divide",
    "each",
    "link",
    "merge",
    "message",
    "native_allgather",
    "native_reduce_scatter",
    "only",
    "region",
    "segments",
    "shares",
    "stages",
    "step",
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
    return [Step("message", (sender, receiver), link(topology, (sender, receiver)), (src, None), (None, dst))]


def copy(rank: int, src: Region, dst: Region) -> list[Step]:
    """One local copy, or none if it is empty."""
    return [Step("copy", (rank,), "local", (src,), (dst,))] if src.count else []


def region(buffer: str, block: Block) -> Region:
    return Region(buffer, block.offset, block.count)


def each(buffer: str, blocks: Sequence[Block]) -> Operand:
    """One region per member: ``Blocks`` if they are equal and evenly spaced, else a tuple."""
    first = blocks[0]
    stride = blocks[1].offset - first.offset if len(blocks) > 1 else first.count
    if stride >= first.count and all(
        b.count == first.count and b.offset == first.offset + i * stride for i, b in enumerate(blocks)
    ):
        return Blocks(buffer, first.offset, first.count, stride, len(blocks))
    return tuple(Region(buffer, b.offset, b.count) for b in blocks)


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
        return [(count * (i + 1) // size, rank) for i, rank in enumerate(island.ranks)]
    ends = list(accumulate(weights[rank] for rank in island.ranks))
    return [(count * end // ends[-1], rank) for end, rank in zip(ends, island.ranks, strict=True)]


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
    for island in topology.islands:
        division = (fixed or {}).get(island.index) or divide(topology, island, total)
        start = 0
        for end, rank in division:
            if start:
                changes.append((start, island.index, rank))
            elif len(current) == island.index:
                current.append(rank)
            else:  # the owners before had nothing
                current[island.index] = rank
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


def shares(island: Island, parts: Sequence[Segment]) -> list[list[Block]]:
    """What each rank of an island owns of the segments, in team order, neighbours joined."""
    mine: dict[int, list[Block]] = {rank: [] for rank in island.ranks}
    for part in parts:
        mine[part.owners[island.index]].append(Block(part.offset, part.count))
    return [merge(blocks) for blocks in mine.values()]


def _rounds(island: Island, parts: Sequence[Segment]) -> Iterable[list[Block]]:
    """Each rank's shares, one per round; a rank that has fewer brings nothing to the later rounds."""
    owned = shares(island, parts)
    for i in range(max(map(len, owned))):
        yield [blocks[i] if i < len(blocks) else Block(0, 0) for blocks in owned]


# --- native steps over shares -----------------------------------------------------------------------------------------


def native_reduce_scatter(island: Island, parts: Sequence[Segment], src: str, dst: str) -> list[Step]:
    """Reduce the segments inside an island; each rank gets what it owns, at the same place of buffer ``dst``."""
    if island.size == 1:
        return []
    out = []
    for blocks in _rounds(island, parts):
        mine = tuple(region(dst, block) for block in blocks)
        out.append(Step("reduce_scatter", island.ranks, "native", (each(src, blocks),) * island.size, mine))
    return out


def native_allgather(island: Island, parts: Sequence[Segment], src: str, dst: str) -> list[Step]:
    """Each rank of an island brings what it owns of the segments and gets all of them, at the same places."""
    if island.size == 1:
        return []
    out = []
    for blocks in _rounds(island, parts):
        mine = tuple(region(src, block) for block in blocks)
        out.append(Step("allgather", island.ranks, "native", mine, (each(dst, blocks),) * island.size))
    return out
