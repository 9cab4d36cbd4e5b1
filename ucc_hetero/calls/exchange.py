"""Messages that were started together, as one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..native.libraries import ffi, lib
from .message import Moved
from .p2p import Messages
from .persistent import PersistentRequest
from .request import Request, finished
from .status import fill_empty


def start_all(messages: Messages, transfers: Sequence[Moved]) -> list[Request]:
    """Start transfers, in order: all of them or none."""
    started: list[Request] = []
    try:
        for transfer in transfers:
            started.append(messages.start(transfer))
    except BaseException:
        _give_up(started)
        raise
    return started


def _give_up(requests: Sequence[Request]) -> None:
    """Take back the receives that nothing has matched, and leave the rest to themselves."""
    for request in requests:
        request.Cancel()
        request.Free()


class Exchange(Request):
    """Finished when all its parts are, and then ``end`` has run; ``fail`` is told of the error that it raises.

    The error of the first part in order that fails is the whole's. ``has_status``: the first part's status is, too.
    """

    def __init__(
        self,
        parts: Sequence[Request],
        *,
        has_status: bool = False,
        end: Callable[[], None] | None = None,
        fail: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(parts[0]._op)
        self._parts, self._has_status, self._end, self._fail = parts, has_status, end, fail

    def Wait(self, status: Any = None) -> bool:
        """Wait until all messages have finished, then return True."""
        fill_empty(status)
        if self._done:
            return True
        self._done = True
        ended = 0
        try:
            for part in self._parts:
                ended += 1
                part.Wait(status if ended == 1 and self._has_status else None)
            if self._end is not None:
                self._end()
        except BaseException as error:
            _give_up(self._parts[ended:])
            if self._fail is not None:
                self._fail(error)
            raise
        return True

    def Test(self, status: Any = None) -> bool:
        """Make some progress and return whether all messages have finished."""
        return bool(self._done or self._ended()) and self.Wait(status)

    def Cancel(self) -> None:
        """Take back the receives that nothing has matched."""
        for part in self._parts:
            part.Cancel()

    def Free(self) -> None:
        """Give the request up; the messages go on and their buffers stay alive until they have finished."""
        self._done = True
        for part in self._parts:
            part.Free()

    def _ended(self) -> int:
        states = (part._done or part._ended() for part in self._parts)
        return int(next((state for state in states if state != 1), 1))

    def _ops(self) -> list[Any]:
        return [part._op for part in self._parts if not (part._done or part._ended())] or [self._op]

    def _arm(self) -> None:
        for part in self._parts:
            part._arm()

    def _drop(self) -> None:
        """Nothing is left to do: the messages' own requests see to their ends."""


class PersistentExchange(PersistentRequest):
    """Messages that are started together again and again: ``begin`` starts them."""

    def __init__(self, begin: Callable[[], Request], owner: object) -> None:
        # The native engine takes an idle message for an operation that has finished.
        idle = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
        super().__init__(lib.ucch_message_op(idle), idle, self._launch, None, lambda: None, owner=owner)
        self._make, self._active = begin, finished()

    def _launch(self) -> int:
        self._active = self._make()
        return 0

    def Wait(self, status: Any = None) -> bool:
        """Wait until the messages have finished, then return True."""
        fill_empty(status)
        if not self._done:
            self._done = True
            self._active.Wait(status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Make some progress and return whether the messages have finished."""
        return bool(self._done or self._ended()) and self.Wait(status)

    def Cancel(self) -> None:
        """Take back the receives that nothing has matched."""
        self._active.Cancel()

    def _ended(self) -> int:
        return self._active._done or self._active._ended()

    def _ops(self) -> list[Any]:
        return [self._op] if self._active._done else self._active._ops()

    def _arm(self) -> None:
        self._active._arm()

    def _drop(self) -> None:
        self._active.Free()
