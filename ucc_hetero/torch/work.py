"""torch's Work over requests of the engine: for a call, a message by a lane, or several calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from .. import env
from ..bootstrap import settings
from ..calls.request import Request, arm, kept_by, native_of, run_poll_hooks
from ..calls.state import ANEW
from ..errors import CollectiveTimeout, UCCHError
from ..native.libraries import lib
from ..native.waiting import wait_in_slices
from ..p2p.captured import CapturedMessage
from ..p2p.transfer import LaneMessage
from .futures import Future, complete_later, this_thread
from .layout import Finish
from .not_compiled import not_compiled
from .streams import Ready, used_in_current

_peek, _follow = lib.ucch_peek, lib.ucch_lane_message_follow

#: Timeout in seconds where a store needs a number but there is no limit.
NO_LIMIT = 1e7
#: Timeout in seconds that makes a call fail at once; 0 would be no limit.
_AT_ONCE = 1e-6


#: DDP module -> Work of the call in which it last told other ranks that it has inputs left.
_of_joins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def notify_join_context(stock: Any, joinable: Any) -> Any:
    """Wrap ``Join.notify_join_context``: keep the Work that DDP, in ``join()``, hands to its reducer.

    The reducer holds the C++ part only, and asks it for a future later. Once Python drops its part, torch no longer
    finds the methods of our class.
    """
    work = stock(joinable)
    if isinstance(work, Work):
        _of_joins[joinable] = work
    return work


def seconds_of(timeout: timedelta | None) -> float:
    """A torch timeout in seconds; 0 (no limit) for zero, negative or None."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return max(seconds, 0.0)


def limit_of(timeout: timedelta | None) -> float:
    """Time limit of a call in seconds: torch's, or UCCH_TIMEOUT if that is set and shorter. 0: no limit."""
    seconds = seconds_of(timeout)
    ours = settings.timeout() if os.environ.get(f"{env.PREFIX}TIMEOUT", "").strip() else float("inf")
    if ours == float("inf"):
        return seconds
    return min(seconds, ours) if seconds else float(ours)


def torch_error(failure: BaseException) -> Exception:
    """The exception type that users of torch expect, with our message."""
    text = str(failure).replace(ANEW, "the group can no longer be used: make a new one")
    if isinstance(failure, CollectiveTimeout):
        text = f"Timeout expired, Timed out in {text}"  # scripts look for these words, spaces included
    error: Exception = dist.DistBackendError(text)
    return error


class PendingOperation(NamedTuple):
    """A request that has not completed, its native operation, and the object that keeps the operation alive."""

    request: Request | LaneWork
    op: Any
    keep: object

    def wait(self, seconds: float) -> Any:
        """Wait up to ``seconds``. True once the operation has ended, or another thread has taken its request."""
        return self.request.finished or lib.ucch_wait(self.op, seconds)


class ReceiveStatus:
    """Status of a receive, which the engine fills as it would an ``MPI.Status``."""

    source, tag, error, cancelled = -1, -1, 0, False

    def Set_elements(self, datatype: Any, count: int) -> None:
        """Ignore the length: torch does not ask for it."""

    def Set_cancelled(self, cancelled: bool) -> None:
        """Ignore the cancellation: torch does not ask for it."""
        self.cancelled = cancelled


