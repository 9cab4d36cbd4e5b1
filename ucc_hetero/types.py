"""Datatypes and operations, with the codes that UCC knows them by.

Codes are those of ``ucc.h`` (API 1.x: ``ucc_predefined_dtype_t``, ``ucc_reduction_op_t``).
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["BYTES", "DTYPES", "OPS", "DType", "Op", "Reduction", "op_of", "reduction"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``code`` is the UCC datatype (predefined id << 3), or -1 where UCC has none and the bytes are moved as uint8.
    ``kind`` is one of ``int uint bool float complex fp8``, or ``opaque`` for bytes of something that only moves.
    """

    name: str
    itemsize: int
    code: int
    kind: str

    def __str__(self) -> str:
        return self.name


#: Every datatype by its name (numpy's, or ml_dtypes' for those that numpy lacks).
DTYPES: dict[str, DType] = {
    name: DType(name, size, -1 if code is None else code << 3, kind)
    for name, size, code, kind in (
        ("int8", 1, 0, "int"),
        ("int16", 2, 1, "int"),
        ("int32", 4, 2, "int"),
        ("int64", 8, 3, "int"),
        ("uint8", 1, 5, "uint"),
        ("uint16", 2, 6, "uint"),
        ("uint32", 4, 7, "uint"),
        ("uint64", 8, 8, "uint"),
        ("bool", 1, None, "bool"),
        ("float16", 2, 10, "float"),
        ("bfloat16", 2, 13, "float"),
        ("float32", 4, 11, "float"),
        ("float64", 8, 12, "float"),
        ("complex64", 8, 15, "complex"),
        ("complex128", 16, 16, "complex"),
        ("float8_e4m3fn", 1, None, "fp8"),
        ("float8_e4m3fnuz", 1, None, "fp8"),
        ("float8_e5m2", 1, None, "fp8"),
        ("float8_e5m2fnuz", 1, None, "fp8"),
    )
}

#: The bytes of elements that nothing here knows, such as structures: they are moved, and never reduced.
BYTES = DType("bytes", 1, -1, "opaque")


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One reduction. ``code`` is UCC's ``ucc_reduction_op_t``, or -1 for operations of the user's own.

    Predefined ones are singletons, compared by identity: they are part of the key that every call looks up.
    """

    name: str
    code: int

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (_op_named, (self.name, self.code))


def _op_named(name: str, code: int) -> Op:
    return OPS.get(name) or Op(name, code)


#: Every predefined reduction by its name.
OPS: dict[str, Op] = {
    name: Op(name, code)
    for code, name in enumerate(
        ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC", "AVG")
    )
}


#: Handles of MPI's predefined operations (mpi4py's objects cannot be hashed) -> ours, made when mpi4py is there.
_from_mpi: dict[int, Op] = {}


def op_of(op: Any) -> Op | None:
    """Our operation for what a caller passed: one of ours, of MPI's, or a name in any case, as CuPy has them.

    None for one of MPI's that has no counterpart (a user's own); ``TypeError`` for what is no operation, ``ValueError``
    for a name that none has.
    """
    if type(op) is Op:
        return op
    if isinstance(op, str):
        found = OPS.get(op.upper())
        if found is None:
            near = difflib.get_close_matches(op.upper(), OPS, 1)
            raise ValueError(f"op {op!r} is not one of {', '.join(OPS)}{f'; did you mean {near[0]}?' if near else ''}")
        return found
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(op, mpi.Op):
        more = ": MPI.Op.Create makes one of a function" if hasattr(op, "__name__") else ""
        raise TypeError(f"op must be a reduction such as MPI.SUM or 'SUM', not {type(op).__name__}{more}")
    if not _from_mpi:
        _from_mpi.update({getattr(mpi, name).handle: ours for name, ours in OPS.items() if hasattr(mpi, name)})
    return _from_mpi.get(op.handle)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Computation of an op on a dtype: in which type the steps work, by which op, and whether to divide at the end."""

    compute: DType
    op: Op
    divide: bool = False


_ARITHMETIC = ("SUM", "PROD", "MAX", "MIN")
_BITS = ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
#: bool is moved as uint8 0 and 1: sums and maxima are OR, products and minima AND (numpy's and torch's meaning).
_BOOL = {"SUM": "MAX", "PROD": "MIN", "MAX": "MAX", "MIN": "MIN", "LAND": "MIN", "LOR": "MAX", "LXOR": "BXOR",
         "BAND": "MIN", "BOR": "MAX", "BXOR": "BXOR"}  # fmt: skip


def reduction(dtype: DType, op: Op) -> Reduction | None:
    """How ``op`` is computed on host memory, or None where there is no correct way.

    libucc reports success and leaves garbage for combinations it lacks, so this table, and not the library, decides
    (checked against UCC 1.4.0 and 1.10: float16 reductions do nothing there, and those of bfloat16 cut off at each
    combination and are 1.2 to 5 times slower, so both are computed in float32 and rounded once). AVG is the sum divided
    once by the number of ranks, truncating towards zero for integers.
    """
    if op.code < 0 or dtype.kind in ("fp8", "opaque") or op.name in ("MAXLOC", "MINLOC"):
        return None
    if dtype.kind == "bool":
        name = _BOOL.get(op.name)
        return Reduction(DTYPES["uint8"], OPS[name]) if name else None
    divide = op.name == "AVG"
    wanted = OPS["SUM"] if divide else op
    if dtype.kind in ("int", "uint"):
        known = wanted.name in _ARITHMETIC + _BITS
    elif dtype.kind == "complex":
        known = wanted.name in ("SUM", "PROD")
    else:
        known = wanted.name in _ARITHMETIC
    if not known:
        return None
    compute = DTYPES["float32"] if dtype.name in ("float16", "bfloat16") else dtype
    return Reduction(compute, wanted, divide)
