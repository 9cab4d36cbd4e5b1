"""Lowers a plan for this rank into a native program: flat steps with addresses relative to the caller's buffers.

The program runs in C (``cffi_build/program.c``); from start to completion no Python runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .errors import LibraryError
from .liveness import Board
from .native import ffi, lib
from .placement import Local, Lowering, Placement
from .plan import Blocks, Operand, Plan, Region, Step, regions
from .teams import Teams
from .ucc import status_name
from .ucc_enums import Coll, CollFlag

__all__ = ["Program", "lower"]

#: Plan kind -> (UCC collective for equal touching blocks, for anything else).
_COLLS = {
    "barrier": (Coll.BARRIER, Coll.BARRIER),
    "bcast": (Coll.BCAST, Coll.BCAST),
    "allreduce": (Coll.ALLREDUCE, Coll.ALLREDUCE),
    "reduce": (Coll.REDUCE, Coll.REDUCE),
    "reduce_scatter": (Coll.REDUCE_SCATTER, Coll.REDUCE_SCATTERV),
    "allgather": (Coll.ALLGATHER, Coll.ALLGATHERV),
    "gather": (Coll.GATHER, Coll.GATHERV),
    # TL/UCP has no SCATTER (HAZARDS H14).
    "scatter": (Coll.SCATTERV, Coll.SCATTERV),
    "alltoall": (Coll.ALLTOALL, Coll.ALLTOALLV),
}
_WIDE = CollFlag.COUNT_64BIT | CollFlag.DISPLACEMENTS_64BIT


class Program:
    """A native program and what it keeps alive."""

    __slots__ = ("__weakref__", "handle", "keep", "op", "plan")

    def __init__(self, handle: Any, plan: Plan, keep: object) -> None:
        self.handle = ffi.gc(handle, lib.ucch_program_free)
        self.op = lib.ucch_program_op(handle)
        self.plan = plan
        self.keep = keep


def lower(plan: Plan, rank: int, what: Lowering, teams: Teams, board: Board, tag: int, label: str) -> Program:
    """Make this rank's program of ``plan``; creates the teams that are new (collective among their members).

    ``tag`` is the communicator's part of a message tag, ``label`` what the board shows of the call.
    """
    return _Lower(plan, rank, what, teams, board, tag).program(label)


class _Lower:
    """One lowering in progress."""

    def __init__(self, plan: Plan, rank: int, what: Lowering, teams: Teams, board: Board, tag: int) -> None:
        self.plan, self.rank, self.what, self.teams, self.board, self.tag = plan, rank, what, teams, board, tag
        self.at = Placement(plan, rank, what)

    def program(self, label: str) -> Program:
        steps = list(self.plan.program(self.rank))
        self.teams.prepare(step for _, _, _, step in steps)
        at = self.at
        self.packed = {i: at.packing(s, m) for i, (_, _, m, s) in enumerate(steps) if s.kind == "reduce_scatter"}
        total = len(at.before) + len(steps) + len(at.after) + sum(len(p) for p in self.packed.values())
        text = label.encode()[: int(lib.UCCH_LABEL_BYTES) - 1]
        handle = lib.ucch_program_new(total, self.board.native, _signature(label), text)
        if handle == ffi.NULL:
            raise MemoryError(f"rank {self.rank}: no memory for a program of {total} steps")
        program = Program(handle, self.plan, (self.teams, self.board))
        self._check(lib.ucch_program_tmp(handle, at.tmp_bytes))
        for i, local in enumerate(at.before):
            self._local(handle, i, local)
        last = self._emit(handle, len(at.before), steps)
        for i, local in enumerate(at.after, last):
            self._local(handle, i, local)
            self._after(handle, i, range(i) if i == last else [i - 1])
        return program

    def _emit(self, handle: Any, first: int, steps: Sequence[tuple[int, int, int, Step]]) -> int:
        """Write the plan's steps from number ``first`` on; returns the number after the last."""
        ordinals: dict[tuple[int, ...], int] = {}
        stages: dict[tuple[int, int], list[int]] = {}
        i = first
        for position, (fragment, stage, member, step) in enumerate(steps):
            earlier = [*range(first), *(j for s in range(stage) for j in stages.get((fragment, s), ()))]
            copies = self.packed.get(position, [])
            for local in copies:
                self._local(handle, i, local)
                self._after(handle, i, earlier)
                i += 1
            if step.link == "local":
                self._local_step(handle, i, step)
            elif step.kind == "message":
                ordinals[step.ranks] = ordinals.get(step.ranks, -1) + 1
                self._message(handle, i, step, member, ordinals[step.ranks])
            elif len(step.ranks) > 1:
                self._coll(handle, i, step, member, copies)
            self._after(handle, i, [*earlier, *range(i - len(copies), i)])
            stages.setdefault((fragment, stage), []).append(i)
            i += 1
        return i

    def _after(self, handle: Any, step: int, earlier: Sequence[int]) -> None:
        if earlier:
            self._check(lib.ucch_program_after(handle, step, len(earlier), ffi.new("int[]", list(earlier))))

    def _local(self, handle: Any, i: int, local: Local) -> None:
        kind, code, to, src, dst, n, by = local
        spans = (src.base, src.offset, n), (dst.base, dst.offset, n)
        self._check(lib.ucch_program_local(handle, i, kind, 0, code, to, *spans, by))

    def _local_step(self, handle: Any, i: int, step: Step) -> None:
        src, dst = step.src[0], step.dst[0]
        assert isinstance(src, Region) and isinstance(dst, Region)
        kind = lib.UCCH_COPY if step.kind == "copy" else lib.UCCH_COMBINE
        spans = self.at.span(src), self.at.span(dst)
        self._check(lib.ucch_program_local(handle, i, kind, self.what.op, self.at.code, 0, *spans, 0.0))

    def _message(self, handle: Any, i: int, step: Step, member: int, ordinal: int) -> None:
        sender, receiver = step.ranks
        tag = self.tag | sender << 31 | ordinal
        region = step.src[0] if member == 0 else step.dst[1]
        assert isinstance(region, Region)
        base, offset, count = self.at.span(region)
        span = (base, offset, count * self.at.itemsize)
        job = self.teams.job
        if member == 0:
            endpoint = job.process.endpoint(job.facts[self.teams.members[receiver]])
            self._check(lib.ucch_program_send(handle, i, endpoint.handle, tag, span))
        else:
            self._check(lib.ucch_program_recv(handle, i, job.process.worker.handle, tag, span))

    def _coll(self, handle: Any, i: int, step: Step, member: int, packed: Sequence[Local]) -> None:
        src, dst = step.src[member], step.dst[member]
        coll = _COLLS[step.kind][not self._equal(step)]
        in_place = self._in_place(step, member) and not packed
        tables: list[tuple[int, list[int], list[int]]] = []
        spans = self._side(src), self._side(dst)
        if step.kind == "bcast":
            spans = self._side(src if member == step.root else dst), self.at.span(None)
        elif step.kind == "reduce_scatter":
            # The v-form's counts describe the source although they stand with the destination, and have no gaps.
            counts = [r.count for r in regions(src)]
            whole = self._source(regions(src), packed)
            spans = whole, whole if in_place else spans[1]
            if coll is Coll.REDUCE_SCATTERV:
                tables.append((1, counts, list(accumulate(counts, initial=0))[:-1]))
        elif coll in _V_FORMS:
            tables += [(side, *self._table(o)) for side, o in ((0, src), (1, dst)) if _is_each(o)]
        flags = (CollFlag.IN_PLACE if in_place else 0) | (_WIDE if coll in _V_FORMS else 0)
        team = self.teams.get(step.ranks, step.link)
        how = coll, self.what.op, flags, max(step.root, 0), self.at.code
        self._check(lib.ucch_program_coll(handle, i, team.native, *how, *spans))
        for side, counts, displs in tables:
            args = len(counts), ffi.new("uint64_t[]", counts), ffi.new("uint64_t[]", displs)
            self._check(lib.ucch_program_counts(handle, i, side, *args))

    def _source(self, each: Sequence[Region], packed: Sequence[Local]) -> tuple[int, int, int]:
        """The span of a reduce_scatter's whole source, where it was packed or where it lies."""
        count = sum(r.count for r in each)
        if packed:
            return packed[0].dst.base, packed[0].dst.offset, count
        base, offset, _ = self.at.span(next((r for r in each if r.count), each[0]))
        return base, offset, count

    def _table(self, operand: Operand) -> tuple[list[int], list[int]]:
        """Counts and displacements of an operand with a region per member, relative to its side's span."""
        each = regions(operand)
        offsets = [self.at.offset(r) or 0 for r in each]
        if isinstance(operand, Blocks) and operand.stride == operand.count:
            offsets = [o - offsets[0] for o in offsets]
        return [r.count for r in each], offsets

    def _equal(self, step: Step) -> bool:
        """True when a library's equal-count form fits; judged from the plan, which is equal on every rank."""
        each = [o for o in (*step.src[:1], *step.dst[:1], step.src[step.root], step.dst[step.root]) if _is_each(o)]
        if (
            self.at.displs["send"] is not None
            or self.at.displs["recv"] is not None
            or self.at.row.layout in ("ranks", "matrix")
        ):
            return not each
        return all(isinstance(o, Blocks) and o.stride == o.count for o in each)

    def _side(self, operand: Operand) -> tuple[int, int, int]:
        """Base, offset in bytes and element count of one side; blocks count from the buffer's beginning."""
        if operand is None:
            return self.at.span(None)
        if isinstance(operand, Region):
            return self.at.span(operand)
        if isinstance(operand, Blocks) and operand.stride == operand.count:
            return self.at.span(Region(operand.buffer, operand.offset, operand.count * operand.n))
        each = regions(operand)
        place = self.at.places[each[0].buffer]
        return place.base, place.offset, sum(r.count for r in each)

    def _in_place(self, step: Step, member: int) -> bool:
        """Whether the member's two sides are one memory, where the library wants to be told."""
        src, dst = step.src[member], step.dst[member]
        if src is None or dst is None:
            return False
        if step.kind in ("allreduce", "reduce"):
            one, two = regions(src)[0], regions(dst)[0]
        elif step.kind in ("allgather", "gather"):
            one, two = regions(src)[0], regions(dst)[member]
        elif step.kind in ("reduce_scatter", "scatter"):
            one, two = regions(src)[member], regions(dst)[0]
        else:
            return False
        return one.count == two.count and self.at.span(one)[:2] == self.at.span(two)[:2]

    def _check(self, status: int) -> None:
        if status < 0:
            raise LibraryError("building a program", status, status_name(status))


_V_FORMS = frozenset({Coll.REDUCE_SCATTERV, Coll.ALLGATHERV, Coll.GATHERV, Coll.SCATTERV, Coll.ALLTOALLV})


def _is_each(operand: Operand) -> bool:
    return isinstance(operand, (Blocks, tuple))


def _signature(label: str) -> int:
    """FNV-1a: equal on every rank for equal calls, where Python's own string hash is salted per process."""
    value = 0xCBF29CE484222325
    for byte in label.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
