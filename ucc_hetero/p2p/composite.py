"""Requests that consist of several requests: messages started together, and partitioned messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..calls.persistent import PersistentRequest, idle
from ..calls.request import Request, fill_empty, finished, native_of
from ..errors import UCCHError
from .captured import CapturedMessage
from .messages import Messages
from .transfer import AnyTransfer


def start_all(messages: Messages, transfers: Sequence[AnyTransfer | CapturedMessage]) -> list[Request]:
    """Start transfers in order. If one fails to start, none stays started."""
    started: list[Request] = []
    try:
        for transfer in transfers:
            started.append(messages.start(transfer))
    except BaseException:
        _give_up(started)
        raise
    return started


def _give_up(requests: Sequence[Request]) -> None:
    """Cancel receives that no message has matched, and drop the other requests."""
    for request in requests:
        request.Cancel()
        request.Free()


class CompositeRequest(Request, ABC):
    """A request that consists of several others, and is complete when all of them are."""

    @abstractmethod
    def _begun(self) -> Sequence[Request]:
        """The parts that have been started."""

    @abstractmethod
    def _settle(self, status: Any) -> None:
        """Collect the parts' results, after this request counts as done. Raises their error."""

    def Wait(self, status: Any = None) -> bool:
        fill_empty(status)
        if not self._done:
            self._take(status)
        return True

    def Test(self, status: Any = None) -> bool:
        fill_empty(status)
        if not self._done and self._ended():
            self._take(status)
        return self._done

    def _take(self, status: Any) -> None:
        self._done = True
        try:
            self._settle(status)
        except BaseException as error:
            self._done = isinstance(error, UCCHError)  # after a signal's exception it can be waited for again
            raise

    def _ended(self) -> int:
        states = (part.finished or part._ended() for part in self._begun())
        return int(next((state for state in states if state != 1), 1))

    def _ops(self) -> list[Any]:
        """The parts' operations under way; the idle operation if there is none, so that Waitany checks this request
        again."""
        left = [part for part in self._begun() if not (part.finished or part._ended())]
        return [op for part in left for op in part._ops()] or [self._op]

    def _arm(self) -> None:
        for part in self._begun():
            part._arm()

    def _drop(self) -> None:
        for part in self._begun():
            part.Free()


class MessageGroup(CompositeRequest):
    """Messages started together. ``end`` is called after them, and ``fail`` with the error before it is raised.

    The error is that of the first part that fails, in order; with ``has_status`` the status is that of the first part.
    """

    def __init__(
        self,
        parts: Sequence[Request],
        *,
        has_status: bool = False,
        end: Callable[[], None] | None = None,
        fail: Callable[[BaseException], None] | None = None,
    ) -> None:
        super().__init__(native_of(parts[0]))
        self._parts, self._has_status, self._end, self._fail = parts, has_status, end, fail

    def _begun(self) -> Sequence[Request]:
        return self._parts

    def _describe(self, state: int, status: Any) -> None:
        first = self._parts[0]
        if state and self._has_status:
            first._describe(first._ended(), status)
        else:
            fill_empty(status)

    def _settle(self, status: Any) -> None:
        ended = 0
        try:
            for part in self._parts:
                ended += 1
                part.Wait(status if ended == 1 and self._has_status else None)
            if self._end is not None:
                self._end()
        except UCCHError as error:
            _give_up(self._parts[ended:])
            if self._fail is not None:
                self._fail(error)
            raise

    def Cancel(self) -> None:
        for part in self._parts:
            part.Cancel()


class PersistentMessages(CompositeRequest, PersistentRequest):
    """Messages that are started together, repeatedly, by ``begin``."""

    def __init__(self, begin: Callable[[], Request], owner: object) -> None:
        super().__init__(*idle(), None, owner=owner)
        self._make, self._active = begin, finished()

    def _begin(self) -> int:
        self._active = self._make()
        return 0

    def _begun(self) -> Sequence[Request]:
        return (self._active,)

    def _describe(self, state: int, status: Any) -> None:
        self._active._describe(state, status)

    def _settle(self, status: Any) -> None:
        self._active.Wait(status)

    def Cancel(self) -> None:
        self._active.Cancel()
