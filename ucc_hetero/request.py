"""What is under way: requests of non-blocking and persistent calls, with mpi4py's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .native import ffi, lib

__all__ = ["PersistentRequest", "Request", "wait_op"]

#: Seconds that a wait stays in C before Python looks for signals (Ctrl-C).
SLICE = 0.05

_wait = lib.ucch_wait


def wait_op(op: Any) -> int:
    """Wait for a native operation; 1 done, 2 failed. Signals are seen in between."""
    while not (state := lib.ucch_wait(op, SLICE)):
        pass
    return int(state)


class Request:
    """A call that has begun.

    ``Wait`` and ``Test`` raise what the call would have raised. Dropping a request does not cancel the call; its
    buffers stay alive until it has finished.
    """

    def __init__(self, op: Any, keep: object, finish: Callable[[int, Any], None]) -> None:
        self._op: Any = op
        self._keep = keep
        #: Called once with the final state and the status object to fill; raises the call's error.
        self._finish = finish
        self._done = False

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished, then return True."""
        if not self._done:
            self._complete(wait_op(self._op), status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Make some progress and return whether the call has finished."""
        if not self._done:
            state = lib.ucch_test(self._op)
            if not state:
                return False
            self._complete(state, status)
        return True

    wait = Wait
    test = Test

    def _complete(self, state: int, status: Any) -> None:
        self._done = True
        try:
            self._finish(state, status)
        finally:
            self._keep = None

    @property
    def finished(self) -> bool:
        """True when the call has finished and its result was taken by ``Wait`` or ``Test``."""
        return self._done

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> bool:
        """Wait for all requests, then return True; the first failure in order is raised when all have ended."""
        cls._wait_many(requests, every=True)
        failure: BaseException | None = None
        for i, request in enumerate(requests):
            try:
                request.Wait(statuses[i] if statuses and i < len(statuses) else None)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Any = None) -> int:
        """Wait for one of the requests and return its index; -1 when all were finished before."""
        pending = [i for i, r in enumerate(requests) if not r._done]
        if not pending:
            return -1
        while True:
            for i in pending:
                if requests[i].Test(status):
                    return i
            cls._wait_many([requests[i] for i in pending], every=False)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> list[int] | None:
        """Wait for at least one request and return the indices of all that have finished; None when none was left."""
        first = cls.Waitany(requests)
        if first < 0:
            return None
        return sorted([first, *(i for i, r in enumerate(requests) if not r._done and r.Test())])

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: list[Any] | None = None) -> bool:
        """Make some progress and return whether all requests have finished."""
        finished = [r.Test() for r in requests]  # each of them is given a chance
        return all(finished)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """(index of a request that has just finished or -1, whether there was one or none was left)."""
        pending = [i for i, r in enumerate(requests) if not r._done]
        for i in pending:
            if requests[i].Test(status):
                return i, True
        return -1, not pending

    @staticmethod
    def _wait_many(requests: Sequence[Request], *, every: bool) -> None:
        ops = [r._op for r in requests if not r._done]
        if ops:
            native = ffi.new("ucch_op *[]", ops)
            while not lib.ucch_wait_any(native, len(ops), every, SLICE):
                pass


class PersistentRequest(Request):
    """A call that was set up once and can be started again and again."""

    def __init__(
        self,
        op: Any,
        keep: object,
        start: Callable[[], int],
        finish: Callable[[int, Any], None],
        free: Callable[[], None],
        *,
        simple: bool = False,
    ) -> None:
        super().__init__(op, keep, finish)
        #: ``start`` starts the native operation; ``simple`` means that success leaves nothing for ``finish`` to do.
        self._begin, self._free, self._simple = start, free, simple
        self._done = True

    def Start(self) -> None:
        """Start the call. ``ValueError`` when the last one was not waited for."""
        if not self._done:
            raise ValueError("this persistent request is still active; Wait for it before the next Start")
        self._begin()
        self._done = False

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished, then return True."""
        if not self._done:
            state = _wait(self._op, SLICE)
            if state == 1 and self._simple:
                self._done = True
            else:
                self._complete(state or wait_op(self._op), status)
        return True

    wait = Wait

    @classmethod
    def Startall(cls, requests: Sequence[PersistentRequest]) -> None:
        """Start all requests, in order."""
        for request in requests:
            request.Start()

    def _complete(self, state: int, status: Any) -> None:
        self._done = True
        self._finish(state, status)

    def Free(self) -> None:
        """Release the request; it cannot be started again."""
        if not self._done:
            raise ValueError("this persistent request is still active; Wait for it before Free")
        self._free()
        self._begin = _freed
        self._keep = None


def _freed() -> int:
    raise ValueError("this persistent request has been freed")
