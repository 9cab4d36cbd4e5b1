"""Blocking calls with a time limit: run in a thread of their own, or watched by one."""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

_T = TypeVar("_T")


class _Thread:
    """A thread that runs a call that does not raise, then others that it is given."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._more = _thread.allocate_lock()
        self._more.acquire()
        _thread.start_new_thread(self._run, ())

    def give(self, call: Callable[[], object]) -> None:
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


#: An idle thread: starting one takes as long as a short MPI call.
_idle: list[_Thread] = []
#: Calls that have not ended.
_calls: set[object] = set()
for _each in (_idle, _calls):
    os.register_at_fork(after_in_child=_each.clear)


def under_way() -> bool:
    return bool(_calls)


class Aside(Generic[_T]):
    """A call that runs in another thread.

    ``threading.Thread.start``, and so every thread pool, hangs if the new thread gets no memory to start with; this
    does not.
    """

    def __init__(self, call: Callable[[], _T]) -> None:
        self._found: list[_T] = []
        self._failure: list[BaseException] = []
        self._under_way = _thread.allocate_lock()
        self._under_way.acquire()
        task = partial(self._run, call)
        _calls.add(self)
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
            task()  # Python 3.12 starts no threads during its finalization

    def _run(self, call: Callable[[], _T]) -> None:
        try:
            self._found.append(call())
        except BaseException as error:
            self._failure.append(error)
        finally:
            _calls.discard(self)
            self._under_way.release()

    def ended(self, seconds: float = 0.0) -> bool:
        """True if it has ended, or ends within ``seconds``."""
        if not self._under_way.acquire(timeout=seconds):
            return False
        self._under_way.release()
        return True

    def result(self) -> _T:
        if self._failure:
            raise self._failure[0]
        return self._found[0]


class Watchdog:
    """A thread that checks whether calls of this process take too long.

    A call in another thread costs two thread switches, a watched call none. ``bites`` is called with the text of a call
    that has exceeded its time.
    """

    def __init__(self, bites: Callable[[str], object]) -> None:
        self._bites = bites
        #: Deadlines of the calls under way, and their texts, by thread.
        self._calls: dict[int, tuple[float, str]] = {}
        self._period = 0.0
        os.register_at_fork(after_in_child=self._forget)

    def over(self, call: Callable[[], _T], seconds: float, text: str) -> _T:
        """The result of a call that may take ``seconds`` seconds."""
        me = _thread.get_ident()
        self._calls[me] = time.monotonic() + seconds, text
        try:
            if not self._period:
                self._period = min(max(seconds / 4, 0.1), 10.0)
                _thread.start_new_thread(self._watch, ())
            return call()
        finally:
            del self._calls[me]

    def _watch(self) -> None:
        while True:
            time.sleep(self._period)
            for until, text in list(self._calls.values()):
                if time.monotonic() > until:
                    self._bites(text)

    def _forget(self) -> None:
        self._calls.clear()
        self._period = 0.0
