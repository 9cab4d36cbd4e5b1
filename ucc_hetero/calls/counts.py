"""Exchanges of the counts of uneven blocks, which are calls of their own before a call or beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .request import Request

if TYPE_CHECKING:
    from .preparation import Prepared


class CountExchange(NamedTuple):
    """The exchange of counts before a call: this rank's are in ``mine``, those of all ranks arrive in ``rows``."""

    mine: Any
    rows: Any
    prepared: Prepared


@dataclass(slots=True, eq=False)
class CountsAlong:
    """Counts that go along with a non-blocking call, as a call of their own. They are compared at its end, as libucc
    does not compare them."""

    begin: Callable[[Prepared], Request]
    prepared: Prepared
    compare: Callable[[], None]
    _request: Request | None = None

    def start(self) -> bool:
        """Send them, again for a later call. False if all programs are in use."""
        if self._request is not None:
            program = self.prepared.pool.take()
            if program is None:
                return False
            self.prepared.program = program
        self._request = self.begin(self.prepared)
        return True

    def check(self) -> None:
        """Raise ``MismatchError`` if the ranks' counts do not match."""
        assert self._request is not None
        self._request.Wait()
        self.compare()
