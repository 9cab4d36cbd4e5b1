"""From the arguments of a call to a program that is ready to start: binds, compares, chooses, plans, lowers, packs."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from .. import env, log
from ..buffers import Buffer, pack
from ..buffers import copy as copy_elements
from ..device import Event, kernels
from ..engine.lowering import Execution, Lowering, Program, Route
from ..engine.placement import Placement, ProgramSpec
from ..engine.stream_program import queues
from ..errors import CollectiveError, MismatchError, NotSupported
from ..native.libraries import ffi, lib
from ..planner.algorithms import Role, with_role
from ..planner.collectives import ROWS, Call, Shape, elements, operands, recv_length
from ..planner.plan import Plan
from ..planner.select import Choice, Tuning, choose, make_plan, reason, supported
from ..transport.bounce import Bounce
from ..transport.channels import Channels
from ..types import DTYPES, OPS, DType, Op, Reduction, op_of, reduction
from .arguments import Bound, CallSpec, bind, delegated, look
from .delegate import Delegated
from .request import Request, run_poll_hooks
from .state import State, Watch

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

#: Kinds that a table remembers before it forgets the oldest.
KINDS = 1024

#: Seconds after which the making of teams is taken for one that a rank has refused to take part in, if one refused.
_LATE = 1.0

#: Bytes of a call's description that ranks compare under UCCH_CHECK.
_SHOWN = 256

_NULL = ffi.NULL
#: Addresses for buffers of no elements, as sent and as received: the native engine wants different ones.
_NOTHING = ffi.new("char[2]")
_NOWHERE = ffi.cast("void *", _NOTHING), ffi.cast("void *", _NOTHING + 1)


class Kinds(dict[_K, _V]):
    """A table of bounded size: the oldest entry makes room for a new one."""

    def keep(self, key: _K, value: _V) -> _V:
        """Remember a value, and return it."""
        if len(self) >= KINDS and key not in self:
            self.pop(next(iter(self)), None)
        self[key] = value
        return value


class CountExchange(NamedTuple):
    """The exchange of counts before a call: ``mine`` goes out, and those of all ranks come into ``rows``."""

    mine: Any
    rows: Any
    prepared: Prepared


class Kind:
    """Idle programs of one kind of call, and its label on the arrival board.

    ``exchange`` is how its ranks exchange counts before it, and ``counts`` what that then brought.
    """

    __slots__ = ("counts", "exchange", "idle", "label")

    def __init__(
        self, label: str, idle: list[Program], exchange: CountExchange | None = None, counts: bytes = b""
    ) -> None:
        self.label, self.idle, self.exchange, self.counts = label, idle, exchange, counts

    def take(self) -> Program | None:
        """A program for this caller alone until it is given back; None if all are in use."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def give_back(self, program: Program) -> None:
        """Let the next such call have a program."""
        if len(self.idle) < program.spare:
            self.idle.append(program)


#: Programs of one communicator, by what they were lowered from and by the signatures of calls.
Cache: TypeAlias = Kinds[Hashable, Kind]


class _About(NamedTuple):
    """A call as it was understood: its memory, its label, its reduction, and how its counts came to be known."""

    bound: Bound
    label: str
    how: Reduction | None = None
    op: Op | None = None
    on_device: bool = False
    counted: bool = False
    asked: CountExchange | None = None


class _Copy(NamedTuple):
    """Memory that a program works on, the caller's, whether the call reads what is there, and whether it writes."""

    copy: Buffer
    original: Buffer
    fetched: bool
    back: bool


