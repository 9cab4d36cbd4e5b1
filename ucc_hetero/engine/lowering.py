"""Lowers a plan for this rank to a native program: a flat list of steps, with offsets relative to the caller's buffers.

The program runs in C (``cffi_build/coll/program.c``), without Python from start to completion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

from ..bindings.ucc import CollFlag, status_name
from ..bootstrap.board import Board, salt
from ..bootstrap.teams import Teams
from ..device import kernels, runtime_of
from ..errors import LibraryError
from ..native.libraries import ffi, lib
from ..planner.algorithms import Role, with_role
from ..planner.collectives import ROWS, extents
from ..planner.plan import KINDS, Operand, Plan, RankStep, Region, Step, regions
from ..trace import timeline
from ..trace.timeline import Note
from ..transport.channels import Channels
from .placement import Local, Placement, ProgramSpec, is_each, may_hold, of_vendors, queued

#: Idle programs of one kind that are kept: as many calls may be in flight without new ones. Fewer if each has long
#: scratch memory of its own, as on the host; on a device they borrow it.
_SPARE, _SPARE_WITH_SCRATCH, _LONG_SCRATCH = 64, 4, 1 << 16
_WIDE = CollFlag.COUNT_64BIT | CollFlag.DISPLACEMENTS_64BIT


class Execution(IntEnum):
    """What waits for the steps of a program, from the host alone to streams alone."""

    #: The host; the program works on copies of device data in host memory.
    STAGED = -1
    #: The host; no stream may wait for its end.
    HOST = 0
    #: The host; a stream may be held meanwhile.
    HELD = 1
    #: The caller's stream: a vendor's library runs the whole call in it.
    LAUNCHED = 2
    #: Streams of all ranks: the whole call is queued in them.
    QUEUED = 3


class Recipe:
    """A native program without a board: fields of a ``ucch_spec``, and for each step those of a ``ucch_part``."""

    __slots__ = ("_about", "_keep", "_steps")

    def __init__(
        self, label: str, spec: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], keep: object = None
    ) -> None:
        text = ffi.new("char[]", label.encode())
        self._about = ffi.new("ucch_spec *", {**spec, "label": text, "signature": lib.ucch_board_signature(text)})
        self._steps, self._keep = ffi.new("ucch_part[]", steps), (text, keep)

    def program(self, board: Board) -> Any:
        """Make the native program. The board, and everything that its steps use, must outlive it."""
        status = ffi.new("int *")
        handle = lib.ucch_program_new(board.native, self._about, len(self._steps), self._steps, status)
        if handle == ffi.NULL:
            raise LibraryError("building a program", status[0], status_name(status[0]))
        return ffi.gc(handle, lib.ucch_program_free)


class Program:
    """A native program and what it keeps alive. ``recipe`` is set if it needs nothing but a board of these ranks."""

    __slots__ = ("__weakref__", "address", "execution", "handle", "keep", "op", "recipe", "spare")

    def __init__(
        self, handle: Any, keep: object, recipe: Recipe | None = None, spare: int = _SPARE,
        execution: Execution = Execution.HELD,
    ) -> None:  # fmt: skip
        self.handle, self.keep, self.recipe = handle, keep, recipe
        self.address = int(ffi.cast("uintptr_t", handle))
        self.op = lib.ucch_program_op(handle)
        #: Number of idle programs of its kind that are kept.
        self.spare = spare
        self.execution = execution


class Route(NamedTuple):
    """How a program's messages travel: the communicator's part of tags, and its channels."""

    tag: int
    #: The communicator's channels, for a call that is queued in streams.
    channels: Channels | None = None
    #: True if the stream is being captured in a graph.
    in_graph: bool = False


class Lowering:
    def __init__(self, plan: Plan, rank: int, spec: ProgramSpec, teams: Teams, board: Board, route: Route) -> None:
        self.plan, self.rank, self.spec, self.teams, self.board = plan, rank, spec, teams, board
        self.tag, self.channels, self.in_graph = route
        self.placement = Placement(plan, rank, spec)
        #: True if its only step is an exchange of parcels.
        self.exchanged = False
        #: True if the engine's own steps compute on the host.
        self.arithmetic = False
        #: The fields of each step's ``ucch_part``, and the arrays they point to.
        self.steps: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        #: The steps' entries in the timeline.
        self.notes: list[Note] = []

    def program(self, label: str, nbytes: int) -> Program:
        """Make the program, shown as ``label``, and teams that do not exist yet (collective among their members)."""
        steps = list(self.plan.steps_of(self.rank))
        self.exchanged = self._by_parcels(steps)
        if not self.exchanged:
            self.teams.prepare((step for _, _, _, step in steps), self.spec.memory)
        self.packed = self._packings(steps)
        before = self._enter(-1, [])
        self._leave(-1, self._emit(before, steps))
        return self._make(label, nbytes)

    def _enter(self, fragment: int, after: Sequence[int]) -> list[int]:
        """Add the copies and casts before a fragment's steps, or before all (-1)."""
        some = [local for local in self.placement.before if local.fragment == fragment]
        return [self._add(self._copy("enter", local, fragment), after, self._local(local)) for local in some]

    def _leave(self, fragment: int, last: list[int]) -> list[int]:
        """Add those after a fragment's steps ``last``, or after all (-1), one by one. Returns their numbers."""
        added = []
        for local in self.placement.after:
            if local.fragment == fragment:
                last = [self._add(self._copy("leave", local, fragment), last, self._local(local))]
                added += last
        return added

    def _packings(self, steps: Sequence[tuple[int, int, int, Step]]) -> dict[int, list[Local]]:
        """Copies that pack the sources of steps, by step number."""
        out: dict[int, list[Local]] = {}
        taken: dict[int, int] = {}
        most = self.plan.in_flight
        for i, (fragment, _, member, step) in enumerate(steps):
            if step.kind == "reduce_scatter":
                slot = fragment % most, taken.get(fragment, 0)
                taken[fragment] = slot[1] + 1
                out[i] = self.placement.packing(step, member, slot)
        return out

    def _execution(self) -> Execution:
        """What waits for the program's end, from its steps."""
        if self.channels is not None:
            return Execution.QUEUED
        if self.spec.memory is None:
            return Execution.HELD
        job, steps = self.teams.job, [step for _, _, _, step in self.plan.steps_of(self.rank)]
        runtime = runtime_of(job.facts[job.rank].vendor)
        holds = runtime is not None and runtime.holds
        if self.spec.memory:  # else it is the memory of a rehearsal library, which UCC sees as host memory
            around = self.placement.before or self.placement.after or any(self.packed.values())
            alone = not around and of_vendors(self.placement, steps)
            library = job.vendors_library(self.spec.memory)
            # libucc completes calls that move no data itself, outside of the stream.
            if alone and steps and all(self.spec.call.counts) and library:
                return Execution.LAUNCHED
            holds = holds and not self.arithmetic and library and may_hold(self.placement, steps)
        return Execution.HELD if holds else Execution.HOST

    def _add(self, note: Note, after: Sequence[int], part: dict[str, Any]) -> int:
        """Add a step; returns its number."""
        self.steps.append({**part, "ndeps": len(after), "deps": self._kept("int[]", after)})
        self.notes.append(note)
        return len(self.steps) - 1

    def _kept(self, kind: str, values: Sequence[int]) -> Any:
        """A C array that lives as long as the program; NULL without values."""
        if not values:
            return ffi.NULL
        self.kept.append(ffi.new(kind, list(values)))
        return self.kept[-1]

    def _copy(self, kind: str, local: Local, fragment: int = -1, stage: int = -1) -> Note:
        return Note("local", kind, fragment, stage, (self.rank,), local.elements * self.placement.itemsize)

    def _make(self, label: str, nbytes: int) -> Program:
        stages: dict[tuple[int, int], int] = {}
        for part, note in zip(self.steps, self.notes, strict=True):
            part["stage"] = stages.setdefault((note.fragment, note.stage), len(stages))
        recipe = Recipe(label, self._spec(label) | {"bytes": nbytes}, self.steps, self.kept)
        owns_long = self.spec.memory is None and self.placement.tmp_bytes > _LONG_SCRATCH
        spare = _SPARE_WITH_SCRATCH if owns_long else _SPARE
        keep = self.plan, self.teams, self.board, self.channels, recipe
        left = recipe if self.exchanged and timeline.recorder is None else None
        return Program(recipe.program(self.board), keep, left, spare, self._execution())

    def _spec(self, label: str) -> dict[str, Any]:
        spec: dict[str, Any] = {"tmp_bytes": self.placement.tmp_bytes}
        if not (self.spec.send_displs or self.spec.recv_displs):
            size = self.spec.dtype.itemsize
            names = "sent", "received", "own"
            spec |= {name: n * size for name, n in zip(names, extents(self.spec.call, self.rank), strict=True)}
        if self.teams.far:
            spec["salt"] = salt(label)
        if self.spec.memory is not None:
            spec |= {"on_device": True, "memory_type": self.spec.memory}
        if timeline.recorder is not None:
            spec["number"] = timeline.recorder.describe(label, self.plan, self.board.number, self.notes)
        if self.channels is not None:
            spec |= queued(self.channels, self.notes, self.placement, self.in_graph)
        return spec

    def _emit(self, before: Sequence[int], steps: Sequence[RankStep]) -> list[int]:
        """Write the plan's steps behind the steps ``before``. Returns all step numbers so far."""
        ordinals: dict[tuple[int, ...], int] = {}
        stages: dict[tuple[int, int], list[int]] = {}
        whole: dict[int, list[int]] = {}
        entered: dict[int, list[int]] = {}
        left = Counter(step.fragment for step in steps)
        most = self.plan.in_flight
        for position, (fragment, stage, member, step) in enumerate(steps):
            earlier = [*before, *(j for s in range(stage) for j in stages.get((fragment, s), ()))]
            if len(earlier) == len(before):  # the fragment's first stage
                earlier += whole.get(fragment - most, ())
            if fragment not in entered:
                entered[fragment] = self._enter(fragment, earlier)
            earlier += entered[fragment]
            packed = self.packed.get(position, [])
            ready = [
                self._add(self._copy("pack", local, fragment, stage), earlier, self._local(local)) for local in packed
            ]
            made = [*ready]
            if step.kind == "message":
                ordinals[step.ranks] = ordinals.get(step.ranks, -1) + 1
            part = self._step(step, member, packed, ordinals.get(step.ranks, 0))
            note = Note(step.link, step.kind, fragment, stage, step.ranks, self._nbytes(step, member))
            made.append(self._add(note, [*earlier, *ready], part))
            stages.setdefault((fragment, stage), []).extend(made)
            whole.setdefault(fragment, []).extend(made)
            left[fragment] -= 1
            if not left[fragment]:
                whole[fragment] += self._leave(fragment, whole[fragment])
        return list(range(len(self.steps)))

    def _step(self, step: Step, member: int, packed: Sequence[Local], ordinal: int) -> dict[str, Any]:
        if step.link == "local":
            return self._local_step(step)
        if step.kind == "message":
            return self._message(step, member, ordinal)
        if self.exchanged:
            return self._exchange(step, member, packed)
        return self._coll(step, member, packed)

    def _nbytes(self, step: Step, member: int) -> int:
        """Bytes of the larger side of a member's part in a step; 0 if no trace is recorded."""
        if timeline.recorder is None:
            return 0
        sides = (sum(r.count for r in regions(side)) for side in (step.src[member], step.dst[member]))
        return max(sides) * self.placement.itemsize

    def _local(self, local: Local) -> dict[str, Any]:
        kind, code, to, src, dst, n, by, _ = local
        self.arithmetic |= kind != lib.UCCH_COPY and not self._kernel(kind, 0, code, to)
        spans = (src.base, src.offset, n), (dst.base, dst.offset, n)
        how = {"kind": lib.UCCH_STEP_LOCAL + kind, "dtype": code, "to": to, "factor": by}
        return {**how, "src": spans[0], "dst": spans[1]}

    def _local_step(self, step: Step) -> dict[str, Any]:
        src, dst = step.src[0], step.dst[0]
        assert isinstance(src, Region) and isinstance(dst, Region)
        kind = lib.UCCH_COPY if step.kind == "copy" else lib.UCCH_COMBINE
        self.arithmetic |= kind != lib.UCCH_COPY and not self._kernel(kind, self.spec.op, self.placement.code, 0)
        spans = self.placement.span(src), self.placement.span(dst)
        how = {"kind": lib.UCCH_STEP_LOCAL + kind, "op": self.spec.op, "dtype": self.placement.code}
        return {**how, "src": spans[0], "dst": spans[1]}

    def _kernel(self, kind: int, op: int, code: int, to: int) -> bool:
        """True if the device has a kernel for such a step."""
        return self.spec.memory is not None and kernels.ready(kind, op, code, to)

    def _message(self, step: Step, member: int, ordinal: int) -> dict[str, Any]:
        sender, receiver = step.ranks
        tag = self.tag | sender << 31 | ordinal
        region = step.src[0] if member == 0 else step.dst[1]
        assert isinstance(region, Region)
        base, offset, count = self.placement.span(region)
        span = (base, offset, count * self.placement.itemsize)
        job = self.teams.job
        if member == 0:
            peer = self.teams.members[receiver]
            connection = job.process.connection(job.facts[peer], job.rank, peer)
            return {
                "kind": lib.UCCH_STEP_SEND, "ep": connection.handle, "tag": tag, "src": span, "peer": receiver
            }  # fmt: skip
        worker = job.process.worker.handle
        return {"kind": lib.UCCH_STEP_RECV, "worker": worker, "tag": tag, "dst": span, "peer": sender}

    def _by_parcels(self, steps: Sequence[tuple[int, int, int, Step]]) -> bool:
        """True if the call is an exchange of parcels on the board (base/parcel.c). Alike on all ranks."""
        call, n, kind = self.spec.call, self.spec.call.ranks, ROWS[self.spec.call.collective].step
        shared = self.board.shared and self.board.ranks == list(range(n)) and n <= lib.UCCH_PARCEL_RANKS
        if not (shared and kind and self.spec.memory is None and len(steps) == 1 and len(set(call.counts)) < 2):
            return False
        if self.plan.algorithm != with_role(call.collective, Role.ONE_STEP) or not self.placement.equal(steps[0][3]):
            return False
        nbytes = self._parcel(kind) * (n if "each" in KINDS[kind].src else 1)
        adds = not KINDS[kind].reduces or not lib.ucch_combine(self.spec.op, self.placement.code, ffi.NULL, ffi.NULL, 0)
        return adds and nbytes <= int(lib.UCCH_PARCEL_BYTES)

    def _parcel(self, kind: str) -> int:
        """Bytes that each rank reads of every parcel."""
        return 0 if kind == "barrier" else self.spec.call.counts[0] * self.placement.itemsize

    def _exchange(self, step: Step, member: int, packed: Sequence[Local]) -> dict[str, Any]:
        (src, dst), kind, all_alike = (step.src[member], step.dst[member]), KINDS[step.kind], step.kind == "barrier"
        given = self._source(regions(src), packed) if step.kind == "reduce_scatter" else self._side(src)
        base, offset, count = given
        writes, reads, nbytes = all_alike or src is not None, all_alike or dst is not None, self._parcel(step.kind)
        whom = step.root if kind.rooted and kind.src[1] == "none" else lib.UCCH_ALL_PEERS
        at = member * nbytes if "each" in kind.src else 0
        span = base, offset, count * self.placement.itemsize if writes else 0
        how = {"writes": writes, "from": whom if reads else lib.UCCH_NOBODY, "combines": kind.reduces, "at": at}
        fields = {"kind": lib.UCCH_STEP_EXCHANGE, "op": self.spec.op, "dtype": self.placement.code, "bytes": nbytes}
        return {**fields, **how, "src": span, "dst": self._side(dst)}

    def _coll(self, step: Step, member: int, packed: Sequence[Local]) -> dict[str, Any]:
        src, dst = step.src[member], step.dst[member]
        kind = KINDS[step.kind]
        coll = kind.ucc if self.placement.equal(step) else kind.ucc_v
        uneven = coll == kind.ucc_v and bool(kind.each)
        in_place = self._in_place(step, member) and not packed
        tables: list[Any] = [ffi.NULL] * 4
        spans = self._side(src), self._side(dst)
        if step.kind == "bcast":
            spans = self._side(src if member == step.root else dst), self.placement.span(None)
        elif step.kind == "reduce_scatter":
            # The v-form's counts describe the source, although they are passed with the destination, and have no gaps.
            counts = [r.count for r in regions(src)]
            whole = self._source(regions(src), packed)
            spans = whole, whole if in_place else spans[1]
            if uneven:
                tables[2:] = self._tables(counts, list(accumulate(counts, initial=0))[:-1])
        elif uneven:
            for side, operand in ((0, src), (2, dst)):
                if is_each(operand):
                    tables[side : side + 2] = self._tables(*self.placement.table(operand))
        flags = (CollFlag.IN_PLACE if in_place else 0) | (_WIDE if uneven else 0)
        team = self.teams.get(step.ranks, step.link)
        fields = {
            "kind": lib.UCCH_STEP_COLL,
            "op": self.spec.op,
            "dtype": self.placement.code,
            "src": spans[0],
            "dst": spans[1],
        }
        how = {"team": team.native, "coll": coll, "flags": flags, "root": max(step.root, 0), "tables": tables}
        return {**fields, **how}

    def _tables(self, counts: Sequence[int], displs: Sequence[int]) -> list[Any]:
        return [self._kept("uint64_t[]", counts), self._kept("uint64_t[]", displs)]

    def _source(self, each: Sequence[Region], packed: Sequence[Local]) -> tuple[int, int, int]:
        """The span of a reduce_scatter's whole source, packed or in place."""
        count = sum(r.count for r in each)
        if packed:
            return (*packed[0].dst, count)
        base, offset, _ = self.placement.span(next((r for r in each if r.count), each[0]))
        return base, offset, count

    def _side(self, operand: Operand) -> tuple[int, int, int]:
        """Base, byte offset and element count of one side; blocks are relative to the buffer's beginning."""
        if operand is None:
            return self.placement.span(None)
        if isinstance(operand, Region):
            return self.placement.span(operand)
        whole = self.placement.whole(operand)
        if whole is not None:
            return self.placement.span(whole)
        each = regions(operand)
        place = self.placement.places[each[0].buffer]
        return place.base, place.offset, sum(r.count for r in each)

    def _in_place(self, step: Step, member: int) -> bool:
        """True if the library must be told that the member's two sides are the same memory."""
        src, dst = step.src[member], step.dst[member]
        if src is None or dst is None:
            return False
        many = KINDS[step.kind].each
        if many == "both":
            return False
        one, two = regions(src)[member if many == "src" else 0], regions(dst)[member if many == "dst" else 0]
        return one.count == two.count and self.placement.span(one)[:2] == self.placement.span(two)[:2]
