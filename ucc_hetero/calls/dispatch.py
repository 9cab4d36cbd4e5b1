"""Runs one communicator's collectives: starts what is prepared, waits, and keeps the books of what is under way."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .. import env
from ..bindings.ucc import status_name
from ..bootstrap.group import Membership
from ..device import report, stream_handle
from ..engine.lowering import Execution, Program
from ..errors import CollectiveError, DeviceError, NotSupported, RefusedError
from ..native.libraries import ffi, lib
from ..planner.select import Tuning
from .arguments import CallSpec, Completion
from .failure import StaleError, failure_of, not_started
from .mpi_fallback import Delegate, is_delegated
from .persistent import PersistentRequest, retire, unsettle
from .prepare import Preparation, Prepared
from .program_cache import Kind, ProgramCache, pointer
from .refusals import Refusals
from .request import SLICE, Request, finished, look_around, reap, wait_op
from .shutdown import wind_up
from .stream_launch import Launches

__all__ = ["Runner"]

_T = TypeVar("_T")

#: Non-blocking calls whose ranks exchange counts while they run.
EXCHANGED = frozenset({"gatherv", "scatterv", "alltoallv", "alltoallw"})

_run = lib.ucch_program_run
_cast = ffi.cast
_LAUNCHED = Execution.LAUNCHED

#: Programs and buffers of calls that failed or were dropped while libucc still used them; never freed.
_graveyard: list[object] = []


class Runner:
    """Everything that the collectives of one communicator need. Collective to create."""

    def __init__(self, mpi: Any, *, arenas: bool = False) -> None:
        from mpi4py import MPI

        timeout = env.get("TIMEOUT")
        #: Seconds after which a call fails; 0 = never.
        self.timeout = 0.0 if math.isinf(timeout) else float(timeout)
        self.members = members = Membership(mpi, self.timeout or 3600.0, arenas)
        self.mpi, self.rank, self.size = mpi, members.rank, members.size
        self.topology, self.board = members.topology, members.board
        #: Why the communicator can no longer be used; empty while it can.
        self.broken = ""
        self._cache = ProgramCache(MPI.IN_PLACE)
        #: Waits for an operation; whoever has more to look at meanwhile puts something else here.
        self.wait: Callable[[Any], int] = wait_op
        #: Whether blocking calls exchange counts that only some ranks know. Else they travel along with the data, as in
        #: non-blocking calls: where other ranks may make the same call as such a one.
        self.exchanges = True
        self.delegate = Delegate(mpi, self.board, self.timeout, self.track, self._broke)
        self._prepared = Preparation(members, self.delegate, self._cache, self._run, self._overtaken)
        #: Calls that a rank has refused.
        self.refusals = Refusals(members, self.timeout)
        #: Calls that ran so far, as ``Preparation.used``.
        self.used = self._prepared.used
        self.launches = Launches(members.board, members.rank, self._broke)
        #: Persistent calls that were not freed: their requests must go before their teams.
        self._persistent: dict[int, Prepared] = {}
        self._active, self._counting = 0, threading.Lock()

    # --- calls --------------------------------------------------------------------------------------------------------

    def blocking(
        self, name: str, send: Any, recv: Any, op: Any = None, root: Any = -1, counts: Any = None, stream: Any = None
    ) -> None:
        """Run a collective to its end; with ``stream`` it starts when the stream gets there.

        The arguments are those of a ``CallSpec``, which would take a tenth of a short call to make.
        """
        if stream is not None:
            self.start(CallSpec(name, send, recv, op, root, counts), stream, Completion.HOST).Wait()
            return
        try:
            # The usual call, of arrays as last time, does nothing but look up, take addresses and run.
            key, kind, outof, into = self._cache.look(name, send, recv, op, root, counts)
            rows = None
            if kind is not None and not self.broken:
                if kind.exchange is None:
                    if self._repeat(kind, outof, into, (send, recv)):
                        return
                elif self.exchanges:
                    kind.exchange.again()
                    rows = kind.exchange.rows
                    if rows.tobytes() == kind.counts and self._repeat(kind, outof, into, (send, recv)):
                        return
            call = CallSpec(name, send, recv, op, root, counts)
            self._again_if_stale(self._general, call, (key, outof, into), rows)
        except Exception as error:
            self.refuse_call(name, error, started=not self.exchanges)
            raise

    def _general(self, call: CallSpec, seen: tuple[Any, Any, Any], rows: Any) -> None:
        """A call that was not made before, or not like this."""
        self._ready()
        if is_delegated(call.op):
            self.delegate.start(call).Wait()
            return
        prepared = self._prepared.prepare(call, exchange=self.exchanges, rows=rows)
        if prepared is None:
            return
        self._run(prepared)
        prepared.finish()
        key, outof, into = seen
        self._cache.keep(key, prepared, outof, into)
        prepared.give_back()

    def _again_if_stale(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """Make a call; anew if it turns out meanwhile that an earlier one has come to nothing."""
        while True:
            try:
                return make(*arguments)
            except StaleError:
                continue

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot make its next call: a mistake that it alone may see."""
        if self.size > 1 and not self.broken and not isinstance(error, CollectiveError):
            self.refusals.refuse(f"{type(error).__name__}: {error}")
            self._forget()

    def refuse_call(self, name: str, error: Exception, *, started: bool = True) -> None:
        """As :meth:`refuse`; ``started``: of a call in which counts travel along with the data."""
        self.refuse(error)
        if started and name in EXCHANGED and self.size > 1 and not (self.broken or isinstance(error, CollectiveError)):
            self.delegate.refuse_along()

    def _repeat(self, kind: Kind, outof: Any, into: Any, keep: object) -> bool:
        """Run a call of a known kind to its end; False when it could not start like this."""
        try:
            program = kind.idle.pop()
        except IndexError:
            return False  # all are in use
        if type(outof) is int:
            outof = _cast("void *", outof)
        if type(into) is int:
            into = _cast("void *", into)
        try:
            state = _run(program.handle, outof, into, self.timeout, SLICE) or self.wait(program.op)
        except BaseException:
            self._interrupted(program, keep, kind.label)
            raise
        if state > 1:
            self._judge(program, state, keep, kind.label)
        kind.idle.append(program)
        return bool(state == 1)

    def start(self, call: CallSpec, stream: Any = None, completion: Completion = Completion.STREAM) -> Request:
        """Start a collective and return its request; with ``stream`` it is a part of the stream's work."""
        lib.ucch_progress_thread(1)
        return self.begin(call, stream, completion)

    def begin(self, call: CallSpec, stream: Any = None, completion: Completion = Completion.STREAM) -> Request:
        """As :meth:`start`, for a caller that makes progress for a moment and wakes the progress thread after that."""
        try:
            if stream is None:
                return self._again_if_stale(self._started, call)
            return self._streamed(call, stream_handle(stream), completion)
        except Exception as error:
            self.refuse_call(call.name, error, started=stream is None)
            raise

    def _started(self, call: CallSpec) -> Request:
        """The request of a call that begins now."""
        self._usable()
        key, kind, outof, into = self._cache.look(*call)
        if kind is not None and kind.exchange is None and (program := kind.take()) is not None:
            keep = call, outof, into = call, pointer(outof), pointer(into)
            if lib.ucch_program_start(program.handle, outof, into, self.timeout) >= 0:
                return self._request(program, kind, keep)
            kind.give_back(program)  # such as one buffer for both sides: the general way handles or refuses it
        self._ready()
        if is_delegated(call.op):
            return self.delegate.start(call)
        prepared = self._prepared.prepare(call)
        if prepared is None:
            return finished()
        self._cache.keep(key, prepared, outof, into)
        program = prepared.program
        state = lib.ucch_program_start(program.handle, prepared.send, prepared.recv, self.timeout)
        if state < 0:
            raise not_started(self.rank, prepared.label, state)
        return self._request(program, prepared.kind, prepared, prepared)

    def _request(self, program: Program, kind: Kind, keep: object, prepared: Prepared | None = None) -> Request:
        """The request of a program that has begun."""
        self.track(1)

        def finish(state: int, status: Any) -> None:
            self.track(-1)
            self._judge(program, state, keep, kind.label)
            if prepared is None:
                kind.give_back(program)
            else:
                prepared.finish()
                prepared.give_back()

        return Request(program.op, keep, finish, owner=self)

    def _streamed(self, call: CallSpec, stream: int, completion: Completion) -> Request:
        """The request of a call that begins when ``stream`` gets there.

        Where the stream must not wait for it (docs/gpu.md) the host does, here if it is the stream that should. No
        stream is held for a call that whoever waits for its request completes: who allocates on the device at any time
        could wait for it, with the locks that the call needs to end.
        """
        key, kind, outof, into = self._cache.look(*call)
        if kind is not None and not self.broken and (program := kind.take()) is not None:
            try:
                launched = self._launched(program, kind.label, outof, into, stream)
            finally:
                kind.give_back(program)
            if launched is not None:
                return launched
        self._ready()
        if is_delegated(call.op):
            raise NotSupported(
                f"{call.name} on rank {self.rank}: an operation of the user's own runs on the host, in no stream"
            )
        prepared = self._prepared.prepare(call, exchange=completion is Completion.HOST, stream=stream)
        if prepared is None:
            return finished()
        if prepared.copies:
            raise NotSupported(
                f"{call.name} on rank {self.rank}: with stream=, memory must be contiguous and read in place"
            )
        launched = self._launched(prepared.program, prepared.label, prepared.send, prepared.recv, stream)
        if launched is None:
            return self._begin_on(prepared, stream, ordered=completion is Completion.STREAM)
        self._cache.keep(key, prepared, outof, into)
        prepared.give_back()
        return launched

    def _launched(self, program: Program, label: str, outof: Any, into: Any, stream: int) -> Request | None:
        """The request of a program that was left to a stream; None where that cannot be, or not yet."""
        if program.execution < _LAUNCHED:
            return None
        return self.launches.launch(program, label, outof, into, self.timeout, stream, self)

    def _begin_on(self, prepared: Prepared, stream: int, *, ordered: bool) -> Request:
        """Start what was prepared when ``stream`` gets there; ``ordered``: the stream waits for the end."""
        program = prepared.program
        runtime = self.members.runtime
        if runtime is None:
            raise DeviceError(f"rank {self.rank} has no GPU runtime for stream= ({report(self.members.place.vendor)})")
        both, at = (prepared.send, prepared.recv), _cast("void *", stream)
        # Calls that could not be launched yet hold the stream, where streams may be held.
        holds = ordered and (program.execution is Execution.HELD or (program.execution is _LAUNCHED and runtime.holds))
        if prepared.staged is not None:
            holds = ordered and runtime.holds
        state = lib.ucch_program_start_on(program.handle, *both, self.timeout, at, holds)
        if state < 0:
            raise not_started(self.rank, prepared.label, state)
        request = self._request(program, prepared.kind, prepared, prepared)
        if state and prepared.staged is not None:
            prepared.staged.leave(stream)
        if ordered and not state:
            request.Wait()  # the stream cannot wait for this call, or must not: the host does
        return request

    def persistent(self, call: CallSpec) -> PersistentRequest:
        """Set a collective up once, to be started many times."""
        try:
            if is_delegated(call.op):
                self._ready()
                return self.delegate.request(call, refuse=self.refuse)
            prepared = self._again_if_stale(self._set_up, call)
        except Exception as error:
            self.refuse(error)
            raise
        if prepared is None:
            idle = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
            return PersistentRequest(lib.ucch_message_op(idle), idle, lambda: 0, lambda *_: None, lambda: None)
        return self._standing(prepared, call)

    def _set_up(self, call: CallSpec) -> Prepared | None:
        """A call that is ready to be started again and again."""
        self._ready()
        prepared = self._prepared.prepare(call, exchange=True, now=False)
        if prepared is None:
            return None
        status = lib.ucch_program_persist(prepared.program.handle, prepared.send, prepared.recv, self.timeout)
        if status < 0:
            raise CollectiveError(f"rank {self.rank}: {prepared.label}: {status_name(status)}")
        lib.ucch_progress_thread(1)
        self._persistent[id(prepared)] = prepared
        return prepared

    def _standing(self, prepared: Prepared, call: CallSpec) -> PersistentRequest:
        """The request of a call that was set up."""
        teams = self.members.teams

        def start() -> int:
            return self._again_if_stale(start_now)

        def start_now() -> int:
            nonlocal prepared, teams
            self._ready()
            if teams is not self.members.teams:  # a call was refused: others are used by now
                free()
                anew = self._set_up(call)
                assert anew is not None
                prepared, teams = anew, self.members.teams
            elif not prepared.in_place:
                prepared.refill()
            state = int(lib.ucch_program_again(prepared.program.handle))
            if state < 0:
                raise not_started(self.rank, prepared.label, state)
            request.rebind(prepared.program.op, prepared, prepared.program.handle if prepared.in_place else None)
            return state

        def finish(state: int, status: Any) -> None:
            self._judge(prepared.program, state, prepared, prepared.label)
            prepared.finish()

        def free() -> None:
            if self._persistent.pop(id(prepared), None) is not None:
                lib.ucch_program_drop(prepared.program.handle)

        direct = prepared.program.handle if prepared.in_place else None
        request = PersistentRequest(
            prepared.program.op, prepared, start, finish, free, direct=direct, owner=self,
            in_stream=partial(self.start, call), refuse=self.refuse,
        )  # fmt: skip
        return request

    # --- books --------------------------------------------------------------------------------------------------------

    def abandon(self, why: str) -> None:
        """From now on nothing is started, in Python or by the native engine."""
        self.broken = why
        lib.ucch_board_break(self.board.native)
        self.board.leave()  # ranks that come to later calls need not wait for the deadline

    def _usable(self) -> None:
        if self.broken:
            raise CollectiveError(
                f"rank {self.rank}: this communicator can no longer be used ({self.broken}); "
                "free it and make a new one from the MPI communicator"
            )
        reap()

    def _ready(self) -> None:
        """As :meth:`_usable`, for a collective: go on from the calls that were refused, as the other ranks do."""
        self._usable()
        look_around()
        if self.refusals.pending:
            self.refusals.settle()
        if self.refusals.catch_up():
            self._forget()

    def _overtaken(self, keep: object) -> None:
        """The last call came to nothing here, because another rank has refused it."""
        _graveyard.append(keep)
        self.refusals.give_up(int(lib.ucch_board_started(self.board.native)))
        self._forget()

    def _broke(self, failure: Exception, keep: object) -> None:
        """A call failed: whoever ran it may still use its memory, and nothing more is run."""
        self.abandon(str(failure))
        _graveyard.append(keep)

    def _run(self, prepared: Prepared) -> None:
        """Run a prepared call to its end, in this thread."""
        program = prepared.program
        try:
            state = _run(program.handle, prepared.send, prepared.recv, self.timeout, SLICE) or self.wait(program.op)
        except BaseException:
            self._interrupted(program, prepared, prepared.label)
            raise
        if state < 0:
            raise not_started(self.rank, prepared.label, state)
        self._judge(program, state, prepared, prepared.label)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _interrupted(self, program: Program, keep: object, label: str) -> None:
        """After Ctrl-C in a blocking call: the others may finish it, this rank never learns of that."""
        if lib.ucch_program_active(program.handle):
            if not self.broken:
                self.abandon(f"{label} was interrupted")
            _graveyard.append((program, keep))

    def _judge(self, program: Program, state: int, keep: object, label: str) -> None:
        if state == 1:
            return
        failure: Exception = failure_of(program.op, self.board, self.rank, label, self.timeout)
        if isinstance(failure, RefusedError) and program.execution < _LAUNCHED:
            error = ffi.new("ucch_error *")
            lib.ucch_op_error(program.op, error)
            _graveyard.append((program, keep))
            self.refusals.give_up(int(error.seq))
            self._forget()
            raise failure
        if isinstance(keep, Prepared):
            failure = keep.reason(failure)
        self._broke(failure, (program, keep))
        raise failure

    def retune(self, tuning: Tuning) -> None:
        """Choose by other rules from now on. Collective, with nothing in flight; equal ones on every rank."""
        self._forget()
        self._prepared.retune(tuning)

    def _forget(self) -> None:
        self._cache.clear()
        unsettle(self)

    def track(self, change: int) -> None:
        """Count the communicator's requests in flight up or down, from any thread."""
        with self._counting:
            self._active += change

    def stats(self) -> dict[str, float]:
        """Finished calls, seconds from their starts to their ends, and bytes of the callers' buffers."""
        calls, seconds, nbytes = ffi.new("uint64_t *"), ffi.new("double *"), ffi.new("uint64_t *")
        lib.ucch_board_stats(self.board.native, calls, seconds, nbytes)
        return {"calls": int(calls[0]), "seconds": float(seconds[0]), "bytes": int(nbytes[0])}

    @property
    def busy(self) -> int:
        """Requests that were started and not seen to end."""
        started = sum(lib.ucch_program_active(p.program.handle) for p in self._persistent.values())
        return int(self._active + started)

    def close(self) -> bool:
        """Release teams and board; collective, with nothing in flight that somebody holds. Whether all ranks do so."""
        together = wind_up(self)
        retire(self)
        if not self.broken:
            self.refusals.catch_up()
        if self.broken:
            # Its teams hang in libucc with whatever the failure left there; they are not touched again.
            _graveyard.append((self.members, self._cache, self._persistent))
            self.members.release_id()
            return together
        for prepared in self._persistent.values():
            lib.ucch_program_drop(prepared.program.handle)
        self._persistent.clear()
        self._forget()
        self.members.close()
        return together
