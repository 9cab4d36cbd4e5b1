"""Runs one communicator's collectives: binds arguments, chooses, plans, lowers, starts, waits, explains failures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import env
from .binding import Bound, bind
from .buffers import Buffer, pack, unpack
from .collectives import ROWS, elements
from .engine import Program, lower
from .errors import CollectiveError, CollectiveTimeout, MismatchError, NotSupported, PeerError
from .membership import Membership
from .native import ffi, lib
from .ops import op_of
from .prepare import KINDS, Preparation, Prepared
from .request import SLICE, PersistentRequest, Request, reap, settle, wait_op
from .types import Op
from .ucc import status_name

__all__ = ["Runner"]

_ndarray = np.ndarray
_from_buffer = ffi.from_buffer
_run = lib.ucch_program_run
_NULL = ffi.NULL

#: Idle programs of one kind that are kept; more would only be needed by that many identical calls in flight.
_SPARE = 4
#: Kinds of calls remembered before the oldest is dropped.
_KINDS = 512

#: Programs and buffers of calls that failed or were dropped while libucc still used them; never freed.
_graveyard: list[object] = []


class _Prepared:
    """A bound call with its program, addresses, and what to do after it."""

    __slots__ = ("bound", "label", "pool", "program", "recv", "send", "unpack")

    def __init__(self, bound: Bound, pool: list[Program], program: Program, label: str) -> None:
        self.bound, self.pool, self.program, self.label = bound, pool, program, label
        self.send: Any = _NULL
        self.recv: Any = _NULL
        #: (packed copy, the caller's buffer) when the result has to be spread out.
        self.unpack: tuple[Buffer, Buffer] | None = None


class Runner:
    """Everything that the collectives of one communicator need. Collective to create."""

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        timeout = env.get("TIMEOUT")
        #: Seconds after which a call fails; 0 = never.
        self.timeout = 0.0 if math.isinf(timeout) else float(timeout)
        self.check = bool(env.get("CHECK"))
        self.members = members = Membership(mpi, self.timeout or 3600.0)
        self.mpi, self.rank, self.size = mpi, members.rank, members.size
        self.topology, self.board = members.topology, members.board
        #: Why the communicator can no longer be used; empty while it can.
        self.broken = ""
        #: What ran so far: label -> choice.
        self.used: dict[str, Choice] = {}
        self._in_place = MPI.IN_PLACE
        self._programs: dict[tuple[Lowering, str], list[Program]] = {}
        self._fast: dict[tuple[Any, ...], Program] = {}
        #: Persistent calls that were not freed: their requests must go before their teams.
        self._persistent: dict[int, _Prepared] = {}
        self._active = 0

    # --- calls --------------------------------------------------------------------------------------------------------

    def blocking(self, name: str, send: Any, recv: Any, op: Any = None, root: int = -1, recvcounts: Any = None) -> None:
        """Run a collective to its end."""
        # The usual call, two plain arrays as last time, does nothing but look up, take addresses and run.
        key = self._key(name, send, recv, op, root) if recvcounts is None else None
        program = self._fast.get(key) if key is not None else None
        if program is not None and not self.broken:
            try:
                into = _NULL if recv is None else _from_buffer(recv, require_writable=True)
                outof = _from_buffer(send) if type(send) is _ndarray else _NULL
            except (BufferError, ValueError, TypeError):
                pass  # read-only, strided or exotic: the binder handles or refuses it
            else:
                state = _run(program.handle, outof, into, self.timeout, SLICE)
                if state == 1:
                    return
                if state >= 0:
                    self._wait(program, state, (send, recv), name)
                    return
        prepared = self._prepare(name, send, recv, op, root, recvcounts, exchange=True)
        if prepared is None:
            return
        program = prepared.program
        state = _run(program.handle, prepared.send, prepared.recv, self.timeout, SLICE)
        if state < 0:
            raise CollectiveError(f"rank {self.rank}: {prepared.label} could not be started ({state})")
        self._wait(program, state, prepared, prepared.label)
        self._finish(prepared)
        if key is not None and not self.check and self._plain(prepared, send, recv):
            if len(self._fast) >= _KINDS:
                self._fast.clear()
            # The fast table keeps the program to itself: it is no longer in the pool.
            self._fast[key] = program
        else:
            self._give_back(prepared)

    def _key(self, name: str, send: Any, recv: Any, op: Any, root: int) -> tuple[Any, ...] | None:
        """What tells calls with plain arrays apart; None for anything else. In place counts as no send buffer."""
        if type(send) is _ndarray:
            outof = send.dtype, send.size
        elif send is None or send is self._in_place:
            outof = None
        else:
            return None
        if type(recv) is _ndarray:
            return name, outof, recv.dtype, recv.size, op, root
        return (name, outof, op, root) if recv is None else None

    def _plain(self, prepared: _Prepared, send: Any, recv: Any) -> bool:
        """Whether addresses are all that changes from one such call to the next."""
        bound = prepared.bound
        return (
            prepared.unpack is None
            and not bound.local
            and (type(send) is _ndarray) == (bound.send is not None)
            and (recv is None) == (bound.recv is None)
            and (recv is None or recv.size > 0)
        )

    def start(self, name: str, send: Any, recv: Any, op: Any = None, root: int = -1, recvcounts: Any = None) -> Request:
        """Start a collective and return its request."""
        prepared = self._prepare(name, send, recv, op, root, recvcounts, exchange=False)
        if prepared is None:
            return _finished()
        lib.ucch_progress_thread(1)
        state = lib.ucch_program_start(prepared.program.handle, prepared.send, prepared.recv, self.timeout)
        if state < 0:
            raise CollectiveError(f"rank {self.rank}: {prepared.label} could not be started ({state})")
        self._active += 1

        def finish(state: int, status: Any) -> None:
            self._active -= 1
            self._judge(prepared.program, state, prepared, prepared.label)
            self._finish(prepared)
            self._give_back(prepared)

        return Request(prepared.program.op, prepared, finish, owner=self)

    def persistent(
        self, name: str, send: Any, recv: Any, op: Any = None, root: int = -1, recvcounts: Any = None
    ) -> PersistentRequest:
        """Set a collective up once, to be started many times."""
        prepared = self._prepare(name, send, recv, op, root, recvcounts, exchange=True)
        if prepared is None:
            idle = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
            return PersistentRequest(lib.ucch_message_op(idle), idle, lambda: 0, _nothing, lambda: None)
        handle, timeout = prepared.program.handle, self.timeout
        status = lib.ucch_program_persist(handle, prepared.send, prepared.recv)
        if status < 0:
            raise CollectiveError(f"rank {self.rank}: {prepared.label}: {status_name(status)}")
        lib.ucch_progress_thread(1)
        self._persistent[id(prepared)] = prepared
        begin, outof, into = lib.ucch_program_start, prepared.send, prepared.recv

        def start() -> int:
            if self.broken or prepared.unpack is not None:
                self._usable()
                self._repack(prepared)
            state = int(begin(handle, outof, into, timeout))
            if state < 0:
                raise CollectiveError(f"rank {self.rank}: {prepared.label} could not be started ({state})")
            return state

        def finish(state: int, status: Any) -> None:
            self._judge(prepared.program, state, prepared, prepared.label)
            self._finish(prepared)

        def free() -> None:
            if self._persistent.pop(id(prepared), None) is not None:
                lib.ucch_program_drop(handle)

        simple = not prepared.copies
        return PersistentRequest(prepared.program.op, prepared, start, finish, free, simple=simple, owner=self)

    # --- preparing ----------------------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self.broken:
            raise CollectiveError(
                f"rank {self.rank}: this communicator can no longer be used ({self.broken}); "
                "free it and make a new one from the MPI communicator"
            )
        reap()

    def _prepare(
        self, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any, *, exchange: bool
    ) -> _Prepared | None:
        """Bind, choose, plan and lower a call, or return None when there is nothing to do."""
        self._usable()
        bound = bind(name, self.size, self.rank, send, recv, root, recvcounts)
        how, ours = self._reduction(name, bound.dtype, op)
        if self.size == 1 and name == "barrier":
            return None
        if bound.local and exchange:
            bound = self._complete(bound)
        label = self._label(bound, ours)
        if self.check:
            self._compare(label)
        return self._lowered(bound, how, ours, label)

    def _lowered(self, bound: Bound, how: Reduction | None, op: Op | None, label: str) -> _Prepared:
        dtype = bound.dtype or DTYPES["uint8"]
        compute = how.compute if how else dtype
        what = Lowering(
            call=bound.call,
            dtype=dtype if how is None or how.compute.name != "uint8" else how.compute,
            compute=compute,
            op=how.op.code if how else 0,
            divisor=self.size if how and how.divide else 0,
            in_place=bound.in_place,
            send_displs=bound.send_displs,
            recv_displs=bound.recv_displs,
        )
        pool = self._programs.get((what, label))
        if pool is None:
            if len(self._programs) >= _KINDS:
                self._programs.pop(next(iter(self._programs)))
            pool = self._programs[what, label] = []
        program = pool.pop() if pool else self._build(what, bound, op, label)
        prepared = _Prepared(bound, pool, program, label)
        self._addresses(prepared)
        return prepared

    def _build(self, what: Lowering, bound: Bound, op: Op | None, label: str) -> Program:
        call = what.call
        if bound.local:
            choice = Choice("flat")
        else:
            nbytes = elements(call) * what.dtype.itemsize
            choice = choose(self.topology, call.collective, nbytes, op, self.members.tuning)
        plan = make_plan(self.topology, call, choice)
        self.used[label] = choice
        tag = self.members.id << 52 | 1 << 51
        program = lower(plan, self.rank, what, self.members.teams, self.board, tag, label)
        total = sum(b.nbytes for b in (bound.send, bound.recv) if b is not None)
        lib.ucch_program_bytes(program.handle, total)
        return program

    def _addresses(self, prepared: _Prepared) -> None:
        bound = prepared.bound
        if bound.send is not None:
            source = pack(bound.send)
            prepared.send = ffi.cast("void *", source.ptr)
            prepared.bound = bound = bound._replace(send=source)
        if bound.recv is not None:
            # Also filled beforehand: in place it holds the input, and gaps between segments keep their contents.
            target = pack(bound.recv)
            if target is not bound.recv:
                prepared.unpack = (target, bound.recv)
            prepared.recv = ffi.cast("void *", target.ptr)

    def _repack(self, prepared: _Prepared) -> None:
        if prepared.unpack is not None:
            target, original = prepared.unpack
            fresh = pack(original)
            ffi.memmove(prepared.recv, ffi.cast("void *", fresh.ptr), target.nbytes)

    def _finish(self, prepared: _Prepared) -> None:
        if prepared.unpack is not None:
            unpack(*prepared.unpack)

    def _give_back(self, prepared: _Prepared) -> None:
        if len(prepared.pool) < _SPARE:
            prepared.pool.append(prepared.program)

    def _reduction(self, name: str, dtype: DType | None, op: Any) -> tuple[Reduction | None, Op | None]:
        if not ROWS[name].reduces:
            return None, None
        assert dtype is not None
        ours = op_of(OPS["SUM"] if op is None else op)
        how = reduction(dtype, ours) if ours is not None else None
        if how is None:
            raise NotSupported(
                f"{name} on rank {self.rank}: {ours or op} on {dtype} is not supported on host memory; "
                "docs/support.md lists what is"
            )
        return how, ours

    def _complete(self, bound: Bound) -> Bound:
        """Exchange the counts that only some ranks know, and compare what two of them know."""
        call, me, p = bound.call, self.rank, self.size
        if call.collective == "alltoallv":
            rows = self.mpi.allgather(call.counts[me * p : (me + 1) * p])
            counts = tuple(n for row in rows for n in row)
            mine = call.counts[me::p]
            wrong = [(r, rows[r][me], mine[r]) for r in range(p) if rows[r][me] != mine[r]]
            if wrong:
                self._vote(f"rank {wrong[0][0]} sends {wrong[0][1]} elements to rank {me}, which expects {wrong[0][2]}")
            else:
                self._vote("")
        else:
            counts = tuple(self.mpi.bcast(call.counts if me == call.root else None, root=call.root))
            same = counts[me] == call.counts[me]
            self._vote(
                "" if same else f"the root counts {counts[me]} elements of rank {me}, which has {call.counts[me]}"
            )
        return bound._replace(call=call._replace(counts=counts), local=False)

    def _vote(self, problem: str) -> None:
        problems = [p for p in self.mpi.allgather(problem) if p]
        if problems:
            raise MismatchError(f"rank {self.rank}: {problems[0]}")

    def _label(self, bound: Bound, op: Op | None) -> str:
        """What the arrival board shows, equal on every rank of a correct call."""
        call = bound.call
        count = "" if bound.local or len(call.counts) != 1 else f"[{call.counts[0]}]"
        parts = [call.collective, f"{bound.dtype}{count}" if bound.dtype else "", str(op or "")]
        if call.root >= 0:
            parts.append(f"root={call.root}")
        return " ".join(p for p in parts if p)

    def _compare(self, label: str) -> None:
        """UCCH_CHECK: every rank's call compared before anything is sent."""
        labels = self.mpi.allgather(label)
        for rank, other in enumerate(labels):
            if other != labels[0]:
                raise MismatchError(f"rank {rank} called {other} while rank 0 called {labels[0]}")

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _wait(self, program: Program, state: int, keep: object, label: str) -> None:
        """Wait for a program that has been started; raise its failure."""
        if state == 0:
            try:
                state = wait_op(program.op)
            except BaseException:
                self.broken = f"{label} was interrupted"
                _graveyard.append((program, keep))
                raise
        self._judge(program, state, keep, label)

    def _judge(self, program: Program, state: int, keep: object, label: str) -> None:
        if state == 1:
            return
        error = ffi.new("ucch_error *")
        lib.ucch_op_error(program.op, error)
        failure = self._explain(error, label)
        self.broken = str(failure)
        _graveyard.append((program, keep))
        raise failure

    def track(self, change: int) -> None:
        """Count the communicator's requests in flight up or down."""
        self._active += change

    def stats(self) -> dict[str, float]:
        """Finished calls, seconds from their starts to their ends, and bytes of the callers' buffers."""
        calls, seconds, nbytes = ffi.new("uint64_t *"), ffi.new("double *"), ffi.new("uint64_t *")
        lib.ucch_board_stats(self.board.native, calls, seconds, nbytes)
        return {"calls": int(calls[0]), "seconds": float(seconds[0]), "bytes": int(nbytes[0])}

    @property
    def busy(self) -> int:
        """Requests that were started and not yet waited for."""
        reap()
        started = sum(lib.ucch_program_active(p.program.handle) for p in self._persistent.values())
        return int(self._active + started)

    def close(self) -> None:
        """Release teams and board; collective, with nothing in flight."""
        settle(self, self.timeout or math.inf)
        if self.busy and not self.broken:
            raise ValueError(f"rank {self.rank}: {self.busy} requests of this communicator are still active")
        if self.broken:
            # Its teams hang in libucc with whatever the failure left there; they are not touched again.
            _graveyard.append((self.members, self._programs, self._fast, self._persistent))
            self.members.release_id()
            return
        for prepared in self._persistent.values():
            lib.ucch_program_drop(prepared.program.handle)
        self._persistent.clear()
        self._programs.clear()
        self._fast.clear()
        self.members.close()


def _nothing(state: int, status: Any) -> None:
    """What is left to do after a call that had nothing to do."""


def _finished() -> Request:
    """A request of a call that had nothing to do."""
    request = Request(None, None, _nothing)
    request._done = True
    return request
