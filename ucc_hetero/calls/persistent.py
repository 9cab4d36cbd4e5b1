"""Requests of persistent calls: set up once, started any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..bindings.handle import Present
from ..native.libraries import lib, owned
from ..native.waiting import SLICE, refuse_finalized
from .request import Request, fill_empty, forget, under_way, wait_op

_wait = lib.ucch_wait

#: Persistent requests that have not been freed.
_startable: Present[PersistentRequest] = Present()


def nothing() -> None:
    """Do nothing."""


def free_all(owner: object) -> None:
    """Make the persistent requests of a communicator unusable, as it is being freed."""
    for request in _startable.all():
        request._part_from(owner)


class PersistentRequest(Request):
    """A call that was set up once and can be started repeatedly: the result of methods with ``_init``."""

    lasting = True
    _begin: Callable[[], int]
    _free: Callable[[], None] = staticmethod(nothing)  # if the constructor has failed

    def __init__(
        self,
        op: Any,
        keep: object,
        start: Callable[[], int] | None,
        finish: Callable[[int, Any], None] | None = None,
        *,
        free: Callable[[], None] = nothing,
        direct: Callable[[], int] | None = None,
        timeout: float = 0.0,
        cancel: Callable[[], None] | None = None,
        fill_status: Callable[[int, Any], None] | None = None,
        owner: object = None,
        refuse: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__(op, keep, finish, timeout=timeout, cancel=cancel, fill_status=fill_status, owner=owner)
        #: ``start`` starts the native operation, or raises; None: the class has a method ``_begin``. ``direct`` starts
        #: that of a call that needs no work before or after; ``start`` is called if it returns a negative number.
        self._free, self._direct = free, direct
        if start is not None:
            self._begin = start
        #: Tells the other ranks that this one cannot start the call.
        self._refuse = refuse
        self._done = True
        if self._call is not None:
            under_way.discard(self._call)
        _startable.add(self)

    def __del__(self) -> None:
        """Release the call as :meth:`Free` does, unless it is active."""
        if self._done:
            self._free()
        super().__del__()

    def _drop(self) -> None:
        """Leave an active call to the callback of its end, which then also releases it."""
        if self._call is not None:
            free, self._free = self._free, nothing
            self.at_end(lambda failed: free())
        super()._drop()

    def _part_from(self, owner: object) -> None:
        if self._owner is owner:
            self._retire(_ownerless)
            self._refuse = None

    def _retire(self, begin: Callable[[], int]) -> None:
        self._begin, self._free, self._direct = begin, nothing, None

    def __bool__(self) -> bool:
        """True until it is freed."""
        return self._begin is not _freed

    def Start(self) -> None:
        """Start the call.

        Raises:
            ValueError: The last start was not waited for, or the request or its communicator was freed.
        """
        if not self._done:
            self._start_refused(
                ValueError("this persistent request is still active; Wait for it before the next Start")
            )
        self._done = self._untold = False  # first: Ctrl-C may interrupt here, and the call be active
        if self._call is not None:
            under_way.add(self._call)
        if self._direct is None or self._direct() < 0:
            try:
                self._begin()
            except Exception as error:
                forget(self)
                self._start_refused(error)

    def Wait(self, status: Any = None) -> bool:
        """Wait until the call has finished; returns at once if it is not active.

        Args:
            status: ``MPI.Status`` to be filled.

        Returns:
            True.

        Raises:
            CollectiveTimeout, PeerError, CollectiveError: The call failed; as its blocking form.
        """
        if self._done:
            fill_empty(status)
            return True
        if self._timeout:
            self._arm()
        state = _wait(self._op, SLICE)
        if state == 1 and self._direct is not None:
            self._done = True
            if self._call is not None:
                under_way.discard(self._call)
            if status is not None:
                self._describe(1, status)
        else:
            self._complete(state or wait_op(self._op), status)
        return True

    def _start_refused(self, error: Exception) -> NoReturn:
        if self._refuse is not None:
            self._refuse(error)
        raise error

    @classmethod
    def Startall(cls, requests: Sequence[PersistentRequest]) -> None:
        """Start all requests, in order.

        Args:
            requests: Persistent requests.

        Raises:
            ValueError: As :meth:`Start`.
        """
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Release the request; it cannot be started again.

        Raises:
            ValueError: It is active.
        """
        if not self._done:
            raise ValueError("this persistent request is still active; Wait for it before Free")
        self._free()
        self._retire(_freed)
        self._call = self._keep = None


def idle() -> tuple[Any, Any]:
    """(a finished operation, its owner): that of a message that was never started."""
    message = owned(lib.ucch_message_new(), lib.ucch_message_free)
    return lib.ucch_message_op(message), message


def _refusal(why: str) -> Callable[[], int]:
    def start() -> int:
        refuse_finalized()
        raise ValueError(why)

    return start


_freed = _refusal("this persistent request has been freed")
_ownerless = _refusal("the communicator of this persistent request has been freed")
