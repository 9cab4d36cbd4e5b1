"""Deaths of ranks, as the exchange among them sees them: MPI with its fault tolerance (ULFM), or torch's store."""

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

#: Open MPI's variable that ``mpirun --with-ft ulfm`` sets.
_FT = "OMPI_MCA_mpi_ft_enable"

#: Exceptions of MPI's calls (``MPI.Exception``) and of the store's where a process has failed.
EXCHANGE_ERRORS = (RuntimeError, OSError)

#: Seconds that a call in another thread has the processor for itself, where all ranks come to it at once.
_ALONE_S = 2e-3

#: Seconds without news of a death after which there are taken to be no more.
_SETTLED_S = 0.05


def lacking(mpi: Any) -> str:
    """Why ranks that exchange over ``mpi`` cannot go on after a death, with the cure; empty where they can."""
    return "" if hasattr(mpi, "world") else mpi_lacks()  # an exchange that is not MPI's


@cache
def mpi_lacks() -> str:
    """The same of ranks that exchange over MPI."""
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
    """True if some rank has revoked ``mpi``, as far as this one has heard; looks for news."""
    if hasattr(mpi, "Iprobe"):
        with suppress(*EXCHANGE_ERRORS):
            mpi.Iprobe()  # MPI hears of it in calls that make progress
    return bool(mpi.Is_revoked())


def give_up(mpi: Any) -> None:
    """Have the other ranks of a store's exchange fail at once where this one has: they would wait as long once more."""
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
    """Wait until no death has been heard of for a moment: Open MPI 5.0.11 may crash if it hears of one in
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
    """Have the process end without ``MPI_Finalize``, in which Open MPI 5.0.11 may wait for ranks that have died.

    After everything else: of what Python calls at its end the last comes first, and MPI's was earlier. With a status
    other than 0 it counts as dead.
    """
    lib.ucch_leave_with(status)
    _at_the_end("ucch_leave")


def leave_late() -> None:
    """Have the process end some seconds after Python has, in case a rank dies while others are in ``MPI_Finalize``."""
    _at_the_end("ucch_leave_late")


def _at_the_end(name: str) -> None:
    ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))))


def in_time(what: str, seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a blocking call of MPI's, made in another thread while this one makes progress.

    Peers may need our side of a transfer before they come to it. ``CollectiveTimeout`` after ``seconds`` (0: never).
    Where MPI takes calls of one thread only, it is just called.
    """
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return call()
    aside = Aside(call)
    if not aside.ended(_ALONE_S) and not progress_until(aside.ended, seconds):
        raise CollectiveTimeout(f"{what}: not every living rank came within {seconds:g} s")
    return aside.result()
