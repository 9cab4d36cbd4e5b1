"""Preparation of a call, from its arguments to a program that can start: binds, compares, chooses, plans, lowers,
packs."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import env, log
from ..buffers import Buffer, pack
from ..buffers import copy as copy_elements
from ..device import Event, kernels
from ..engine.lowering import Execution, Lowering, Program, Recipe, Route
from ..engine.placement import Placement, ProgramSpec, queues
from ..errors import CollectiveError, MismatchError, NotSupported
from ..native.libraries import ffi, lib
from ..planner.algorithms import Role, with_role
from ..planner.collectives import ROWS, Call, Shape, elements, operands, recv_length
from ..planner.plan import Plan
from ..planner.select import Choice, Tuning, choose, cut_to_length, make_plan, reason
from ..transport.bounce import Bounce
from ..transport.channels import Channels
from ..types import DTYPES, OPS, Op, Reduction, op_of
from .arguments import Bound, CallSpec, Copy, bind, label_of, look_up, number_of, reduced_by_mpi, reduction_of
from .counts import CountExchange, CountsAlong, all_counts, told_counts, unequal_root
from .mpi_reduction import MPIReduction
from .request import Request, run_poll_hooks
from .state import State, Watch

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

#: Most entries of a table; then the oldest is dropped.
_MOST_ENTRIES = 1024

#: Seconds after which a refusal by another rank is taken for the reason why teams are not made.
_LATE_S = 1.0

#: Bytes of a call's label that ranks compare under UCCH_CHECK.
_COMPARED_BYTES = 256

_NULL = ffi.NULL
#: Addresses for empty send and receive buffers: the native engine needs different ones.
_EMPTY = ffi.new("char[2]")
_EMPTY_ADDRESSES = ffi.cast("void *", _EMPTY), ffi.cast("void *", _EMPTY + 1)


class BoundedDict(dict[_K, _V]):
    """A dict of bounded size: a new entry replaces the oldest."""

    def keep(self, key: _K, value: _V) -> _V:
        if len(self) >= _MOST_ENTRIES and key not in self:
            self.pop((*self, key)[0], None)  # other threads may change it
        self[key] = value
        return value


@dataclass(slots=True, eq=False)
class ProgramPool:
    """Idle programs of calls that differ only in addresses. ``exchange`` runs before each of them; its ``counts`` must
    be these: those of all ranks, or with ``local`` those that this rank receives."""

    label: str
    idle: list[Program]
    exchange: CountExchange | None = None
    counts: bytes = b""
    local: bool = False

    def in_c(self, spare: int) -> tuple[Any, ...]:
        """The pool as C takes it (cffi_build/python/repeat.c); ``spare``: the most idle programs."""
        if self.exchange is None:
            return self, self.idle, spare, None
        prepared = self.exchange.prepared
        sends, receives = number_of(prepared.send), number_of(prepared.recv)
        held = prepared.pool, prepared.program
        exchange = prepared.program.address, sends, receives, self.counts, held, prepared
        return self, self.idle, spare, exchange

    def take(self) -> Program | None:
        """Take a program out; None if all are in use."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def give_back(self, program: Program) -> None:
        if len(self.idle) < program.spare:
            self.idle.append(program)


#: Pools of one communicator, by the specification of their programs and by the signatures of calls.
ProgramCache: TypeAlias = BoundedDict[Hashable, ProgramPool]


class _BoundCall(NamedTuple):
    """A bound call with its label, reduction and exchange of counts. ``counted``: no rank knew all counts by itself."""

    bound: Bound
    label: str
    reduction: Reduction | None = None
    op: Op | None = None
    on_device: bool = False
    counted: bool = False
    exchange: CountExchange | None = None