class Prepared:
    """A bound call of ``rank`` with its program, addresses, and the copies around it.

    ``staged``: the program works on copies in pinned host memory of all that lies on the device. No library then sees
    device memory, whatever devices the ranks have, or none. ``stream``: the data is there when this stream gets here.
    """

    __slots__ = (
        *(
            "_left",
            "_rank",
            "_stream",
            "agreed",
            "bound",
            "copies",
            "counted",
            "delegated",
            "exchange",
            "kept_by",
            "kind",
        ),
        *("label", "program", "recv", "repeatable", "send", "staged"),
    )

    def __init__(
        self, bound: Bound, kind: Kind, program: Program, rank: int, staged: Bounce | None = None,
        stream: int | None = None,
    ) -> None:  # fmt: skip
        self.bound, self.kind, self.program, self.label = bound, kind, program, kind.label
        self._rank, self.staged, self._stream = rank, staged, stream
        #: When a stream will have put the results where they belong.
        self._left: Event | None = None
        #: Raises if the counts of the ranks turn out not to match, where they were not compared before.
        self.agreed: Callable[[], None] | None = None
        #: A :class:`Delegated`, if MPI has a part in it; and where such a call waits for the next one like it.
        self.delegated: Any = None
        self.kept_by: list[Prepared] | None = None
        #: True if nothing but addresses changes from this call to the next one that looks like it, and has its counts.
        self.repeatable = True
        #: True if a rank alone does not know the counts; ``exchange`` is how they were exchanged, if they were now.
        self.counted = False
        self.exchange: CountExchange | None = None
        self.send: Any = _NULL
        self.recv: Any = _NULL
        #: Of memory that has gaps, or lies on a device.
        self.copies = [_Copy(copy, original, True, receives) for copy, original, receives in bound.parts]
        if bound.send is not None:
            self.send = self._address(bound.send, receives=False)
        if bound.recv is not None:
            # Also filled beforehand: in place it holds the input, and gaps between segments keep their contents.
            # The root of a bcast may have it in memory that cannot be written to.
            self.recv = self._address(bound.recv, receives=not bound.recv.readonly)
        for copy, original, _ in bound.parts:
            copy_elements(original, copy)

    def _address(self, buffer: Buffer, *, receives: bool) -> Any:
        if not buffer.nbytes and buffer.vendor == "host":
            return _NOWHERE[receives]  # all empty bytearrays have one address
        if self.staged is not None:
            found = self._on_host(self.staged, buffer)
            if found.fetched:
                self.staged.down(buffer, found.copy, self._stream)
        else:
            found = _Copy(buffer if buffer.contiguous else pack(buffer), buffer, True, receives)
        if found.copy is not buffer:
            self.copies.append(found)
        return ffi.cast("void *", found.copy.ptr)

    def _on_host(self, bounce: Bounce, buffer: Buffer) -> _Copy:
        """Pinned memory for a buffer of the device."""
        read, written, bound = True, False, self.bound
        if buffer is bound.recv:
            call = bound.call
            # In place it holds the input, gaps keep their contents, and at its root a broadcast's data lies there.
            whole = buffer.count == recv_length(call, self._rank) and bound.recv_displs is None
            read = bound.in_place or not whole
            written = not buffer.readonly and bool(ROWS[call.collective].post(Shape(call), self._rank))
        return _Copy(bounce.memory_for(buffer), buffer, read, written)

    def refill(self) -> None:
        """Take the caller's data into the copies again, before a persistent call starts anew."""
        if self.delegated is not None:
            self.delegated.fill()
        for copy, original, fetched, _ in self.copies:
            if self.staged is None:
                copy_elements(original, copy)
            elif fetched:
                self.staged.down(original, copy)

    def leave(self, stream: int) -> None:
        """Let a stream that waits for the call put the results where they belong."""
        assert self.staged is not None
        self._bring_back(stream)
        self._left = self.staged.mark(stream)

    def finish(self) -> None:
        """Spread the results out. ``MismatchError`` if they cannot be right."""
        if self.agreed is not None:
            self.agreed()
        event, self._left = self._left, None
        if event is None:
            self._bring_back(None)
        else:
            assert self.staged is not None
            self.staged.wait(event)
        if self.delegated is not None:
            self.delegated.finish()

    def _bring_back(self, stream: int | None) -> None:
        for copy, original, _, back in self.copies:
            if back and self.staged is not None:
                self.staged.up(copy, original, original.nbytes, stream)
            elif back:
                copy_elements(copy, original)

    @property
    def in_place(self) -> bool:
        """True if the program works in the caller's own memory."""
        return not self.copies and self.staged is None and self.delegated is None

    def reason(self, failure: Exception) -> Exception:
        """Why a call failed: that the ranks' counts do not match, where they turn out not to."""
        try:
            if self.agreed is not None:
                self.agreed()
        except MismatchError as mismatch:
            mismatch.__cause__ = failure
            return mismatch
        except CollectiveError:
            pass  # not every rank has called it
        return failure

    def keep(self, cache: Cache, key: Hashable, outof: Any, into: Any) -> None:
        """Let the next call of this signature use the programs of this one, if only addresses change between them."""
        if key is None or not self.repeatable:
            return
        # Not what begins at a displacement, or lies elsewhere; a rank may have memory that its part of the call has no
        # use for.
        if any(
            used and used != (ffi.cast("void *", seen) if type(seen) is int else seen)
            for used, seen in ((self.send, outof), (self.recv, into))
        ):
            return
        kind, asked = self.kind, self.exchange
        if self.counted:
            known = cache.get(key)
            exchange = known.exchange if known is not None and known.exchange else asked
            if exchange is None:
                return
            if exchange is asked:
                self.exchange = None  # its program is not given back
            kind = Kind(kind.label, kind.idle, exchange, (asked or exchange).rows.tobytes())
        cache.keep(key, kind)

    def give_back(self) -> None:
        """Let the program be used by the next such call."""
        if self.kept_by is not None and len(self.kept_by) < self.program.spare:
            self.delegated.rest()
            self.kept_by.append(self)
            return
        self.kind.give_back(self.program)
        if self.exchange is not None:
            self.exchange.prepared.give_back()
            self.exchange = None


