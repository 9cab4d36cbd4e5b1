"""mpi4py's constants and datatypes, without importing mpi4py: whoever passes one has imported it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

from ucc_hetero.buffers.model import Dims, merge
from ucc_hetero.types import DTYPES, DType

__all__ = ["Element", "element_of", "is_bottom", "is_datatype", "is_in_place"]


@dataclass(frozen=True, slots=True)
class Element:
    """One entry of an MPI datatype: elements of ``dtype``, looped over ``dims`` from byte ``offset``.

    Entry number i starts ``i * extent`` bytes after the first.
    """

    dtype: DType
    extent: int
    dims: Dims
    offset: int = 0

    @property
    def per_entry(self) -> int:
        """Elements in one entry."""
        return prod(count for count, _ in self.dims)

    @property
    def dense(self) -> bool:
        """True when successive entries make up contiguous memory."""
        size = self.dtype.itemsize
        whole = merge(((2, self.extent), *self.dims), size)
        return self.offset == 0 and len(whole) == 1 and whole[0][1] == size


#: mpi4py's type characters of each dtype: numpy's, and ``c`` (CHAR) and ``p`` (AINT, OFFSET, COUNT).
_CHARACTERS_OF = {
    "int8": "bc",
    "int16": "h",
    "int32": "i",
    "int64": "lqp",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "LQ",
    "bool": "?",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "complex64": "F",
    "complex128": "D",
}
_CHARACTERS = {character: name for name, characters in _CHARACTERS_OF.items() for character in characters}

#: Predefined datatypes seen so far, by handle. Handles of derived ones are used again once freed.
_known: dict[int, Element] = {}


def _mpi() -> Any:
    return sys.modules.get("mpi4py.MPI")


def is_in_place(buf: object) -> bool:
    """True for ``None`` and ``MPI.IN_PLACE``, the two ways to say that the receive buffer holds the input."""
    if buf is None:
        return True
    module = _mpi()
    return module is not None and buf is module.IN_PLACE


def is_bottom(buf: object) -> bool:
    """True for ``MPI.BOTTOM``."""
    module = _mpi()
    return module is not None and buf is module.BOTTOM


def is_datatype(spec: object) -> bool:
    """True for an ``MPI.Datatype``."""
    module = _mpi()
    return module is not None and isinstance(spec, module.Datatype)


def element_of(datatype: Any) -> Element:
    """What an ``MPI.Datatype`` describes.

    Takes predefined types and everything built of one predefined type by contiguous, vector, hvector, subarray,
    resized and dup. Raises ``TypeError`` for the others, with the way out.
    """
    known = _known.get(datatype.handle)
    if known is not None:
        return known
    module = _mpi()
    if datatype == module.DATATYPE_NULL:
        raise TypeError(
            "MPI.DATATYPE_NULL (a type that this MPI lacks, or one already freed) is no datatype; "
            "pass a numpy dtype or a name such as 'bfloat16'"
        )
    base, combiner, facts = datatype.decode()
    if combiner == "NAMED":
        return _known.setdefault(datatype.handle, _predefined(datatype))
    try:
        inner = element_of(base)
    finally:
        if not base.is_predefined:
            base.Free()
    return _derived(combiner, facts, inner, datatype.extent, module.ORDER_C)


def _predefined(datatype: Any) -> Element:
    bfloat16 = getattr(_mpi(), "BFLOAT16_T", None)  # mpi4py 4.1 and newer; it has no type character
    dtype = DTYPES.get("bfloat16" if datatype == bfloat16 else _CHARACTERS.get(datatype.typechar, ""))
    if dtype is None or dtype.itemsize != datatype.size:
        raise TypeError(
            f"datatype {datatype.name} is not supported; supported are those of {', '.join(DTYPES)}, "
            f"and MPI.BYTE moves the bytes of anything else"
        )
    return Element(dtype, dtype.itemsize, ())


def _derived(combiner: str, facts: dict[str, Any], inner: Element, extent: int, order_c: int) -> Element:
    offset = inner.offset
    if combiner in ("DUP", "RESIZED"):
        loops: Dims = ()
    elif combiner == "CONTIGUOUS":
        loops = ((facts["count"], inner.extent),)
    elif combiner in ("VECTOR", "HVECTOR"):
        unit = inner.extent if combiner == "VECTOR" else 1
        loops = ((facts["count"], facts["stride"] * unit), (facts["blocklength"], inner.extent))
    elif combiner == "SUBARRAY":
        loops, start = _subarray(facts, inner.extent, order_c)
        offset += start
    else:
        raise TypeError(
            f"derived datatypes made by {combiner.lower()} are not supported; copy the elements into a contiguous "
            f"array (numpy indexing does it) or make one call per part"
        )
    return Element(inner.dtype, extent, loops + inner.dims, offset)


def _subarray(facts: dict[str, Any], extent: int, order_c: int) -> tuple[Dims, int]:
    """Loops, and the byte at which the first element lies."""
    axes = list(zip(facts["sizes"], facts["subsizes"], facts["starts"], strict=True))
    if facts["order"] == order_c:
        axes.reverse()
    loops: list[tuple[int, int]] = []
    start, stride = 0, extent
    for size, subsize, first in axes:  # fastest axis first
        loops.insert(0, (subsize, stride))
        start += first * stride
        stride *= size
    return tuple(loops), start
