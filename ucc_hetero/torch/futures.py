"""Futures of asynchronous calls: who completes them, and in which order their callbacks run.

A callback may itself communicate, and wait for it (PowerSGD does). It must therefore never run in the thread that
completes futures, and what it posts must be posted in the same order on every rank, although futures complete at
different times on different ranks. So callbacks run one after the other, in the order in which they were attached,
in a thread of the group's; calls posted from there go to a *lane*, a communicator, of their own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ..native import ffi, lib
from .streams import beside

if TYPE_CHECKING:
    from .work import Work

__all__ = ["Future", "InOrder", "complete_later", "level", "stop", "stop_all"]

#: Seconds that the completing thread waits in C before it looks for newly added calls.
_SLICE = 0.002


class _Here(threading.local):
    """What the calling thread is about: 0 is ordinary code."""

    level = 0


_here = _Here()


def level() -> int:
    """0 in ordinary code, 1 in a callback, 2 in a callback of a call that was posted in a callback, ..."""
    return _here.level


class InOrder:
    """A thread that does what it is given, one after the other. Calls posted from there are of level ``at``."""

    def __init__(self, at: int, name: str) -> None:
        self._level = at
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"ucch-{name}", daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those that were added before."""
        self._jobs.put(job)

    def _loop(self) -> None:
        _here.level = self._level
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self, seconds: float) -> None:
        """Let the thread end after what it has been given; wait for that."""
        self._jobs.put(None)
        self._thread.join(seconds)


class Future(torch.futures.Future):  # type: ignore[type-arg,unused-ignore]
    """A torch future whose callbacks run in a thread of the group's, in the order in which they were attached."""

    def __init__(
        self, callbacks: Callable[[int], InOrder], work: Work | None = None, devices: Sequence[Any] | None = None
    ) -> None:
        #: Those of the tensors that the result may hold; None for the host's alone.
        self._devices = work.devices if work is not None else devices
        super().__init__(devices=self._devices)
        #: The group's callbacks of a level.
        self._callbacks = callbacks
        self._work = work

    def wait(self) -> Any:
        """Wait for the result and return it; raises what the call raised."""
        if self._work is not None:
            try:
                self._work.wait()  # in this thread: no hand-over
            except Exception as failure:
                self._work.publish(failure)  # callbacks that ask for the result get it, too
            else:
                self._work.publish()
        return super().wait()  # another thread may be publishing: there is a result only after this

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Call ``callback(self)`` when there is a result; the returned future holds what it returns."""
        out = Future(self._callbacks, devices=self._devices)

        def job() -> None:
            with beside(self._devices):
                self._settle()
                try:
                    out.set_result(callback(self))
                except Exception as failure:
                    out.set_exception(failure)

        self._callbacks(level() + 1).add(job)
        return out

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` when there is a result."""
        self.then(callback)

    def _settle(self) -> None:
        """Wait for the result, whatever it is."""
        with suppress(Exception):  # the callback sees it, as torch has it
            self.wait()


class _Completer:
    """The thread that completes the futures of calls that nobody waits for."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._some = threading.Condition()
        self._on = True
        self._thread = threading.Thread(target=self._loop, name="ucch-futures", daemon=True)
        self._thread.start()

    def add(self, work: Work) -> None:
        with self._some:
            self._works.append(work)
            self._some.notify()

    def _loop(self) -> None:
        while self._on:
            with self._some:
                while not self._works and self._on:
                    self._some.wait()
                works = list(self._works)
            done = [work for work in works if self._completed(work)]
            with self._some:
                self._works = [work for work in self._works if work not in done]
            ops = [op for work in works for op in work.pending()] if not done else []
            if ops:
                lib.ucch_wait_any(ffi.new("ucch_op *[]", ops), len(ops), False, _SLICE)
            elif not done:
                time.sleep(_SLICE)  # none has begun

    @staticmethod
    def _completed(work: Work) -> bool:
        with beside(work.devices):
            done = work.is_completed()
            if done:
                work.publish()
        return done

    def stop(self) -> None:
        with self._some:
            self._on = False
            self._some.notify()
        self._thread.join()


_completer: _Completer | None = None
_lock = threading.Lock()


def complete_later(work: Work) -> None:
    """Set the result of a call's future once the call has finished."""
    global _completer
    with _lock:
        if _completer is None:
            _completer = _Completer()
        _completer.add(work)


def stop_all(threads: Sequence[InOrder], seconds: float = 5.0) -> None:
    """End threads; what they were given is done before."""
    end = time.monotonic() + seconds
    for each in threads:
        each.stop(max(0.0, end - time.monotonic()))


def stop() -> None:
    """End the completing thread, before the process ends: a thread that is inside torch then ends a good run badly."""
    global _completer
    with _lock:
        if _completer is not None:
            _completer.stop()
            _completer = None
