"""Messages that a probe has taken out of libucp's queue, until they are received, discarded, or go back.

libucp cannot take them back. A message whose receive has not begun, because a signal's exception came or the caller
dropped it, is kept for the next receive or probe that matches it.
"""

from __future__ import annotations

from bisect import insort
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any

from ..calls.state import State
from ..native.libraries import ffi, lib

_orders, _order = count(), attrgetter("order")


class _Match:
    """A message of libucp's, in memory that only C writes. Discarded if it is dropped, so that its sender does not wait
    for ever."""

    #: NULL before the probe has found it, and from the start of its receive on.
    handle: Any = (None,)  # if the constructor was interrupted

    def __init__(self, process: Any, lanes: Any) -> None:
        self.order, self._process, self._lanes = next(_orders), process, lanes
        self.found, self.handle = ffi.new("ucch_offer *"), ffi.new("ucp_tag_message_h *")

    def __bool__(self) -> bool:
        return bool(self.handle[0])

    def __del__(self) -> None:
        if self and self._process.usable:  # at exit the worker may be closed first
            lib.ucch_discard(self._process.worker.handle, self._lanes, self.handle[0], self.found)


class Taken:
    """A message that its owner alone can receive. False before a probe has found it, and once its receive has begun."""

    _match = _Match(None, None)  # if the constructor was interrupted

    def __init__(self, state: State, match: _Match) -> None:
        self._state, self._match = state, match

    @classmethod
    def none_yet(cls, state: State, process: Any, lanes: Any) -> Taken:
        """Make the place for a message before a probe looks for it: no signal's exception can come in between."""
        return cls(state, _Match(process, lanes))

    @property
    def handle(self) -> Any:
        return self._match.handle

    @property
    def found(self) -> Any:
        """Tag and length, as ``ucch_offer``."""
        return self._match.found

    def __bool__(self) -> bool:
        return bool(self._match)

    def __del__(self) -> None:
        """Give the message back. No function of Python's is called: a signal's exception would end this."""
        match = self._match
        if match.handle[0] and self._state.board.native is not None and match not in self._state.given_back:
            insort(self._state.given_back, match, key=_order)


def again(state: State, value: int, mask: int) -> Taken | None:
    """Take the first message with such a tag that was given back; None if there is none."""
    for match in list(state.given_back):
        if int(match.found.code) & mask == value:
            taken = Taken(state, match)  # first: it gives the message back if a signal's exception comes now
            with suppress(ValueError):  # another thread has it
                state.given_back.remove(match)
                return taken
            taken._match = Taken._match
    return None
