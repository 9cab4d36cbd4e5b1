"""The end of a process: everything is released before MPI is finalised, and a failed rank ends the job.

A rank that dies of an exception while the others communicate would leave them waiting for ever in MPI_Finalize or in a
collective; plain mpi4py scripts hang there. Here the others see it leave, and the failed rank aborts the job.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from types import TracebackType
from typing import Any

from . import job, timeline
from .native import lib

__all__ = ["failed", "living", "register"]

#: Every communicator that has not been freed, in order of creation, which is equal on all its ranks.
living: list[Any] = []

_registered = False
_failed = False
_pid = 0


def register() -> None:
    """Arrange for the end. To be called after mpi4py.MPI was imported: exit functions run in reverse order."""
    global _registered, _pid
    if _registered:
        return
    _registered, _pid = True, os.getpid()
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        global _failed
        _failed = True
        previous(kind, value, tb)

    sys.excepthook = hook
    atexit.register(_at_exit)


def failed() -> bool:
    """Whether this process is ending by an exception."""
    return _failed


def _at_exit() -> None:
    if os.getpid() != _pid:
        return  # a forked child owns none of this
    from mpi4py import MPI

    for comm in living:
        comm._run.board.leave()
    lib.ucch_progress_thread(0)
    if MPI.Is_finalized():
        return
    if _failed:
        sys.stderr.flush()
        if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
            MPI.COMM_WORLD.Abort(1)
        return  # whoever started the others, torchrun say, ends them
    fine = [_together(each) for each in job.all_jobs()]  # every rank takes part in each, whatever the others say
    if all(fine):
        timeline.finish()
        for comm in reversed(living[:]):
            comm.Free()
        job.close_all()


def _together(each: job.Job) -> bool:
    """Wait for all ranks of a job; True when every one of them is in order, so that a collective end will work."""
    from array import array

    from mpi4py import MPI

    mine = array("i", [not any(comm._run.broken or comm._run.busy for comm in living)])
    worst = array("i", [0])
    request = each.comm.Iallreduce(mine, worst, op=MPI.MIN)
    pause = 0.0
    while not request.Test():
        # Peers may still need our side of a transfer; there is no hurry otherwise.
        lib.ucch_progress_once()
        time.sleep(pause)
        pause = min(pause + 1e-5, 1e-3)
    return bool(worst[0])
