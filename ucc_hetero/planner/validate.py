"""Validation of plans: a plan is run symbolically, and every rank's result is compared with what the collective
promises.

It refuses malformed steps, reads of undefined data, missing or repeated contributions, and steps that may run
concurrently and access the same memory. A valid plan gives the right result in whatever order the engine runs its
steps, also in place, where a rank's ``send`` and ``recv`` share memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import NamedTuple

from .collectives import ROWS, Call, Shape, lengths
from .plan import KINDS, EqualRegions, Operand, Plan, Region, Step, regions
from .topology import Topology

#: Bits per rank in a mask: counts of a contribution up to 65,535 are distinguished.
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
    """rank -> number of times that it is counted."""
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
    """A part of a rank's memory, as disjoint cells in order; memory without a cell is undefined."""

    __slots__ = ("cells", "starts")

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.starts: list[int] = []

    def read(self, start: int, end: int) -> list[Cell]:
        """The cells of an interval, clipped to it; they cover less if something is undefined."""
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
        """Replace the contents of an interval; memory without a cell becomes undefined."""
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
    """The reduction of values over one interval, given as cells; ``ValueError`` if they are different elements of the
    vectors."""
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
    """A span (start, end, True if written, user) that overlaps one of another user, where at least one is written; else
    None."""
    #: By whether they are written: the furthest end of any user, and of any other user.
    ends: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for start, end, written, user in sorted(spans):
        before = ends[True] + (ends[False] if written else [])
        if any(other != user and start < at for at, other in before):
            return start, end
        furthest = {other: at for at, other in sorted([*ends[written], (end, user)])}
        ends[written] = sorted(((at, other) for other, at in furthest.items()), reverse=True)[:2]
    return None


class InvalidPlan(ValueError):
    """A plan that is malformed or gives a wrong result; the message says where and how."""


class _Place(NamedTuple):
    """A region in a rank's real memory; buffers that alias share memory."""

    rank: int
    name: str
    start: int
    end: int


class _State:
    """The memories of all ranks, and the accesses since the last check."""

    def __init__(self, plan: Plan, call: Call, in_place: bool, ordered: bool) -> None:
        self.plan = plan
        self.ordered = ordered
        #: rank -> ranks that it knows to have arrived, from barriers.
        self.arrived = [mask_of((rank,)) for rank in range(call.ranks)]
        self.memory: dict[tuple[int, str], Memory] = {}
        self.base: dict[tuple[int, str], tuple[str, int]] = {}
        shape, row = Shape(call), ROWS[call.collective]
        for rank in range(call.ranks):
            for name in ("send", "recv", "tmp"):
                self.base[rank, name] = (name, 0)
                self.memory[rank, name] = Memory()
            alias = row.in_place(shape, rank) if in_place else None
            if alias is not None:
                self.base[rank, alias.inner] = (alias.outer, alias.offset)
            count = row.send(shape, rank)
            if count:
                name, at = self.base[rank, "send"]
                self.memory[rank, name].write(at, at + count, [Cell(at, at + count, mask_of((rank,)), -at)])

    def place(self, rank: int, region: Region) -> _Place:
        size = self.plan.sizes[rank][("send", "recv", "tmp").index(region.buffer)]
        if region.offset < 0 or region.count < 0 or region.offset + region.count > size:
            raise InvalidPlan(f"rank {rank}: {region} is outside its buffer of {size} elements")
        name, base = self.base[rank, region.buffer]
        return _Place(rank, name, base + region.offset, base + region.offset + region.count)

    def read(self, place: _Place) -> list[Cell]:
        """Values as cells, relative to the place; refuses undefined memory."""
        cells = self.memory[place.rank, place.name].read(place.start, place.end)
        covered = place.start
        for cell in cells:
            if cell.start > covered:
                break
            covered = cell.end
        if covered < place.end:
            raise InvalidPlan(f"rank {place.rank} reads undefined {place.name}[{covered}]")
        return [Cell(c.start - place.start, c.end - place.start, c.mask, c.shift + place.start) for c in cells]

    def write(self, place: _Place, cells: list[Cell]) -> None:
        at = place.start
        moved = [Cell(c.start + at, c.end + at, c.mask, c.shift - at) for c in cells]
        self.memory[place.rank, place.name].write(at, place.end, moved)


# --- the form of a step -----------------------------------------------------------------------------------------------


def _fits(operand: Operand, form: str, n: int) -> bool:
    if form == "none":
        return operand is None
    if form == "one":
        return isinstance(operand, Region)
    return operand is not None and not isinstance(operand, Region) and len(operand) == n


