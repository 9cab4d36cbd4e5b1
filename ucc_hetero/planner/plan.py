"""Plans, as algorithms produce them: stages of steps over regions of named buffers. Pure data, equal on every rank.

Coordinates are *dense*: a buffer of several blocks (one per rank, say) is addressed as if the blocks lay one after the
other; the engine maps a region to the caller's displacements when it lowers the plan.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

__all__ = [
    "KINDS",
    "LEAST_IN_FLIGHT",
    "Blocks",
    "Fragment",
    "Operand",
    "Plan",
    "Region",
    "Step",
    "StepKind",
    "no_collector",
    "regions",
]

#: Fragments of a plan of few stages that a rank works on at a time.
LEAST_IN_FLIGHT = 4


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


class StepKind(NamedTuple):
    """Everything that tells one kind of step from another.

    ``src`` and ``dst`` say what a member brings and gets, at the root (a message's sender) and elsewhere: ``none``,
    ``one`` region, or ``each``: ``Blocks`` or a tuple with a region per member, in team order, which may be empty.
    ``ucc`` and ``ucc_v`` are ``ucc_coll_type_t`` for equal blocks that touch and for all others, 0 where libucc does
    not run it. ``ranks`` is how many take part, 0 for two or more; one rank's are local.
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
        """The sides with a region per member: ``src``, ``dst``, ``both`` or neither (empty)."""
        many = "each" in self.src, "each" in self.dst
        return {(True, True): "both", (True, False): "src", (False, True): "dst"}.get(many, "")


_NONE, _ONE, _EACH = ("none", "none"), ("one", "one"), ("each", "each")
#: Every kind of step by its name. ``ucc_coll_type_t`` is a bit each; scatter is SCATTERV in both forms, as libucc's
#: TL/UCP has no SCATTER. combine: dst = dst op src, dst holding the lower contribution.
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
    #: How deep each stage lies, in stages that several ranks take part in. Of the whole fragment, where ``stages`` has
    #: only one rank's steps. Counted here unless given.
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.depths) != len(self.stages):
            shared = (any(step.link != "local" for step in stage) for stage in self.stages)
            object.__setattr__(self, "depths", tuple(n - 1 for n in accumulate(shared)))


@dataclass(frozen=True, slots=True)
class Plan:
    """A collective as fragments of stages of steps."""

    collective: str
    algorithm: str
    #: Elements in each rank's dense buffers and scratch: ``sizes[rank] = (send, recv, tmp)``.
    sizes: tuple[tuple[int, int, int], ...]
    fragments: tuple[Fragment, ...]

    @property
    def in_flight(self) -> int:
        """Fragments that a rank works on at a time: those further on wait for those so many before them.

        As many as there are stages, so that all of them are busy. More in flight would not end sooner, but all of them
        would be polled (a rank alone in its island could begin everything at once), and what they work on would not
        stay in caches.
        """
        return max([LEAST_IN_FLIGHT, *(f.depths[-1] + 1 for f in self.fragments if f.depths)])

    def program(self, rank: int) -> Iterator[tuple[int, int, int, Step]]:
        """Yield (fragment, stage, index in ranks, step) for this rank, in posting order.

        The order is that of wave fronts (fragment + depth of the stage, then stage): every rank posts the steps of one
        team in the same order, and fragment k+1 enters the first stage before fragment k has left the last. Stages of
        local steps alone add no depth: nobody else waits for them, and what follows them on a team must not queue
        behind later fragments.
        """
        waves: list[tuple[int, int, int, int, int, Step]] = []
        for f, fragment in enumerate(self.fragments):
            for s, (stage, depth) in enumerate(zip(fragment.stages, fragment.depths, strict=True)):
                for step in stage:
                    if rank in step.ranks:
                        waves.append((f + depth, depth, s, f, step.ranks.index(rank), step))
        waves.sort(key=lambda w: w[:3])
        for _, _, s, f, member, step in waves:
            yield f, s, member, step

    def to_json(self) -> str:
        """The plan as JSON, for files and people; ``from_json`` reads it back equal."""
        fragments = [
            {"depths": f.depths, "stages": [[_pack_step(step) for step in stage] for stage in f.stages]}
            for f in self.fragments
        ]
        head = {"format": 2, "collective": self.collective, "algorithm": self.algorithm, "sizes": self.sizes}
        return json.dumps(head | {"fragments": fragments})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote; ``ValueError`` if it is something else."""
        try:
            data = json.loads(text)
            if data["format"] != 2:
                raise ValueError(f"format {data['format']!r}; this version reads format 2")
            fragments = tuple(
                Fragment(
                    tuple(tuple(_unpack_step(step) for step in stage) for stage in f["stages"]), tuple(f["depths"])
                )
                for f in data["fragments"]
            )
            sizes = tuple((send, recv, tmp) for send, recv, tmp in data["sizes"])
            return cls(data["collective"], data["algorithm"], sizes, fragments)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a plan in JSON: {error!r}") from None


#: What a packed operand begins with: ["region", buffer, offset, count], ["blocks", buffer, ...], ["each", [...], ...].
_FORMS: dict[str, type[Region] | type[Blocks]] = {"region": Region, "blocks": Blocks}


def _pack_operand(operand: Operand) -> list[Any] | None:
    if operand is None:
        return None
    if isinstance(operand, Region):
        return ["region", operand.buffer, operand.offset, operand.count]
    if isinstance(operand, Blocks):
        return ["blocks", operand.buffer, operand.offset, operand.count, operand.stride, operand.n]
    return ["each", *(_pack_operand(region) for region in operand)]


def _unpack_operand(data: list[Any] | None) -> Operand:
    if data is None:
        return None
    form, *rest = data
    if form == "each":
        return tuple(Region(*region[1:]) for region in rest)
    return _FORMS[form](*rest)


def _pack_step(step: Step) -> list[Any]:
    src, dst = (_pack_members(operands) for operands in (step.src, step.dst))
    return [step.kind, step.link, step.ranks, step.root, src, dst]


def _pack_members(operands: tuple[Operand, ...]) -> list[Any]:
    """[times, operand] runs: mostly all members have the same."""
    out: list[Any] = []
    last: Operand = None
    for operand in operands:
        if out and (operand is last or operand == last):
            out[-1][0] += 1
        else:
            out.append([1, _pack_operand(operand)])
        last = operand
    return out


def _unpack_step(data: list[Any]) -> Step:
    kind, link, ranks, root, *sides = data
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}")
    src, dst = (
        tuple(operand for times, packed in side for operand in [_unpack_operand(packed)] * times) for side in sides
    )
    return Step(kind, tuple(ranks), link, src, dst, root)


@contextmanager
def no_collector(ranks: int) -> Iterator[None]:
    """Keep the garbage collector off while a large plan is made: nothing of it is garbage, and it doubles the time."""
    on = ranks >= 64 and gc.isenabled()
    if on:
        gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
