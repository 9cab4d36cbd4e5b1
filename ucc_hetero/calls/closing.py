"""The end of a communicator: its own calls have ended, the other ranks close it, too, and its parts are freed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import log
from ..bindings import quarantine
from ..bootstrap.meeting import Seat
from ..errors import CollectiveTimeout, DataError
from ..native.libraries import lib
from ..native.waiting import progress_until
from .request import dropped, run_poll_hooks, under_way, withdraw
from .state import State
from .verification import Verification

#: What the arrival board shows of a rank that frees the communicator, unless it shows all ranks.
_FREE = "Free"
#: Seconds between checks while a communicator is closed and nothing of this rank is active.
_NAP_S = 2e-4
#: Seconds in which the other ranks usually arrive: no nap before.
_SPIN_S = 1e-4


class Closing(State, ABC):
    """A communicator's state, and how it is closed."""

    _verification: Verification | None

    def __init__(self, mpi: Any, seat: Seat | None = None, queues: bool = True) -> None:
        super().__init__(mpi, seat, queues)
        #: The exchange with which ranks close, and its memory, once begun; also by a Free that Ctrl-C interrupted.
        self._leaving: tuple[Any, ...] = ()
        #: Wrong data that was found while the communicator was closed.
        self.unfit: DataError | None = None
        #: True once parts of it are being freed; and while it is freed here, and other ranks may still need it.
        self.closes = self.late = False

    @property
    def launches(self) -> int:
        return int(lib.ucch_board_launches(self.board.native))

    @property
    def busy(self) -> int:
        posted: int = sum(each.active for each in self.posters)
        return posted + sum(call.owner is self for call in list(under_way))

    def close(self, seconds: float | None = None) -> bool | None:
        """Free teams and board; collective. True if all ranks do so: the MPI communicator is no longer needed then.

        ``seconds``: None is returned if ranks have not come by then, or wait for this one in another communicator, and
        what they need can be freed later, by :meth:`end`. ``ValueError`` if there are active requests; nothing was
        changed."""
        self.ended_by_refusal()
        if not self.late:
            self._drain()
        if seconds is None or not self._frees_alone:
            return self.end(bool(self.meet(self.timeout)))
        met = self.meet(min(seconds, self.timeout or seconds), lambda: self._hopeless() or self._is_needed())
        self.late = met is None
        return None if met is None else self.end(met)

    @property
    def _frees_alone(self) -> bool:
        """True if nothing that is freed once all ranks have come needs them again.

        Rings end when both sides have taken everything out. NCCL frees a communicator only with the other ranks of the
        host: ncclCommDestroy took the 8 s by which the other rank called it later (2.28.9, two H200s), and that rank
        might have waited for this one. Checksums of the last calls are compared."""
        members = self.members
        plain = members.tuning.plain and self._verification is None
        return plain and members.runtime is None and members.channels is None

    def _is_needed(self) -> bool:
        """True if a rank of this host that has not come waits in another communicator for a call of this one."""
        board = self.board
        if board.shows_all:
            late = [r for slot, r in enumerate(board.ranks) if not lib.ucch_board_given_back(board.native, slot)]
        else:
            late = [r for r in board.ranks if board.label(r, board.next) != _FREE]
        return any(map(board.elsewhere, late))

    def met_late(self) -> bool | None:
        """What :meth:`close` returns by now, without waiting; if not None, one thread has to call :meth:`end`."""
        return self.meet(-1.0)

    def attend(self) -> None:
        """Discard messages to this rank if it has freed the communicator and other ranks have not."""
        if self.late:
            self._discard()

    def end(self, together: bool) -> bool:
        """Free everything; ``together``: all ranks do so. Returns ``together``."""
        self.late = False
        if self._leaving and not together:
            quarantine.keep(self._leaving, partial(_all_have_left, self._leaving[0], self.mpi), _all_have_left)
        self._free_parts(together)
        return together

    @abstractmethod
    def _free_parts(self, together: bool) -> None:
        """Free teams, programs and board, or leak what a failed call may still use."""

    def _drain(self) -> None:
        """Wait for this rank's calls whose requests were dropped. A rank of a broken communicator does not wait.

        Receives whose requests were dropped are cancelled. Their messages may still arrive, with senders waiting for
        them, and are discarded until no rank has active calls.
        """
        if not self.broken:
            given_up = len(dropped(self))  # before `busy` is read: this completes operations that have ended
            self._refuse_active(self.busy - given_up)
            if not self.board.shows_all:
                self.board.announce(_FREE)  # ranks that make a call see this and need not time out
        withdraw(self)
        progress_until(self._all_ended, self.timeout, longest=_NAP_S)
        if not self.broken:
            if late := len(dropped(self)):
                text = f"{late} call(s) whose requests were dropped have not ended after {self.timeout:g} s"
                raise CollectiveTimeout(f"rank {self.rank}: {text}: a send waits for its receive{self.freed_text()}")
            self._refuse_active(self.busy)

    def _refuse_active(self, held: int) -> None:
        if held > 0:
            raise ValueError(
                f"rank {self.rank}: {held} requests of this communicator are still active; Wait for them before Free"
            )

    def _all_ended(self) -> bool:
        """True if no dropped or launched call is active."""
        left = dropped(self) or self.launches
        self._discard()
        run_poll_hooks()
        return not left

    def meet(self, seconds: float, hopeless: Callable[[], bool] | None = None) -> bool | None:
        """Wait until all ranks of the communicator close it, at most ``seconds`` (0: no limit), or until one on this
        host has died. True if all ranks have arrived; None if others may still come.

        A call can fail on one rank alone, which then has nothing to wait for; the other ranks do not know that."""
        from mpi4py import MPI

        hopeless = hopeless or self._hopeless
        wait = partial(progress_until, seconds=seconds, hopeless=hopeless, longest=_NAP_S, spin=_SPIN_S)
        if lib.ucch_board_revoked(self.board.native):
            return False
        try:
            if self.board.shows_all:
                self.board.give_back()
                over = wait(partial(lib.ucch_board_given_back, self.board.native, -1))
            else:
                if not self._leaving:
                    mine, least = array("i", [1]), array("i", [0])
                    self._leaving = self.mpi.Iallreduce(mine, least, op=MPI.MIN), mine, least
                with quarantine.unless_over(self._leaving):
                    over = wait(self._leaving[0].Test)
        except (RuntimeError, OSError) as error:  # of MPI or torch's store: a process has failed
            log.log("live").debug("the other ranks are not waited for: %s", error)
            return False
        quarantine.release(_all_have_left)
        return over or (False if self._hopeless() else None)

    def _hopeless(self) -> bool:
        """True if it is useless to wait for the other ranks; also discards messages that have arrived."""
        self._discard()
        run_poll_hooks()
        return self.ended_by_refusal() or bool(self.broken) or self.board.dead() >= 0

    def _discard(self) -> None:
        """Discard messages for receives that were cancelled, but not those of collectives."""
        if not self.broken:
            self.members.discard_users()


def _all_have_left(request: Any, mpi: Any) -> bool:
    """True once all ranks have closed; then frees the MPI communicator, of which there are few (2048 in MPICH)."""
    try:
        if not request.Test():
            return False
        mpi.Free()
    except (RuntimeError, OSError) as error:
        log.log("live").debug("a communicator is not given back: %s", error)
    return True
