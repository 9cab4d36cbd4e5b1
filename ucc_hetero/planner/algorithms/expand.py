"""Collectives among few ranks, expanded into messages between them and local steps.

Streams of devices can send messages without a host, but not run a library's collectives across vendors. Every byte goes
directly to the rank that needs it. One owner reduces each share, or all ranks sum in rank order, so results are equal
to the last bit on all ranks. Collectives that vendors' libraries lack inside an island are composed of those that they
have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..plan import KINDS, EqualRegions, Fragment, Plan, Region, Step, regions
from .registry import cut_at

#: Most elements for which two ranks exchange whole operands, and most that each of more ranks sends in such an
#: exchange: it takes one crossing instead of two. Two ranks send no more bytes that way, but need scratch for a whole
#: operand, not half. Measured on 2 + 2 H200s on two hosts: two crossings of an allreduce of 8 B took 35 us each.
MOST_WHOLE, MOST_TO_ALL = 1 << 25, 12 << 10

#: (rank, elements) -> unused scratch.
_Take = Callable[[int, int], Region]


def _part(region: Region, at: int, count: int) -> Region:
    return Region(region.buffer, region.offset + at, count)


class _PlanWriter:
    """Writes the stages that one step becomes. ``only``: the rank whose plan it is; None: all ranks."""

    def __init__(self, step: Step, take: _Take, only: int | None) -> None:
        self.step, self._take, self._only = step, take, only
        self.n = len(step.ranks)
        self.stages: list[list[Step]] = [[]]

    def src(self, i: int, k: int = 0) -> Region:
        """Region ``k`` of member ``i``'s source."""
        return regions(self.step.src[i])[k]

    def dst(self, i: int, k: int = 0) -> Region:
        return regions(self.step.dst[i])[k]

    def wants(self, i: int) -> bool:
        return self._only in (None, self.step.ranks[i])

    def move(self, stage: int, i: int, j: int, src: Callable[[], Region], dst: Callable[[], Region]) -> None:
        """Move ``src`` of member ``i`` to ``dst`` of member ``j``. Each function is called only if its member's steps
        are wanted."""
        if not (self.wants(i) or self.wants(j)):
            return
        there = dst() if self.wants(j) else None
        here = src() if self.wants(i) else there
        there = there or here
        assert here is not None and there is not None
        if not here.count or (i == j and here == there):
            return
        one, other = self.step.ranks[i], self.step.ranks[j]
        stage = max(stage, i == j)  # in place a copy overwrites data that is sent to others
        steps = self._stage(stage)
        if i == j:
            steps.append(Step("copy", (one,), (here,), (there,), link="local"))
        else:
            steps.append(Step("message", (one, other), (here, None), (None, there), link=self.step.link))

    def reduce_to(self, i: int, part: Callable[[int], Region], into: Callable[[], Region]) -> None:
        """Reduce all members' ``part(j)`` in ``into`` of member ``i``, which may overlap other parts, after the
        messages."""
        others = [(i - distance) % self.n for distance in range(1, self.n)]  # not all starting with the same member
        spare = [self.spare(i, into().count) for _ in others] if self.wants(i) else []
        for k, j in enumerate(others):
            self.move(0, j, i, partial(part, j), partial(spare.__getitem__, k))
        self.move(1, i, i, partial(part, i), into)
        for k, place in enumerate(spare):
            self.combine(2 + k, i, place, into())

    def _stage(self, number: int) -> list[Step]:
        while len(self.stages) <= number:
            self.stages.append([])
        return self.stages[number]

    def spare(self, i: int, count: int) -> Region:
        return self._take(self.step.ranks[i], count)

    def combine(self, stage: int, i: int, src: Region, into: Region) -> None:
        """Add ``src`` of member ``i`` to ``into``, if its steps are wanted."""
        if not (self.wants(i) and src.count):
            return
        self._stage(stage).append(Step("combine", (self.step.ranks[i],), (src,), (into,), link="local"))


def _whole(writer: _PlanWriter, count: int) -> None:
    """Allreduce in one exchange: each rank gets the operands of all other ranks, and sums in rank order."""
    n = writer.n
    for i in range(n):
        theirs = {j: writer.spare(i, count) for j in range(n) if j != i} if writer.wants(i) else {}
        for distance in range(1, n):
            j = (i - distance) % n
            writer.move(0, j, i, partial(writer.src, j), partial(theirs.__getitem__, j))
        if not writer.wants(i):
            continue
        operands = [writer.src(i) if j == i else theirs[j] for j in range(n)]
        if i == 0:
            writer.move(1, 0, 0, partial(writer.src, 0), partial(writer.dst, 0))
        total = operands[0] if i else writer.dst(0)
        for j in range(1, n):
            writer.combine(j + (i == 0), i, operands[j], total)
        if i:
            writer.move(n, i, i, partial(operands.__getitem__, 0), partial(writer.dst, i))