class Prepared:
    """A bound call on ``rank`` with its program, addresses and copies.

    ``staged``: bounce buffers; the program works on copies in pinned host memory of all buffers on the device, so no
    library sees device memory, whichever devices the ranks have. ``stream``: the data is ready when this stream reaches
    this point.
    """

    __slots__ = (
        "_copied_back", "_rank", "_stream", "bound", "copies", "counted", "counts_along", "exchange", "kept", "label",
        "mpi_reduction", "nbytes", "pool", "program", "recv", "repeatable", "reusable_in", "send", "staged",
    )  # fmt: skip

    def __init__(
        self, bound: Bound, pool: ProgramPool, program: Program, rank: int, staged: Bounce | None = None,
        stream: int | None = None,
    ) -> None:  # fmt: skip
        self.bound, self.pool, self.program, self.label = bound, pool, program, pool.label
        self._rank, self.staged, self._stream = rank, staged, stream
        #: Recorded behind the copies of the results in a stream.
        self._copied_back: Event | None = None
        #: Counts that were sent along with the data.
        self.counts_along: CountsAlong | None = None
        #: The reduction by MPI.
        self.mpi_reduction: MPIReduction | None = None
        #: The list in which this object waits for its next call, and the caller's buffers in that call.
        self.reusable_in: list[Prepared] | None = None
        self.kept: object = None
        #: Bytes of the longer buffer.
        self.nbytes = max(0 if buffer is None else buffer.nbytes for buffer in (bound.send, bound.recv))
        #: True if the next call with the same signature and counts differs only in addresses.
        self.repeatable = True
        #: True if no rank knew all counts by itself; ``exchange``: the exchange of counts that this call made, if any.
        self.counted = False
        self.exchange: CountExchange | None = None
        self.send: Any = _NULL
        self.recv: Any = _NULL
        #: Copies of memory that has gaps or is on a device.
        self.copies = list(bound.copies)
        if bound.send is not None:
            self.send = self._address(bound.send, receives=False)
        if bound.recv is not None:
            # Filled beforehand, too: in place it holds the input, and gaps between segments must not change. For the
            # root of a bcast it may be read-only memory.
            self.recv = self._address(bound.recv, receives=not bound.recv.readonly)
        for each in bound.copies:
            copy_elements(each.original, each.copy)

    def _address(self, buffer: Buffer, *, receives: bool) -> Any:
        if not buffer.nbytes and buffer.vendor == "host":
            return _EMPTY_ADDRESSES[receives]  # all empty bytearrays have the same address
        if self.staged is not None:
            found = self._on_host(self.staged, buffer)
            if found.read:
                self.staged.down(buffer, found.copy, self._stream)
        else:
            found = Copy(buffer if buffer.contiguous else pack(buffer), buffer, True, receives)
        if found.copy is not buffer:
            self.copies.append(found)
        return ffi.cast("void *", found.copy.ptr)

    def _on_host(self, bounce: Bounce, buffer: Buffer) -> Copy:
        """The pinned copy of a device buffer."""
        read, written, bound = True, False, self.bound
        if buffer is bound.recv:
            call = bound.call
            # It is read if it holds the input (in place, root of a bcast) or has gaps that must not change.
            whole = buffer.count == recv_length(call, self._rank) and bound.recv_displs is None
            read = bound.in_place or not whole
            written = not buffer.readonly and bool(ROWS[call.collective].post(Shape(call), self._rank))
        return Copy(bounce.memory_for(buffer), buffer, read, written)

    def refill(self) -> None:
        """Copy the caller's data again, before a new start of a persistent call."""
        if self.mpi_reduction is not None:
            self.mpi_reduction.fill()
        for copy, original, read, _ in self.copies:
            if self.staged is None:
                copy_elements(original, copy)
            elif read:
                self.staged.down(original, copy)

    def copy_back_in(self, stream: int) -> None:
        """Copy the results back in a stream that waits for the call."""
        assert self.staged is not None
        self._copy_back(stream)
        self._copied_back = self.staged.mark(stream)

    def finish(self) -> None:
        """Copy the results to the caller's memory. ``MismatchError`` if the ranks' counts do not match."""
        if self.counts_along is not None:
            self.counts_along.check()
        event, self._copied_back = self._copied_back, None
        if event is None:
            self._copy_back(None)
        else:
            assert self.staged is not None
            self.staged.wait(event)
        if self.mpi_reduction is not None:
            self.mpi_reduction.finish()

    def _copy_back(self, stream: int | None) -> None:
        for copy, original, _, written in self.copies:
            if written and self.staged is not None:
                self.staged.up(copy, original, original.nbytes, stream)
            elif written:
                copy_elements(copy, original)

    @property
    def in_place(self) -> bool:
        """True if the program works in the caller's memory."""
        return not self.copies and self.staged is None and self.mpi_reduction is None

    def explained(self, failure: Exception) -> Exception:
        """The ``MismatchError`` that explains a failure if the ranks' counts do not match; else the failure."""
        try:
            if self.counts_along is not None:
                self.counts_along.check()
        except MismatchError as mismatch:
            mismatch.__cause__ = failure
            return mismatch
        except CollectiveError:
            pass  # not all ranks have made the call
        return failure

    def give_back(self) -> None:
        if self.reusable_in is not None and len(self.reusable_in) < self.program.spare:
            if self.mpi_reduction is not None:
                self.mpi_reduction.release()
            self.kept, self.bound = None, self.bound._replace(send=None, recv=None)
            self.reusable_in.append(self)
            return
        self.pool.give_back(self.program)
        if self.exchange is not None:
            self.exchange.prepared.give_back()
            self.exchange = None


