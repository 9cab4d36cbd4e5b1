"""Methods to go on after the death of ranks, with mpi4py's names.

The exchange between ranks (MPI with fault tolerance, or torch's store) tells which ranks are alive, and agrees on that.
Calls under way in libucc and libucp are abandoned, so that no rank waits for a dead one.
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

#: Seconds between checks for a revocation by ranks of other hosts.
_CHECK_S = 0.01


class FaultWatch:
    """A poll hook that checks for a revoked communicator, and for deaths on other hosts."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._mpi = runner, runner.mpi
        #: The board's native object; NULL once the communicator was shrunk or freed.
        self.board: Any = runner.board.native
        #: Why ranks cannot go on after a death; empty if they can.
        self.unsupported = faults.lacking(runner.mpi)
        self._checked, self._pause = 0.0, getattr(runner.mpi, "check_s", _CHECK_S)
        if not self.unsupported and runner.size > 1:
            poll_hooks.append(self.check)

    def check(self) -> None:
        """End the calls under way if the communicator was revoked, or if a rank of another host has died."""
        now = time.monotonic()
        if now - self._checked > self._pause and self.board is not None:
            self._checked = now
            if lib.ucch_board_revoked(self.board):
                return
            with suppress(*faults.EXCHANGE_ERRORS):  # boards and links name the dead ranks; every wait runs this hook
                if faults.revoked(self._mpi):
                    lib.ucch_board_revoke(self.board)
                if (links := self._runner.members.links) is not None:
                    links.note_deaths(faults.dead_ranks(self._mpi))

    def close(self) -> None:
        """Remove the hook, and drop the board."""
        self.board = None
        if self.check in poll_hooks:
            poll_hooks.remove(self.check)


