"""Placement of a plan's buffers: in the caller's memory, one inside the other (in place), or in scratch with copies
around.

Dense offsets of the plan become byte offsets from the engine's base buffers here. Data that steps cannot use where the
caller has it (blocks with gaps, a datatype that is computed in a wider one, staged in-place data) is copied before and
after.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from ..device import kernels
from ..native.libraries import lib
from ..planner.collectives import ROWS, Block, Call, Shape, alias
from ..planner.plan import KINDS, EqualRegions, Operand, Plan, Region, Step, regions
from ..trace.timeline import Note
from ..transport.channels import Channels
from ..types import DTYPES, OPS, DType


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """Everything that a program depends on but addresses.

    ``dtype`` is the caller's, ``compute`` the one that steps use (float32 for float16 reductions on host memory).
    ``divisor``: number of ranks for AVG, else 0. Displacements are those of the caller's v-form blocks in elements, or
    None if blocks are dense.
    """

    call: Call
    dtype: DType
    compute: DType
    op: int
    divisor: int
    in_place: bool
    send_displs: tuple[int, ...] | None = None
    recv_displs: tuple[int, ...] | None = None
    #: Memory type of a call on device memory; None on host memory.
    memory: int | None = None


class Place(NamedTuple):
    """Where a buffer is: a base buffer of the engine and an offset in bytes."""

    base: int
    offset: int


class Local(NamedTuple):
    """A local step: ``kind`` of the engine on ``elements`` of UCC datatype ``code`` (casts: to ``to``).

    ``fragment``: the only one that uses these elements; -1 if several do.
    """

    kind: int
    code: int
    to: int
    src: Place
    dst: Place
    elements: int
    by: float = 0.0
    fragment: int = -1


class Placement:
    """The places for one lowering, and the local steps ``before`` and ``after`` the plan."""

    def __init__(self, plan: Plan, rank: int, spec: ProgramSpec) -> None:
        self.plan, self.rank, self.spec = plan, rank, spec
        self.row = ROWS[spec.call.collective]
        self.itemsize = spec.compute.itemsize
        self.send_length, self.recv_length, self.tmp_length = plan.sizes[rank]
        self.tmp_bytes = self.tmp_length * self.itemsize
        self.before: list[Local] = []
        self.after: list[Local] = []
        #: Scratch for packed sources, and its size in bytes.
        self.slots: dict[tuple[int, int], tuple[Place, int]] = {}
        self.places = self._user_places()
        self.displs = {"send": spec.send_displs, "recv": spec.recv_displs}
        #: Of buffers whose fragments take turns in scratch: (first element, where it is) of each fragment.
        self.turns: dict[str, list[tuple[int, int]]] = {}
        self._stage()

    @property
    def code(self) -> int:
        """UCC datatype of the steps; bool and fp8, which UCC lacks, are treated as bytes."""
        return self.spec.compute.code if self.spec.compute.code >= 0 else DTYPES["uint8"].code

    def _user_places(self) -> dict[str, Place]:
        """Send and receive buffers as the caller gave them; in place one lies in the other (``Row.in_place``)."""
        send, recv = Place(lib.UCCH_SEND, 0), Place(lib.UCCH_RECV, 0)
        places = {"send": send, "recv": recv, "tmp": Place(lib.UCCH_TMP, 0)}
        if self.spec.call.collective == "bcast":
            places["send"] = recv
        elif self.spec.in_place:
            inside = alias(self.spec.call, self.rank)
            if inside is not None:
                # The caller passes one buffer: on the root of a scatter its send buffer, on other ranks the receive
                # buffer.
                outer = send if self.row.rooted and inside.outer == "send" else recv
                places[inside.outer] = outer
                displs = self.spec.recv_displs if inside.outer == "recv" else self.spec.send_displs
                at = inside.offset if displs is None else displs[self.rank]
                places[inside.inner] = Place(outer.base, at * self.spec.dtype.itemsize)
            elif self.row.staged:
                places["send"] = recv
        return places

    def _scratch(self, nbytes: int) -> Place:
        place = Place(lib.UCCH_TMP, -(-self.tmp_bytes // 64) * 64)
        self.tmp_bytes = place.offset + nbytes
        return place

    def _stage(self) -> None:
        """Add copies or casts around the plan where steps cannot use the caller's memory."""
        spec, places = self.spec, self.places
        cast = spec.compute is not spec.dtype
        copied = spec.in_place and self.row.staged
        if cast:
            places["tmp"] = self._scratch(self.tmp_length * self.itemsize)
        if self.send_length and (cast or copied or self._gaps("send")):
            self._move("send", self.send_length, cast, into=True)
        # Some ranks receive nothing (the first of an exscan): their buffers must not change.
        receives = self.recv_length and bool(self.row.post(Shape(spec.call), self.rank))
        # MPI wants the result of an in-place reduce_scatter at the start of the buffer, and the rest unchanged.
        shared = spec.in_place and self.row.shares
        if receives and (cast or shared or self._gaps("recv")):
            self._move("recv", self.recv_length, cast, into=False)
        if spec.divisor and self.recv_length:
            scaled = []
            for fragment, first, n in self._cuts("recv", self.recv_length):
                base, offset, _ = self.span(Region("recv", first, n))
                at = Place(base, offset)
                scaled.append(Local(lib.UCCH_SCALE, spec.compute.code, 0, at, at, n, spec.divisor, fragment))
            self.after = scaled + self.after

    def _gaps(self, name: str) -> bool:
        """True if a region of the plan spans blocks that are not adjacent in the caller's memory."""
        if self.displs[name] is None:
            return False
        return any(
            self.offset(r) is None
            for _, _, member, step in self.plan.steps_of(self.rank)
            for operand in (step.src[member], step.dst[member])
            for r in regions(operand)
            if r.buffer == name and r.count
        )

    def _move(self, name: str, count: int, cast: bool, *, into: bool) -> None:
        """Place buffer ``name`` in scratch, copied before the plan (``into``) or after it."""
        spec, user = self.spec, self.places[name]
        if not into and spec.in_place and self.row.shares:
            user = Place(lib.UCCH_RECV, 0)
        pieces = self._pieces(name, count)
        self.displs[name] = None
        self.places[name] = self._scratch(self._turns(name, count, pieces) * self.itemsize)
        kind, theirs = (lib.UCCH_CAST, spec.dtype.code) if cast else (lib.UCCH_COPY, self.code)
        for fragment, dense, actual, n in pieces:
            outside = Place(user.base, user.offset + actual * spec.dtype.itemsize)
            inside = Place(*self.span(Region(name, dense, n))[:2])
            if into:
                self.before.append(Local(kind, theirs, self.code, outside, inside, n, fragment=fragment))
            else:
                self.after.append(Local(kind, self.code, theirs, inside, outside, n, fragment=fragment))

    def _turns(self, name: str, count: int, pieces: Sequence[tuple[int, int, int, int]]) -> int:
        """Let a buffer's fragments take turns in scratch, which then stays in caches. Returns the elements of scratch.

        A fragment enters its place when the one before it there has left it (``Plan.in_flight``).
        """
        most, longest = self.plan.in_flight, max(piece[3] for piece in pieces)
        if pieces[0][0] < 0 or most * longest >= count:
            return count
        self.turns[name] = [(first, fragment % most * longest) for fragment, first, _, _ in pieces]
        return most * longest

    def _pieces(self, name: str, count: int) -> list[tuple[int, int, int, int]]:
        """(fragment or -1, dense offset, offset in the caller's memory, elements) of each part of the buffer."""
        displs = self.displs[name]
        if displs is None:
            return [(fragment, first, first, n) for fragment, first, n in self._cuts(name, count)]
        return [(-1, b.offset, displs[peer], b.count) for peer, b in enumerate(self._blocks(name)) if b.count]

    def _cuts(self, name: str, count: int) -> list[tuple[int, int, int]]:
        """(fragment, first element, elements) of the parts of a buffer that one fragment each uses: what is done for
        each of them alone stays in caches, and overlaps with the others. One part for all, -1, if there are none, or if
        the result of one fragment may be where another still reads."""
        if self.spec.memory is not None or (self.spec.in_place and self.row.layout != "vector"):
            return [(-1, 0, count)]
        spans: dict[int, tuple[int, int]] = {}
        for fragment, _, member, step in self.plan.steps_of(self.rank):
            for operand in (step.src[member], step.dst[member]):
                for r in regions(operand):
                    if r.buffer == name and r.count:
                        low, high = spans.get(fragment, (r.offset, r.offset))
                        spans[fragment] = min(low, r.offset), max(high, r.offset + r.count)
        edges = [0, *(high for _, high in spans.values())]
        adjacent = all(low == edge for (low, _), edge in zip(spans.values(), edges, strict=False))
        if len(spans) < 2 or not adjacent or edges[-1] != count:
            return [(-1, 0, count)]
        return [(fragment, low, high - low) for fragment, (low, high) in spans.items()]

    def _blocks(self, name: str) -> list[Block]:
        shape = Shape(self.spec.call)
        at = shape.send if name == "send" else shape.recv
        return [at(self.rank, peer) for peer in range(self.spec.call.ranks)]

    def offset(self, region: Region) -> int | None:
        """Offset of a dense region in the caller's memory or in scratch, in elements; None if it spans blocks that are
        not adjacent."""
        if region.buffer in self.turns:
            turns = self.turns[region.buffer]
            first, at = turns[bisect_right(turns, region.offset, key=itemgetter(0)) - 1]
            return region.offset - first + at
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

    def span(self, region: Region | None) -> tuple[int, int, int]:
        """A region as the engine wants it: base, byte offset, elements."""
        if region is None:
            return lib.UCCH_TMP, 0, 0
        place = self.places[region.buffer]
        offset = self.offset(region)
        assert offset is not None  # ensured by _stage
        return place.base, place.offset + offset * self.itemsize, region.count

    def table(self, operand: Operand) -> tuple[list[int], list[int]]:
        """Counts and displacements of an operand with a region per member, relative to the beginning of its side."""
        each = regions(operand)
        offsets = [self.offset(r) or 0 for r in each]
        if self.whole(operand) is not None:
            offsets = [o - offsets[0] for o in offsets]
        return [r.count for r in each], offsets

    def equal(self, step: Step) -> bool:
        """True if the library's form with equal counts fits; follows from the plan, so it is the same on every rank."""
        each = [o for o in (*step.src[:1], *step.dst[:1], step.src[step.root], step.dst[step.root]) if is_each(o)]
        if (
            self.displs["send"] is not None
            or self.displs["recv"] is not None
            # Of these only reduce_scatter has counts and offsets that are the same on every rank.
            or (self.row.layout in ("ranks", "matrix") and not self.row.shares)
        ):
            return not each
        return all(isinstance(o, EqualRegions) and o.stride == o.count for o in each)

    def whole(self, operand: Operand) -> Region | None:
        """Equal blocks as one region, if they are adjacent in the caller's memory, too; else None."""
        if isinstance(operand, EqualRegions) and operand.stride == operand.count:
            region = Region(operand.buffer, operand.offset, operand.count * operand.n)
            return region if self.offset(region) is not None else None
        return None

    def packing(self, step: Step, member: int, slot: tuple[int, int]) -> list[Local]:
        """Copies that make a reduce_scatter's source contiguous, as libucc needs it.

        Steps with the same ``slot`` are never under way at the same time: they share scratch.
        """
        each = [r for r in regions(step.src[member]) if r.count]
        touching = all(
            one.buffer == two.buffer and self.offset(two) == (self.offset(one) or 0) + one.count
            for one, two in pairwise(each)
        )
        if touching:
            return []
        nbytes = sum(r.count for r in each) * self.itemsize
        if slot not in self.slots or self.slots[slot][1] < nbytes:
            self.slots[slot] = self._scratch(nbytes), nbytes
        here, _ = self.slots[slot]
        copies, at = [], here.offset
        for region in each:
            base, offset, count = self.span(region)
            copies.append(Local(lib.UCCH_COPY, self.code, 0, Place(base, offset), Place(here.base, at), count))
            at += count * self.itemsize
        return copies


