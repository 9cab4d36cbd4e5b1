"""Filling ``MPI.Status`` objects, from which mpi4py's methods then answer."""

from __future__ import annotations

from typing import Any


def set_status(status: Any, source: int, tag: int, nbytes: int, error: int = 0) -> None:
    """Fill an ``MPI.Status``, if there is one."""
    if status is None:
        return
    from mpi4py import MPI

    status.source, status.tag, status.error = source, tag, error
    status.Set_elements(MPI.BYTE, nbytes)
    status.Set_cancelled(False)


def fill_empty(status: Any) -> None:
    """Fill the status that MPI gives to a request that is not active."""
    if status is not None:
        from mpi4py import MPI

        set_status(status, MPI.ANY_SOURCE, MPI.ANY_TAG, 0)
