"""Calls that a rank refuses, because its arguments cannot be right: they come to nothing on all ranks.

A refused call counts as made, so that all ranks go on with the same number. Whoever has entered it, or comes to it
later, reads on the arrival board (ranks of other hosts hear by message, :mod:`.notices`) who refused it and why. What
libucc was given for such a call never ends, and its teams count calls by themselves: from the next call on the
communicator uses new ones. Where all ranks refuse, nobody has given anything to libucc, and nothing has to change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..bootstrap.group import Membership
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until


class Refusals:
    """The refused calls of one communicator, as this rank knows them."""

    def __init__(self, members: Membership, timeout: float) -> None:
        self._members, self._board, self._timeout = members, members.board, timeout
        #: This rank's own refusals of which it is not known yet whether all ranks have them.
        self.pending: list[int] = []
        #: Whether libucc still holds calls that came to nothing.
        self.tainted = False
        #: Tells the ranks of other hosts, where there are any.
        self.tell: Callable[[Any], None] | None = None
        self._lock = threading.Lock()

    def refuse(self, why: str) -> None:
        """Tell all ranks that this one refuses its next call."""
        native, rank = self._board.native, self._members.rank
        text = ffi.new("char[]", why.encode()[: int(lib.UCCH_REFUSAL_BYTES) - 1])
        self._await_readers()
        lib.ucch_lock()
        number = int(lib.ucch_board_refuse(native, rank, text))
        lib.ucch_unlock()
        self.pending.append(number)
        if self.tell is not None:
            self.tell(ffi.new("ucch_refusal *", (number, number, number, rank, rank, ffi.buffer(text)[:])))

    def _await_readers(self) -> None:
        """Wait until those who are many refusals behind have read the one that makes room for the next one."""
        # Where time is up their own call says who is missing.
        progress_until(lambda: lib.ucch_board_room(self._board.native), self._timeout)

    def settle(self) -> None:
        """Wait until the other ranks have come to the calls that this one refused, and go on as they do."""
        pending, self.pending = self.pending, []
        alive = [number for number in pending if self._entered(number)]
        native, started = self._board.native, int(lib.ucch_board_started(self._board.native))
        if lib.ucch_board_refused(native, lib.ucch_board_since(native), started, ffi.NULL):
            self.give_up(started)  # others refused what this rank had ended well before
        with self._lock:
            lib.ucch_board_settle(native, pending[-1] + 1)
            if alive:
                self._members.renew(alive[-1] + 1)

    def catch_up(self) -> bool:
        """Take note of a refused call that this rank has ended well, or that it has not waited for."""
        stale = bool(lib.ucch_board_stale(self._board.native))
        if stale:
            self.give_up(int(lib.ucch_board_started(self._board.native)))
        return stale

    def _entered(self, number: int) -> bool:
        """Whether any rank has entered a call that this one refused."""
        if self.tell is not None:
            return True  # ranks of other hosts may have, and all ranks have to think the same
        native = self._board.native
        known = progress_until(
            lambda: lib.ucch_board_entered(native, number) >= 0,
            self._timeout,
            lambda: lib.ucch_board_gone(native, number) != -1,
        )
        return not known or bool(lib.ucch_board_entered(native, number))  # the call to come says who is missing

    def give_up(self, number: int) -> None:
        """Call ``number`` came to nothing here, and with it what this rank has started since the refused one."""
        native = self._board.native
        with self._lock:
            if number < lib.ucch_board_since(native):
                return  # as was known when a call before it was given up
            self.tainted = True
            started = int(lib.ucch_board_started(native))
            refusal = self._board.refusal(number)
            if refusal is not None:
                # Those who make a team with this rank for the call go by this: they wait for it no longer.
                refusal.first, refusal.last = refusal.call + (started > refusal.call), started
                refusal.by = self._members.rank
                self._await_readers()
                lib.ucch_board_give_up(native, refusal)
                if self.tell is not None:
                    self.tell(refusal)
            lib.ucch_board_settle(native, started + 1)
            self._members.renew(started + 1)
