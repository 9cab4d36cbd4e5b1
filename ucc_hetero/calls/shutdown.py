"""The end of a communicator: on every rank what is under way ends before anything is given back.

A receive whose request was dropped is taken back, as no caller would see its data. Its message may be on its way, and
the sender wait until it is taken: such messages are thrown away until no rank has calls under way.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import log
from ..bindings import quarantine
from ..native.libraries import lib
from ..native.waiting import progress_until
from .request import dropped, look_around, withdraw

if TYPE_CHECKING:
    from .dispatch import Runner

#: Seconds between looks while nothing of our own is under way.
_NAP = 2e-4


def wind_up(run: Runner) -> bool:
    """End the calls whose requests were dropped; collective, but a rank whose communicator is broken does not wait.
    True if all ranks have done so: then the MPI communicator is no longer needed.

    ``ValueError`` while the caller holds active requests: nothing was changed then.
    """
    if not run.broken:
        given_up = len(dropped(run)) + run.delegate.settle()  # before what is busy: this completes what has ended
        _refuse(run, run.busy - given_up)
    withdraw(run)
    _end_ours(run)
    if not run.broken:
        _refuse(run, run.busy)
    return await_others(run, run.timeout)


def _refuse(run: Runner, held: int) -> None:
    if held > 0:
        raise ValueError(f"rank {run.rank}: {held} requests of this communicator are still active")


def _end_ours(run: Runner) -> None:
    """Until nothing that was dropped, delegated or launched is under way; the communicator's timeout at most."""

    def over() -> bool:
        left = dropped(run) or (not run.broken and run.delegate.settle()) or run.launches
        _discard(run)
        look_around()
        return not left

    progress_until(over, run.timeout, longest=_NAP)


def await_others(run: Runner, seconds: float) -> bool:
    """Until all ranks have got here, or ``seconds`` (0: for ever); one that died on this host is not waited for.
    True if they have.

    A call can fail on one rank alone, which then has nothing to wait for; but the other ranks do not know.
    """
    from mpi4py import MPI

    mine, least = array("i", [1]), array("i", [0])
    if lib.ucch_board_revoked(run.board.native):
        return False
    try:
        request = run.mpi.Iallreduce(mine, least, op=MPI.MIN)
        over = progress_until(request.Test, seconds, partial(_nobody_comes, run), longest=_NAP)
    except (RuntimeError, OSError) as error:  # MPI's, or torch's store's: a process has failed
        log.log("live").debug("the others are not waited for: %s", error)
        return False
    if not over:
        quarantine.keep((request, mine, least), partial(_all_have_left, request, run.mpi), _all_have_left)
    quarantine.release(_all_have_left)
    return over


def _nobody_comes(run: Runner) -> bool:
    """True if this communicator's ranks cannot be waited for; throws away messages that came meanwhile."""
    _discard(run)
    look_around()
    return run.ended() or bool(run.broken) or run.board.dead() >= 0


def _all_have_left(request: Any, mpi: Any) -> bool:
    """True once all ranks have left MPI's communicator, which is given back: there are not many (2048 in MPICH)."""
    try:
        if not request.Test():
            return False
        mpi.Free()
    except (RuntimeError, OSError) as error:
        log.log("live").debug("a communicator is not given back: %s", error)
    return True


def _discard(run: Runner) -> None:
    """Throw away messages that came for receives that were taken back, but not those of collectives."""
    if not run.broken:
        run.members.discard_users()
