"""Waits that make progress: a peer may need this rank's side of a transfer before it can do what is waited for.

MPI makes progress, too. Before another rank reaches our call it may wait for a message of MPI from this rank, such as a
long one whose mpi4py request has not been waited for. MPI moves such messages only while one of its functions is
called.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import NotSupported
from . import threaded
from .libraries import lib, refuse_children

#: Seconds that a wait stays in C before Python checks for signals (Ctrl-C). With MPI: seconds before MPI makes
#: progress, and how many such turns pass between checks for signals.
SLICE, _MPI_SLICE, _MPI_TURNS = 0.05, 0.002, 25

_State = TypeVar("_State")

#: Error of calls after MPI.Finalize, which has freed the communicators.
_FINALIZED = "MPI has been finalized and cannot begin again: call MPI.Finalize() after the last use of communicators"


def refuse_finalized() -> None:
    """Raise if MPI has been finalized: communicators have been freed, and MPI's functions would end the process."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_finalized():
        raise NotSupported(_FINALIZED)


def callable_mpi() -> Any:
    """The module mpi4py.MPI if this thread may call it and no other thread is in an MPI call that makes progress; else
    None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or threaded.under_way() or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi if mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main() else None


def progress_mpi() -> None:
    """Let MPI make progress if this thread may call it."""
    if (mpi := callable_mpi()) is not None:
        # MPI errors concern dead ranks; the failed call's own error tells more. Exceptions of signal handlers pass.
        with suppress(mpi.Exception):
            mpi.COMM_SELF.Iprobe()


def wait_in_slices(wait: Callable[[float], _State | None], poll_hook: Callable[[], object] = bool) -> _State:
    """Wait in C, in slices, with checks for signals between them. ``poll_hook`` is called now and then, and may raise.

    ``wait`` waits for at most the seconds that it is given. Its first true result is returned.
    """
    refuse_children()
    seconds, turns = (_MPI_SLICE, _MPI_TURNS) if "mpi4py.MPI" in sys.modules else (SLICE, 1)
    turn = 0
    while not (state := wait(seconds)):
        progress_mpi()
        if turn % turns == 0:
            poll_hook()
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
    """Make progress until ``done()`` is true.

    Args:
        done: The condition; may raise.
        seconds: Time limit; 0: none, negative: already over.
        hopeless: Returns True, or raises, if the condition can no longer become true.
        step: Seconds by which each nap between rounds is longer than the one before.
        longest: The longest nap.
        spin: Seconds at the beginning in which only ``done`` is called.
        apart: Seconds between two calls of ``hopeless``.

    Returns:
        True if done; False if hopeless or out of time.
    """
    began = look_at = time.monotonic()
    until, nap = began + (seconds or math.inf), 0.0
    while not done():
        now = time.monotonic()
        if now < began + spin:
            lib.ucch_rest(now, began)
            continue
        if now > until or (now >= look_at and hopeless()):
            return False
        look_at = now + apart if now >= look_at else look_at
        lib.ucch_progress_once()
        progress_mpi()
        time.sleep(nap)
        nap = min(nap + step, longest)
    return True
