"""A send and a receive that were started together, as one request."""

from __future__ import annotations

from typing import Any

from .request import Request
from .status import fill_empty

__all__ = ["Exchange"]


class Exchange(Request):
    """Finished when both are. ``Status`` is the receive's, and so is the error where both fail."""

    def __init__(self, incoming: Request, outgoing: Request) -> None:
        super().__init__(incoming._op, None, _never)
        self._incoming, self._outgoing = incoming, outgoing

    def Wait(self, status: Any = None) -> bool:
        """Wait until both messages have finished, then return True."""
        if self._done:
            fill_empty(status)
            return True
        self._done = True
        try:
            self._incoming.Wait(status)
        except BaseException:
            self._outgoing.Free()
            raise
        return self._outgoing.Wait()

    def Test(self, status: Any = None) -> bool:
        """Make some progress and return whether both messages have finished."""
        return bool(self._done or self._ended()) and self.Wait(status)

    def Free(self) -> None:
        """Give the request up; both messages go on and their buffers stay alive until they have finished."""
        self._done = True
        self._incoming.Free()
        self._outgoing.Free()

    def _ended(self) -> int:
        state = self._incoming._ended()
        return state if state != 1 else self._outgoing._ended()

    def _ops(self) -> list[Any]:
        return [part._op for part in (self._incoming, self._outgoing) if not part._ended()] or [self._op]

    def _arm(self) -> None:
        self._incoming._arm()
        self._outgoing._arm()

    def _drop(self) -> None:
        """Nothing is left to do: the messages' own requests see to their ends."""


def _never(state: int, status: Any) -> None:
    raise AssertionError("a pair of messages does not end as one native operation")
