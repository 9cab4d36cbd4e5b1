"""Plans made by algorithms: stages of steps over regions of named buffers. Pure data, equal on every rank.

Offsets are *dense*: a buffer of several blocks (one per rank, say) is addressed as if the blocks were adjacent. The
engine maps regions to the caller's displacements when it lowers the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

#: Fragments in flight on a rank, for plans of few stages.
LEAST_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Region:
    """A part of one of a rank's buffers.

    Attributes:
        buffer: ``send``, ``recv``, or ``tmp``, which is scratch of the rank.
        offset: Its first element, from the buffer's beginning.
        count: Number of elements.
    """

    buffer: str
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class EqualRegions:
    """Regions of equal length at equal distances; can be indexed and iterated over like a tuple of :class:`Region`.

    Takes constant space where a tuple of n regions would not: a flat plan over P ranks stays O(P). ``stride == count``
    means that the blocks are adjacent, so that a library's form with equal counts fits.

    Attributes:
        buffer: ``send``, ``recv`` or ``tmp``.
        offset: First element of the first block, from the buffer's beginning.
        count: Elements of each block.
        stride: Elements from the beginning of a block to that of the next one.
        n: Number of blocks.
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


#: Source or destination of a member of a step: one region, a region per member (equal or not), or none.
Operand = Region | EqualRegions | tuple[Region, ...] | None


def regions(operand: Operand) -> tuple[Region, ...]:
    """The regions of an operand, in the order of the team; none for None."""
    if operand is None:
        return ()
    if isinstance(operand, Region):
        return (operand,)
    return operand if isinstance(operand, tuple) else tuple(operand)


class StepKind(NamedTuple):
    """Everything that distinguishes one kind of step from another.

    Attributes:
        src: Source of a member, at the root (the sender of a message) and elsewhere: ``none``, ``one`` region, or
            ``each``:
            ``EqualRegions`` or a tuple with a region per member, in the order of the team. A region may be empty.
        dst: Destination of a member, likewise.
        ucc: ``ucc_coll_type_t`` for equal adjacent blocks; 0 if libucc does not run it.
        ucc_v: ``ucc_coll_type_t`` for all other blocks.
        reduces: True if data is combined by an operation.
        rooted: True if one member is the root.
        ranks: Number of ranks that take part; 0: two or more. Steps of one rank are local.
    """

    src: tuple[str, str]
    dst: tuple[str, str]
    ucc: int = 0
    ucc_v: int = 0
    reduces: bool = False
    rooted: bool = False
    ranks: int = 0

    @property
    def each(self) -> str:
        """Sides with a region per member: ``src``, ``dst``, ``both``, or empty for neither."""
        many = "each" in self.src, "each" in self.dst
        return {(True, True): "both", (True, False): "src", (False, True): "dst"}.get(many, "")


