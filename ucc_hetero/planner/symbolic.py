"""Symbolic memory: intervals whose values are multisets of contributions.

A value is ``(mask, shift)``: element x holds the reduction of element ``x + shift`` of the send buffers of the ranks in
``mask``, an integer in which rank r counts ``1 << (BITS * r)``, so that what is counted twice shows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Bits per rank in a mask: a contribution counted up to 65,535 times is told from every other.
BITS = 16


class Cell(NamedTuple):
    """Elements ``start`` to ``end`` hold the value ``(mask, shift)``."""

    start: int
    end: int
    mask: int
    shift: int


def mask_of(ranks: Iterable[int]) -> int:
    return sum(1 << BITS * rank for rank in ranks)


def members(mask: int) -> dict[int, int]:
    """rank -> how often it is counted."""
    out: dict[int, int] = {}
    rank = 0
    while mask:
        times = mask & ((1 << BITS) - 1)
        if times:
            out[rank] = times
        mask >>= BITS
        rank += 1
    return out


class Memory:
    """One piece of a rank's memory, as disjoint cells in order; what no cell covers is undefined."""

    __slots__ = ("cells", "starts")

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.starts: list[int] = []

    def read(self, start: int, end: int) -> list[Cell]:
        """The cells of an interval, cut to it; less than the interval where something is undefined."""
        i = max(0, bisect_right(self.starts, start) - 1)
        out: list[Cell] = []
        while start < end and i < len(self.cells) and self.starts[i] < end:
            cell = self.cells[i]
            if cell.end > start:
                if cell.start < start or cell.end > end:
                    cell = Cell(max(cell.start, start), min(cell.end, end), cell.mask, cell.shift)
                out.append(cell)
            i += 1
        return out

    def write(self, start: int, end: int, cells: Sequence[Cell]) -> None:
        """Replace what an interval holds; no cells leave it undefined."""
        if start >= end:
            return
        first = max(0, bisect_right(self.starts, start) - 1)
        last = first
        new: list[Cell] = []
        rest: list[Cell] = []
        while last < len(self.cells) and self.starts[last] < end:
            old = self.cells[last]
            if old.start < start:
                new.append(Cell(old.start, min(old.end, start), old.mask, old.shift))
            if old.end > end:
                rest.append(Cell(end, old.end, old.mask, old.shift))
            last += 1
        joined: list[Cell] = []
        for cell in (*new, *cells, *rest):
            before = joined[-1] if joined else None
            if before and before.end == cell.start and before.shift == cell.shift and before.mask == cell.mask:
                joined[-1] = Cell(before.start, cell.end, cell.mask, cell.shift)
            else:
                joined.append(cell)
        self.cells[first:last] = joined
        self.starts[first:last] = [cell.start for cell in joined]


def add(operands: Sequence[Sequence[Cell]]) -> list[Cell]:
    """The reduction of values over one interval, cells each; ``ValueError`` for different elements of their vectors."""
    cuts = sorted({cell.end for cells in operands for cell in cells})
    out = []
    at = [0] * len(operands)
    start = operands[0][0].start if operands[0] else 0
    for end in cuts:
        mask, shift = 0, operands[0][at[0]].shift
        for i, cells in enumerate(operands):
            cell = cells[at[i]]
            if cell.shift != shift:
                raise ValueError(f"adds element {start + cell.shift} to element {start + shift}")
            mask += cell.mask
            if cell.end == end:
                at[i] += 1
        out.append(Cell(start, end, mask, shift))
        start = end
    return out


def overlap(spans: Iterable[tuple[int, int, bool, int]]) -> tuple[int, int] | None:
    """A span (start, end, True if it is written, user) that meets one of another user, where one of both is written."""
    #: By whether they are written, the furthest end of any user, and of any other one.
    ends: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for start, end, written, user in sorted(spans):
        before = ends[True] + (ends[False] if written else [])
        if any(other != user and start < at for at, other in before):
            return start, end
        furthest = {other: at for at, other in sorted([*ends[written], (end, user)])}
        ends[written] = sorted(((at, other) for other, at in furthest.items()), reverse=True)[:2]
    return None