def is_each(operand: Operand) -> bool:
    return isinstance(operand, (EqualRegions, tuple))


#: Datatypes that the vendors' collective libraries lack.
_NOT_VENDORS = frozenset({"int16", "uint16", "complex64", "complex128"})
#: Reductions that they have (``ucc_reduction_op_t``): SUM, PROD, MAX, MIN.
_VENDORS_OPS = range(4)


def vendors_know(placement: Placement, steps: Sequence[Step]) -> bool:
    """True if the vendors' libraries have the collectives, the datatype and the operation."""
    if any(step.kind == "reduce_scatter" and not placement.equal(step) for step in steps):
        return False  # libucc has no uneven one over the vendors' libraries, and uses TL/UCP
    reduces = any(KINDS[step.kind].reduces and KINDS[step.kind].ucc for step in steps)
    return placement.spec.compute.name not in _NOT_VENDORS and (not reduces or placement.spec.op in _VENDORS_OPS)


def of_vendors(placement: Placement, steps: Sequence[Step]) -> bool:
    """True if vendors' libraries run all of these steps."""
    return all(step.link == "native" and step.kind != "message" for step in steps) and vendors_know(placement, steps)


def may_hold(placement: Placement, steps: Sequence[Step]) -> bool:
    """True if a stream may be held while such steps run.

    It may if nothing in them can wait for the stream. Work of libucp and TL/UCP on device memory can: it copies in the
    default stream, and allocates and frees, which waits for the whole device. So can the engine's arithmetic on the
    host, which allocates. The vendors' libraries do not, nor do the engine's copies and kernels, nor anything on host
    memory.
    """
    return vendors_know(placement, steps) and not any(step.kind == "message" for step in steps)