def _check_form(topology: Topology, step: Step) -> None:
    n = len(step.ranks)
    if step.kind not in KINDS:
        raise InvalidPlan(f"kind {step.kind!r} is not in the table of kinds")
    if len(step.src) != n or len(step.dst) != n or len(set(step.ranks)) != n:
        raise InvalidPlan(f"{n} ranks {step.ranks[:8]} must be distinct and have one src and one dst each")
    if not all(0 <= rank < topology.size for rank in step.ranks):
        raise InvalidPlan(f"ranks {step.ranks[:8]} are not all among {topology.size}")
    kind = KINDS[step.kind]
    if n != (kind.ranks or max(n, 2)):
        raise InvalidPlan(f"{n} members, where {step.kind} takes {kind.ranks or 'at least 2'}")
    if kind.rooted != (0 <= step.root < n):
        raise InvalidPlan(f"root {step.root} of {n} members")
    for i in range(n):
        side = int(i != max(step.root, 0))
        if not _fits(step.src[i], kind.src[side], n) or not _fits(step.dst[i], kind.dst[side], n):
            raise InvalidPlan(f"member {i} needs src: {kind.src[side]} and dst: {kind.dst[side]}")


def _check_counts(step: Step) -> None:
    """All members must agree on how much each sends to each; the source counts must be equal if data is reduced."""
    kind = KINDS[step.kind]
    sent, got = ([[r.count for r in regions(operand)] for operand in side] for side in (step.src, step.dst))
    for i, mine in enumerate(sent):
        for j, theirs in enumerate(got):
            if mine and theirs and mine[j * ("each" in kind.src)] != theirs[i * ("each" in kind.dst)]:
                raise InvalidPlan(f"members {i} and {j} disagree on the count that goes from one to the other")


# --- running a step ---------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    src: list[_Place]
    dst: list[_Place]
    in_place: bool


def _member(state: _State, step: Step, i: int) -> _Member:
    """Place a member's operands and check that they overlap only as the kind allows."""
    rank = step.ranks[i]
    src = [state.place(rank, region) for region in regions(step.src[i])]
    dst = [state.place(rank, region) for region in regions(step.dst[i])]
    mine = src[i] if len(src) > 1 else src[0] if src else None
    its = dst[i] if len(dst) > 1 else dst[0] if dst else None
    in_place = mine is not None and mine == its and mine.end > mine.start
    if in_place and step.kind in ("alltoall", "combine"):
        raise InvalidPlan(f"rank {rank}: {step.kind} cannot be in place")
    read = [(place, False) for place in src if not (in_place and place == mine)]
    operands = enumerate([*read, *((place, True) for place in dst)])
    _refuse_meeting("operands", [(place, written, number) for number, (place, written) in operands])
    return _Member(src, dst, in_place)


def _refuse_unlike(step: Step, team: list[_Member]) -> None:
    """libucc's ranks choose how to reduce and scatter equal blocks by whether their own is in place: if they differ,
    the call fails."""
    if step.kind == "reduce_scatter" and all(isinstance(operand, EqualRegions) for operand in step.src):
        counts = {place.end - place.start for member in team for place in member.dst}
        if len(counts) == 1 < len({member.in_place for member in team}):
            raise InvalidPlan(f"{step.kind} of ranks {list(step.ranks)} is in place on some of them only")


def _run(state: _State, step: Step, team: list[_Member]) -> None:
    """Move the values of one step from its sources to its destinations."""
    kind, n = KINDS[step.kind], len(step.ranks)
    if step.kind == "barrier":
        known = reduce(or_, (state.arrived[rank] for rank in step.ranks))
        for rank in step.ranks:
            state.arrived[rank] = known
        return
    read: dict[_Place, list[Cell]] = {}

    def brought(i: int, j: int) -> list[Cell]:
        """The values from member i for member j."""
        place = team[i].src[j if "each" in kind.src else 0]
        if place not in read:
            read[place] = state.read(place)
        return read[place]

    sums: dict[int, list[Cell]] = {}
    out: list[tuple[_Place, list[Cell]]] = []
    for j, member in enumerate(team):
        for k, place in enumerate(member.dst):
            if step.kind == "combine":
                lower, higher = state.read(place), brought(0, 0)
                if state.ordered:
                    _check_order(lower, higher)
                out.append((place, add([lower, higher])))
            elif kind.reduces:
                share = j if "each" in kind.src else 0
                if share not in sums:
                    sums[share] = add([brought(i, share) for i in range(n)])
                out.append((place, sums[share]))
            else:
                sender = k if "each" in kind.dst else max(step.root, 0)
                out.append((place, brought(sender, j)))
    for member in team:
        if step.kind == "reduce_scatter" and member.in_place:  # a library may use the rest of the buffer as scratch
            for place in member.src:
                state.write(place, [])
    for place, value in out:
        state.write(place, value)


