"""Runs one communicator's collectives: starts what is prepared, waits, and keeps the books of what is under way."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .. import env
from ..bindings.ucc import status_name
from ..bootstrap.group import Membership
from ..device import report, stream_handle
from ..engine.lowering import Program
from ..errors import CollectiveError, DeviceError, NotSupported, RefusedError
from ..native.libraries import ffi, lib
from ..planner.select import Tuning
from .arguments import root_of
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
        self.delegate = Delegate(mpi, self.board, self.timeout, self.track, self._broke)
        self._prepared = Preparation(members, self.delegate, self._cache, self._run, self._overtaken)
        #: Calls that a rank has refused.
        self.refusals = Refusals(members)
        #: What ran so far, as ``Preparation.used``.
        self.used = self._prepared.used
        self.launches = Launches(members.board, members.rank, self._broke)
        #: Persistent calls that were not freed: their requests must go before their teams.
        self._persistent: dict[int, Prepared] = {}
        self._active, self._counting = 0, threading.Lock()

    # --- calls --------------------------------------------------------------------------------------------------------

    def blocking(
        self,
        name: str,
        send: Any,
        recv: Any,
        op: Any = None,
        root: int = -1,
        recvcounts: Any = None,
        stream: Any = None,
        *,
        exchange: bool = True,
    ) -> None:
        """Run a collective to its end; with ``stream`` it starts when the stream gets there.

        Without ``exchange`` counts that only some ranks know travel along with the data, as in non-blocking calls:
        where some ranks may make the same call as such a one.
        """
        try:
            if type(root) is not int:
                root = root_of(name, self.size, self.rank, root)
            if stream is not None:
                self.start(name, send, recv, op, root, recvcounts, stream, host=True).Wait()
                return
            # The usual call, of arrays as last time, does nothing but look up, take addresses and run.
            key, kind, outof, into = self._cache.look(name, send, recv, op, root, recvcounts)
            rows = None
            if kind is not None and not self.broken:
                if kind.exchange is None:
                    if self._repeat(kind, outof, into, (send, recv)):
                        return
                elif exchange:
                    kind.exchange.again()
                    rows = kind.exchange.rows
                    if rows.tobytes() == kind.counts and self._repeat(kind, outof, into, (send, recv)):
                        return
            arguments = name, send, recv, op, root, recvcounts
            self._again_if_stale(self._general, arguments, (key, outof, into), rows, exchange)
        except Exception as error:
            self.refuse_call(name, error, started=not exchange)
            raise

    def _general(self, arguments: tuple[Any, ...], seen: tuple[Any, Any, Any], rows: Any, exchange: bool) -> None:
        """A call that was not made before, or not like this."""
        self._ready()
        if arguments[3] is not None and is_delegated(arguments[3]):
            self.delegate.run(*arguments)
            return
        prepared = self._prepared.prepare(*arguments, exchange=exchange, rows=rows)
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
        program = kind.take()
        if program is None:
            return False
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

    def start(
        self,
        name: str,
        send: Any,
        recv: Any,
        op: Any = None,
        root: int = -1,
        recvcounts: Any = None,
        stream: Any = None,
        *,
        host: bool = False,
    ) -> Request:
        """Start a collective and return its request; with ``stream`` it is a part of the stream's work.

        ``host``: the caller will wait for the request at once, so that the stream need not.
        """
        try:
            if stream is not None:
                return self.start_on(stream_handle(stream), name, send, recv, op, root, recvcounts, host=host)[0]
            return self._again_if_stale(self._started, name, send, recv, op, root, recvcounts)
        except Exception as error:
            self.refuse_call(name, error, started=stream is None)
            raise

    def _started(self, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any) -> Request:
        """The request of a call that begins."""
        if type(root) is not int:
            root = root_of(name, self.size, self.rank, root)
        self._ready()
        key, kind, outof, into = self._cache.look(name, send, recv, op, root, recvcounts)
        if kind is not None and kind.exchange is None:
            again = self._begin_again(kind, pointer(outof), pointer(into), (send, recv))
            if again is not None:
                return again
        if op is not None and is_delegated(op):
            request = self.delegate.request(name, send, recv, op, root, recvcounts)
            request.Start()
            return request
        prepared = self._prepared.prepare(name, send, recv, op, root, recvcounts, exchange=False)
        if prepared is None:
            return finished()
        self._cache.keep(key, prepared, outof, into)
        return self._begin(prepared)

    def _begin_again(self, kind: Kind, outof: Any, into: Any, keep: object) -> Request | None:
        """Start a call of a known kind; None when it cannot be like this."""
        program = kind.take()
        if program is None:
            return None
        lib.ucch_progress_thread(1)
        if lib.ucch_program_start(program.handle, outof, into, self.timeout) < 0:
            kind.give_back(program)
            return None  # such as one buffer for both sides: the general way handles or refuses it
        self.track(1)
        keep = keep, outof, into

        def finish(state: int, status: Any) -> None:
            self.track(-1)
            self._judge(program, state, keep, kind.label)
            kind.give_back(program)

        return Request(program.op, keep, finish, owner=self)

    def start_on(
        self, stream: int, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any,
        *, host: bool = False, later: bool = False, hold: bool = True,
    ) -> tuple[Request, bool]:  # fmt: skip
        """Start a collective when ``stream`` gets there; also whether the stream waits for its end.

        Where streams must not wait for a call (docs/gpu.md) the host does, here or, with ``later``, when the caller
        waits for the request. ``host`` as in :meth:`start`. Without ``hold`` no stream is held: a caller that allocates
        on the device at any time could wait for it, with the locks that the call needs to end.
        """
        key, kind, outof, into = self._cache.look(name, send, recv, op, root, recvcounts)
        if kind is not None and not self.broken and (program := kind.take()) is not None:
            try:
                if program.launches:
                    request = self.launches.launch(program, kind.label, outof, into, self.timeout, stream, self)
                    if request is not None:
                        return request, True
            finally:
                kind.give_back(program)
        prepared = self._bound(name, send, recv, op, root, recvcounts, exchange=host)
        if prepared is None:
            return finished(), True
        if prepared.program.launches:
            both = prepared.send, prepared.recv
            request = self.launches.launch(prepared.program, prepared.label, *both, self.timeout, stream, self)
            if request is not None:
                self._cache.keep(key, prepared, outof, into)
                prepared.give_back()
                return request, True
        held = prepared.program.holds and hold and not host
        request = self._begin(prepared, stream, ordered=held or not (host or later))
        return request, held

    def _bound(
        self, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any, *, exchange: bool
    ) -> Prepared | None:
        """Prepare a call that a stream will start."""
        self._ready()
        if op is not None and is_delegated(op):
            raise NotSupported(
                f"{name} on rank {self.rank}: an operation of the user's own runs on the host, in no stream"
            )
        prepared = self._prepared.prepare(name, send, recv, op, root, recvcounts, exchange=exchange)
        if prepared is not None and prepared.copies:
            raise NotSupported(f"{name} on rank {self.rank}: with stream=, memory must be contiguous and read in place")
        return prepared

    def _begin(
        self, prepared: Prepared, stream: int | None = None, *, ordered: bool = False, watched: bool = True
    ) -> Request:
        """Start what was prepared: now, or when ``stream`` gets there; ``ordered``: the stream waits for the end.

        Without ``watched`` the caller makes progress for a moment, and wakes the progress thread if that is not enough.
        """
        if watched:
            lib.ucch_progress_thread(1)
        program = prepared.program.handle
        if stream is None:
            state = lib.ucch_program_start(program, prepared.send, prepared.recv, self.timeout)
        else:
            if self.members.runtime is None:
                raise DeviceError(
                    f"rank {self.rank} has no GPU runtime for stream= ({report(self.members.place.vendor)})"
                )
            at, hold = ffi.cast("void *", stream), ordered and prepared.program.holds
            state = lib.ucch_program_start_on(program, prepared.send, prepared.recv, self.timeout, at, hold)
        if state < 0:
            raise not_started(self.rank, prepared.label, state)
        self.track(1)

        def finish(state: int, status: Any) -> None:
            self.track(-1)
            self._judge(prepared.program, state, prepared, prepared.label)
            prepared.finish()
            prepared.give_back()

        request = Request(prepared.program.op, prepared, finish, owner=self)
        if ordered and not state:
            request.Wait()  # the stream cannot wait for this call, or must not: the host does
        return request

    def persistent(
        self, name: str, send: Any, recv: Any, op: Any = None, root: int = -1, recvcounts: Any = None
    ) -> PersistentRequest:
        """Set a collective up once, to be started many times."""
        try:
            if type(root) is not int:
                root = root_of(name, self.size, self.rank, root)
            arguments = name, send, recv, op, root, recvcounts
            if op is not None and is_delegated(op):
                self._ready()
                return self.delegate.request(*arguments, refuse=self.refuse)
            prepared = self._again_if_stale(self._set_up, *arguments)
        except Exception as error:
            self.refuse(error)
            raise
        if prepared is None:
            idle = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
            return PersistentRequest(lib.ucch_message_op(idle), idle, lambda: 0, lambda *_: None, lambda: None)
        return self._standing(prepared, arguments)

    def _set_up(self, name: str, send: Any, recv: Any, op: Any, root: int, recvcounts: Any) -> Prepared | None:
        """A call that is ready to be started again and again."""
        self._ready()
        prepared = self._prepared.prepare(name, send, recv, op, root, recvcounts, exchange=True, now=False)
        if prepared is None:
            return None
        status = lib.ucch_program_persist(prepared.program.handle, prepared.send, prepared.recv, self.timeout)
        if status < 0:
            raise CollectiveError(f"rank {self.rank}: {prepared.label}: {status_name(status)}")
        lib.ucch_progress_thread(1)
        self._persistent[id(prepared)] = prepared
        return prepared

    def _standing(self, prepared: Prepared, arguments: tuple[Any, ...]) -> PersistentRequest:
        """The request of a call that was set up."""
        teams = self.members.teams

        def start() -> int:
            return self._again_if_stale(start_now)

        def start_now() -> int:
            nonlocal prepared, teams
            self._ready()
            if teams is not self.members.teams:  # a call was refused: others are used by now
                free()
                anew = self._set_up(*arguments)
                assert anew is not None
                prepared, teams = anew, self.members.teams
            elif prepared.copies:
                prepared.refill()
            state = int(lib.ucch_program_again(prepared.program.handle))
            if state < 0:
                raise not_started(self.rank, prepared.label, state)
            request.rebind(prepared.program.op, prepared, None if prepared.copies else prepared.program.handle)
            return state

        def finish(state: int, status: Any) -> None:
            self._judge(prepared.program, state, prepared, prepared.label)
            prepared.finish()

        def free() -> None:
            if self._persistent.pop(id(prepared), None) is not None:
                lib.ucch_program_drop(prepared.program.handle)

        def in_stream(stream: Any) -> Request:
            name, send, recv, op, root, recvcounts = arguments
            return self.start(name, send, recv, op, root, recvcounts, stream)

        direct = None if prepared.copies else prepared.program.handle
        request = PersistentRequest(
            prepared.program.op, prepared, start, finish, free, direct=direct, owner=self, in_stream=in_stream,
            refuse=self.refuse,
        )  # fmt: skip
        return request

    # --- books --------------------------------------------------------------------------------------------------------

    def _break(self, why: str) -> None:
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
            self.refusals.settle(self.timeout)
        if self.refusals.catch_up():
            self._forget()

    def _overtaken(self, keep: object) -> None:
        """The last call came to nothing here, because another rank has refused it."""
        _graveyard.append(keep)
        self.refusals.give_up(int(lib.ucch_board_started(self.board.native)))
        self._forget()

    def _broke(self, failure: Exception, keep: object) -> None:
        """A call failed: whoever ran it may still use its memory, and nothing more is run."""
        self._break(str(failure))
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
                self._break(f"{label} was interrupted")
            _graveyard.append((program, keep))

    def _judge(self, program: Program, state: int, keep: object, label: str) -> None:
        if state == 1:
            return
        failure: Exception = failure_of(program.op, self.board, self.rank, label, self.timeout)
        if isinstance(failure, RefusedError) and not program.launches:
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
