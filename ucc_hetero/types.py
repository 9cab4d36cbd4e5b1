"""Datatypes, operations and vendors, and the codes that UCC knows them by.

Codes are those of ``ucc.h`` (API 1.x: ``ucc_predefined_dtype_t``, ``ucc_reduction_op_t``, ``ucc_memory_type_t``).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPES", "OPS", "VENDORS", "DType", "Op"]

#: Whose memory a rank's buffers live in.
VENDORS = ("nvidia", "amd", "host")


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``code`` is the UCC datatype (predefined id << 3), or -1 where UCC has none and the bytes are moved as uint8.
    ``kind`` is one of ``int uint bool float complex fp8``.
    """

    name: str
    itemsize: int
    code: int
    kind: str

    def __str__(self) -> str:
        return self.name


def _rows() -> dict[str, DType]:
    table = (
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
    return {n: DType(n, size, -1 if code is None else code << 3, kind) for n, size, code, kind in table}


#: Every datatype by its name (numpy's, or ml_dtypes' for those that numpy lacks).
DTYPES: dict[str, DType] = _rows()


@dataclass(frozen=True, slots=True)
class Op:
    """One reduction. ``code`` is UCC's ``ucc_reduction_op_t``, or -1 for operations of the user's own."""

    name: str
    code: int

    def __str__(self) -> str:
        return self.name


#: Every predefined reduction by its name.
OPS: dict[str, Op] = {
    name: Op(name, code)
    for code, name in enumerate(
        ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC", "AVG")
    )
}