_NONE, _ONE, _EACH = ("none", "none"), ("one", "one"), ("each", "each")
#: Every kind of step, by name. ``ucc_coll_type_t`` has a bit per type. scatter is SCATTERV in both forms, as libucc's
#: TL/UCP has no SCATTER. combine: dst = dst op src, where dst is the contribution of lower ranks.
KINDS: dict[str, StepKind] = {
    "barrier": StepKind(_NONE, _NONE, 1 << 5, 1 << 5),
    "bcast": StepKind(("one", "none"), ("none", "one"), 1 << 6, 1 << 6, rooted=True),
    "allreduce": StepKind(_ONE, _ONE, 1 << 2, 1 << 2, reduces=True),
    "reduce": StepKind(_ONE, ("one", "none"), 1 << 11, 1 << 11, reduces=True, rooted=True),
    "reduce_scatter": StepKind(_EACH, _ONE, 1 << 12, 1 << 13, reduces=True),
    "allgather": StepKind(_ONE, _EACH, 1 << 0, 1 << 1),
    "gather": StepKind(_ONE, ("each", "none"), 1 << 9, 1 << 10, rooted=True),
    "scatter": StepKind(("each", "none"), _ONE, 1 << 15, 1 << 15, rooted=True),
    "alltoall": StepKind(_EACH, _EACH, 1 << 3, 1 << 4),
    "message": StepKind(("one", "none"), ("none", "one"), ranks=2),
    "copy": StepKind(_ONE, _ONE, ranks=1),
    "combine": StepKind(_ONE, _ONE, reduces=True, ranks=1),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a group of ranks; ``src[i]`` and ``dst[i]`` belong to ``ranks[i]``.

    Equal ``src[i]`` and ``dst[i]`` mean in place, and so does an ``each`` operand whose i-th region is the other
    operand of member i. The validator refuses any other overlap.

    Attributes:
        kind: A name of ``KINDS``: ``allreduce``, ``message``, ``copy`` and so on.
        ranks: Ranks of the communicator that take part, in the order of their team.
        src: Source of each member.
        dst: Destination of each member.
        root: Index of the root in ``ranks``; -1 if the kind has none.
        link: ``native`` (inside one island), ``bridge`` (between islands) or ``local`` (in one rank's memory). Set in
            plans;
            algorithms leave it out, as it follows from the ranks.
    """

    kind: str
    ranks: tuple[int, ...]
    src: tuple[Operand, ...]
    dst: tuple[Operand, ...]
    root: int = -1
    link: str = ""

    @property
    def on_team(self) -> bool:
        """True if a team of its ranks runs it."""
        return self.link != "local" and self.kind != "message" and len(self.ranks) > 1


@dataclass(frozen=True, slots=True)
class Fragment:
    """One pipelined slice of the data. A rank starts a step when it has finished its steps of the earlier stages.

    Attributes:
        stages: The steps of each stage, which may run concurrently.
        depths: Depth of each stage, counted in stages with steps of several ranks, for the whole fragment even if
            ``stages`` has one
            rank's steps only. Computed unless given.
    """

    stages: tuple[tuple[Step, ...], ...]
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.depths) != len(self.stages):
            shared = (any(step.link != "local" for step in stage) for stage in self.stages)
            object.__setattr__(self, "depths", tuple(n - 1 for n in accumulate(shared)))


class RankStep(NamedTuple):
    """A step of one rank: indices of its fragment and stage, and the rank's index in the step's ranks."""

    fragment: int
    stage: int
    member: int
    step: Step


@dataclass(frozen=True, slots=True)
class Plan:
    """A collective as fragments of stages of steps: the result of :func:`ucc_hetero.planner.select.make_plan`.

    Attributes:
        collective: Name of the collective: ``allreduce``, ``bcast`` and so on.
        algorithm: Name of the algorithm that made the plan.
        sizes: Elements in each rank's buffers and scratch: ``sizes[rank] = (send, recv, tmp)``.
        fragments: The slices of the data, in order.
    """

    collective: str
    algorithm: str
    sizes: tuple[tuple[int, int, int], ...]
    fragments: tuple[Fragment, ...]

    @property
    def in_flight(self) -> int:
        """Number of fragments in flight on a rank: fragment k waits for fragment k - ``in_flight``.

        It equals the number of stages, so that all stages are busy. More fragments would not end sooner, but all would
        be polled (a rank alone in its island could begin everything at once), and their data would not stay in caches.
        """
        return max([LEAST_IN_FLIGHT, *(f.depths[-1] + 1 for f in self.fragments if f.depths)])

    def steps_of(self, rank: int) -> Iterator[RankStep]:
        """List a rank's steps in the order in which it posts them.

        The order is by wave fronts (fragment + depth of the stage, then stage): every rank posts the steps of a team in
        the same order, and fragment k+1 enters the first stage before fragment k has left the last. Stages with local
        steps only add no depth: no other rank waits for them, and later steps on a team must not queue behind later
        fragments.

        Args:
            rank: The rank.

        Returns:
            Each step with its position.
        """
        waves: list[tuple[int, int, int, int, int, Step]] = []
        for f, fragment in enumerate(self.fragments):
            for s, (stage, depth) in enumerate(zip(fragment.stages, fragment.depths, strict=True)):
                for step in stage:
                    if rank in step.ranks:
                        waves.append((f + depth, depth, s, f, step.ranks.index(rank), step))
        waves.sort(key=lambda w: w[:3])
        for _, _, s, f, member, step in waves:
            yield RankStep(f, s, member, step)


@contextmanager
def no_collector(ranks: int) -> Iterator[None]:
    """Disable the garbage collector while a large plan is made: nothing in it is garbage, and collecting doubles the
    time."""
    on = ranks >= 64 and gc.isenabled()
    if on:
        gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
