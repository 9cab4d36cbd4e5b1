"""What an algorithm produces: stages of steps over regions of named buffers. Pure data, equal on every rank.

Coordinates are *dense*: a buffer of several blocks (one per rank, say) is addressed as if the blocks lay one after the
other; the engine maps a region to the caller's displacements when it lowers the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["KINDS", "Blocks", "Fragment", "Operand", "Plan", "Region", "Step", "regions"]


@dataclass(frozen=True, slots=True)
class Region:
    """``count`` elements from element ``offset`` of ``buffer``: ``send``, ``recv`` or ``tmp`` (scratch of the rank)."""

    buffer: str
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """``n`` regions of ``count`` elements each, block i beginning at element ``offset + i * stride`` of ``buffer``.

    Says in constant space what a tuple of n regions would: a flat plan over P ranks stays O(P). ``stride == count``
    means that the blocks touch, so that a library's equal-count form fits.
    """

    buffer: str
    offset: int
    count: int
    stride: int
    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Region:
        if not 0 <= i < self.n:
            raise IndexError(f"block {i} of {self.n}")
        return Region(self.buffer, self.offset + i * self.stride, self.count)

    def __iter__(self) -> Iterator[Region]:
        return (Region(self.buffer, self.offset + i * self.stride, self.count) for i in range(self.n))


#: What one member of a step brings or gets: one region, a region per member (equal or not), or nothing.
Operand = Region | Blocks | tuple[Region, ...] | None


def regions(operand: Operand) -> tuple[Region, ...]:
    """The regions of an operand, in team order; empty for nothing."""
    if operand is None:
        return ()
    if isinstance(operand, Region):
        return (operand,)
    return operand if isinstance(operand, tuple) else tuple(operand)


#: kind -> (reduces, meaning of one member's src, of its dst). n = len(step.ranks), "root only" elsewhere None.
#: "each" = ``Blocks`` or a tuple, with one region per member, in team order; regions may be empty (count 0).
KINDS: dict[str, tuple[bool, str, str]] = {
    "barrier": (False, "none", "none"),
    "bcast": (False, "region at root", "region elsewhere"),
    "allreduce": (True, "region", "region"),
    "reduce": (True, "region", "region at root"),
    "reduce_scatter": (True, "each", "region: its own share"),
    "allgather": (False, "region: its own share", "each"),
    "gather": (False, "region", "each at root"),
    "scatter": (False, "each at root", "region"),
    "alltoall": (False, "each", "each"),
    # Point to point: ranks = (sender, receiver); src[0] and dst[1].
    "message": (False, "region at sender", "region at receiver"),
    # Local: ranks = (rank,).
    "copy": (False, "region", "region"),
    "combine": (True, "region", "region: dst = dst op src, dst holding the lower contribution"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of one group of ranks; ``src[i]`` and ``dst[i]`` belong to ``ranks[i]``.

    Equal ``src[i]`` and ``dst[i]`` regions mean in place, as does an ``each`` operand whose i-th region is the other
    operand of member i; any other overlap is a mistake that the validator refuses.
    """

    kind: str
    ranks: tuple[int, ...]
    #: ``native`` (inside one island), ``bridge`` (crosses islands) or ``local``.
    link: str
    src: tuple[Operand, ...]
    dst: tuple[Operand, ...]
    #: Index in ``ranks``; -1 where the kind has no root.
    root: int = -1


@dataclass(frozen=True, slots=True)
class Fragment:
    """One pipelined slice of the data. A rank starts a step when it has finished its steps of the earlier stages."""

    stages: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A collective as fragments of stages of steps."""

    collective: str
    algorithm: str
    #: Elements in each rank's dense buffers and scratch: ``sizes[rank] = (send, recv, tmp)``.
    sizes: tuple[tuple[int, int, int], ...]
    fragments: tuple[Fragment, ...]

    def program(self, rank: int) -> Iterator[tuple[int, int, int, Step]]:
        """Yield (fragment, stage, index in ranks, step) for this rank, in posting order.

        The order is that of wave fronts (fragment + stage, then stage): every rank posts the steps of one team in the
        same order, and fragment k+1 enters the first stage before fragment k has left the last.
        """
        waves: list[tuple[int, int, int, int, Step]] = []
        for f, fragment in enumerate(self.fragments):
            for s, stage in enumerate(fragment.stages):
                for step in stage:
                    if rank in step.ranks:
                        waves.append((f + s, s, f, step.ranks.index(rank), step))
        waves.sort(key=lambda w: w[:3])
        for _, s, f, member, step in waves:
            yield f, s, member, step
