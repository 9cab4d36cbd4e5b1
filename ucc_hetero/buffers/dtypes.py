"""Element types, under the names of all array libraries."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..types import DTYPES, DType
from . import mpi_datatypes


class DLPackType(NamedTuple):
    """DLPack's ``DLDataType``."""

    code: int
    bits: int
    lanes: int


#: DLDataTypeCode -> stem of the name. Float8 formats have whole names: their bits do not distinguish them.
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_FP8 = {10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2", 13: "float8_e5m2fnuz"}

#: Buffer formats that numpy's dtype constructor does not know.
_PEP3118_COMPLEX = {"Zf": "F", "Zd": "D"}

_AS_BYTES = "pass [buf, MPI.BYTE] to move its bytes"
#: Types that users may pass but that cannot be moved, with the way out.
_WAYS_OUT = {
    "bytes": _AS_BYTES,
    "longdouble": "cast it to float64",
    "clongdouble": "cast it to complex128",
    "object": "use the lower-case methods, which pickle",
    "str": "encode it to bytes",
    "datetime64": "pass .view('int64')",
    "timedelta64": "pass .view('int64')",
    "void": f"{_AS_BYTES}, or one field at a time",
    "record": f"{_AS_BYTES}, or one field at a time",
}


_FOREIGN = ("bfloat16", *_DLPACK_FP8.values())
#: numpy's dtypes; those of ml_dtypes are found by name.
BY_NUMPY: dict[np.dtype[Any], DType] = {np.dtype(name): each for name, each in DTYPES.items() if name not in _FOREIGN}
BY_NUMPY[np.dtype("S1")] = DTYPES["int8"]  # C's char, as in memoryview.cast("c") and MPI.CHAR


def dtype_of(spec: object) -> DType:
    """Return the element type that ``spec`` names.

    ``spec`` is a DType; a numpy, ml_dtypes or torch dtype; a numpy or ml_dtypes scalar type, or Python's ``int``,
    ``float``, ``complex``, ``bool``; a string (``"bfloat16"``, or a numpy, array or memoryview type code such as
    ``"f4"``); a DLPackType; or an ``MPI.Datatype`` (for a derived one, the type of its elements).

    Raises ``TypeError`` with the name of the type if it cannot be moved, or has foreign byte order.
    """
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, np.dtype):
        return _from_numpy(spec)
    if isinstance(spec, str):
        return DTYPES.get(spec) or _from_code(spec)
    if isinstance(spec, DLPackType):
        return _from_dlpack(spec)
    if mpi_datatypes.is_datatype(spec):
        return mpi_datatypes.element_of(spec).dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(spec, torch.dtype):
        return _named(str(spec).removeprefix("torch."), str(spec))
    if isinstance(spec, type):
        return _from_numpy(np.dtype(spec), spec.__name__)
    raise TypeError(
        f"{spec!r} ({type(spec).__name__}) is not a datatype; pass a numpy dtype, an MPI.Datatype or a name such as "
        f"'float32' or 'bfloat16'"
    )


def _named(name: str, shown: str) -> DType:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise TypeError(f"datatype {shown} is not supported; supported are {', '.join(DTYPES)}")
    return dtype


@lru_cache(maxsize=256)
def _from_code(code: str) -> DType:
    try:
        dtype = np.dtype(_PEP3118_COMPLEX.get(code, code.removeprefix("@")))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"datatype {code!r} is not supported ({error}); pass an MPI.Datatype, a numpy dtype or one of "
            f"{', '.join(DTYPES)}"
        ) from error
    return _from_numpy(dtype, repr(code))


def _from_numpy(dtype: np.dtype[Any], shown: str = "") -> DType:
    known = BY_NUMPY.get(dtype)
    if known is not None:
        return known
    if dtype.newbyteorder("=") in BY_NUMPY:
        raise TypeError(
            f"datatype {dtype.str!r} has foreign byte order; convert it with .astype({dtype.newbyteorder('=').name!r})"
        )
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return _named(dtype.name, dtype.name)
    name = dtype.type.__name__.rstrip("_")
    way_out = _WAYS_OUT.get(name)
    if way_out is None:
        return _named(dtype.name, shown or dtype.name)
    raise TypeError(f"datatype {shown or dtype} ({name}) is not supported; {way_out}")


def _from_dlpack(spec: DLPackType) -> DType:
    name = _DLPACK_FP8.get(spec.code)
    if name is None:
        stem = _DLPACK_CODES.get(spec.code, "?")
        name = "bool" if (stem, spec.bits) == ("bool", 8) else f"{stem}{spec.bits}"
    if spec.lanes != 1:
        name = f"{name}x{spec.lanes}"
    return _named(name, f"DLPack code {spec.code}, {spec.bits} bits, {spec.lanes} lanes")