def _check_order(lower: list[Cell], higher: list[Cell]) -> None:
    """Every contribution in ``lower`` must be from a lower rank than all in ``higher``."""
    top = max(((cell.mask.bit_length() - 1) // BITS for cell in lower), default=0)
    bottom = min((((cell.mask & -cell.mask).bit_length() - 1) // BITS for cell in higher), default=0)
    if lower and top >= bottom:
        raise InvalidPlan(f"combines rank {top} before rank {bottom}: the order of the ranks is lost")


# --- concurrent accesses ----------------------------------------------------------------------------------------------


def _accesses(step: Step, team: list[_Member]) -> Iterator[tuple[_Place, bool]]:
    """Places that a step accesses, with True for those that it writes."""
    for member in team:
        # An in-place reduce_scatter may use its source as scratch, which counts as a write.
        scratch = member.in_place and step.kind == "reduce_scatter"
        yield from ((place, scratch) for place in member.src)
        yield from ((place, True) for place in member.dst)


def _refuse_meeting(what: str, accesses: Iterable[tuple[_Place, bool, int]]) -> None:
    """Refuse accesses (place, True if written, user) by two users to the same memory if one writes."""
    by_memory: dict[tuple[int, str], set[tuple[int, int, bool, int]]] = {}
    for place, written, user in accesses:
        if place.end > place.start:
            by_memory.setdefault((place.rank, place.name), set()).add((place.start, place.end, written, user))
    for (rank, name), spans in by_memory.items():
        if at := overlap(spans):
            raise InvalidPlan(f"rank {rank}: {what} meet at {name}[{at[0]}:{at[1]}]")


# --- the whole plan ---------------------------------------------------------------------------------------------------


def _check_post(state: _State, call: Call) -> None:
    shape, row = Shape(call), ROWS[call.collective]
    everybody = mask_of(range(call.ranks))
    for rank in range(call.ranks):
        if call.collective == "barrier" and state.arrived[rank] != everybody:
            raise InvalidPlan(
                f"rank {rank} leaves before all have arrived: {_difference(state.arrived[rank], everybody)}"
            )
        for expect in row.post(shape, rank):
            if not expect.count:
                continue
            wanted = mask_of(expect.ranks)
            for cell in state.read(state.place(rank, Region("recv", expect.offset, expect.count))):
                where = f"rank {rank}: recv[{expect.offset + cell.start}:{expect.offset + cell.end}]"
                if cell.shift != expect.source:
                    raise InvalidPlan(
                        f"{where} holds element {cell.start + cell.shift}, not {expect.source + cell.start}"
                    )
                if cell.mask != wanted:
                    raise InvalidPlan(f"{where} {_difference(cell.mask, wanted)}")


def _difference(mask: int, wanted: int) -> str:
    have, want = members(mask), members(wanted)
    missing = sorted(set(want) - set(have))
    wrong = sorted(set(have) - set(want))
    twice = sorted(rank for rank in have if have[rank] > 1)
    parts = (("lacks ranks", missing), ("holds ranks", wrong), ("counts more than once ranks", twice))
    return ", ".join(f"{text} {ranks[:8]}" for text, ranks in parts if ranks)


@contextmanager
def _at(*where: object) -> Iterator[None]:
    """Add the position in the plan to an error."""
    try:
        yield
    except ValueError as error:
        raise InvalidPlan(f"fragment {', '.join(map(str, where))}: {error}") from None


def validate(plan: Plan, topology: Topology, call: Call, in_place: bool = False, ordered: bool = False) -> None:
    """Prove that a plan does what its call promises.

    Args:
        plan: The plan, of all ranks.
        topology: The topology that it was made for.
        call: The call that it was made for.
        in_place: Prove it with ``send`` and ``recv`` sharing memory as in the collective's row.
        ordered: Require also that local combinations keep the rank order, for operations that do not commute.

    Raises:
        InvalidPlan: If it does not; says where and how.
    """
    if [size[:2] for size in plan.sizes] != lengths(call):
        raise InvalidPlan(f"the buffers' sizes are not those of {call.collective} over {call.ranks} ranks")
    state = _State(plan, call, in_place, ordered)
    of_fragments: set[tuple[_Place, bool, int]] = set()
    for f, fragment in enumerate(plan.fragments):
        for s, stage in enumerate(fragment.stages):
            teams = []
            for step in stage:
                with _at(f, f"stage {s}", step.kind):
                    _check_form(topology, step)
                    _check_counts(step)
                    teams.append([_member(state, step, i) for i in range(len(step.ranks))])
                    _refuse_unlike(step, teams[-1])
            used = [(*access, n) for n, step in enumerate(stage) for access in _accesses(step, teams[n])]
            with _at(f, f"stage {s}"):
                _refuse_meeting("steps of one stage", used)
            of_fragments |= {(place, written, f) for place, written, _ in used}
            for step, team in zip(stage, teams, strict=True):
                with _at(f, f"stage {s}", step.kind):
                    _run(state, step, team)
    if len(plan.fragments) > 1:
        _refuse_meeting("fragments", of_fragments)
    _check_post(state, call)
