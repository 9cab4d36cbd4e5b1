"""Futures of asynchronous calls: which thread completes them, and in which order their callbacks run.

A callback may itself communicate, and wait for it (PowerSGD does). It must therefore never run in the thread that
completes futures, and what it posts must be posted in the same order on every rank, although futures complete at
different times on different ranks. So callbacks run one after the other, in the order in which they were attached,
in a thread of the group's; calls posted from there go to a communicator of their own. Only those of a future that the
caller has waited for, which all ranks have then, run at once and in the caller's thread, as torch's do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from .. import log
from ..native.libraries import lib
from .streams import in_idle_stream

#: Seconds after which the completing thread looks at its calls although nothing of them has been heard.
_SLICE = 0.25


class _ThreadState(threading.local):
    """The level of the calling thread, 0 in ordinary code; ``ordinary`` is False in threads of this package."""

    level, ordinary = 0, True


this_thread = _ThreadState()


def level() -> int:
    """0 in ordinary code, 1 in a callback, 2 in a callback of a call that was posted in a callback, ..."""
    return this_thread.level


class CallbackThread:
    """A thread that runs callbacks one after the other. Calls that they post are of level ``at``."""

    def __init__(self, at: int, name: str) -> None:
        self._level = at
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop, name=f"ucch-{name}", daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those that were added before; in the caller's thread once this one has been stopped."""
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
            except Exception as failure:  # those after it are not to wait for ever
                log.log("torch").warning("%s: %s", self._thread.name, failure)

    def stop(self, seconds: float) -> bool:
        """Have the thread end after the callbacks that it has been given, and wait so long. True if it has ended."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()


class _Failed:
    """The value of a failed call's future: C++ that takes tensors out of it, as DDP's reducer does, gets the failure.

    A future of devices takes tensors out itself when it gets the value, ``looks`` times: it finds none.
    """

    def __init__(self, failure: Exception, looks: int) -> None:
        self.failure, self._looks = failure, looks

    def __reduce__(self) -> Any:
        if self._looks:
            self._looks -= 1
            return str, ()
        raise self.failure

    def __str__(self) -> str:
        """Raise the failure: DDP's C++ puts the value of a hook's future into its error text if it is no tensor."""
        raise self.failure


def _raise_failure(result: _Failed) -> None:
    raise result.failure


class Future(torch.futures.Future):  # type: ignore[type-arg,unused-ignore]
    """A torch future whose callbacks run in a thread of the group's, in the order in which they were attached."""

    #: Ordinary code has waited for it, or for its call.
    waited = False

    def __init__(
        self,
        callbacks: Callable[[int], CallbackThread],
        work: Any = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        #: Devices of the tensors that the result may hold; None for the host's alone.
        self._devices = work.devices if work is not None else devices
        super().__init__(devices=self._devices)
        #: The group's callbacks of a level.
        self._callbacks = callbacks
        self._work = work

    def wait(self) -> Any:
        if this_thread.ordinary:
            self.waited = True
        work = self._work
        if work is not None:
            try:
                work.wait()  # in this thread: no hand-over
            except Exception as failure:
                work.publish(failure)  # callbacks that ask for the result get it, too
            else:
                work.publish()
        return super().wait()  # another thread may be publishing: there is a result only after this

    def set_exception(self, result: Exception) -> None:
        """As torch's own, which holds the exception itself: C++ looks for tensors there, and crashes."""
        self._set_unwrap_func(_raise_failure)
        self.set_result(_Failed(result, looks=int(bool(self._devices))))

    def settled(self) -> None:
        """Drop the call, which refers to this future, as the result is there."""
        self._work = None

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Call ``callback(self)`` when there is a result, at once for one that was waited for; the future of what it
        returns."""
        out = Future(self._callbacks, devices=self._devices)

        def job() -> None:
            with in_idle_stream(self._devices):
                self._settle()
                try:
                    result = callback(self)
                except Exception as failure:
                    out.set_exception(failure)
                except BaseException as failure:  # SystemExit, in a thread: a waiter must not wait for ever
                    out.set_exception(RuntimeError(f"a callback ended with {failure!r}"))
                else:
                    out.set_result(result)

        if self.waited and this_thread.ordinary:
            out.waited = True
            job()
        else:
            self._callbacks(level() + 1).add(job)
        return out

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` when there is a result; its exceptions are logged."""

        def told(each: Any) -> None:
            try:
                callback(each)
            except BaseException as failure:
                name = getattr(callback, "__qualname__", repr(callback))
                log.log("torch").error("the callback %s of a call ended with %r", name, failure, exc_info=failure)

        self.then(told)

    def _settle(self) -> None:
        """Wait for the result, whatever it is."""
        with suppress(Exception):  # the callback sees it, as torch has it
            self.wait()


class _Completer:
    """The thread that completes the futures of calls that no thread waits for.

    It sleeps until the engine's doorbell rings: when a call that it listens to has ended, when a call is added, and
    when it is to stop. The engine's own thread makes progress, or a thread that waits in the engine.
    """

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._on = True
        self._thread = threading.Thread(target=self._loop, name="ucch-futures", daemon=True)
        self._thread.start()

    def add(self, work: Any) -> None:
        """Complete the future of a call once the call has ended."""
        self._new.put(work)
        lib.ucch_progress_thread(1)
        lib.ucch_doorbell_ring()

    def _loop(self) -> None:
        this_thread.ordinary = False
        works: list[Any] = []
        while self._on:
            known = lib.ucch_doorbell_count()  # before anything is looked at: nothing can end unheard after that
            while not self._new.empty():
                works.append(self._new.get())
            left = [work for work in works if not self._completed(work)]
            if len(left) == len(works):
                lib.ucch_doorbell_wait(known, _SLICE)
            works = left

    @staticmethod
    def _completed(work: Any) -> bool:
        try:
            work.listen()  # it may have begun only now
            with in_idle_stream(work.devices):
                done: bool = work.is_over()
                if done:
                    work.publish()
        except Exception as failure:  # this thread serves others, too
            log.log("torch").warning("the result of a call could not be handed on: %s", failure)
            work.publish(failure)
            return True
        return done

    def stop(self) -> None:
        """End the thread; futures of what is under way get no result any more."""
        self._on = False
        lib.ucch_doorbell_ring()
        self._thread.join()


_completer: _Completer | None = None
_lock = threading.Lock()


def complete_later(work: Any) -> None:
    """Set the result of a call's future once the call has finished."""
    global _completer
    with _lock:
        if _completer is None:
            _completer = _Completer()
        _completer.add(work)


def stop() -> None:
    """End the completing thread, before the process ends: a thread that is inside torch then ends a good run badly."""
    global _completer
    with _lock:
        last, _completer = _completer, None
    if last is not None:
        last.stop()  # without the lock: it may be adding a call
