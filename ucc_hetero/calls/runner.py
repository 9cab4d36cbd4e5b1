"""Runner of one communicator's collectives: starts prepared calls, waits for them, and tracks active ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ..bindings import quarantine
from ..bindings.ucc import status_name
from ..bootstrap.meeting import Seat
from ..bootstrap.timely import note_abandoned
from ..device import no_runtime, stream_handle
from ..engine.lowering import Execution, Program
from ..errors import (
    CollectiveError,
    CollectiveTimeout,
    DeviceError,
    NotSupported,
    RefusedError,
    RevokedError,
)
from ..native.libraries import FORKED, ffi, lib, repeater
from ..native.waiting import SLICE, refuse_finalized
from ..planner.select import Choice, Tuning
from .arguments import CallSpec, Completion, look_up, number_of, reduced_by_mpi
from .closing import Closing
from .mpi_reduction import block_calls
from .persistent import PersistentRequest, free_all
from .posted import PostedRequest
from .preparation import BoundedDict, Preparation, Prepared, ProgramCache, ProgramPool
from .request import (
    Captured,
    Launched,
    Request,
    dropped_calls,
    fill_empty,
    forget,
    poll_hooks,
    reap,
    run_poll_hooks,
    wait_op,
)
from .state import ANEW
from .verification import Verification, sampled

_run = lib.ucch_program_run
_leave = lib.ucch_program_leave
_launch = lib.ucch_program_launch
_cast, _NULL = ffi.cast, ffi.NULL
_LAUNCHED = Execution.LAUNCHED


class RepeatableCall(NamedTuple):
    """A call that can be repeated with other addresses without examining its arguments.

    ``program``: the program to launch into streams; None if such calls run on the host. ``mean``: the caller divides
    the sum by the number of ranks.
    """

    pool: ProgramPool
    program: Program | None
    mean: bool


#: A call to repeat, and the addresses to send from and to receive at; 0 for none.
Repetition: TypeAlias = tuple[RepeatableCall, int, int]


#: Most seconds to wait for streams to pass a failed call: until then they may write to its buffers.
_LET_GO_S = 1.0


class Runner(Closing):
    """The collectives of one communicator. Collective to create, unless its seat is ready."""

    def __init__(self, mpi: Any, seat: Seat | None = None, queues: bool = True) -> None:
        from mpi4py import MPI

        #: Repeats calls on numpy arrays in one crossing into C where possible.
        self._repeater: Any = None
        every = sampled()
        if repeater and not every:
            goes_on = self._await, self._interrupted, self._go_on_counted, self._adopt, fill_empty
            self._repeater = repeater((self.run, self._begin_call, *goes_on), MPI.IN_PLACE, dropped_calls)
        self.in_c = self._repeater
        super().__init__(mpi, seat, queues)
        if self._repeater is not None:
            self.posters.append(self._repeater)
        self._in_place, self._cache = MPI.IN_PLACE, ProgramCache()
        #: Waits for an operation. A caller that has more to poll replaces it.
        self.wait: Callable[[Any], int] = wait_op
        #: True if blocking calls exchange counts that only some ranks know. If not, counts travel with the data as in
        #: non-blocking calls: other ranks may make the same call in that form.
        self.exchanges = True
        self._prepared = Preparation(self, self._cache, self._run_prepared, self._start)
        #: Calls so far, as ``Preparation.used``.
        self.used = self._prepared.used
        #: The same for communicators whose calls are reported together with this one's.
        self.beside: list[dict[str, tuple[Choice, str, Execution]]] = []
        #: Calls that can be repeated, by keys of their callers.
        self.repeatable: BoundedDict[Hashable, RepeatableCall] = BoundedDict()
        #: Persistent calls that have not been freed: their requests must be freed before their teams.
        self._persistent: dict[int, Prepared] = {}
        self._verification = Verification(self, every, self.used) if every and self.size > 1 else None
        #: Runs a call, and begins one and returns its request, with the arguments of :meth:`run` by position.
        self.blocking: Callable[..., None] = self.run if self._repeater is None else self._repeater.call
        self.posted: Callable[..., Request] = self._begin_call if self._repeater is None else self._repeater.start
        #: As :meth:`start`, for a caller that makes progress itself for a moment and wakes the progress thread then.
        self.begin: Callable[[CallSpec, Any, Completion], Request] = self._begin
        if self._verification is not None:
            self.blocking = partial(self._verification.blocking, self.run)
            self.begin = partial(self._verification.begin, self._begin)

    # --- before a call ------------------------------------------------------------------------------------------------

    def check_usable(self, *, calls: bool = True) -> None:
        """Raise if the communicator cannot be used. If a later call was refused, operations that make no ``calls`` may
        go on until this rank reaches that call."""
        if self.orphaned:
            refuse_finalized()
            raise CollectiveError(f"rank {self.rank}: {FORKED}")
        if self.board.native is None:
            raise ValueError(f"rank {self.rank}: the communicator has been freed")
        if lib.ucch_board_broken(self.board.native):
            if lib.ucch_board_revoked(self.board.native):
                self.broken = self.broken or "it was revoked"
                raise RevokedError(
                    f"rank {self.rank}: this communicator has been revoked; Shrink() makes one of the ranks that live"
                )
            if calls and self.ended_by_refusal(self.board.next):
                raise RefusedError(f"rank {self.rank}: {self.broken}; {ANEW}")
        if self.broken:
            raise CollectiveError(f"rank {self.rank}: after an earlier failure ({self.broken}) {ANEW}")
        if dropped_calls:
            reap()

    def check_ready(self, *, calls: bool = True) -> None:
        """Run the poll hooks, and raise if no collective can be made."""
        self.check_usable(calls=calls)
        if poll_hooks:
            run_poll_hooks()

    # --- calls --------------------------------------------------------------------------------------------------------

    def run(
        self, name: str, send: Any, recv: Any, op: Any = None, root: Any = -1, counts: Any = None, stream: Any = None
    ) -> None:
        """Run a collective, which has the arguments of ``CallSpec``, to its end; with ``stream`` it starts when the
        stream reaches this point."""
        call = CallSpec(name, send, recv, op, root, counts)
        if stream is not None:
            self.start(call, stream, Completion.HOST).Wait()
            return
        try:
            self._run_call(call)
        except Exception as error:
            self.refuse(error)
            raise

    def _go_on_counted(self, pool: ProgramPool, state: int, *call: Any) -> None:
        """Go on with a call of :meth:`run` after the exchange of its counts, which began in C and is in this state."""
        exchange = pool.exchange
        assert exchange is not None
        with self.refusing:
            self._run_prepared(exchange.prepared, state)
            self._run_call(CallSpec(*call[:6]), exchange.rows)

    def _run_call(self, call: CallSpec, rows: Any = None) -> None:
        """``rows``: the counts of all ranks, if they have been exchanged."""
        # The fast path, for arrays as in an earlier call: look up, take addresses, run.
        key, pool, send_at, recv_at = look_up(self._cache, self._in_place, *call)
        pool = pool or self._prepared.inherited(key)
        if pool is not None and pool.exchange is not None and not self.broken:
            if rows is not None:
                pool = pool if rows.tobytes() == pool.counts else None
            elif self.exchanges or pool.local:
                pool, rows = self._same_counts(pool)
            else:
                pool = None
        if pool is not None and not self.broken and self._run_from_pool(pool, send_at, recv_at, call[1:3], call):
            return
        self._run_unknown(call, (key, send_at, recv_at), rows)

    def _run_unknown(self, call: CallSpec, seen: tuple[Any, Any, Any], rows: Any) -> None:
        self.check_ready()
        if self.size > 2 and reduced_by_mpi(call, self.rank) and (blocks := block_calls(call, self.size, self.rank)):
            for block in blocks:
                self._run_unknown(block, (None, None, None), None)
            return
        prepared = self._prepared.prepare(call, exchange=self.exchanges, rows=rows)
        self._run_prepared(prepared)
        prepared.finish()
        self._prepared.keep(prepared, *seen)
        prepared.give_back()

    def run_labelled(self, label: str, call: CallSpec, send_at: Any = ffi.NULL, recv_at: Any = ffi.NULL) -> None:
        """Run a call on host memory that is part of a larger one: ranks compare ``label``, which is also the key for
        repeating it. Without Python if it is the same string again."""
        try:
            if self._repeater is not None and self._repeater.attempt(label, *call[1:]):
                return
            pool = self._cache.get(label) or self._prepared.inherited(label)
            named = call._replace(name=label)
            if pool is not None and not self.broken and self._run_from_pool(pool, send_at, recv_at, call, named):
                return
            self.check_ready()
            prepared = self._prepared.prepare(call, label=label)
            self._run_prepared(prepared)
            self._prepared.keep(prepared, label, send_at, recv_at)
            prepared.give_back()
        except Exception as error:
            self.refuse(error)
            if isinstance(error, CollectiveTimeout):
                note_abandoned()
            raise

    def _run_from_pool(
        self, pool: ProgramPool, send_at: Any, recv_at: Any, keep: tuple[Any, ...], call: CallSpec | None = None
    ) -> bool:
        """Run a program of a pool to its end. False if it could not be started. With ``call`` the next one needs no
        Python."""
        program = pool.take()
        if program is None:
            return False  # all are in use
        try:
            if type(send_at) is int:
                send_at = _cast("void *", send_at)
            if type(recv_at) is int:
                recv_at = _cast("void *", recv_at)
            state = _run(program.handle, send_at, recv_at, self._timeout, SLICE)
            if state != 1 and state >= 0:
                self._await((pool, program), *keep)
        except BaseException:
            self._interrupted((pool, program), *keep)
            raise
        if state < 0 or state == 1:
            pool.give_back(program)
        if state == 1 and call is not None:
            self._leave_to_c(pool, program, call)
        return bool(state >= 0)

    def _leave_to_c(self, pool: ProgramPool, program: Program, call: CallSpec) -> None:
        """Let C make the next call like this one."""
        # C tells roots apart by their addresses, and an object that is no int may change.
        if self._repeater is not None and type(call.root) is int and not pool.local:
            self._repeater.keep(*pool.in_c(program.spare), *call)

    def _await(self, held: tuple[ProgramPool, Program], *keep: object) -> None:
        """Wait for a program that was started, and raise its failure. An exception here is followed by
        :meth:`_interrupted`."""
        pool, program = held
        state = self.wait(program.op)
        if state > 1:
            self._judge(program, state, keep, pool.label)
        pool.give_back(program)

    def start(self, call: CallSpec, stream: Any = None, completion: Completion = Completion.STREAM) -> Request:
        """Start a collective and return its request; with ``stream`` it is part of the stream's work."""
        if stream is None:
            lib.ucch_progress_thread(1)
            return self.begin(call, None, completion)
        request = None
        try:
            request = self.begin(call, stream, completion)
        finally:
            if request is None or not request.lasting:  # a launch wakes the thread itself if it has to
                lib.ucch_progress_thread(1)
        return request

    def _begin_call(
        self, name: str, send: Any, recv: Any, op: Any = None, root: Any = -1, counts: Any = None, stream: Any = None
    ) -> Request:
        return self.start(CallSpec(name, send, recv, op, root, counts), stream)

    def _begin(self, call: CallSpec, stream: Any, completion: Completion) -> Request:
        try:
            if stream is None:
                return self._started(call)
            return self._streamed(call, self._handle_of(stream, call), completion)
        except Exception as error:
            self.refuse(error)
            raise

    def _handle_of(self, stream: Any, call: CallSpec) -> int:
        try:
            return stream_handle(stream)
        except TypeError as mistake:
            raise TypeError(f"{call.name} on rank {self.rank}: {mistake}") from None

    def _started(self, call: CallSpec) -> Request:
        self.check_usable()
        key, pool, send_at, recv_at = look_up(self._cache, self._in_place, *call)
        pool = pool or self._prepared.inherited(key)
        if pool is not None and pool.exchange is None and (program := pool.take()) is not None:
            if type(send_at) is int:
                send_at = _cast("void *", send_at)
            if type(recv_at) is int:
                recv_at = _cast("void *", recv_at)
            request = self._request(program, pool, (call, send_at, recv_at))  # first: Ctrl-C may interrupt here
            if lib.ucch_program_start(program.handle, send_at, recv_at, self.timeout) >= 0:
                self._leave_to_c(pool, program, call)
                return request
            forget(request)
            pool.give_back(program)  # for example the same buffer for both sides: the general way handles or refuses it
        self.check_ready()
        if (prepared := self._prepared.reused(key, call, send_at, recv_at)) is None:
            prepared = self._prepared.prepare(call)
            keep = self._prepared.keep_reusable if prepared.bound.local else self._prepared.keep
            keep(prepared, key, send_at, recv_at)
        return self._start(prepared)

    def _start(self, prepared: Prepared) -> Request:
        program = prepared.program
        request = self._request(program, prepared.pool, prepared, prepared)
        state = lib.ucch_program_start(program.handle, prepared.send, prepared.recv, self.timeout)
        if state < 0:
            forget(request)
            raise self.not_started(prepared.label, state)
        return request

    def _request(self, program: Program, pool: ProgramPool, keep: object, prepared: Prepared | None = None) -> Request:
        """The request of a program that is about to start; made before, so that Ctrl-C cannot lose the call."""
        held = program, keep  # the program outlives a return to a full pool
        return Request(program.op, held, self._end_of(program, pool, keep, prepared), owner=self)

    def _adopt(self, request: PostedRequest, pool: ProgramPool, program: Program, *buffers: Any) -> None:
        """Take over the request of a call that was begun in C."""
        request.become_ordinary(program.op, (program, buffers), finish=self._end_of(program, pool, buffers), owner=self)

    def _end_of(
        self, program: Program, pool: ProgramPool, keep: object, prepared: Prepared | None = None
    ) -> Callable[[int, Any], None]:
        """What is to be done when a program has ended."""
        given_back = False

        def finish(state: int, status: Any) -> None:
            nonlocal given_back
            if given_back:
                return  # Ctrl-C came afterwards, and the request was waited for again
            if state != 1:
                self._judge(program, state, keep, pool.label)
            if prepared is not None:
                prepared.finish()
            given_back = True  # first: another call may take the program at once
            if prepared is None:
                pool.give_back(program)
            else:
                prepared.give_back()

        return finish

    def _streamed(self, call: CallSpec, stream: int, completion: Completion) -> Request:
        """The request of a call that starts when ``stream`` reaches this point.

        If the stream must not wait for it (docs/gpu.md) the host waits: here, if the stream should (``completion``). No
        stream is held for a call that completes in its request's wait: a thread that allocates device memory could wait
        for that stream while it holds locks that the call needs.
        """
        key, pool, send_at, recv_at = look_up(self._cache, self._in_place, *call)
        exchange, rows = completion is Completion.HOST, None
        if pool is not None and pool.local:
            pool = None  # counts are exchanged before the call, or go along with it; not by this pool
        if pool is not None and pool.exchange is not None:
            pool, rows = self._same_counts(pool) if exchange and not self.broken else (None, None)
        if pool is not None and not self.broken and (program := pool.take()) is not None:
            try:
                launched = self._launched(program, pool.label, send_at, recv_at, stream)
            finally:
                pool.give_back(program)
            if launched is not None:
                return launched
        self.check_ready()
        if reduced_by_mpi(call, self.rank):
            raise NotSupported(
                f"{call.name} on rank {self.rank}: an operation of the user's own runs on the host, in no stream"
            )
        if lib.ucch_stream_captures(stream):
            return self._captured(call, stream, rows)
        prepared = self._prepared.prepare(call, exchange=exchange, rows=rows, stream=stream)
        if prepared.copies and prepared.staged is None:
            raise NotSupported(
                f"{call.name} on rank {self.rank}: with stream=, memory must be contiguous and read in place"
            )
        launched = self._launched(prepared.program, prepared.label, prepared.send, prepared.recv, stream)
        if launched is None:
            return self._begin_on(prepared, stream, ordered=completion is Completion.STREAM)
        self._prepared.keep(prepared, key, send_at, recv_at)
        prepared.give_back()
        return launched

    def _same_counts(self, pool: ProgramPool) -> tuple[ProgramPool | None, Any]:
        """Exchange the counts again. Returns (the pool if they are those it was made for, else None; the counts).

        With a ``local`` pool other counts are a ``MismatchError``: no other pool can serve the call on this rank."""
        assert pool.exchange is not None
        self._run_prepared(pool.exchange.prepared)
        rows = pool.exchange.rows
        if pool.local:
            self._prepared.check_received(pool)
            return pool, rows
        return pool if rows.tobytes() == pool.counts else None, rows

    def _captured(self, call: CallSpec, stream: int, rows: Any) -> Request:
        prepared = self._prepared.captured(call, rows)
        addresses = number_of(prepared.send), number_of(prepared.recv)
        status = lib.ucch_program_capture(prepared.program.handle, True, *addresses, self.timeout, stream)
        if status == lib.UCCH_FAIL_BROKEN:
            self.earlier_failed(prepared.label)
        if status < 0:
            raise self.not_started(prepared.label, status)
        prepared.give_back()
        return Captured()

    def make_repeatable(self, key: Hashable, call: CallSpec, *, on_host: bool, mean: bool = False) -> None:
        """Let :meth:`repeat` make calls like this one, which has been made, by ``key``."""
        if self._verification is not None or key in self.repeatable:
            return  # checksums must be compared, which repeated calls do not do
        pool = look_up(self._cache, self._in_place, *call)[1]
        if pool is None or pool.exchange is not None:
            return
        program = None if on_host else pool.take()
        if not on_host and program is None:
            return  # all are in use
        launched = program is not None and program.execution >= _LAUNCHED
        self.repeatable.keep(key, RepeatableCall(pool, program if launched else None, mean))
        if program is not None and not launched:
            pool.give_back(program)

    def repeat(self, calls: Sequence[Repetition], stream: int | None, keep: tuple[Any, ...]) -> int:
        """Make calls without requests: run them to their ends, or launch them into a stream, which orders them.

        A failure is raised by the next call. Returns the number of calls made; the general way has to make the others.
        One call per kind at a time.
        """
        for made, ((pool, program, _), send_at, recv_at) in enumerate(calls):
            if self.broken:
                return made
            if stream is None:
                if not self._run_from_pool(pool, send_at, recv_at, keep):
                    return made
            elif program is None or not _leave(program.handle, send_at, recv_at, self._timeout, stream):
                if program is not None:
                    self._not_launched(program, pool.label)
                return made
        return len(calls)

    def repeat_for(self, seconds: float, calls: Sequence[Repetition], keep: Any) -> tuple[int, list[Request]]:
        """As :meth:`repeat` without a stream, waiting at most this long for each call; ``keep`` stays alive until its
        end. Returns also requests of calls that are under way or have failed."""
        requests: list[Request] = []
        for made, ((pool, _, _), send_at, recv_at) in enumerate(calls):
            program = None if self.broken else pool.take()
            if program is None:
                return made, requests
            try:
                both = _cast("void *", send_at), _cast("void *", recv_at)
                state = _run(program.handle, *both, self._timeout, seconds)
                if state != 1 and state >= 0:
                    finish = self._end_of(program, pool, keep)
                    requests.append(Request(program.op, (program, keep), finish, owner=self))
                else:
                    pool.give_back(program)
            except BaseException:
                self._interrupted((pool, program), keep)
                raise
            if state < 0:
                return made, requests
        return len(calls), requests

    def repeat_in_stream(self, calls: Sequence[Repetition], stream: int) -> list[Request]:
        """As :meth:`repeat` with a stream, returning the requests of the calls made."""
        requests: list[Request] = []
        for (pool, program, _), send_at, recv_at in calls:
            if program is None or self.broken:
                break
            op = _launch(program.handle, send_at, recv_at, self._timeout, stream)
            if op == _NULL:
                if not requests:  # else the next call raises: the caller keeps the memory of those made
                    self._not_launched(program, pool.label)
                break
            requests.append(Launched(op, (program, pool.label, self._timeout), self))
        return requests

    def _launched(self, program: Program, label: str, send_at: Any, recv_at: Any, stream: int) -> Request | None:
        """Launch a program into a stream and return its request; None if that is not possible now."""
        if program.execution < _LAUNCHED:
            return None
        op = _launch(program.handle, number_of(send_at), number_of(recv_at), self._timeout, stream)
        if op == ffi.NULL:
            self._not_launched(program, label)
            return None
        return Launched(op, (program, label, self._timeout), self)

    def _not_launched(self, program: Program, label: str) -> None:
        """Raise if an earlier call has failed. If not, the general way makes or refuses the call."""
        op = lib.ucch_launch_failed()
        if op != ffi.NULL:
            self.failed_in_stream(op, program, label, self._timeout)
        if lib.ucch_launch_status() == lib.UCCH_FAIL_BROKEN:
            self.earlier_failed(label)

    def failed_in_stream(self, op: Any, program: Program, label: str, timeout: float) -> NoReturn:
        failure = self.failure_of(op, label, timeout)
        self.fail(failure, program)
        raise failure

    def _begin_on(self, prepared: Prepared, stream: int, *, ordered: bool) -> Request:
        """Start a prepared call when ``stream`` reaches this point; ``ordered``: the stream waits for its end."""
        program = prepared.program
        runtime = self.members.runtime
        if runtime is None:
            raise DeviceError(no_runtime(self.rank, self.members.place.vendor))
        both, at = (prepared.send, prepared.recv), _cast("void *", stream)
        # Calls that could not be launched hold the stream, if streams may be held.
        holds = ordered and (program.execution is Execution.HELD or (program.execution is _LAUNCHED and runtime.holds))
        if prepared.staged is not None:
            holds = ordered and runtime.holds
        request = self._request(program, prepared.pool, prepared, prepared)
        state = lib.ucch_program_start_on(program.handle, *both, self.timeout, at, holds)
        if state < 0:
            forget(request)
            raise self.not_started(prepared.label, state)
        if state and prepared.staged is not None:
            prepared.copy_back_in(stream)
        if ordered and not state:
            request.Wait()  # the stream cannot or must not wait for this call: the host does
        return request

    def persistent(self, call: CallSpec) -> PersistentRequest:
        with self.refusing:
            self.check_ready(calls=False)
            prepared = self._prepared.prepare(call, exchange=True, sets_up=True)
            program = prepared.program
            status = lib.ucch_program_persist(program.handle, prepared.send, prepared.recv, self.timeout)
            if status < 0:
                raise CollectiveError(f"rank {self.rank}: {prepared.label}: {status_name(status)}")
            lib.ucch_progress_thread(1)
            self._persistent[id(prepared)] = prepared

        def start() -> int:
            self.check_ready()
            if not prepared.in_place:
                prepared.refill()
            state = int(lib.ucch_program_again(program.handle))
            if state < 0:
                raise self.not_started(prepared.label, state)
            return state

        def finish(state: int, status: Any) -> None:
            self._judge(program, state, prepared, prepared.label)
            prepared.finish()

        def free() -> None:
            if id(prepared) in self._persistent:
                lib.ucch_program_drop(program.handle)  # first: a thread that closes the communicator must find it
                self._persistent.pop(id(prepared), None)

        ways: tuple[Callable[[], int], Callable[[int, Any], None]] = start, finish
        direct = partial(lib.ucch_program_again, program.handle) if prepared.in_place else None
        if self._verification is not None:
            ways, direct = self._verification.around(call, start, finish), None
        return PersistentRequest(
            program.op, prepared, *ways, free=free, direct=direct, owner=self, refuse=self.refuse,
        )  # fmt: skip

    def _run_prepared(self, prepared: Prepared, state: int | None = None) -> None:
        """Run a call to its end. ``state``: that of its program, if it has begun."""
        program = prepared.program
        try:
            if state is None:
                state = _run(program.handle, prepared.send, prepared.recv, self._timeout, SLICE)
            state = state or self.wait(program.op)
        except BaseException:
            self._interrupted((prepared.pool, program), prepared)
            raise
        if state < 0:
            raise self.not_started(prepared.label, state)
        self._judge(program, state, prepared, prepared.label)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _interrupted(self, held: tuple[ProgramPool, Program], *keep: object) -> None:
        """Clean up after Ctrl-C in a blocking call: the other ranks may finish it, but this rank's result is lost.

        Buffers of a failed call stay with the libraries. Called after every exception in an active call; has no effect
        if the failure was already judged.
        """
        pool, program = held
        state = int(lib.ucch_peek(program.op))
        if state > 1 and not self.broken:
            with suppress(Exception):
                self._judge(program, state, keep[0], pool.label)
        elif state != 1:
            quarantine.keep((program, keep))
        if not (state or self.broken):
            self.abandon(f"{pool.label} was interrupted")

    def _judge(self, program: Program, state: int, keep: object, label: str) -> None:
        if state == 1:
            return
        failure: Exception = self.failure_of(program.op, label)
        if self._verification is not None:
            failure = self._verification.found() or failure
        if isinstance(keep, Prepared):
            failure = keep.explained(failure)
        self.fail(failure, (program, keep))
        if self.members.channels is not None:
            self.members.channels.passed(_LET_GO_S)
        raise failure

    def retune(self, tuning: Tuning) -> None:
        """Choose by other rules from now on. Collective, with nothing in flight; rules must be equal on all ranks."""
        self._forget()
        self._prepared.retune(tuning)

    def _forget(self) -> None:
        self._prepared.forget()
        self.repeatable.clear()
        if self._repeater is not None:
            self._repeater.clear()

    def stats(self) -> dict[str, float]:
        """Number of finished calls, seconds from their starts to their ends, and bytes of the callers' buffers."""
        calls, seconds, nbytes = ffi.new("uint64_t *"), ffi.new("double *"), ffi.new("uint64_t *")
        lib.ucch_board_stats(self.board.native, calls, seconds, nbytes)
        return {"calls": int(calls[0]), "seconds": float(seconds[0]), "bytes": int(nbytes[0])}

    def _free_parts(self, together: bool) -> None:
        if self._verification is not None:
            self.unfit = self._verification.close(together)
        self.closes = True
        free_all(self)
        if not self.broken:  # a call that this rank refused, other ranks may have begun: news of that may be on its way
            self.members.await_quiet(self.ended_by_refusal)
        if self.broken or self.ended_by_refusal():
            # Its teams hang in libucc with the failed call's operations: they are leaked.
            quarantine.keep((self.members, self._cache, self._prepared.reusable, self._persistent))
            self._persistent = {}  # else a dropped call that ends later would release its own
            self.members.abandon()
            return
        for prepared in list(self._persistent.values()):
            lib.ucch_program_drop(prepared.program.handle)
        self._persistent.clear()
        self._forget()
        self.members.close(together=together)
