"""Waits during which progress is made: peers may need our side of a transfer before they can do what is waited for.

MPI makes progress, too. Another rank may wait for a message of MPI's from this one, such as a long one of mpi4py's
whose request was not waited for yet, or the end of one that MPI counts as sent, before it comes to our call. MPI moves
such messages only while it is called.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from . import aside
from .libraries import lib

#: Seconds that a wait stays in C before Python looks for signals (Ctrl-C); and before MPI makes progress, where there
#: is MPI, which it does so many times between such looks.
SLICE, _MPI_SLICE, _MPI_TURNS = 0.05, 0.002, 25

_State = TypeVar("_State")


def callable_mpi() -> Any:
    """MPI's module, if this thread may call it, and no other one is in a call of MPI's that makes progress; or None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or aside.under_way() or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main() else None


def progress_mpi() -> None:
    """Let MPI make progress, where this thread may call it."""
    if (mpi := callable_mpi()) is not None:
        # Its errors are of ranks that have died, of which our call's own says more. Not what handlers of signals raise.
        with suppress(mpi.Exception):
            mpi.COMM_SELF.Iprobe()


def wait_in_slices(wait: Callable[[float], _State | None], look: Callable[[], object] = bool) -> _State:
    """Wait in C, by slices between which Python sees signals. ``look`` is called now and then, and may raise.

    ``wait`` waits for the seconds that it is given, or less; once it returns something true, that is the result.
    """
    seconds, turns = (_MPI_SLICE, _MPI_TURNS) if "mpi4py.MPI" in sys.modules else (SLICE, 1)
    turn = 0
    while not (state := wait(seconds)):
        progress_mpi()
        if turn % turns == 0:
            look()
        turn += 1
    return state


def progress_until(
    done: Callable[[], object],
    seconds: float = 0.0,
    hopeless: Callable[[], object] = bool,
    *,
    step: float = 1e-5,
    longest: float = 1e-3,
    spin: float = 0.0,
    apart: float = 0.0,
) -> bool:
    """Make progress until something is done.

    Args:
        done: True once it is; may raise what went wrong.
        seconds: The most that is waited; 0 is for ever, and less than 0 is over.
        hopeless: True, or raises, once it will not be.
        step: Naps between rounds are longer by this each time, in seconds.
        longest: The longest nap.
        spin: Seconds at the beginning in which nothing but ``done`` is asked.
        apart: Seconds between two looks at whether it is ``hopeless``.

    Returns:
        True if it is done; False where that is hopeless, or did not happen in time.
    """
    began = look_at = time.monotonic()
    until, nap = began + (seconds or math.inf), 0.0
    while not done():
        now = time.monotonic()
        if now < began + spin:
            os.sched_yield()
            continue
        if now > until or (now >= look_at and hopeless()):
            return False
        look_at = now + apart if now >= look_at else look_at
        lib.ucch_progress_once()
        progress_mpi()
        time.sleep(nap)
        nap = min(nap + step, longest)
    return True
