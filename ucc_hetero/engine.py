"""Lowers a plan for this rank into a native program: flat steps with addresses relative to the caller's buffers.

The program runs in C (``cffi_build/program.c``); from start to completion no Python runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .collectives import ROWS, Alias, Call, Shape, alias
from .errors import LibraryError
from .liveness import Board
from .native import ffi, lib
from .plan import Blocks, Operand, Plan, Region, Step, regions
from .teams import Teams
from .types import DTYPES, DType
from .ucc import status_name
from .ucc_enums import Coll, CollFlag

__all__ = ["Lowering", "Program", "lower"]

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


@dataclass(frozen=True, slots=True)
class Lowering:
    """Everything but addresses that a program depends on.

    ``dtype`` is the caller's, ``compute`` the one that steps work in (float32 for float16 reductions on host memory).
    ``divisor`` is the number of ranks for AVG, else 0. Displacements are those of the caller's v-form blocks in
    elements, or None where the blocks are dense.
    """

    call: Call
    dtype: DType
    compute: DType
    op: int
    divisor: int
    in_place: bool
    send_displs: tuple[int, ...] | None = None
    recv_displs: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a buffer lies: a base of the native engine and bytes from it; ``count`` elements where it is a piece."""

    base: int
    offset: int
    count: int = 0


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
        self.row = ROWS[what.call.collective]
        self.itemsize = what.compute.itemsize
        self.send_length, self.recv_length, self.tmp_length = plan.sizes[rank]
        self.tmp_bytes = self.tmp_length * self.itemsize
        self.before: list[tuple[int, int, int, int, _Place, _Place, int, float]] = []
        self.after: list[tuple[int, int, int, int, _Place, _Place, int, float]] = []
        self.places = self._user_places()
        self.displs = {"send": what.send_displs, "recv": what.recv_displs}
        self._stage()

    # --- where the plan's buffers lie ---------------------------------------------------------------------------------

    def _user_places(self) -> dict[str, _Place]:
        """Send and receive buffers as the caller gave them; in place they lie in one another (``Row.in_place``)."""
        send, recv = _Place(lib.UCCH_SEND, 0), _Place(lib.UCCH_RECV, 0)
        places = {"send": send, "recv": recv, "tmp": _Place(lib.UCCH_TMP, 0)}
        if self.what.call.collective == "bcast":
            places["send"] = recv
        elif self.what.in_place:
            inside = alias(self.what.call, self.rank)
            if inside is not None:
                # The caller passes one buffer: a scatter's root its send buffer, everyone else the receive buffer.
                outer = send if self.row.rooted and inside.outer == "send" else recv
                places[inside.outer] = outer
                places[inside.inner] = _Place(outer.base, self._alias_offset(inside) * self.what.dtype.itemsize)
            elif self.row.staged:
                places["send"] = recv
        return places

    def _alias_offset(self, inside: Alias) -> int:
        displs = self.what.recv_displs if inside.outer == "recv" else self.what.send_displs
        return inside.offset if displs is None or inside.offset == 0 and not displs else displs[self.rank]

    def _scratch(self, nbytes: int) -> _Place:
        place = _Place(lib.UCCH_TMP, -(-self.tmp_bytes // 64) * 64)
        self.tmp_bytes = place.offset + nbytes
        return place

    def _stage(self) -> None:
        """Put copies or conversions around the plan where it cannot work in the caller's memory."""
        what, places = self.what, self.places
        cast = what.compute is not what.dtype
        copied = what.in_place and self.row.staged
        if cast:
            places["tmp"] = self._scratch(self.tmp_length * self.itemsize)
        if self.send_length and (cast or copied or self._gaps("send")):
            self._move("send", self.send_length, cast, into=True)
        if self.recv_length and (cast or self._gaps("recv")):
            self._move("recv", self.recv_length, cast, into=False)
        if what.divisor and self.recv_length:
            at = places["recv"]
            self.after.insert(0, (lib.UCCH_SCALE, 0, what.compute.code, 0, at, at, self.recv_length, what.divisor))
        inside = alias(what.call, self.rank) if what.in_place else None
        if inside is not None and inside.outer == "send" and not self.row.rooted and inside.offset and not cast:
            # MPI wants an in-place reduce_scatter's result at the start of the buffer.
            start = _Place(lib.UCCH_RECV, 0)
            self.after.append((lib.UCCH_COPY, 0, self._bytes_code(), 0, places["recv"], start, self.recv_length, 0.0))

    def _bytes_code(self) -> int:
        """A datatype of the element's size, for copies; UCC has none for bool and fp8, which are bytes."""
        return self.what.dtype.code if self.what.dtype.code >= 0 else DTYPES["uint8"].code

    def _gaps(self, name: str) -> bool:
        """True when a region of the plan spans blocks that do not touch in the caller's memory."""
        if self.displs[name] is None:
            return False
        return any(
            self._offset(r) is None
            for _, _, member, step in self.plan.program(self.rank)
            for operand in (step.src[member], step.dst[member])
            for r in regions(operand)
            if r.buffer == name and r.count
        )

    def _move(self, name: str, count: int, cast: bool, *, into: bool) -> None:
        """Let ``name`` lie in scratch, filled before the plan (``into``) or emptied after it."""
        what, user = self.what, self.places[name]
        if not into and what.in_place and self.row.name in ("reduce_scatter", "reduce_scatter_block"):
            user = _Place(lib.UCCH_RECV, 0)
        here = self.places[name] = self._scratch(count * self.itemsize)
        pieces = self._pieces(name, count)
        self.displs[name] = None
        kind = lib.UCCH_CAST if cast else lib.UCCH_COPY
        for dense, actual, n in pieces:
            outside = _Place(user.base, user.offset + actual * what.dtype.itemsize)
            inside = _Place(here.base, here.offset + dense * self.itemsize)
            if into:
                code, to = (what.dtype.code, what.compute.code) if cast else (self._bytes_code(), 0)
                self.before.append((kind, 0, code, to, outside, inside, n, 0.0))
            else:
                code, to = (what.compute.code, what.dtype.code) if cast else (self._bytes_code(), 0)
                self.after.append((kind, 0, code, to, inside, outside, n, 0.0))

    def _pieces(self, name: str, count: int) -> list[tuple[int, int, int]]:
        """(dense offset, offset in the caller's memory, elements) of what the buffer consists of."""
        displs = self.displs[name]
        if displs is None:
            return [(0, 0, count)]
        return [(b.offset, displs[peer], b.count) for peer, b in enumerate(self._blocks(name)) if b.count]

    def _blocks(self, name: str) -> list[Any]:
        shape = Shape(self.what.call)
        at = shape.send if name == "send" else shape.recv
        return [at(self.rank, peer) for peer in range(self.what.call.ranks)]

    def _offset(self, region: Region) -> int | None:
        """A dense region's first element in the caller's memory; None when it spans blocks that do not touch."""
        displs = self.displs.get(region.buffer)
        if displs is None or not region.count:
            return region.offset
        start: int | None = None
        for peer, block in enumerate(self._blocks(region.buffer)):
            low = max(region.offset, block.offset)
            if low >= min(region.offset + region.count, block.offset + block.count):
                continue
            actual = displs[peer] + low - block.offset
            if start is None:
                start = actual
            elif actual != start + low - region.offset:
                return None
        return region.offset if start is None else start

    # --- steps ----------------------------------------------------------------------------------------------------------

    def program(self, label: str) -> Program:
        steps = list(self.plan.program(self.rank))
        self.teams.prepare(step for _, _, _, step in steps)
        self.packed = {i: self._packing(s, m) for i, (_, _, m, s) in enumerate(steps) if s.kind == "reduce_scatter"}
        total = len(self.before) + len(steps) + len(self.after) + sum(len(p) for p in self.packed.values())
        text = label.encode()[: int(lib.UCCH_LABEL_BYTES) - 1]
        handle = lib.ucch_program_new(total, self.board.native, _signature(label), text)
        if handle == ffi.NULL:
            raise MemoryError(f"rank {self.rank}: no memory for a program of {total} steps")
        program = Program(handle, self.plan, (self.teams, self.board))
        self._check(lib.ucch_program_tmp(handle, self.tmp_bytes))
        for i, local in enumerate(self.before):
            self._local(handle, i, *local)
        first = len(self.before)
        last = self._emit(handle, first, steps)
        for i, local in enumerate(self.after):
            self._local(handle, last + i, *local)
            self._after(handle, last + i, range(first if i == 0 else last + i - 1, last + i))
        return program

    def _emit(self, handle: Any, first: int, steps: Sequence[tuple[int, int, int, Step]]) -> int:
        """Write the plan's steps from number ``first`` on; returns the number after the last."""
        ordinals: dict[tuple[int, ...], int] = {}
        stages: dict[tuple[int, int], list[int]] = {}
        i = first
        for position, (fragment, stage, member, step) in enumerate(steps):
            earlier = [*range(first), *(j for s in range(stage) for j in stages.get((fragment, s), ()))]
            copies = self.packed.get(position, [])
            for source, place in copies:
                self._local(handle, i, lib.UCCH_COPY, 0, self._compute_code(), 0, source, place, place.count, 0.0)
                self._after(handle, i, earlier)
                i += 1
            if step.link == "local":
                self._local_step(handle, i, step)
            elif step.kind == "message":
                ordinals[step.ranks] = ordinals.get(step.ranks, -1) + 1
                self._message(handle, i, step, member, ordinals[step.ranks])
            elif len(step.ranks) > 1:
                self._coll(handle, i, step, member, copies[0][1] if copies else None)
            self._after(handle, i, [*earlier, *range(i - len(copies), i)])
            stages.setdefault((fragment, stage), []).append(i)
            i += 1
        return i

    def _packing(self, step: Step, member: int) -> list[tuple[_Place, _Place]]:
        """Copies that make a reduce_scatter's source contiguous: libucc cannot take blocks that do not touch."""
        each = [r for r in regions(step.src[member]) if r.count]
        touching = all(
            one.buffer == two.buffer and self._offset(two) == (self._offset(one) or 0) + one.count
            for one, two in pairwise(each)
        )
        if touching or len(step.ranks) < 2:
            return []
        here = self._scratch(sum(r.count for r in each) * self.itemsize)
        copies, at = [], here.offset
        for region in each:
            base, offset, count = self._span(region)
            copies.append((_Place(base, offset), _Place(here.base, at, count)))
            at += count * self.itemsize
        return copies

    def _after(self, handle: Any, step: int, earlier: Sequence[int]) -> None:
        if earlier:
            self._check(lib.ucch_program_after(handle, step, len(earlier), ffi.new("int[]", list(earlier))))

    def _span(self, region: Region | None) -> tuple[int, int, int]:
        if region is None:
            return lib.UCCH_TMP, 0, 0
        place = self.places[region.buffer]
        offset = self._offset(region)
        assert offset is not None  # _stage saw to that
        return place.base, place.offset + offset * self.itemsize, region.count

    def _local(
        self, handle: Any, i: int, kind: int, op: int, code: int, to: int, src: _Place, dst: _Place, n: int, by: float
    ) -> None:
        spans = (src.base, src.offset, n), (dst.base, dst.offset, n)
        self._check(lib.ucch_program_local(handle, i, kind, op, code, to, *spans, by))

    def _local_step(self, handle: Any, i: int, step: Step) -> None:
        src, dst = step.src[0], step.dst[0]
        assert isinstance(src, Region) and isinstance(dst, Region)
        kind = lib.UCCH_COPY if step.kind == "copy" else lib.UCCH_COMBINE
        code = self._compute_code()
        spans = self._span(src), self._span(dst)
        self._check(lib.ucch_program_local(handle, i, kind, self.what.op, code, 0, *spans, 0.0))

    def _compute_code(self) -> int:
        return self.what.compute.code if self.what.compute.code >= 0 else DTYPES["uint8"].code

    def _message(self, handle: Any, i: int, step: Step, member: int, ordinal: int) -> None:
        sender, receiver = step.ranks
        tag = self.tag | sender << 31 | ordinal
        region = step.src[0] if member == 0 else step.dst[1]
        assert isinstance(region, Region)
        base, offset, count = self._span(region)
        span = (base, offset, count * self.itemsize)
        job = self.teams.job
        if member == 0:
            endpoint = job.process.endpoint(job.facts[self.teams.members[receiver]])
            self._check(lib.ucch_program_send(handle, i, endpoint.handle, tag, span))
        else:
            self._check(lib.ucch_program_recv(handle, i, job.process.worker.handle, tag, span))

    def _coll(self, handle: Any, i: int, step: Step, member: int, packed: _Place | None) -> None:
        src, dst = step.src[member], step.dst[member]
        coll = _COLLS[step.kind][not self._equal(step)]
        in_place = self._in_place(step, member)
        flags = CollFlag.IN_PLACE if in_place else CollFlag(0)
        tables: list[tuple[int, Sequence[int], Sequence[int]]] = []
        spans = self._side(src), self._side(dst)
        if step.kind == "bcast":
            spans = (self._side(src if member == step.root else dst), self._span(None))
        elif step.kind == "reduce_scatter":
            # The v-form's counts describe the source although they stand with the destination, and have no gaps.
            counts = [r.count for r in regions(src)]
            first = next((r for r in regions(src) if r.count), regions(src)[0])
            base, offset, _ = self._span(first) if packed is None else (packed.base, packed.offset, 0)
            whole = base, offset, sum(counts)
            in_place = in_place and packed is None
            flags = CollFlag.IN_PLACE if in_place else CollFlag(0)
            spans = whole, whole if in_place else spans[1]
            if coll is Coll.REDUCE_SCATTERV:
                tables.append((1, counts, list(accumulate(counts, initial=0))[:-1]))
        elif coll in _V_FORMS:
            tables += [(side, *self._table(o)) for side, o in ((0, src), (1, dst)) if _is_each(o)]
        if coll in _V_FORMS:
            flags |= _WIDE
        team = self.teams.get(step.ranks, step.link)
        code = self._compute_code()
        self._check(
            lib.ucch_program_coll(handle, i, team.native, coll, self.what.op, flags, max(step.root, 0), code, *spans)
        )
        for side, counts, displs in tables:
            args = len(counts), ffi.new("uint64_t[]", counts), ffi.new("uint64_t[]", displs)
            self._check(lib.ucch_program_counts(handle, i, side, *args))

    def _table(self, operand: Operand) -> tuple[list[int], list[int]]:
        """Counts and displacements of an operand with a region per member, relative to its side's span."""
        each = regions(operand)
        offsets = [self._offset(r) or 0 for r in each]
        if isinstance(operand, Blocks) and operand.stride == operand.count:
            offsets = [o - offsets[0] for o in offsets]
        return [r.count for r in each], offsets

    def _equal(self, step: Step) -> bool:
        """True when a library's equal-count form fits; judged from the plan, which is equal on every rank."""
        each = [o for o in (*step.src[:1], *step.dst[:1], step.src[step.root], step.dst[step.root]) if _is_each(o)]
        if self.displs["send"] is not None or self.displs["recv"] is not None or self.row.layout in ("ranks", "matrix"):
            return not each
        return all(isinstance(o, Blocks) and o.stride == o.count for o in each)

    def _side(self, operand: Operand) -> tuple[int, int, int]:
        """Base, offset in bytes and element count of one side; blocks count from the buffer's beginning."""
        if operand is None:
            return self._span(None)
        if isinstance(operand, Region):
            return self._span(operand)
        if isinstance(operand, Blocks) and operand.stride == operand.count:
            return self._span(Region(operand.buffer, operand.offset, operand.count * operand.n))
        each = regions(operand)
        place = self.places[each[0].buffer]
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
        return one.count == two.count and self._span(one)[:2] == self._span(two)[:2]

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
