"""Going on after the death of ranks, with mpi4py's names.

The exchange among the ranks, MPI's with fault tolerance or torch's store, says which ranks live and agrees on it.
Operations under way in libucc and libucp are left to them, and no rank waits for one that is gone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from .. import log
from ..bootstrap import faults, settings, storecomm
from ..bootstrap.storecomm import begin_without_mpi
from ..calls.request import poll_hooks
from ..calls.runner import Runner
from ..errors import CollectiveError, CollectiveTimeout, NotSupported, PeerError, RevokedError, UCCHError
from ..native.libraries import lib

_Self = TypeVar("_Self", bound="FaultMethods")
_R = TypeVar("_R")

#: Seconds between looks for a revocation by ranks of other hosts.
_LOOK_S = 0.01


class FaultWatch:
    """A poll hook that looks for revocations of a communicator, and for deaths on other hosts."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._mpi = runner, runner.mpi
        #: The board's native object, until the communicator is shrunk or freed.
        self.board: Any = runner.board.native
        #: Why ranks cannot go on after a death; empty if they can.
        self.unsupported = faults.lacking(runner.mpi)
        self._looked, self._pause = 0.0, getattr(runner.mpi, "look_s", _LOOK_S)
        if not self.unsupported and runner.size > 1:
            poll_hooks.append(self.look)

    def look(self) -> None:
        """End the calls that are under way, if the communicator was revoked or a rank of another host has died."""
        now = time.monotonic()
        if now - self._looked > self._pause and self.board is not None:
            self._looked = now
            if lib.ucch_board_revoked(self.board):
                return
            with suppress(*faults.EXCHANGE_ERRORS):  # every wait runs this hook: boards and links say who died
                if faults.revoked(self._mpi):
                    lib.ucch_board_revoke(self.board)
                if (links := self._runner.members.links) is not None:
                    links.note_deaths(faults.dead_ranks(self._mpi))

    def close(self) -> None:
        """Remove the hook, and forget the board."""
        self.board = None
        if self.look in poll_hooks:
            poll_hooks.remove(self.look)