def queues(channels: Channels, plan: Plan, placement: Placement) -> bool:
    """True if the whole call is queued; alike on every rank, as ``plan`` is that of all ranks."""
    steps = [step for f in plan.fragments for stage in f.stages for step in stage]
    if any(step.link == "bridge" and step.kind != "message" for step in steps):
        return False
    native = [step for step in steps if step.link == "native"]
    # libucc completes calls that move no data itself, outside of the stream.
    full = all(r.count for step in native for side in (*step.src, *step.dst) for r in regions(side))
    if not full or (native and not (channels.native_in_stream and vendors_know(placement, native))):
        return False
    return _computes(steps, placement, channels.computes)


def queued(channels: Channels, notes: Sequence[Note], placement: Placement, in_graph: bool) -> dict[str, Any]:
    """Fields of the ``ucch_spec`` of a queued program; ``in_graph``: for capture. ``notes``: of its steps."""
    combines = any(note.kind == "combine" for note in notes)
    key = (placement.spec.op, placement.code) if combines else (OPS["SUM"].code, DTYPES["uint8"].code)
    kernels.ready(lib.UCCH_FUSED, *key, 0)  # also for long calls, which use it in graphs
    return {"channels": channels.handle, "in_graph": in_graph, "op": key[0], "dtype": key[1]}


def _computes(steps: Sequence[Step], placement: Placement, compiles: bool) -> bool:
    """True if devices have kernels for all arithmetic, also that of other ranks' steps; ``compiles``: all have a
    compiler."""
    spec, wanted = placement.spec, []
    if any(step.kind == "combine" for step in steps):
        wanted.append((lib.UCCH_COMBINE, spec.op, placement.code, 0))
    if spec.divisor or placement.row.prefix:
        wanted.append((lib.UCCH_SCALE, 0, placement.code, 0))
    if spec.compute is not spec.dtype:
        wanted += [
            (lib.UCCH_CAST, 0, spec.dtype.code, placement.code),
            (lib.UCCH_CAST, 0, placement.code, spec.dtype.code),
        ]
    return not wanted or (compiles and kernels.all_ready(wanted))