def _allreduce(writer: _PlanWriter) -> None:
    n, whole = writer.n, writer.src(0).count if writer.step.src[0] is not None else 0
    if whole <= MOST_WHOLE and (n == 2 or (n - 1) * whole <= MOST_TO_ALL):
        _whole(writer, whole)
        return
    ends = [cut_at(whole, i, n) for i in range(n + 1)]

    def share(side: Callable[[int], Region], member: int, i: int) -> Region:
        return _part(side(member), ends[i], ends[i + 1] - ends[i])

    for i in range(n):
        writer.reduce_to(i, partial(share, writer.src, i=i), partial(share, writer.dst, i, i))
    for distance in range(1, n):
        for i in range(n):
            j = (i + distance) % n
            writer.move(n + 1, i, j, partial(share, writer.dst, i, i), partial(share, writer.dst, j, i))


def _reduce_scatter(writer: _PlanWriter) -> None:
    for i in range(writer.n):
        writer.reduce_to(i, partial(writer.src, k=i), partial(writer.dst, i))


def _reduce(writer: _PlanWriter) -> None:
    writer.reduce_to(writer.step.root, writer.src, partial(writer.dst, writer.step.root))


def _straight(writer: _PlanWriter) -> None:
    """Data that is not reduced goes directly from each member that has it to each that gets it."""
    kind, n, root = KINDS[writer.step.kind], writer.n, writer.step.root
    if not kind.rooted:
        pairs = [(i, (i + distance) % n) for distance in range(n) for i in range(n)]
    elif kind.src[1] == "none":
        pairs = [(root, j) for j in range(n)]
    else:
        pairs = [(i, root) for i in range(n)]
    for i, j in pairs:
        if i != j or kind.each:  # the root of a broadcast receives nothing
            src = partial(writer.src, i, j if "each" in kind.src else 0)
            writer.move(0, i, j, src, partial(writer.dst, j, i if "each" in kind.dst else 0))


#: Kind of step -> the function that expands it into messages; a barrier moves no data.
_KINDS: dict[str, Callable[[_PlanWriter], None]] = {
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    **dict.fromkeys(("bcast", "allgather", "gather", "scatter", "alltoall"), _straight),
}


def _reductions(step: Step) -> list[Step]:
    """An island's reduce_scatter with unequal shares, as a reduction of each share: vendors' libraries lack it."""
    out = []
    for owner in range(len(step.ranks)):
        src = tuple(regions(side)[owner] for side in step.src)
        dst = tuple(side if i == owner else None for i, side in enumerate(step.dst))
        if src[0].count:
            out.append(Step("reduce", step.ranks, src, dst, owner, step.link))
    return out


def expand_plan(plan: Plan, only: int | None = None, apart: Callable[[Step], bool] | None = None) -> Plan:
    """``plan`` with messages in place of the collectives for which ``apart(step)`` is true on all of their ranks; None:
    for streams, of those over bridges. ``only``: the rank that it is a plan of.

    A stage becomes several of the same depth, so that steps on teams keep their order. A barrier stays.
    """
    sizes = [list(size) for size in plan.sizes]

    def take(rank: int, count: int) -> Region:
        offset = sizes[rank][2]
        sizes[rank][2] += count
        return Region("tmp", offset, count)

    fragments = []
    for fragment in plan.fragments:
        stages: list[tuple[Step, ...]] = []
        depths: list[int] = []
        for stage, depth in zip(fragment.stages, fragment.depths, strict=True):
            for steps in _spelled(stage, take, only, apart):
                stages.append(tuple(steps))
                depths.append(depth)
        fragments.append(Fragment(tuple(stages), tuple(depths)))
    return Plan(plan.collective, plan.algorithm, tuple([(a, b, c) for a, b, c in sizes]), tuple(fragments))


def _spelled(
    stage: tuple[Step, ...], take: _Take, only: int | None, apart: Callable[[Step], bool] | None
) -> list[list[Step]]:
    out: list[list[Step]] = [[]]
    for step in stage:
        expands = len(step.ranks) > 1 and (step.link == "bridge" if apart is None else apart(step))
        write = _KINDS.get(step.kind) if expands else None
        if write is None:
            # Shares that differ in length or are not adjacent.
            equal = all(isinstance(side, EqualRegions) and side.stride == side.count for side in step.src)
            uneven = apart is None and step.kind == "reduce_scatter" and len(step.ranks) > 1 and not equal
            out[0] += _reductions(step) if uneven else [step]
            continue
        if only is not None and only not in step.ranks:
            continue
        writer = _PlanWriter(step, take, only)
        write(writer)
        while len(out) < len(writer.stages):
            out.append([])
        for into, steps in zip(out, writer.stages, strict=False):
            into += steps
    return [steps for steps in out if steps]