class FaultMethods(ABC):
    """Methods for the survivors after ranks have died (docs/faults.md).

    They need an exchange that survives: ``mpirun --with-ft ulfm``, or torch's store. Otherwise they raise
    ``NotSupported``.
    """

    _mpi: Any
    _runner: Runner
    _fault_watch: FaultWatch

    @classmethod
    @abstractmethod
    def _adopt(cls: type[_Self], mpi: Any) -> _Self:
        """Make a communicator of this class over MPI's."""

    def Revoke(self) -> None:
        """Revoke the communicator on all ranks, without waiting: their calls fail with ``RevokedError``."""
        self._need_survivors("Revoke")
        self._runner.broken = self._runner.broken or "it was revoked"
        if self._fault_watch.board is not None:
            lib.ucch_board_revoke(self._fault_watch.board)
        self._mpi.Revoke()

    def Is_revoked(self) -> bool:
        """Test whether the communicator has been revoked.

        Returns:
            True if this rank knows of it.
        """
        if self._fault_watch.board is None or lib.ucch_board_revoked(self._fault_watch.board):
            return True
        return not self._fault_watch.unsupported and faults.revoked(self._mpi)

    def Get_failed(self) -> Any:
        """Return the ranks that have died.

        Returns:
            ``MPI.Group`` of the ranks whose death this rank knows of.
        """
        self.Is_revoked()  # MPI learns of deaths in calls that make progress
        return self._mpi.Get_failed()

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge deaths. ``Agree`` does not fail for acknowledged ones.

        Args:
            num_to_ack: Number of deaths to acknowledge, oldest first; all if None.

        Returns:
            Number of acknowledged deaths.
        """
        self.Is_revoked()
        return int(self._mpi.Ack_failed(num_to_ack))

    def Agree(self, flag: int) -> int:
        """Agree on bits. Collective among the survivors; works on a revoked communicator.

        Args:
            flag: This rank's bits.

        Returns:
            The bitwise AND of all survivors' flags.

        Raises:
            PeerError: On all survivors, if a death is known that not all have acknowledged.
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
        """Make a communicator of the survivors. Collective among them.

        Revokes this communicator, so that ranks which wait in its calls come too. It can be freed at any time, without
        the other ranks.

        Returns:
            The new communicator, with the ranks in the same order.
        """
        self._need_survivors("Shrink")
        began, known, mpi = time.monotonic(), self._runner.size, self._mpi
        self.Revoke()
        self._fault_watch.close()
        while True:  # ranks may die meanwhile; then try again without them
            faults.settle(mpi)
            mpi = self._in_time("Shrink", mpi.Shrink)
            if mpi.Get_size() < known:  # unfinished messages of the dead must not match those of a new team
                self._runner.members.job.stale = True
            made, failure = self._attempt(mpi)
            if self._all_well(mpi, failure is None):
                assert made is not None
                log.log("live").info(
                    "rank %d goes on as rank %d of %d after %.3f s",
                    self._runner.rank, mpi.Get_rank(), mpi.Get_size(), time.monotonic() - began,
                )  # fmt: skip
                return made
            if mpi.Get_size() == known:  # no rank has died since: another attempt would fail too
                raise failure or CollectiveError(f"rank {mpi.Get_rank()}: another rank failed in Shrink")
            known = mpi.Get_size()

    def Grow(self: _Self, store: Any, least: int = 1) -> _Self | None:
        """Let processes join that wait in :meth:`Enter`. Collective; rank 0 asks the store.

        Args:
            store: Store in which they wait: torch's, or :class:`ucc_hetero.Store`.
            least: Admit no process unless this many wait.

        Returns:
            A communicator of these ranks followed by the new ones; None at once if fewer than ``least`` wait. This
            communicator stays usable, and has to be freed separately.

        Raises:
            CollectiveError: On all ranks: rank 0 cannot ask the store, or a rank failed.
        """
        if least < 1:
            raise ValueError(f"least: {least}; it must be 1 or more")
        if self.Is_revoked():
            raise RevokedError(f"rank {self._runner.rank}: Grow: this communicator was revoked: Shrink() first")
        mpi = self._in_time("Grow", lambda: storecomm.let_in(self._mpi, store, least, self._runner.timeout))
        if mpi is None:
            return None
        made, failure = self._attempt(mpi)
        if all(self._in_time("Grow", lambda: self._mpi.allgather(failure is None))):
            return made
        mpi.Revoke()
        raise failure or CollectiveError(f"rank {self._runner.rank}: another rank failed in Grow")

    @classmethod
    def Enter(cls: type[_Self], store: Any, timeout: float | None = None) -> _Self:
        """Join the ranks that call :meth:`Grow`, from a process that was started later.

        Args:
            store: The store that these ranks use.
            timeout: Seconds to wait; ``UCCH_TIMEOUT`` if None.

        Returns:
            A communicator of all ranks, the new ones included.

        Raises:
            CollectiveTimeout: The ranks did not call :meth:`Grow` in time.
        """
        begin_without_mpi()
        return cls._adopt(storecomm.arrive(store, settings.timeout() if timeout is None else timeout))

    def _need_survivors(self, what: str) -> None:
        if self._fault_watch.unsupported:
            raise NotSupported(f"{what} on rank {self._runner.rank}: {self._fault_watch.unsupported}")

    def _attempt(self: _Self, mpi: Any) -> tuple[_Self | None, Exception | None]:
        """Try once: (communicator over ``mpi``, None) or (None, error). On failure the other ranks' attempts fail
        too."""
        try:
            return self._adopt(mpi), None
        except (UCCHError, *faults.EXCHANGE_ERRORS) as error:
            log.log("live").info("rank %d: a communicator could not be made: %s", mpi.Get_rank(), error)
            mpi.Revoke()
            return None, error

    def _all_well(self, mpi: Any, well: bool) -> bool:
        """True if all ranks made the communicator, and none has died since."""
        try:
            return bool(self._in_time("Shrink", lambda: mpi.Agree(int(well))))
        except CollectiveTimeout:
            raise
        except faults.EXCHANGE_ERRORS as error:  # raised on all ranks
            log.log("live").info("rank %d: a rank died meanwhile: %s", mpi.Get_rank(), error)
            mpi.Revoke()
            return False

    def _in_time(self, what: str, call: Callable[[], _R]) -> _R:
        return faults.in_time(f"rank {self._runner.rank}: {what}", self._runner.timeout, call)
