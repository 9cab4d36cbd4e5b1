"""Blocking calls in threads of their own, which are waited for with a limit."""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Thread:
    """A thread that has begun a call, which raises nothing; others follow when that has ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._more = _thread.allocate_lock()
        self._more.acquire()
        _thread.start_new_thread(self._run, ())

    def give(self, call: Callable[[], object]) -> None:
        """Begin the next call."""
        self._call = call
        self._more.release()

    def _run(self) -> None:
        while self._call is not None:
            self._call()
            self._call = None
            if _idle:
                return
            _idle.append(self)
            self._more.acquire()


#: A thread that waits for a call: to start one takes as long as short calls of MPI's.
_idle: list[_Thread] = []
os.register_at_fork(after_in_child=_idle.clear)


class Aside(Generic[_T]):
    """A call that has begun in another thread.

    ``threading.Thread.start``, and with it every pool of threads, waits for ever for a thread that finds no memory to
    begin with; this does not.
    """

    def __init__(self, call: Callable[[], _T]) -> None:
        self._found: list[_T] = []
        self._failure: list[BaseException] = []
        self._under_way = _thread.allocate_lock()
        self._under_way.acquire()
        task = partial(self._run, call)
        try:
            _idle.pop().give(task)
        except IndexError:
            self._begin(task)

    def _begin(self, task: Callable[[], None]) -> None:
        try:
            _Thread(task)
        except RuntimeError as error:
            if "shutdown" not in str(error):
                raise
            task()  # Python 3.12 begins no thread for what it calls at its end

    def _run(self, call: Callable[[], _T]) -> None:
        try:
            self._found.append(call())
        except BaseException as error:
            self._failure.append(error)
        finally:
            self._under_way.release()

    def ended(self, seconds: float = 0.0) -> bool:
        """True if it has ended, or does so within these seconds."""
        if not self._under_way.acquire(timeout=seconds):
            return False
        self._under_way.release()
        return True

    def result(self) -> _T:
        """The result of a call that has ended, or its error raised."""
        if self._failure:
            raise self._failure[0]
        return self._found[0]
