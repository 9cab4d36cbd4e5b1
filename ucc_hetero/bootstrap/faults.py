"""Deaths of ranks as their exchange sees them: MPI with fault tolerance (ULFM), or torch's store."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from ..errors import CollectiveTimeout
from ..native.aside import Aside
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until

_T = TypeVar("_T")

#: Variable of Open MPI that ``mpirun --with-ft ulfm`` sets.
_FT = "OMPI_MCA_mpi_ft_enable"

#: Exceptions of MPI (``MPI.Exception``) and of the store if a process has failed.
EXCHANGE_ERRORS = (RuntimeError, OSError)

#: Seconds in which a call in another thread has the processor for itself, as all ranks usually arrive at once.
_ALONE_S = 2e-3

#: Seconds without news of a death after which no more are expected.
_SETTLED_S = 0.05


def lacking(mpi: Any) -> str:
    """Why ranks that exchange over ``mpi`` cannot go on after a death, with the cure; empty if they can."""
    return "" if hasattr(mpi, "world") else mpi_lacks()  # an exchange that is not MPI


@cache
def mpi_lacks() -> str:
    """The same for ranks that exchange over MPI."""
    from mpi4py import MPI

    name = MPI.get_vendor()[0]
    if name == "Open MPI":
        if os.environ.get(_FT, "").lower() in ("1", "y", "yes", "true", "enabled", "t"):
            return ""
        return "mpirun ends the job when a rank dies, unless Open MPI 5's is told to go on: mpirun --with-ft ulfm"
    try:
        MPI.COMM_SELF.Is_revoked()
    except NotImplementedError:
        return f"{name} cannot go on after a death: use Open MPI 5 and mpirun --with-ft ulfm"
    return ""


def revoked(mpi: Any) -> bool:
    """True if some rank has revoked ``mpi``, as far as this one knows; polls for news."""
    if hasattr(mpi, "Iprobe"):
        with suppress(*EXCHANGE_ERRORS):
            mpi.Iprobe()  # MPI notices it in calls that make progress
    return bool(mpi.Is_revoked())


def give_up(mpi: Any) -> None:
    """Let the other ranks of a store's exchange fail at once, as this one has: they would wait for their own
    timeout."""
    if hasattr(mpi, "watch"):
        with suppress(*EXCHANGE_ERRORS):
            mpi.Revoke()


def dead_ranks(mpi: Any) -> list[int]:
    """Ranks of ``mpi`` that have died, as far as its exchange knows."""
    if hasattr(mpi, "dead"):
        return list(mpi.dead())
    failed, everyone = mpi.Get_failed(), mpi.Get_group()
    try:
        return sorted(type(failed).Translate_ranks(failed, list(range(failed.Get_size())), everyone))
    finally:
        failed.Free()
        everyone.Free()


def settle(mpi: Any) -> None:
    """Wait until no death has been reported for a moment: Open MPI 5.0.11 may crash if one is reported in
    ``Comm_dup``."""
    dead, until = dead_ranks(mpi), time.monotonic() + _SETTLED_S

    def settled() -> bool:
        nonlocal dead, until
        revoked(mpi)
        if dead != (now := dead_ranks(mpi)):
            dead, until = now, time.monotonic() + _SETTLED_S
        return time.monotonic() > until

    progress_until(settled)


def leave(status: int) -> None:
    """End the process without ``MPI_Finalize``, in which Open MPI 5.0.11 may wait for dead ranks.

    Runs after everything else: Python calls exit functions in reverse order of registration. A status other than 0
    means failure.
    """
    lib.ucch_leave_with(status)
    _at_the_end("ucch_leave")


def leave_late() -> None:
    """End the process some seconds after Python has ended, in case a rank dies while others are in ``MPI_Finalize``."""
    _at_the_end("ucch_leave_late")


def _at_the_end(name: str) -> None:
    ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))))


def in_time(what: str, seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a blocking MPI call, made in another thread while this one makes progress.

    Peers may need this rank's side of a transfer before they enter it. ``CollectiveTimeout`` after ``seconds`` (0:
    none). If MPI may be called by one thread only, this thread calls it.
    """
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return call()
    aside = Aside(call)
    if not aside.ended(_ALONE_S) and not progress_until(aside.ended, seconds):
        raise CollectiveTimeout(f"{what}: not every living rank came within {seconds:g} s")
    return aside.result()