class Preparation:
    """From calls to programs, for one communicator; they come from its cache if it has them."""

    def __init__(
        self, state: State, cache: Cache, run: Callable[[Prepared], None], start: Callable[[Prepared], Request]
    ) -> None:
        from mpi4py import MPI

        self._state, self.members, self._cache = state, state.members, cache
        self._in_place = MPI.IN_PLACE
        #: Short calls that MPI has a part in and that are over, by their signatures.
        self.delegated: Kinds[Hashable, list[Prepared]] = Kinds()
        #: Runs a prepared call to its end, and begins one.
        self._run, self._start = run, start
        self.rank, self.size = state.rank, state.size
        #: UCCH_CHECK: every rank's call compared before anything is sent.
        self.check = env.get("CHECK") is True
        #: Calls that ran so far: label -> (choice, its origin, who waits).
        self.used: dict[str, tuple[Choice, str, Execution]] = {}
        self._on_host = _of_host(state.members.tuning)
        #: Kind of a call -> True if devices do such calls themselves.
        self._ways: Kinds[Hashable, bool] = Kinds()
        self._bounces: list[Bounce] = []

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

        ``exchange``: the ranks may talk about the counts that only some of them know (blocking and persistent calls).
        ``rows``: what they said, where they did already. ``sets_up``: it is to be started many times later. ``stream``:
        the data is there when this stream gets here. ``label``: what the ranks compare, if not the call.
        """
        if delegated(call, self.rank):
            return self._prepare_delegated(call, sets_up)
        about = self._about(call, exchange, rows)
        if label:
            about = about._replace(label=label)
        if self.members.device.everywhere and not about.on_device and about.bound.dtype is not None:
            # Libraries choose by the kind of memory: all ranks must have the same.
            about = about._replace(label=f"{about.label} host")
        if self.check:
            self.compare(about.label)
        agreed = self._counts_in_flight(call.name, about.bound.call) if about.bound.local else None
        prepared = self._lowered(about, sets_up, stream)
        prepared.agreed = agreed
        prepared.exchange, prepared.counted = about.asked, about.counted
        prepared.repeatable = prepared.in_place and not (self.check or about.bound.local)
        return prepared

    def _prepare_delegated(self, call: CallSpec, sets_up: bool) -> Prepared:
        """A call that MPI has a part in, as it was prepared for one that looks the same, if there was one."""
        name, send, recv, op, root, counts = call
        key, kept, outof, into = look(self.delegated, self._in_place, name, send, recv, op_of(op), root, counts)
        if kept and not sets_up:
            prepared = kept.pop()
            prepared.delegated.again(outof, into, op)
            return prepared
        with_mpi = Delegated(call, self.size, self.rank)
        prepared = self.prepare(with_mpi.moved, sets_up=sets_up, label=with_mpi.label)
        if key is not None and prepared.repeatable and not sets_up and with_mpi.fits(outof, into):
            prepared.kept_by = self.delegated.keep(key, []) if kept is None else kept
        prepared.delegated = with_mpi
        return prepared

    def _about(self, call: CallSpec, exchange: bool, rows: Any = None) -> _About:
        """Understand a call, with the counts of all ranks where these may talk about them (``exchange``)."""
        name, bound = call.name, bind(call, self.size, self.rank)
        on_device = self._on_device(name, bound)
        how, ours = reduction_of(name, bound.dtype, call.op, self.rank)
        counted, asked = bound.local, None
        # mpi4py exchanges the counts of a reduce_scatter when it is called, in all forms.
        if bound.local and (exchange or name == "reduce_scatter"):
            bound, asked = self._complete(name, bound, rows)
        return _About(bound, label_of(name, bound, ours), how, ours, on_device, counted, asked)

    def captured(self, call: CallSpec, rows: Any) -> Prepared:
        """As :meth:`prepare`, for a stream that is being captured in a graph: every rank's kernels do it all.

        ``NotSupported``, on all ranks alike, for what they cannot do, or not yet.
        """
        about, lacks = self._about(call, True, rows), "its data lies in host memory"
        bound, label = about.bound, f"{about.label} in a graph"
        channels, topology = None, self.members.topology
        if about.on_device:
            channels, topology, lacks = self.members.for_graphs()
        if channels is None:
            raise NotSupported(f"{call.name} on rank {self.rank} cannot be captured in a graph: {lacks}")
        what = self._what(about, on_device=True)
        choice = Choice(with_role(what.call.collective, Role.ONE_STEP), queued=True)
        plan, whole = (make_plan(topology, what.call, choice, rank) for rank in (self.rank, None))
        with kernels.beside_a_capture(make=self.members.topology.flat):
            if not queues(channels, whole, Placement(plan, self.rank, what)):
                raise NotSupported(f"{call.name} on rank {self.rank} cannot be captured: no kernel does all of it")
            kind = self._kind((what, label), label)
            program = kind.take() or self._build(what, bound, label, False, (choice, "graph"), (plan, channels))
        prepared = Prepared(bound, kind, program, self.rank)
        prepared.exchange = about.asked
        if prepared.copies:
            raise NotSupported(f"{label} on rank {self.rank}: memory must be contiguous and read in place")
        return prepared

    def _on_device(self, name: str, bound: Bound) -> bool:
        """True if the call's data is on this rank's device."""
        if any(original.vendor != "host" for _, original, _ in bound.parts):
            raise NotSupported(f"{name} on rank {self.rank} takes host memory only: copy the data to the host")
        buffers = ("sendbuf", bound.send), ("recvbuf", bound.recv)
        if all(buffer is None or buffer.vendor == "host" for _, buffer in buffers):
            return False
        self.members.device.check(buffers)
        return True

    def _lowered(self, about: _About, sets_up: bool = False, stream: int | None = None) -> Prepared:
        bound, label, local, bounce = about.bound, about.label, about.bound.local, None
        what = self._what(about, on_device=about.on_device)
        tuning = self.members.tuning if about.on_device else self._on_host
        if about.on_device and not self._stays(what, local, about.op):
            what = self._what(about, on_device=False)
            bounce = self._bounce(label, local)
        # ``local`` is part of the key: one rank's counts can look like those of all, and then another algorithm runs.
        kind = self._kind((what, label, local), label)
        program = kind.take()
        if program is None:
            chosen = (self._without_counts(what), "counts unknown") if local else self._choice(what, tuning)
            program = self._build(what, bound, label, sets_up, chosen)
        if bounce is not None:
            self.used[label] = *self.used[label][:2], Execution.STAGED
        return Prepared(bound, kind, program, self.rank, bounce, stream)

    def _kind(self, key: Hashable, label: str) -> Kind:
        """Kind of the programs that are lowered from ``key``."""
        return self._cache.get(key) or self._cache.keep(key, Kind(label, []))

    def _what(self, about: _About, *, on_device: bool) -> ProgramSpec:
        """Everything but addresses that the call's program depends on, on this rank's device or in host memory."""
        bound, how = about.bound, about.how
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

    def _stays(self, what: ProgramSpec, local: bool, op: Op | None) -> bool:
        """True if the devices do a call themselves: by one vendor's library, or queued in streams. Alike on all ranks.

        Everything else goes by way of host memory whole.
        """
        members = self.members
        if members.topology.flat:
            return not (members.device.by_host or _order_shows(what))
        if members.channels is None or local:
            return False
        found = self._ways.get((what, op))
        if found is None:
            choice = self._choice(what, members.tuning)[0]
            plan, whole = (make_plan(members.topology, what.call, choice, rank) for rank in (self.rank, None))
            stays = choice.queued and queues(members.channels, whole, Placement(plan, self.rank, what))
            found = self._ways.keep((what, op), stays)
        return found

    def _bounce(self, label: str, local: bool) -> Bounce:
        """Bounce buffers for a call that goes by way of host memory; the first one of a kind is told of."""
        members = self.members
        if label not in self.used:
            why = f"no call of this communicator is queued ({members.lacks})"
            if members.topology.flat:
                why = members.device.by_host or "libucc's product of complex numbers differs in bits between ranks"
            elif members.channels is not None and local:
                why = "no rank knows all of its counts; blocking calls exchange them"
            elif members.channels is not None:
                why = "streams cannot do it: a vendor's library or compiler lacks the datatype or the operation"
            # Not expected in a communicator whose other calls are queued.
            first = members.channels is not None and not self._bounces and self.rank == 0
            say = log.log("coll").warning if first else log.log("coll").info
            say("%s goes by way of host memory, which is slower: %s", label, why)
        if not self._bounces:
            assert members.runtime is not None
            self._bounces.append(Bounce(members.runtime))
        return self._bounces[0]

    def _choice(self, what: ProgramSpec, tuning: Tuning) -> tuple[Choice, str]:
        """The choice for a call with counts, and what made it."""
        nbytes = elements(what.call) * what.dtype.itemsize
        about = self.members.topology, what.call.collective, nbytes, tuning
        return supported(choose(*about), nbytes), reason(*about)

    def _build(
        self,
        what: ProgramSpec,
        bound: Bound,
        label: str,
        sets_up: bool,
        chosen: tuple[Choice, str],
        graph: tuple[Plan, Channels] | None = None,
    ) -> Program:
        members, (choice, why) = self.members, chosen
        channels = members.channels if what.memory is not None else None
        plan, channels = graph or (make_plan(members.topology, what.call, choice, self.rank), channels)
        self.used[label] = choice, why, Execution.HOST
        route = Route(members.id << 52 | 1 << 51, channels, graph is not None)
        members.teams.look = self._looks(label, sets_up=sets_up)
        try:
            program = Lowering(plan, self.rank, what, members.teams, members.board, route).program(label)
        except CollectiveError as error:
            self._state.broke(error, plan)
            raise
        finally:
            members.teams.look = None
        self.used[label] = choice, why, program.execution
        total = sum(b.nbytes for b in (bound.send, bound.recv) if b is not None)
        lib.ucch_program_bytes(program.handle, total)
        return program

    def _looks(self, label: str, *, sets_up: bool) -> Callable[[], None]:
        """Looks while this rank waits for others to make the teams of a call, where they may call something else.

        A persistent call that is set up is no call yet, and other ranks may make it in another form. A rank that has
        refused the next call may have done so after this was set up there, which ends here, too, then: it has refused
        to set it up where that takes long.
        """
        began, watches = time.monotonic(), list[Watch]()

        def announce(text: str) -> tuple[int, int]:
            return self.members.board.announce(text, as_any=sets_up), 0

        def look() -> None:
            run_poll_hooks()
            if not watches and (not sets_up or time.monotonic() - began > _LATE):
                watches.append(Watch(self._state, label, announce))
            for watch in watches:
                watch.look()

        return look

    def _without_counts(self, what: ProgramSpec) -> Choice:
        """Choice for non-blocking calls whose counts only some ranks know; the same on every rank.

        In one island of devices the vendor's library, which needs its own counts only; else a message per block.
        """
        if self.members.topology.flat and what.memory is not None:
            return Choice(with_role(what.call.collective, Role.ONE_STEP))
        return Choice(with_role(what.call.collective, Role.UNCOUNTED))

    def _exchange(self, label: str, mine: Any) -> CountExchange:
        """The rows of int64 numbers (numpy, equal lengths) of all ranks, in rank order: a call of its own on the
        board."""
        rows = np.empty((self.size, len(mine)), np.int64)
        bound = bind(CallSpec("allgather", mine, rows), self.size, self.rank)
        prepared = self._lowered(_About(bound, label))
        self._run(prepared)
        return CountExchange(mine, rows, prepared)

    def _complete(self, name: str, bound: Bound, rows: Any) -> tuple[Bound, CountExchange | None]:
        """Exchange the counts that only some ranks know, and compare what two of them know; alike on every rank."""
        call, me, p = bound.call, self.rank, self.size
        if call.collective == "alltoallv":
            mine = *call.counts[me * p : (me + 1) * p], *call.counts[me::p]
        elif name == "reduce_scatter":
            assert bound.send is not None
            mine = call.counts[me], bound.send.count
        else:  # the root alone knows what it expects: by a fingerprint of it every rank compares that with what comes
            mine = call.counts[me], _fingerprint(call.counts) if me == call.root else 0
        label = f"{name} {bound.dtype}" + (f" root={call.root}" if call.root >= 0 else "") + ": counts"
        asked = self._exchange(label, np.array(mine, np.int64)) if rows is None else None
        rows = rows if asked is None else asked.rows
        if call.collective == "alltoallv":
            counts = self._matrix(name, rows)
        else:
            counts = tuple(rows[:, 0].tolist())
            if name == "reduce_scatter":
                self._check_total(name, counts, rows[:, 1])
            elif rows[call.root, 1] != _fingerprint(counts):
                self._disagree(name, label, call)
        return bound._replace(call=call._replace(counts=counts), local=False), asked

    def _matrix(self, name: str, rows: Any) -> tuple[int, ...]:
        """What each rank sends to each, where that is what the other one expects."""
        sent, expected = np.split(rows, 2, axis=1)
        for sender, receiver in np.argwhere(sent != expected.T):
            raise MismatchError(
                f"{name} on rank {self.rank}: rank {sender} sends {sent[sender, receiver]} elements to rank "
                f"{receiver}, which expects {expected[receiver, sender]}"
            )
        return tuple(sent.ravel().tolist())

    def _check_total(self, name: str, counts: Sequence[int], sent: Any) -> None:
        """Every rank must send as many elements as all of them receive."""
        for rank, count in enumerate(sent):
            if count != sum(counts):
                raise MismatchError(
                    f"{name} on rank {self.rank}: rank {rank} sends {count} elements, and the ranks' recvbufs "
                    f"together hold {sum(counts)}"
                )

    def _disagree(self, name: str, label: str, call: Call) -> None:
        """Find out and say, on every rank, whose count is not what the root expects."""
        asked = self._exchange(label, np.array(call.counts, np.int64))
        asked.prepared.give_back()
        due = asked.rows[call.root]
        for rank, row in enumerate(asked.rows):
            if row[rank] != due[rank]:
                raise MismatchError(
                    f"{name} on rank {self.rank}: root {call.root} counts {due[rank]} elements of rank {rank}, "
                    f"which has {row[rank]}"
                )

    def _counts_in_flight(self, name: str, call: Call) -> Callable[[], None]:
        """Send the counts along with a non-blocking call; to be compared when it is over.

        libucc reports nothing when less arrives than was expected.
        """
        me, p, root = self.rank, self.size, call.root
        ones = [int(root < 0 or root in (me, peer)) for peer in range(p)]
        peers = [peer for peer in range(p) if ones[peer]]
        mine = due = np.array([call.counts[me if root >= 0 and me != root else peer] for peer in peers], np.int64)
        if root < 0:
            mine, due = np.array(call.counts[me * p : (me + 1) * p]), np.array(call.counts[me::p])
        got = np.empty(len(peers), np.int64)
        bound = bind(CallSpec("alltoallv", [mine, ones], [got, ones]), p, me)
        label = f"{name}{f' root={root}' if root >= 0 else ''}: counts along"
        request = self._start(self._lowered(_About(bound, label)))

        def compare() -> None:
            request.Wait()
            for peer, one, two in zip(peers, got, due, strict=True):
                if one != two:
                    raise MismatchError(f"{name} on rank {me}: rank {peer} says {one} elements, this rank {two}")

        return compare

    def forget(self) -> None:
        """Let go of all that was prepared."""
        self._cache.clear()
        self.delegated.clear()

    def retune(self, tuning: Tuning) -> None:
        """Choose by other rules from now on; equal ones on every rank."""
        self.members.tuning = replace(tuning, queued=self.members.channels is not None)
        self._on_host = _of_host(tuning)
        self._ways.clear()

    def compare(self, label: str) -> None:
        """Compare what every rank is about to call; ``MismatchError`` on all of them."""
        text = label.encode()[:_SHOWN].ljust(_SHOWN)
        asked = self._exchange("UCCH_CHECK", np.frombuffer(text, np.int64))
        asked.prepared.give_back()
        labels = [row.tobytes().decode(errors="replace").rstrip() for row in asked.rows]
        for rank, other in enumerate(labels):
            if other != labels[0]:
                raise MismatchError(f"rank {rank} called {other} while rank 0 called {labels[0]}")


def _order_shows(what: ProgramSpec) -> bool:
    """True if libucc's kernels give ranks other bits: they fuse the products of complex numbers, whose order each rank
    begins with its own (ec_cuda of UCC 1.4). No vendor's library has these."""
    return what.compute.kind == "complex" and what.op == OPS["PROD"].code


