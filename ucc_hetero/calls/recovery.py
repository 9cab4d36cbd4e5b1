"""Recovery after the death of ranks: a communicator is given up for all its ranks; those that live get another one.

The exchange among the ranks, MPI's with fault tolerance or torch's store, says which ranks live and agrees on it.
Operations under way in libucc and libucp are left to them, and no rank waits for one that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from .. import log
from ..bootstrap import faults, growth
from ..errors import CollectiveError, CollectiveTimeout, NotSupported, PeerError, RevokedError, UCCHError
from ..native.libraries import lib
from .request import poll_hooks
from .state import State

_C = TypeVar("_C")

#: Seconds between looks for a revocation by ranks of other hosts.
_LOOK_S = 0.01


class Recovery:
    """Part of a communicator that sees to ranks which die."""

    def __init__(self, state: State) -> None:
        self._state, self._mpi = state, state.mpi
        self._native: Any = state.board.native
        #: Why its ranks cannot go on; empty where they can.
        self.lacks = faults.lacking(state.mpi)
        self._looked, self._pause = 0.0, getattr(state.mpi, "look_s", _LOOK_S)
        if not self.lacks and state.size > 1:
            poll_hooks.append(self.look)

    def look(self) -> None:
        """Take note of a revocation, or of a death on another host: calls that are under way end."""
        now = time.monotonic()
        if now - self._looked > self._pause and self._native is not None:
            self._looked = now
            if lib.ucch_board_revoked(self._native):
                return
            with suppress(*faults.EXCHANGE_ERRORS):  # every wait runs this hook: boards and links say who died
                if faults.revoked(self._mpi):
                    lib.ucch_board_revoke(self._native)
                if (links := self._state.members.links) is not None:
                    links.note_deaths(faults.dead_ranks(self._mpi))

    def close(self) -> None:
        """Have nothing more to do with the board, which is gone."""
        self._native = None
        if self.look in poll_hooks:
            poll_hooks.remove(self.look)

    def _able(self, what: str) -> None:
        if self.lacks:
            raise NotSupported(f"{what} on rank {self._state.rank}: {self.lacks}")

    def revoked(self) -> bool:
        """True if the communicator has been revoked, as far as this rank has heard."""
        if self._native is None or lib.ucch_board_revoked(self._native):
            return True
        return not self.lacks and faults.revoked(self._mpi)

    def revoke(self) -> None:
        """Give the communicator up: calls under way end on all ranks with a ``RevokedError``. Does not wait for other
        ranks."""
        self._able("Revoke")
        if not self._state.broken:
            self._state.broken = "it was revoked"
        if self._native is not None:
            lib.ucch_board_revoke(self._native)
        self._mpi.Revoke()

    def agree(self, flag: int) -> int:
        """The bits that all living ranks have set. ``PeerError`` while a rank is dead that was not acknowledged."""
        self._able("Agree")
        try:
            return self._timed("Agree", lambda: int(self._mpi.Agree(flag)))
        except faults.EXCHANGE_ERRORS as error:
            if isinstance(error, UCCHError):
                raise
            dead = faults.dead_ranks(self._mpi)
            raise PeerError(
                f"rank {self._state.rank}: Agree: rank(s) {dead} died; Ack_failed() acknowledges it ({error})"
            ) from error

    def shrink(self, adopt: Callable[[Any], _C]) -> _C:
        """A communicator of the ranks that live, which ``adopt`` makes over their exchange; collective among them.

        Ranks that die meanwhile are left behind as well.
        """
        self._able("Shrink")
        began, known = time.monotonic(), self._state.size
        self.revoke()
        self.close()
        mpi = self._mpi
        while True:
            faults.settle(mpi)
            mpi = self._timed("Shrink", mpi.Shrink)
            if mpi.Get_size() < known:  # what the dead have left under way would be taken for the next team's
                self._state.members.job.spoilt = True
            made, failure = self._attempt(adopt, mpi)
            if self._all_well(mpi, failure is None):
                assert made is not None
                log.log("live").info(
                    "rank %d goes on as rank %d of %d after %.3f s",
                    self._state.rank, mpi.Get_rank(), mpi.Get_size(), time.monotonic() - began,
                )  # fmt: skip
                return made
            if mpi.Get_size() == known:  # no rank has died since: it would fail again
                raise failure or CollectiveError(f"rank {mpi.Get_rank()}: another rank could not go on, and says why")
            known = mpi.Get_size()

    def grow(self, adopt: Callable[[Any], _C], store: Any, least: int) -> _C | None:
        """A communicator of these ranks and of those that wait at ``store``; None where fewer than ``least`` do."""
        if least < 1:
            raise ValueError(f"least: {least} newcomers, where at least 1 is let in")
        if self.revoked():
            raise RevokedError(f"rank {self._state.rank}: Grow: this communicator was revoked: Shrink() first")
        mpi = self._timed("Grow", lambda: growth.let_in(self._mpi, store, least, self._state.timeout))
        if mpi is None:
            return None
        made, failure = self._attempt(adopt, mpi)
        if all(self._timed("Grow", lambda: self._mpi.allgather(failure is None))):
            return made
        mpi.Revoke()
        raise failure or CollectiveError(f"rank {self._state.rank}: Grow: another rank could not, and says why")

    def _attempt(self, adopt: Callable[[Any], _C], mpi: Any) -> tuple[_C | None, Exception | None]:
        """Make it: (what ``adopt`` makes, why it did not); then the other ranks' part of it ends as well."""
        try:
            return adopt(mpi), None
        except (UCCHError, *faults.EXCHANGE_ERRORS) as error:
            log.log("live").info("rank %d: a communicator could not be made: %s", mpi.Get_rank(), error)
            mpi.Revoke()
            return None, error

    def _all_well(self, mpi: Any, well: bool) -> bool:
        """True if the communicator was made on all ranks, and none has died since."""
        try:
            return bool(self._timed("Shrink", lambda: mpi.Agree(int(well))))
        except CollectiveTimeout:
            raise
        except faults.EXCHANGE_ERRORS as error:  # the same on all of them
            log.log("live").info("rank %d: a rank died meanwhile: %s", mpi.Get_rank(), error)
            mpi.Revoke()
            return False

    def _timed(self, what: str, call: Callable[[], _C]) -> _C:
        return faults.in_time(f"rank {self._state.rank}: {what}", self._state.timeout, call)