@not_compiled
class Work(dist.Work):
    """One asynchronous call, or several that finish together: what calls of a group return with ``async_op=True``.

    ``outputs`` are the tensors that hold the result. ``finish`` runs once after the last request, in the thread that
    sees the end; ``keep`` stays alive until then. ``ready`` is set for a call in a stream (:mod:`.streams`).
    """

    # Class attributes: most calls use the defaults, and setting them costs time.
    _requests: Sequence[Any] = ()
    _finish: Finish = None
    _keep: object = None
    _source: ReceiveStatus | None = None
    _ready: Ready | None = None
    _error: Exception | None = None
    _future: Future | None = None
    _waited = False
    _published = False
    _done = True
    #: Rank of the peer if it is known from the start, else -1.
    _peer = -1
    #: True for a collective, for which barriers wait; False for a message.
    collective = False

    def __init__(
        self,
        group: Any,
        outputs: Sequence[Any],
        requests: Sequence[Request] = (),
        finish: Finish = None,
        keep: object = None,
        source: ReceiveStatus | None = None,
        ready: Ready | None = None,
    ) -> None:
        super().__init__()
        self._group, self._outputs, self._lock, self._ready = group, outputs, threading.Lock(), ready
        if requests:
            self._requests, self._done = requests, False
            self._finish, self._keep, self._source = finish, keep, source
            group.in_flight[self] = None
        elif finish is not None:
            self._finish = finish
            self._error = self._try_to_deliver()

    # --- the end of the call ------------------------------------------------------------------------------------------

    @property
    def leaves_work(self) -> bool:
        """True if the result must be copied or converted after the call has ended."""
        return self._finish is not None

    def _collect(self) -> None:
        """Collect the results of requests that have all ended, once."""
        with self._lock:
            if self._done:
                return
            error: Exception | None = None
            for request in self._requests:
                try:
                    request.Wait(self._source)
                except UCCHError as failure:
                    error = error or torch_error(failure)
            if self._source is not None and self._source.cancelled:
                where = f"group {self._group.group_name!r} on rank {self._group.rank()}"
                error = dist.DistBackendError(f"{where} was destroyed before the message of a receive came")
            self._requests = ()
            if error is not None:
                self._finish = None
            elif self._finish is not None:
                error = self._try_to_deliver()
            elif self._ready is not None:
                self._ready.over()
            self._error = error
            if self._finish is None:
                self._keep = None
            self._done = True  # set last, as other threads read it without the lock
        self._group.in_flight.pop(self, None)

    def _try_to_deliver(self) -> Exception | None:
        """Run ``finish``, if it is still to run. Returns its error, which is raised where the call is waited for; the
        next wait then runs it again, as the error may be that of a signal's handler."""
        try:
            if self._finish is not None:
                self._deliver()
            self._finish = None
        except Exception as failure:
            return failure
        return None

    def _deliver(self) -> None:
        """Run ``finish`` on the received data."""
        assert self._finish is not None
        self._finish()
        self._ready = used_in_current([self._keep, *self._outputs])  # the thread that waits may use another stream

    def is_over(self) -> bool:
        """True if the call has ended; collects its results. Makes no progress."""
        requests = self._requests
        if requests and requests[0].lasting:  # so are the others, all of them calls in a stream
            for request in requests:
                if not _peek(request.op):
                    return False
            self._collect()
        elif not self._done and all(_peek(each.op) for each in self.pending()):
            self._collect()
        return self._done

    def pending(self) -> list[PendingOperation]:
        """The native operations that are under way, kept alive: another thread may collect the call at any time."""
        found = [PendingOperation(each, native_of(each), kept_by(each)) for each in self._requests if not each.finished]
        return [each for each in found if not each.request.finished]

    def poll(self, seconds: float) -> None:
        """Make progress for ``seconds``, which suffices for short calls; the progress thread finishes the others."""
        requests = self._requests
        if self.collective or (requests and not requests[0].Get_status()):  # that of a message makes progress in C
            for each in self.pending():
                if not each.wait(seconds):
                    lib.ucch_progress_thread(1)
                    return
        self._collect()

    def let_go(self) -> None:
        """Release streams that wait for the call, as the group was aborted."""

    def listen(self) -> None:
        """Make the doorbell (:mod:`.futures`) ring when an operation of the call ends."""
        for each in self.pending():
            lib.ucch_listen(each.op)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is there. Raises the call's error.

        For device tensors the current stream waits and the host does not. ``timeout`` limits this wait; the call itself
        has the group's timeout.
        """
        if not self._done:
            if self._ready is None:
                self._await(seconds_of(timeout))
            else:
                self.is_over()  # collects an error that is known by now
        if self._ready is not None and self._ready.order():
            self.leave()
        return self._told()

    def leave(self) -> None:
        """Let the group drop the tensors: the stream that owns their memory already waits for the call."""
        with self._lock:
            if self in self._group.in_flight:
                self._group.in_flight.pop(self, None)
                self._keep = None
                self._group.in_flight[WaitedWork(self)] = None

    def _told(self) -> bool:
        """Raise the call's error, or the error of a message without whose data a stream went on."""
        if this_thread.ordinary:
            self._waited = True
            if self._future is not None:
                self._future.waited = True
        if self._error is not None:
            self._done = self._finish is None
            raise self._error
        if self._group.streams_wait:
            self._group.check_data()
        return True

    def _await(self, limit: float) -> None:
        end = time.monotonic() + limit if limit else 0.0
        arm([each for each in self._requests if not each.finished])
        for each in self.pending():
            self._until(each.wait, end)
        self._collect()

    def _until(self, happened: Callable[[float], Any], end: float) -> None:
        """Wait in slices until ``happened(seconds)`` is true. Raises on an abort, and after ``end`` (0: no limit)."""

        def happened_in_time(seconds: float) -> Any:
            state = happened(min(seconds, max(end - time.monotonic(), 1e-3)) if end else seconds)
            if not state and end and time.monotonic() > end:
                raise dist.DistBackendError(
                    f"Timeout expired, Timed out waiting for an operation of group {self._group.group_name!r} on rank "
                    f"{self._group.rank()}; it is still under way"
                )
            return state

        def poll_hook() -> None:
            self._group.check_aborted()
            run_poll_hooks()

        wait_in_slices(happened_in_time, poll_hook)

    # --- what torch asks ----------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """True if the call has ended, with or without an error. Makes some progress."""
        if not self._done and all(lib.ucch_test(each.op) for each in self.pending()):
            self._collect()
        if self._ready is None or self._error is not None:
            return self._done
        return bool(self._ready.query())  # the stream may be done before the host has looked

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def settle(self) -> None:
        """Wait until the call no longer uses its buffers. A receive whose message has not come is cancelled."""
        if self._source is not None:
            for request in self._requests:
                if not request.finished:
                    request.Cancel()
        self.wait()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        return list(self._outputs)

    def source_rank(self) -> int:
        """The group rank of a received message's sender."""
        return self._source.source if self._source is not None else self._peer

    _source_rank = source_rank

    # --- futures ------------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[Any] | None:
        found = {t.device for t in self._outputs if t.device.type != "cpu"}
        return list(found) or None

    def get_future(self) -> Future:
        """A future of the list of result tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = Future(self._group.callbacks, self)
            self._future.waited = self._waited
        if self._done or self._ready is not None:
            self.publish()
        else:
            complete_later(self)
        return self._future

    def publish(self, failure: Exception | None = None) -> None:
        """Complete the future, if there is one; once. ``failure``: the error that waiting for the call has raised."""
        with self._lock:
            future = self._future
            if future is None or self._published:
                return
            self._published = True
        failure = self._error or failure
        if failure is not None:
            future.set_exception(failure)
        elif self._ready is not None:
            self._ready.publish(future, list(self._outputs))
        else:
            future.set_result(list(self._outputs))
        if self._done:
            future.settled()  # break the reference cycle, which would hold the tensors until a garbage collection


class WaitedWork:
    """What a group keeps of a call that a stream waits for: its requests (:class:`.Launched`), without its tensors."""

    leaves_work = False

    def __init__(self, work: Work) -> None:
        self._group, self._requests, self._ready, self._work = work._group, work._requests, work._ready, ref(work)

    def is_over(self) -> bool:
        well = True
        for request in self._requests:
            state = _peek(request.op)
            if not state:
                return False
            well = well and state == 1
        work = self._work()
        if work is not None:
            work.is_over()
        for request in () if well else self._requests:
            with suppress(UCCHError):  # the next call raises the failure
                request.Wait()
        if self._ready is not None:
            self._ready.over()
        self._group.in_flight.pop(self, None)
        return True

    def let_go(self) -> None:
        """Do nothing: no stream waits for the host."""

    def settle(self) -> None:
        self.is_over()


@not_compiled
class LaneWork(Work):
    """A message by a lane, between streams of two ranks. ``wait`` makes the current stream wait.

    The tensor of a send must stay unchanged until ``wait``, as with NCCL. There is no request object, which would
    double the cost.
    """

    _followed = False

    def __init__(
        self,
        group: Any,
        outputs: Sequence[Any],
        message: LaneMessage,
        finish: Finish,
        stream: Callable[[], int],
        seconds: float,
    ) -> None:
        """``stream`` returns the calling thread's current stream; ``seconds`` limits a wait for the message."""
        dist.Work.__init__(self)  # directly: one function call less than through Work
        self._group, self._outputs, self._lock = group, outputs, threading.Lock()
        self._lane_message: LaneMessage | None = message
        self._peer, self._stream, self._seconds = message.peer, stream, seconds
        if finish is not None:
            self._finish = finish
        self._done = False
        group.in_flight[self] = None

    @property
    def finished(self) -> bool:
        return self._done

    def pending(self) -> list[PendingOperation]:
        message = self._lane_message
        return [] if message is None else [PendingOperation(self, message.op, message)]

    def is_over(self) -> bool:
        message = self._lane_message
        if message is not None and _peek(message.op):
            self._collect()
        return self._done

    def _collect(self) -> None:
        """Record how the message has ended, once."""
        with self._lock:
            message, self._lane_message = self._lane_message, None
            if message is None:
                return
            if _peek(message.op) == 1:
                self._error = self._try_to_deliver()
            else:
                self._error, self._finish = torch_error(self._group.failure_of(message)), None
            self._done = True
        self._group.in_flight.pop(self, None)
        if self._error is not None and self._followed:  # a stream went on without the data
            self._group.broke(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message. Raises its error if that is known by now."""
        if not self._done and not self._follow():
            limit = seconds_of(timeout)
            end = time.monotonic() + limit if limit else 0.0
            for each in self.pending():  # queue it into its stream once the stream need not wait for it
                self._until(partial(lib.ucch_wait_matched, each.op), end)
            self._follow()
        message = self._lane_message
        if message is not None and _peek(message.op) > 1:
            self.is_over()
        if self._ready is not None:
            self._ready.order()
        return self._told()

    def _follow(self) -> bool:
        """Make the current stream wait, if the message was posted in its stream. True if nothing is left to do."""
        with self._lock:
            message = self._lane_message
            if message is None:
                if not self._done:
                    self._error, self._done = self._try_to_deliver(), True
                return True
            if _follow(message.handle, self._stream(), self._seconds) != 1:
                return False
            self._followed = self._group.streams_wait = True
            if self._finish is not None:
                self._deliver()
                self._finish = None
        return True

    def let_go(self) -> None:
        """Release waiting streams: the message times out now."""
        for each in self.pending():
            lib.ucch_op_deadline(each.op, _AT_ONCE)

    def settle(self) -> None:
        """Wait until nothing uses the buffers any more."""
        for each in self.pending():
            if self._seconds:
                lib.ucch_op_deadline(each.op, self._seconds)
            self._until(partial(lib.ucch_wait, each.op), 0.0)
        self.is_over()


@not_compiled
class GraphWork(Work):
    """A message that becomes part of a graph when it is waited for."""

    def __init__(
        self,
        group: Any,
        outputs: Sequence[Any],
        message: CapturedMessage,
        finish: Finish,
        stream: Callable[[], int],
    ) -> None:
        """``stream`` returns the calling thread's current stream."""
        super().__init__(group, outputs)
        self._message, self._finish, self._stream, self._peer = message, finish, stream, message.peer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message in every replay of the graph."""
        try:
            self._message.follow(self._stream())
        except UCCHError as failure:
            raise torch_error(failure) from failure
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._message.given is not None

    def get_future(self) -> Future:
        """Wait for the message, and return a future of the result tensors."""
        self.wait()
        return super().get_future()


@not_compiled
class CombinedWork(Work):
    def __init__(self, group: Any, parts: Sequence[Work], entered: Sequence[Ready] = ()) -> None:
        """``entered``: the points in shared streams at which all parts are complete."""
        super().__init__(group, [tensor for part in parts for tensor in part._outputs])
        self._parts, self._entered = parts, entered
        self._done = all(part._done for part in parts)

    def _collect(self) -> None:
        """Record the first error of the parts, which have all been collected."""
        with self._lock:
            self._error, self._done = self.exception(), True

    def is_over(self) -> bool:
        """True if all calls have ended; collects their results. Makes no progress."""
        if not self._done and all(part.is_over() for part in self._parts):
            self._collect()
        return self._done

    def pending(self) -> list[PendingOperation]:
        return [each for part in self._parts for each in part.pending()]

    def is_completed(self) -> bool:
        if all(part.is_completed() for part in self._parts):
            self._collect()
            return True
        return False

    def exception(self) -> Exception | None:
        return next((part._error for part in self._parts if part._error is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all calls. Raises the first error."""
        for part in self._parts:
            if self._entered and part._ready is not None:
                part.is_over()
                if part._error is not None:
                    raise part._error
            else:
                part.wait(timeout)
        self._error = None  # if a part had one, it has been raised
        behind = [ready.order() for ready in self._entered]
        for part in self._parts if behind and all(behind) else ():
            if part._ready is not None:
                part.leave()
        return self._told()

    def publish(self, failure: Exception | None = None) -> None:
        """Complete the future. A thread that takes the result gets a stream that waits for every part."""
        for part in self._parts:
            if part._ready is not None:
                part._ready.order()
        super().publish(failure)