def _of_host(tuning: Tuning) -> Tuning:
    """The tuning of calls on host memory."""
    return replace(tuning, queued=False) if tuning.queued else tuning


def _fingerprint(counts: Sequence[int]) -> int:
    """A number that differs for counts that differ, but for one mistake in billions."""
    data = np.array(counts, np.int64).tobytes()
    return zlib.crc32(data) | (zlib.adler32(data) & 0x7FFFFFFF) << 32


def reduction_of(name: str, dtype: DType | None, op: Any, rank: int) -> tuple[Reduction | None, Op | None]:
    """How a call reduces, and by which operation; None twice for those that do not."""
    if name not in ROWS or not ROWS[name].reduces:
        return None, None
    assert dtype is not None
    ours = op_of(OPS["SUM"] if op is None else op)
    how = reduction(dtype, ours) if ours is not None else None
    if how is None:
        raise NotSupported(
            f"{name} on rank {rank}: {ours or op} on {dtype} is not supported on host memory; "
            "docs/support.md lists what is"
        )
    return how, ours


def label_of(name: str, bound: Bound, op: Op | None) -> str:
    """Label on the arrival board, equal on every rank of a correct call."""
    call = bound.call
    count = ""
    if not bound.local and ROWS[call.collective].layout != "matrix":
        count = f"[{','.join(map(str, call.counts))}]"
    parts = [name, f"{bound.dtype}{count}" if bound.dtype else "", str(op or "")]
    if call.root >= 0:
        parts.append(f"root={call.root}")
    return " ".join(p for p in parts if p)
