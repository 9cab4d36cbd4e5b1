"""Building blocks of algorithms: steps, operands, and where ranks keep the data that they own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from ..collectives import Block
from ..plan import EqualRegions, Operand, Region, Step
from .partition import rounds
from .registry import Piece, Stage, Stages


class LocalSteps(list[Step]):
    """A stage that consists of local steps only."""


def stages(*parts: Iterable[Step]) -> Stages:
    """Join lists of steps into an algorithm's result.

    Args:
        parts: The steps of each stage, in order. Steps of one stage run side by side.

    Returns:
        Stages: A rank begins a stage when its steps of the stage before have ended.
    """
    return tuple([Stage(tuple(part), isinstance(part, LocalSteps)) for part in parts])


def message(sender: int, receiver: int, src: Region, dst: Region) -> list[Step]:
    """Make a message.

    Args:
        sender: The sending rank.
        receiver: The receiving rank.
        src: A region of the sender's buffers.
        dst: A region of the receiver's buffers, as long.

    Returns:
        list[Step]: The message, or nothing if it is empty.
    """
    return [Step("message", (sender, receiver), (src, None), (None, dst))] if src.count else []


def copy(rank: int, src: Region, dst: Region) -> list[Step]:
    """Make a local copy.

    Args:
        rank: The rank that copies.
        src: A region of its buffers.
        dst: Another one, as long.

    Returns:
        list[Step]: The copy, or nothing if it is empty.
    """
    return [Step("copy", (rank,), (src,), (dst,))] if src.count else []


def copies(rank: int, src: str, runs: Sequence[Block], dst: str, places: Sequence[Block]) -> Iterator[Step]:
    for run, place in zip(runs, places, strict=True):
        yield from copy(rank, region(src, run), region(dst, place))


def adjacent(at: int, counts: Iterable[int]) -> list[Block]:
    """Consecutive blocks with these numbers of elements, from element ``at`` on."""
    ends = list(accumulate(counts, initial=at))
    return [Block(a, b - a) for a, b in pairwise(ends)]


def region(buffer: str, block: Block) -> Region:
    return Region(buffer, block.offset, block.count)


def each(buffer: str, blocks: Sequence[Block]) -> Operand:
    """One region per member: ``EqualRegions`` if they are equally long and evenly spaced, else a tuple."""
    return uniform(buffer, blocks) or tuple([Region(buffer, b.offset, b.count) for b in blocks])


def uniform(buffer: str, blocks: Sequence[Block | Region]) -> EqualRegions | None:
    """``EqualRegions`` if the blocks are equally long and evenly spaced, else None."""
    start, count, n = blocks[0].offset, blocks[0].count, len(blocks)
    stride = blocks[1].offset - start if n > 1 else count
    if stride < count or [b.count for b in blocks].count(count) < n:
        return None
    if [b.offset for b in blocks] != [start + i * stride for i in range(n)]:
        return None
    return EqualRegions(buffer, start, count, stride, n)


def only(root: int, n: int, operand: Operand) -> tuple[Operand, ...]:
    return (None,) * root + (operand,) + (None,) * (n - root - 1)


def without(root: int, n: int, operand: Operand) -> tuple[Operand, ...]:
    return (operand,) * root + (None,) + (operand,) * (n - root - 1)


#: (rank, block of the dense buffer) -> where that rank keeps the block. An empty block may be anywhere.
Place = Callable[[int, Block], Region]


def dense(buffer: str) -> Place:
    """At the block's own offset in ``send`` or ``recv``."""
    return lambda _, block: Region(buffer, block.offset, block.count)


def shifted(buffer: str, start: Callable[[int], int]) -> Place:
    """In a buffer that begins at element ``start(rank)`` of the dense buffer (a rank's own block)."""
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


class Windows:
    """Scratch of ranks, each for ``blocks(rank)`` of the dense buffer; allocated when the plan first needs a rank's."""

    def __init__(self, piece: Piece, blocks: Callable[[int], Sequence[Block]]) -> None:
        self.piece, self.blocks = piece, blocks
        self.made: dict[int, Window] = {}

    def __call__(self, rank: int, block: Block) -> Region:
        if not self.piece.wants((rank,)):
            return Region("tmp", 0, block.count)
        if rank not in self.made:
            self.made[rank] = Window(self.piece, rank, self.blocks(rank))
        return self.made[rank](block)


def _places(place: Place, ranks: Sequence[int], blocks: Sequence[Block]) -> tuple[Region, ...]:
    return tuple([place(rank, block) for rank, block in zip(ranks, blocks, strict=True)])


def reduce_scatter_steps(ranks: tuple[int, ...], owned: Sequence[Sequence[Block]], dst: Place) -> list[Step]:
    """Reduce blocks of ``send`` over ``ranks``; each rank gets the blocks that it owns at ``dst``. No steps for one
    rank."""
    if len(ranks) == 1:
        return []
    out = []
    for blocks in rounds(owned):
        src = each("send", blocks)
        out.append(Step("reduce_scatter", ranks, (src,) * len(ranks), _places(dst, ranks, blocks)))
    return out


def allgather_steps(ranks: tuple[int, ...], owned: Sequence[Sequence[Block]], src: Place) -> list[Step]:
    """Gather the blocks that each rank owns into ``recv`` of all ``ranks``. No steps for one rank."""
    if len(ranks) == 1:
        return []
    out = []
    for blocks in rounds(owned):
        to = each("recv", blocks)
        out.append(Step("allgather", ranks, _places(src, ranks, blocks), (to,) * len(ranks)))
    return out