class FaultMethods(ABC):
    """Methods for the ranks that live when others have died (docs/faults.md).

    They need an exchange that goes on itself: ``mpirun --with-ft ulfm``, or torch's store. ``NotSupported`` otherwise.
    """

    _mpi: Any
    _runner: Runner
    _fault_watch: FaultWatch

    @classmethod
    @abstractmethod
    def _adopt(cls: type[_Self], mpi: Any) -> _Self:
        """A communicator of this class over MPI's."""

    def Revoke(self) -> None:
        """Give the communicator up for all ranks, without waiting: their calls end with a ``RevokedError``."""
        self._need_survivors("Revoke")
        self._runner.broken = self._runner.broken or "it was revoked"
        if self._fault_watch.board is not None:
            lib.ucch_board_revoke(self._fault_watch.board)
        self._mpi.Revoke()

    def Is_revoked(self) -> bool:
        """Tell if the communicator has been revoked.

        Returns:
            True if this rank has heard so.
        """
        if self._fault_watch.board is None or lib.ucch_board_revoked(self._fault_watch.board):
            return True
        return not self._fault_watch.unsupported and faults.revoked(self._mpi)

    def Get_failed(self) -> Any:
        """Tell which ranks have died.

        Returns:
            ``MPI.Group`` of those that this rank knows of.
        """
        self.Is_revoked()  # MPI hears of deaths in calls that make progress
        return self._mpi.Get_failed()

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge deaths, for which ``Agree`` then does not fail.

        Args:
            num_to_ack: The first so many; all if None.

        Returns:
            How many deaths are acknowledged.
        """
        self.Is_revoked()
        return int(self._mpi.Ack_failed(num_to_ack))

    def Agree(self, flag: int) -> int:
        """Agree on a number; collective among the living ranks, also when revoked.

        Args:
            flag: This rank's bits.

        Returns:
            The bits that all living ranks have set.

        Raises:
            PeerError: On all of them, while a rank is dead that not all have acknowledged.
        """
        self._need_survivors("Agree")
        try:
            return self._in_time("Agree", lambda: int(self._mpi.Agree(flag)))
        except faults.EXCHANGE_ERRORS as error:
            if isinstance(error, UCCHError):
                raise
            dead = faults.dead_ranks(self._mpi)
            raise PeerError(
                f"rank {self._runner.rank}: Agree: rank(s) {dead} died; Ack_failed() acknowledges it ({error})"
            ) from error

    def Shrink(self: _Self) -> _Self:
        """Go on with the ranks that live; collective among them.

        Revokes this one, so that ranks which wait in a call of it come as well. Free it at any time: that does not wait
        for other ranks.

        Returns:
            A new communicator of them, in the same order.
        """
        self._need_survivors("Shrink")
        began, known, mpi = time.monotonic(), self._runner.size, self._mpi
        self.Revoke()
        self._fault_watch.close()
        while True:  # ranks that die meanwhile are left behind as well
            faults.settle(mpi)
            mpi = self._in_time("Shrink", mpi.Shrink)
            if mpi.Get_size() < known:  # what the dead have left under way would be taken for the next team's
                self._runner.members.job.stale = True
            made, failure = self._attempt(mpi)
            if self._all_well(mpi, failure is None):
                assert made is not None
                log.log("live").info(
                    "rank %d goes on as rank %d of %d after %.3f s",
                    self._runner.rank, mpi.Get_rank(), mpi.Get_size(), time.monotonic() - began,
                )  # fmt: skip
                return made
            if mpi.Get_size() == known:  # no rank has died since: it would fail again
                raise failure or CollectiveError(f"rank {mpi.Get_rank()}: another rank could not go on, and says why")
            known = mpi.Get_size()

    def Grow(self: _Self, store: Any, least: int = 1) -> _Self | None:
        """Let in the processes that wait in :meth:`Enter`; collective among these ranks, of which the first asks.

        Args:
            store: Where they wait: torch's store, or :class:`ucc_hetero.Store`.
            least: Let in so many or none.

        Returns:
            A new communicator of these ranks and, behind them, of the newcomers; None, at once, if fewer than ``least``
            wait. This communicator goes on, and is to be freed on its own.
        """
        if least < 1:
            raise ValueError(f"least: {least} newcomers, where at least 1 is let in")
        if self.Is_revoked():
            raise RevokedError(f"rank {self._runner.rank}: Grow: this communicator was revoked: Shrink() first")
        mpi = self._in_time("Grow", lambda: storecomm.let_in(self._mpi, store, least, self._runner.timeout))
        if mpi is None:
            return None
        made, failure = self._attempt(mpi)
        if all(self._in_time("Grow", lambda: self._mpi.allgather(failure is None))):
            return made
        mpi.Revoke()
        raise failure or CollectiveError(f"rank {self._runner.rank}: Grow: another rank could not, and says why")

    @classmethod
    def Enter(cls: type[_Self], store: Any, timeout: float | None = None) -> _Self:
        """Join the ranks that call :meth:`Grow`, as a process that has come later.

        Args:
            store: The same as theirs.
            timeout: Seconds to wait; ``UCCH_TIMEOUT`` if None.

        Returns:
            A communicator of all of them.

        Raises:
            CollectiveTimeout: They have not called :meth:`Grow` within that time.
        """
        begin_without_mpi()
        return cls._adopt(storecomm.arrive(store, settings.timeout() if timeout is None else timeout))

    def _need_survivors(self, what: str) -> None:
        if self._fault_watch.unsupported:
            raise NotSupported(f"{what} on rank {self._runner.rank}: {self._fault_watch.unsupported}")

    def _attempt(self: _Self, mpi: Any) -> tuple[_Self | None, Exception | None]:
        """(a communicator over ``mpi``, why there is none); then the other ranks' part of it ends as well."""
        try:
            return self._adopt(mpi), None
        except (UCCHError, *faults.EXCHANGE_ERRORS) as error:
            log.log("live").info("rank %d: a communicator could not be made: %s", mpi.Get_rank(), error)
            mpi.Revoke()
            return None, error

    def _all_well(self, mpi: Any, well: bool) -> bool:
        """True if the communicator was made on all ranks, and none has died since."""
        try:
            return bool(self._in_time("Shrink", lambda: mpi.Agree(int(well))))
        except CollectiveTimeout:
            raise
        except faults.EXCHANGE_ERRORS as error:  # the same on all of them
            log.log("live").info("rank %d: a rank died meanwhile: %s", mpi.Get_rank(), error)
            mpi.Revoke()
            return False

    def _in_time(self, what: str, call: Callable[[], _R]) -> _R:
        return faults.in_time(f"rank {self._runner.rank}: {what}", self._runner.timeout, call)