class Preparation:
    """Finds or makes the programs of one communicator's calls. ``run`` runs a prepared call, ``start`` starts it."""

    def __init__(
        self, state: State, cache: ProgramCache, run: Callable[[Prepared], None], start: Callable[[Prepared], Request]
    ) -> None:
        from mpi4py import MPI

        self._state, self.members, self._cache = state, state.members, cache
        self._in_place = MPI.IN_PLACE
        #: Short reductions by MPI, and non-blocking calls with counts along, that have ended and can be reused, by
        #: signature.
        self.reusable: BoundedDict[Hashable, list[Prepared]] = BoundedDict()
        self._run, self._start = run, start
        self.rank, self.size = state.rank, state.size
        #: UCCH_CHECK: compare every rank's call before data is sent.
        self.check = env.get("CHECK") is True
        #: Calls so far: label -> (choice, its source, execution).
        self.used: dict[str, tuple[Choice, str, Execution]] = {}
        self._host_tuning = _tuning_on_host(state.members.tuning)
        #: Calls of earlier communicators of the same ranks, by signature: label, recipe, and their entry in ``used``.
        known, same = state.members.known, state.board.shared and state.members.tuning == state.members.known.tuning
        self._inherited: dict[Hashable, tuple[str, Recipe, Any]] = known.recipes if same and not self.check else {}
        #: (specification, operation) -> True if devices run such calls themselves.
        self._on_device_cache: BoundedDict[Hashable, bool] = BoundedDict()
        self._bounces: list[Bounce] = []

    def inherited(self, key: Hashable) -> ProgramPool | None:
        """The pool of a call that an earlier communicator of these ranks has made; None if there is none."""
        found = self._inherited.get(key)
        if found is None:
            return None
        label, recipe, self.used[found[0]] = found
        program = Program(recipe.program(self.members.board), self.members.board, recipe)
        return self._cache.keep(key, ProgramPool(label, [program]))

    def _can_repeat(self, prepared: Prepared, key: Hashable, send_at: Any, recv_at: Any) -> bool:
        """True if calls with this signature differ from this one only in addresses."""
        if key is None or not prepared.repeatable:
            return False
        # Not if both buffers began at one address, and the call was bound in place: the signature has two buffers, and
        # the next ones may differ.
        if prepared.bound.in_place and send_at and recv_at:
            return False
        # Not if the buffer begins at a displacement or is a copy. A rank may pass a buffer that its part of the call
        # does not use.
        return not any(
            used and used != (ffi.cast("void *", seen) if type(seen) is int else seen)
            for used, seen in ((prepared.send, send_at), (prepared.recv, recv_at))
        )

    def keep(self, prepared: Prepared, key: Hashable, send_at: Any, recv_at: Any) -> None:
        """Let calls with this signature, which differ only in addresses, skip preparation, also on later communicators
        of these ranks."""
        if not self._can_repeat(prepared, key, send_at, recv_at):
            return
        pool, mine, recipe = prepared.pool, prepared.exchange, prepared.program.recipe
        known = self._cache.get(key)
        exchange = known.exchange if known is not None else None
        if prepared.bound.local:
            call = prepared.bound.call
            if not self._gathers_counts(call):
                return
            due = np.array(call.counts[self.rank :: self.size], np.int64)
            exchange = exchange or self._counts_along(call.collective, call)
            pool = ProgramPool(pool.label, pool.idle, exchange, due.tobytes(), local=True)
        elif prepared.counted:
            exchange = exchange or mine
            if exchange is None:
                return
            if exchange is mine:
                prepared.exchange = None  # its program stays with the pool
            pool = ProgramPool(pool.label, pool.idle, exchange, (mine or exchange).rows.tobytes())
        elif recipe is not None and len(self._inherited) < _MOST_ENTRIES:
            self._inherited[key] = prepared.label, recipe, self.used[prepared.label]
        self._cache.keep(key, pool)

    def keep_reusable(self, prepared: Prepared, key: Hashable, send_at: Any, recv_at: Any) -> None:
        """Let a non-blocking call with counts along be started again, once it has ended."""
        if self._can_repeat(prepared, key, send_at, recv_at):
            prepared.reusable_in = self.reusable.get(key) or self.reusable.keep(key, [])

    def reused(self, key: Hashable, call: CallSpec, send_at: Any, recv_at: Any) -> Prepared | None:
        """A call with counts along that has ended, with other addresses; its counts are on their way. None if there is
        none, or the addresses are special."""
        ended = self.reusable.get(key)
        if not ended or call.op is not None:
            return None
        first, second = sorted(map(number_of, (send_at, recv_at)))
        prepared = ended.pop()
        along, overlap = prepared.counts_along, first > 0 and second - first < prepared.nbytes
        assert along is not None
        if overlap or not along.start():
            ended.append(prepared)
            return None
        prepared.kept = call
        prepared.send = ffi.cast("void *", number_of(send_at)) if prepared.send else _NULL
        prepared.recv = ffi.cast("void *", number_of(recv_at)) if prepared.recv else _NULL
        return prepared

    def prepare(
        self,
        call: CallSpec,
        *,
        exchange: bool = False,
        sets_up: bool = False,
        rows: Any = None,
        stream: int | None = None,
        label: str = "",
    ) -> Prepared:
        """Bind, choose, plan and lower a call.

        ``exchange``: exchange counts that only some ranks know before the call, as blocking and persistent calls do;
        ``rows``: counts that were exchanged already. ``sets_up``: the call is persistent, and started later.
        ``stream``: the data is ready when this stream reaches this point. ``label``: what ranks compare instead of the
        call's own."""
        if reduced_by_mpi(call, self.rank):
            return self._prepare_mpi_reduction(call, sets_up)
        bound = self._bound_call(call, exchange, rows)
        if label:
            bound = bound._replace(label=label)
        if self.members.device.everywhere and not bound.on_device and bound.bound.dtype is not None:
            # Libraries choose algorithms by memory type: all ranks must have the same.
            bound = bound._replace(label=f"{bound.label} host")
        if self.check:
            self.compare(bound.label)
        alone = bound.bound.local and rows is None
        along = self._attach_counts(call.name, bound.bound.call) if alone else None
        if along is not None:
            along.start()
        prepared = self._lowered(bound, sets_up, stream)
        prepared.counts_along = along
        prepared.exchange, prepared.counted = bound.exchange, bound.counted
        prepared.repeatable = prepared.in_place and not self.check
        return prepared

    def _prepare_mpi_reduction(self, call: CallSpec, sets_up: bool) -> Prepared:
        """Prepare a call whose operation MPI computes, or reuse one of the same signature that has ended."""
        name, send, recv, op, root, counts = call
        key, ended, send_at, recv_at = look_up(self.reusable, self._in_place, name, send, recv, op_of(op), root, counts)
        if ended and not sets_up:
            prepared = ended.pop()
            assert prepared.mpi_reduction is not None
            prepared.mpi_reduction.use_again(send_at, recv_at, op)
            return prepared
        reduction = MPIReduction(call, self.size, self.rank)
        prepared = self.prepare(reduction.transfer, sets_up=sets_up, label=reduction.label)
        if key is not None and prepared.repeatable and not sets_up and reduction.fits(send_at, recv_at):
            prepared.reusable_in = self.reusable.keep(key, []) if ended is None else ended
        prepared.mpi_reduction = reduction
        return prepared

    def _bound_call(self, call: CallSpec, exchange: bool, rows: Any = None) -> _BoundCall:
        """Bind a call; with ``exchange`` the counts of all ranks are exchanged if needed."""
        name, bound = call.name, bind(call, self.size, self.rank)
        on_device = self._on_device(name, bound)
        reduction, op = reduction_of(name, bound.dtype, call.op, self.rank)
        counted, made = bound.local, None
        # mpi4py exchanges the counts of a reduce_scatter when it is called, in every form.
        if bound.local and (exchange or name == "reduce_scatter"):
            bound, made = self._exchange_counts(name, bound, rows)
        return _BoundCall(bound, label_of(name, bound, op), reduction, op, on_device, counted, made)

    def captured(self, call: CallSpec, rows: Any) -> Prepared:
        """As :meth:`prepare`, for a stream that is being captured in a graph: the ranks' kernels do the whole call.

        ``NotSupported`` on all ranks alike if kernels cannot do it, or are not loaded."""
        found, lacks = self._bound_call(call, True, rows), "its data lies in host memory"
        bound, label = found.bound, f"{found.label} in a graph"
        channels, topology = None, self.members.topology
        if found.on_device:
            channels, topology, lacks = self.members.for_graphs()
        if channels is None:
            raise NotSupported(f"{call.name} on rank {self.rank} cannot be captured in a graph: {lacks}")
        spec = self._spec(found, on_device=True)
        choice = Choice(with_role(spec.call.collective, Role.ONE_STEP), queued=True)
        plan, whole = (make_plan(topology, spec.call, choice, rank) for rank in (self.rank, None))
        with kernels.beside_a_capture(make=self.members.topology.flat):
            if not queues(channels, whole, Placement(plan, self.rank, spec)):
                raise NotSupported(f"{call.name} on rank {self.rank} cannot be captured: no kernel does all of it")
            pool = self._pool((spec, label), label)
            graph, chosen = (plan, channels), (choice, "graph")
            program = pool.take() or self._build(spec, bound, label, chosen, sets_up=False, graph=graph)
        prepared = Prepared(bound, pool, program, self.rank)
        prepared.exchange = found.exchange
        if prepared.copies:
            raise NotSupported(f"{label} on rank {self.rank}: memory must be contiguous and read in place")
        return prepared

    def _on_device(self, name: str, bound: Bound) -> bool:
        if any(each.original.vendor != "host" for each in bound.copies):
            raise NotSupported(f"{name} on rank {self.rank} takes host memory only: copy the data to the host")
        buffers = ("sendbuf", bound.send), ("recvbuf", bound.recv)
        if all(buffer is None or buffer.vendor == "host" for _, buffer in buffers):
            return False
        self.members.device.check(buffers)
        return True

    def _lowered(self, call: _BoundCall, sets_up: bool = False, stream: int | None = None) -> Prepared:
        """A bound call with a program from its pool, or a new one."""
        bound, label, local, bounce = call.bound, call.label, call.bound.local, None
        spec = self._spec(call, on_device=call.on_device)
        tuning = self.members.tuning if call.on_device else self._host_tuning
        if call.on_device and not self._runs_on_device(spec, local, call.op):
            spec = self._spec(call, on_device=False)
            bounce = self._bounce(label, local)
        # ``local`` is part of the key: a rank's own counts can equal those of another call that all ranks know, which
        # uses another algorithm.
        pool = self._pool((spec, label, local), label)
        program = pool.take()
        if program is None:
            chosen = (self._choice_without_counts(spec), "counts unknown") if local else self._choice(spec, tuning)
            program = self._build(spec, bound, label, chosen, sets_up=sets_up)
        if bounce is not None:
            self.used[label] = *self.used[label][:2], Execution.STAGED
        return Prepared(bound, pool, program, self.rank, bounce, stream)

    def _pool(self, key: Hashable, label: str) -> ProgramPool:
        """The pool of programs that are lowered from ``key``."""
        return self._cache.get(key) or self._cache.keep(key, ProgramPool(label, []))

    def _spec(self, call: _BoundCall, *, on_device: bool) -> ProgramSpec:
        """All that the call's program depends on but addresses, on this rank's device or in host memory."""
        bound, how = call.bound, call.reduction
        dtype, device = bound.dtype or DTYPES["uint8"], self.members.device
        if how and on_device and device.halves and how.compute is not dtype and dtype.kind == "float":
            how = Reduction(dtype, how.op, how.divide)
        return ProgramSpec(
            call=bound.call,
            dtype=dtype if how is None or how.compute.name != "uint8" else how.compute,
            compute=how.compute if how else dtype,
            op=how.op.code if how else 0,
            divisor=operands(bound.call, self.rank) if how and how.divide else 0,
            in_place=bound.in_place,
            send_displs=bound.send_displs,
            recv_displs=bound.recv_displs,
            memory=device.memory if on_device else None,
        )

    def _runs_on_device(self, spec: ProgramSpec, local: bool, op: Op | None) -> bool:
        """True, alike on all ranks, if the devices run the call; else all of it goes by way of host memory."""
        members = self.members
        if members.topology.flat:
            # libucc's kernels would give different bits on different ranks: they multiply complex numbers with fused
            # operations, each rank starting with its own operand (ec_cuda of UCC 1.4). The vendors' libraries lack
            # these products.
            by_order = spec.compute.kind == "complex" and spec.op == OPS["PROD"].code
            return not (members.device.by_host or by_order)
        if members.channels is None or local:
            return False
        found = self._on_device_cache.get((spec, op))
        if found is None:
            choice = self._choice(spec, members.tuning)[0]
            plan, whole = (make_plan(members.topology, spec.call, choice, rank) for rank in (self.rank, None))
            found = choice.queued and queues(members.channels, whole, Placement(plan, self.rank, spec))
            self._on_device_cache.keep((spec, op), found)
        return found

    def _bounce(self, label: str, local: bool) -> Bounce:
        """Bounce buffers for a call that goes by way of host memory; logs why, once per label."""
        members = self.members
        if label not in self.used:
            why = f"no call of this communicator is queued ({members.lacks})"
            if members.topology.flat:
                why = members.device.by_host or "libucc's product of complex numbers differs in bits between ranks"
            elif members.channels is not None and local:
                why = "no rank knows all of its counts; blocking calls exchange them"
            elif members.channels is not None:
                why = "streams cannot do it: a vendor's library or compiler lacks the datatype or the operation"
            # Unexpected in a communicator whose other calls are queued.
            first = members.channels is not None and not self._bounces and self.rank == 0
            say = log.log("coll").warning if first else log.log("coll").info
            say("%s goes by way of host memory, which is slower: %s", label, why)
        if not self._bounces:
            assert members.runtime is not None
            self._bounces.append(Bounce(members.runtime))
        return self._bounces[0]

    def _choice(self, spec: ProgramSpec, tuning: Tuning) -> tuple[Choice, str]:
        nbytes = elements(spec.call) * spec.compute.itemsize
        inputs = self.members.topology, spec.call.collective, nbytes, tuning
        return cut_to_length(choose(*inputs), nbytes), reason(*inputs)

    def _build(
        self,
        spec: ProgramSpec,
        bound: Bound,
        label: str,
        chosen: tuple[Choice, str],
        *,
        sets_up: bool,
        graph: tuple[Plan, Channels] | None = None,
    ) -> Program:
        """Plan and lower a call. ``chosen``: its choice, and the choice's source. ``graph``: the plan and channels for
        a capture."""
        members, (choice, why) = self.members, chosen
        channels = members.channels if spec.memory is not None else None
        plan, channels = graph or (make_plan(members.topology, spec.call, choice, self.rank), channels)
        if spec.memory is None and not (members.known.one_team and choice.algorithm == "flat"):
            plan = members.teams.fitted(plan)
        self.used[label] = choice, why, Execution.HOST
        route = Route(members.id << 52 | 1 << 51, channels, graph is not None)
        members.teams.poll_hook = self._watch_teams(label, sets_up=sets_up)
        total = sum(b.nbytes for b in (bound.send, bound.recv) if b is not None)
        try:
            program = Lowering(plan, self.rank, spec, members.teams, members.board, route).program(label, total)
        except CollectiveError as error:
            self._state.fail(error, plan)
            raise
        finally:
            members.teams.poll_hook = None
        self.used[label] = choice, why, program.execution
        return program

    def _watch_teams(self, label: str, *, sets_up: bool) -> Callable[[], None]:
        """A hook for the time in which this rank waits for others to make a call's teams: raises if they have called
        something else.

        Setting up a persistent call is not a call yet, and other ranks may still make the next call in another form. A
        rank that refused the next call may have set this one up before, so its teams may yet be made: a refusal counts
        only after ``_LATE_S`` seconds.
        """
        began, watches = time.monotonic(), list[Watch]()

        def announce(text: str) -> tuple[int, int]:
            return self.members.board.announce(text, as_any=sets_up), 0

        def poll_hook() -> None:
            run_poll_hooks()
            if not watches and (not sets_up or time.monotonic() - began > _LATE_S):
                watches.append(Watch(self._state, label, announce))
            for watch in watches:
                watch.check()

        return poll_hook

    def _choice_without_counts(self, spec: ProgramSpec) -> Choice:
        """The choice if only some ranks know the counts: one step if libraries need only a rank's own counts, else
        messages."""
        one_step = self.members.topology.flat and spec.memory is not None
        return Choice(with_role(spec.call.collective, Role.ONE_STEP if one_step else Role.UNCOUNTED))

    def _gather_rows(self, label: str, mine: Any) -> CountExchange:
        """Gather a row of int64 from every rank, of equal lengths, by a call of its own with this label."""
        rows = np.empty((self.size, len(mine)), np.int64)
        bound = bind(CallSpec("allgather", mine, rows), self.size, self.rank)
        prepared = self._lowered(_BoundCall(bound, label))
        self._run(prepared)
        return CountExchange(mine, rows, prepared)

    def _exchange_counts(self, name: str, bound: Bound, rows: Any) -> tuple[Bound, CountExchange | None]:
        """Bind the counts of all ranks. Returns also the exchange that was made, None if ``rows`` are given."""
        call = bound.call
        label = f"{name} {bound.dtype}" + (f" root={call.root}" if call.root >= 0 else "") + ": counts"
        mine = np.array(told_counts(name, bound, self.rank), np.int64)
        made = self._gather_rows(label, mine) if rows is None else None
        counts = all_counts(name, call, self.rank, rows if made is None else made.rows)
        if counts is None:
            told = self._gather_rows(label, np.array(call.counts, np.int64))
            told.prepared.give_back()
            raise unequal_root(name, call.root, self.rank, told.rows)
        return bound._replace(call=call._replace(counts=counts), local=False), made

    def _attach_counts(self, name: str, call: Call) -> CountsAlong:
        """The counts that go along with a non-blocking call."""
        me, p, root = self.rank, self.size, call.root
        if self._gathers_counts(call):
            along, expected = self._counts_along(name, call), call.counts[me::p]
            return CountsAlong(self._start, along.prepared, lambda: self._check_expected(name, along.rows, expected))
        ones = [int(root < 0 or root in (me, peer)) for peer in range(p)]
        peers = [peer for peer in range(p) if ones[peer]]
        mine = due = np.array([call.counts[me if root >= 0 and me != root else peer] for peer in peers], np.int64)
        if root < 0:
            mine, due = np.array(call.counts[me * p : (me + 1) * p]), np.array(call.counts[me::p])
        got = np.empty(len(peers), np.int64)
        bound = bind(CallSpec("alltoallv", [mine, ones], [got, ones]), p, me)
        label = f"{name}{f' root={root}' if root >= 0 else ''}: counts along"

        def compare() -> None:
            for peer, one, two in zip(peers, got, due, strict=True):
                if one != two:
                    raise MismatchError(f"{name} on rank {me}: rank {peer} says {one} elements, this rank {two}")

        return CountsAlong(self._start, self._lowered(_BoundCall(bound, label)), compare)

    def _gathers_counts(self, call: Call) -> bool:
        """True if all ranks gather the counts that go along with a call: rows this short need no libucc on a host."""
        return call.root < 0 and self.size <= lib.UCCH_PARCEL_RANKS

    def _counts_along(self, name: str, call: Call) -> CountExchange:
        """The exchange of counts along with a call among all ranks, which has not begun."""
        me, p = self.rank, self.size
        mine, rows = np.array(call.counts[me * p : (me + 1) * p], np.int64), np.empty((p, p), np.int64)
        bound = bind(CallSpec("allgather", mine, rows), p, me)
        return CountExchange(mine, rows, self._lowered(_BoundCall(bound, f"{name}: counts along")))

    def check_received(self, pool: ProgramPool) -> None:
        """``MismatchError`` if a rank sends another number of elements than the calls of a local pool expect of it."""
        assert pool.exchange is not None
        self._check_expected(pool.label, pool.exchange.rows, np.frombuffer(pool.counts, np.int64))

    def _check_expected(self, name: str, rows: Any, expected: Any) -> None:
        for peer in np.flatnonzero(rows[:, self.rank] != expected):
            raise MismatchError(
                f"{name} on rank {self.rank}: rank {peer} says {rows[peer, self.rank]} elements, this rank "
                f"{expected[peer]}"
            )

    def forget(self) -> None:
        self._cache.clear()
        self.reusable.clear()

    def retune(self, tuning: Tuning) -> None:
        """Choose by other rules from now on, equal on all ranks. Collective."""
        self.members.retune(tuning)
        self._host_tuning, self._inherited = _tuning_on_host(tuning), {}
        self._on_device_cache.clear()

    def compare(self, label: str) -> None:
        """Compare the ranks' next call. ``MismatchError`` on all ranks if they differ."""
        text = label.encode()[:_COMPARED_BYTES].ljust(_COMPARED_BYTES)
        made = self._gather_rows("UCCH_CHECK", np.frombuffer(text, np.int64))
        made.prepared.give_back()
        labels = [row.tobytes().decode(errors="replace").rstrip() for row in made.rows]
        for rank, other in enumerate(labels):
            if other != labels[0]:
                raise MismatchError(f"rank {rank} called {other} while rank 0 called {labels[0]}")


def _tuning_on_host(tuning: Tuning) -> Tuning:
    return replace(tuning, queued=False) if tuning.queued else tuning
