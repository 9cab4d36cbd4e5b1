"""Calls on device memory that go by way of host memory whole: copies of what they read and write, in pinned memory.

No library then sees device memory, whatever devices the ranks have, or none: the program is that of host memory.
"""

from __future__ import annotations

from typing import NamedTuple

from ..buffers import Buffer
from ..device import Event
from ..planner.collectives import ROWS, Shape, recv_length
from ..transport.bounce import Bounce
from .arguments import Bound


class _Copy(NamedTuple):
    """A caller's buffer, its copy, whether the call needs what is in it, and whether it writes to it."""

    original: Buffer
    pinned: Buffer
    fetched: bool
    back: bool


class HostCopies:
    """Copies for one call of ``rank``; what ``stream`` has put there by the time that it gets here is fetched by it."""

    def __init__(self, bounce: Bounce, rank: int, stream: int | None) -> None:
        self._bounce, self._rank, self._stream = bounce, rank, stream
        self._copies: list[_Copy] = []
        self._left: Event | None = None

    def address(self, bound: Bound, buffer: Buffer) -> int:
        """Address of the copy of ``buffer``, one of the call's."""
        needed, written = True, False
        if buffer is bound.recv:
            call = bound.call
            # In place it holds the input, gaps keep their contents, and at its root a broadcast's data lies there.
            whole = buffer.count == recv_length(call, self._rank) and bound.recv_displs is None
            needed = bound.in_place or not whole
            written = not buffer.readonly and bool(ROWS[call.collective].post(Shape(call), self._rank))
        found = _Copy(buffer, self._bounce.memory_for(buffer), needed, written)
        self._copies.append(found)
        if needed:
            self._bounce.down(buffer, found.pinned, self._stream)
        return found.pinned.ptr

    def fetch(self) -> None:
        """Take the caller's data again, before a persistent call starts anew."""
        for copy in self._copies:
            if copy.fetched:
                self._bounce.down(copy.original, copy.pinned)

    def leave(self, stream: int) -> None:
        """Let a stream that waits for the call put the results where they belong."""
        self._put(stream)
        self._left = self._bounce.mark(stream)

    def bring_back(self) -> None:
        """Put the results where they belong; the copies are of no more use then."""
        event, self._left = self._left, None
        if event is None:
            self._put(None)
        else:
            self._bounce.wait(event)

    def _put(self, stream: int | None) -> None:
        for copy in self._copies:
            if copy.back:
                self._bounce.up(copy.pinned, copy.original, copy.original.nbytes, stream)
