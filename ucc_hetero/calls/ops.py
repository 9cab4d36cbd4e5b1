"""Reduction operations as callers name them (``MPI.SUM``, ``"SUM"``, ``ucc_hetero.SUM``, an ``MPI.Op``) -> ours."""

from __future__ import annotations

import sys
from typing import Any

from ..types import OPS, Op

#: Handles of MPI's predefined operations (mpi4py's objects cannot be hashed) -> ours, made when mpi4py is there.
_from_mpi: dict[int, Op] = {}


def op_of(op: Any) -> Op | None:
    """Our operation for what a caller passed; None for an MPI operation that has no counterpart (a user's own).

    Raises ``TypeError`` for something that is no operation, ``ValueError`` for an unknown name.
    """
    if type(op) is Op:
        return op
    if isinstance(op, str):
        found = OPS.get(op.upper())
        if found is None:
            raise ValueError(f"op {op!r} is not one of {', '.join(OPS)}")
        return found
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(op, mpi.Op):
        raise TypeError(f"op must be a reduction such as MPI.SUM or 'SUM', not {type(op).__name__}")
    if not _from_mpi:
        _from_mpi.update({getattr(mpi, name).handle: ours for name, ours in OPS.items() if hasattr(mpi, name)})
    return _from_mpi.get(op.handle)
