"""Futures of asynchronous calls: which thread completes them, and in which order callbacks run.

A callback may communicate and wait (PowerSGD does), so it must not run in the thread that completes futures. The calls
of callbacks must be posted in the same order on all ranks, although futures complete at different times. So callbacks
run one at a time, in the order in which they were attached, in a thread of the group, and their calls use a
communicator of their own. Callbacks of a future that the caller has waited for run at once in the caller's thread, as
in torch: there all ranks have waited.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from .. import log
from ..native.completion import CompletionThread
from ..native.libraries import lib
from .streams import in_idle_stream


class _ThreadState(threading.local):
    #: 0 in ordinary code, 1 in a callback, 2 in a callback of a call that was posted in a callback, ...
    level = 0
    #: False in this package's own threads.
    ordinary = True


this_thread = _ThreadState()


class CallbackThread:
    """A thread that runs callbacks one at a time. Calls that they post have level ``at``."""

    def __init__(self, at: int, name: str) -> None:
        self._level = at
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop, name=f"ucch-{name}", daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Run ``job`` after the earlier ones; in the caller's thread once this thread was stopped."""
        with self._lock:
            if not self._ended:
                self._jobs.put(job)
                return
        job()

    def _loop(self) -> None:
        this_thread.level, this_thread.ordinary = self._level, False
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as failure:  # the callbacks behind it must run
                log.log("torch").warning("%s: %s", self._thread.name, failure)

    def stop(self, seconds: float) -> bool:
        """Let the thread end after the callbacks it already has. Waits ``seconds``; True if the thread has ended."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()


class _Failed:
    """Value of a failed call's future. C++ code that takes tensors out of it, such as DDP's reducer, gets the failure.

    torch's future takes tensors out of a value ``looks`` times when it is set: those get none.
    """

    def __init__(self, failure: Exception, looks: int) -> None:
        self.failure, self._looks = failure, looks

    def __reduce__(self) -> Any:
        if self._looks:
            self._looks -= 1
            return str, ()
        raise self.failure

    def reveal(self) -> Any:
        """Raise the failure."""
        raise self.failure

    #: DDP's C++ code formats the value of a hook's future into its error if it is no tensor.
    __str__ = reveal


class Future(torch.futures.Future):  # type: ignore[type-arg,unused-ignore]
    """A torch future whose callbacks run in a thread of the group, in the order in which they were attached."""

    #: True once ordinary code has waited for the future, or for its call.
    waited = False

    def __init__(
        self,
        callbacks: Callable[[int], CallbackThread],
        work: Any = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        #: Devices of the result's tensors; None if they are in host memory.
        self._devices = work.devices if work is not None else devices
        super().__init__(devices=self._devices)
        #: level -> the group's thread for callbacks of this level.
        self._callbacks = callbacks
        self._work = work

    def wait(self) -> Any:
        if this_thread.ordinary:
            self.waited = True
        work = self._work
        if work is not None:
            try:
                work.wait()  # complete it in this thread, without the completing thread
            except Exception as failure:
                work.publish(failure)  # callbacks see the failure when they ask for the result
            else:
                work.publish()
        return super().wait()  # another thread may be publishing the result

    def set_exception(self, result: Exception) -> None:
        """Like torch's, but wraps the exception: C++ code would look for tensors in the bare one, and crash."""
        self._set_unwrap_func(_Failed.reveal)
        self.set_result(_Failed(result, looks=int(bool(self._devices))))

    def settled(self) -> None:
        """Drop the reference to the call, now that the result is set: it refers back to this future."""
        self._work = None

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Run ``callback(self)`` once there is a result, or now if that was waited for. Returns the future of its
        value."""
        out = Future(self._callbacks, devices=self._devices)

        def job() -> None:
            with in_idle_stream(self._devices):
                self._settle()
                try:
                    result = callback(self)
                except Exception as failure:
                    out.set_exception(failure)
                except BaseException as failure:  # also SystemExit: waiters must not wait for ever
                    out.set_exception(RuntimeError(f"a callback ended with {failure!r}"))
                else:
                    out.set_result(result)

        if self.waited and this_thread.ordinary:
            out.waited = True
            job()
        else:
            self._callbacks(this_thread.level + 1).add(job)
        return out

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Run ``callback(self)`` once there is a result. Its exceptions are logged."""

        def told(each: Any) -> None:
            try:
                callback(each)
            except BaseException as failure:
                name = getattr(callback, "__qualname__", repr(callback))
                log.log("torch").error("the callback %s of a call ended with %r", name, failure, exc_info=failure)

        self.then(told)

    def _settle(self) -> None:
        """Wait for the result; errors are left to the callback."""
        with suppress(Exception):  # as in torch, the callback gets the failure from the future
            self.wait()


_completer = CompletionThread("ucch-futures")


def complete_later(work: Any) -> None:
    """Complete the future of a call that no thread waits for once the call has finished."""
    lib.ucch_progress_thread(1)
    _completer.add(partial(_completed, work))


def _completed(work: Any) -> bool:
    this_thread.ordinary = False
    try:
        work.listen()  # it may have started only now
        with in_idle_stream(work.devices):
            done: bool = work.is_over()
            if done:
                work.publish()
    except Exception as failure:  # other calls still need this thread
        log.log("torch").warning("the result of a call could not be handed on: %s", failure)
        work.publish(failure)
        return True
    return done


def stop() -> None:
    """End the completing thread before the process exits: a daemon thread inside torch could crash it. Futures of calls
    that have not ended get no result."""
    _completer.stop()
