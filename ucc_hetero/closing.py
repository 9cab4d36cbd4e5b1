"""The end of a communicator: on every rank what is under way ends before anything is given back.

A receive that was dropped is taken back, as nobody would ever see what it received. Its message may be on its way, and
the sender wait for somebody to take it: such messages are thrown away until all ranks have nothing under way any more.
"""

from __future__ import annotations

import math
import time
from array import array
from typing import TYPE_CHECKING

from .native import lib
from .request import dropped, withdraw

if TYPE_CHECKING:
    from .runner import Runner

__all__ = ["wind_up"]

#: Seconds between looks while nothing of our own is under way.
_NAP = 2e-4


def wind_up(run: Runner) -> None:
    """Bring to its end what nobody waits for; collective, unless the communicator is broken.

    ``ValueError`` while requests that somebody holds are active: nothing was changed then.
    """
    if not run.broken:
        _refuse(run, run.busy - len(dropped(run)) - run.delegate.settle())
    withdraw(run)
    _end_ours(run)
    if run.broken:
        return
    _refuse(run, run.busy)
    _await_others(run)


def _refuse(run: Runner, held: int) -> None:
    if held > 0:
        raise ValueError(f"rank {run.rank}: {held} requests of this communicator are still active")


def _end_ours(run: Runner) -> None:
    """Until nothing that was dropped, delegated or launched is under way; the communicator's timeout at most."""
    until = time.monotonic() + (run.timeout or math.inf)
    while time.monotonic() < until:
        waiting = dropped(run)
        if waiting:
            lib.ucch_wait(waiting[0], _NAP)
        elif not run.broken and run.delegate.settle():
            time.sleep(_NAP)
        elif not run.launches.active:
            return
        else:
            lib.ucch_progress_once()
            time.sleep(0)
        _discard(run)


def _await_others(run: Runner) -> None:
    """Until all ranks have got here; one that died on this host is not waited for."""
    from mpi4py import MPI

    mine, least = array("i", [1]), array("i", [0])
    request = run.mpi.Iallreduce(mine, least, op=MPI.MIN)
    pause = 0.0
    while not request.Test() and run.board.dead() < 0:
        lib.ucch_progress_once()
        _discard(run)
        time.sleep(pause)
        pause = min(pause + 1e-5, _NAP)


def _discard(run: Runner) -> None:
    """Throw away what came for receives that were taken back; collectives' own messages are others'."""
    if not run.broken:
        run.members.discard_users()
