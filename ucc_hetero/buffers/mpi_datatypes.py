"""mpi4py's constants and datatypes, without importing mpi4py: a caller that passes them has done so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..types import BYTES, DTYPES, DType
from .buffer import Array, Dims, merge, packed_places, unpacked_places


@dataclass(frozen=True, slots=True)
class Element:
    """One entry of an MPI datatype: elements of ``dtype`` in loops over ``dims``, from byte ``offset`` on.

    Entry i starts ``i * extent`` bytes after entry 0. If loops cannot describe the entry, ``places`` holds the byte
    offsets of its elements (``packed_places``).
    """

    dtype: DType
    extent: int
    dims: Dims
    offset: int = 0
    places: bytes = b""

    @property
    def per_entry(self) -> int:
        return len(self.places) // 8 if self.places else prod(count for count, _ in self.dims)

    def starts(self) -> Array:
        """Byte offsets of the elements of an entry."""
        return unpacked_places(self.places) if self.places else self.offset + _visited(self.dims)

    @property
    def dense(self) -> bool:
        """True if successive entries are contiguous in memory."""
        if self.places:
            return False
        size = self.dtype.itemsize
        whole = merge(((2, self.extent), *self.dims), size)
        return self.offset == 0 and len(whole) == 1 and whole[0][1] == size


#: dtype -> mpi4py's type characters: numpy's, and ``c`` (CHAR) and ``p`` (AINT, OFFSET, COUNT).
_CHARACTERS_OF = {
    "int8": "bc", "int16": "h", "int32": "i", "int64": "lqp", "uint8": "B", "uint16": "H", "uint32": "I",
    "uint64": "LQ", "bool": "?", "float16": "e", "float32": "f", "float64": "d", "complex64": "F", "complex128": "D",
}  # fmt: skip
_CHARACTERS = {character: name for name, characters in _CHARACTERS_OF.items() for character in characters}

#: Handle -> predefined datatype. Handles of derived datatypes may be reused once freed, and are not kept.
_known: dict[int, Element] = {}


def _mpi() -> Any:
    return sys.modules.get("mpi4py.MPI")


def is_bottom(buf: object) -> bool:
    module = _mpi()
    return module is not None and buf is module.BOTTOM


def bare_address(buf: object) -> int:
    """The address of an empty ``MPI.memory``, by which array libraries pass a bare address; 0 for anything else."""
    return int(buf.address) if is_memory(buf) and not buf.nbytes else 0  # type: ignore[attr-defined]


def is_memory(buf: object) -> bool:
    module = _mpi()
    return module is not None and isinstance(buf, module.memory)


def is_datatype(spec: object) -> bool:
    module = _mpi()
    return module is not None and isinstance(spec, module.Datatype)


def datatype_of(dtype: DType) -> Any:
    """The MPI datatype of a dtype, as mpi4py finds it for an array. ``TypeError`` if there is none."""
    module = _mpi()
    if dtype.name not in _CHARACTERS_OF or module is None:
        raise TypeError(f"MPI has no datatype for {dtype}")
    return module.Datatype.fromcode(_CHARACTERS_OF[dtype.name][0])


def element_of(datatype: Any) -> Element:
    """The elements of an entry of an ``MPI.Datatype``.

    Supports predefined datatypes, and all derived ones except darray. Elements of structures with several types, and of
    predefined types without arithmetic here, are ``BYTES``. Raises ``TypeError`` with the way out otherwise.
    """
    known = _known.get(datatype.handle)
    if known is not None:
        return known
    module = _mpi()
    if datatype == module.DATATYPE_NULL:
        raise TypeError(
            "MPI.DATATYPE_NULL (a type that this MPI lacks, or one already freed) is not a datatype; "
            "pass a numpy dtype or a name such as 'bfloat16'"
        )
    base, combiner, facts = datatype.decode()
    if combiner == "NAMED":
        return _known.setdefault(datatype.handle, _predefined(datatype))
    bases = facts["datatypes"] if combiner == "STRUCT" else [base]
    try:
        inner = [element_of(each) for each in bases]
    finally:
        for each in bases:
            if not each.is_predefined:
                each.Free()
    if combiner in _BLOCKS:
        return _of_blocks(combiner, facts, inner, datatype.extent)
    return _of_loops(combiner, facts, inner[0], datatype.extent, module.ORDER_C)


def _predefined(datatype: Any) -> Element:
    bfloat16 = getattr(_mpi(), "BFLOAT16_T", None)  # mpi4py 4.1 and newer; it has no type character
    dtype = DTYPES.get("bfloat16" if datatype == bfloat16 else _CHARACTERS.get(datatype.typechar, ""))
    if dtype is not None and dtype.itemsize == datatype.size:
        return Element(dtype, dtype.itemsize, ())
    if 0 < datatype.size == datatype.extent:  # e.g. long double, or a pair without a gap
        return Element(BYTES, datatype.extent, ((datatype.size, 1),))
    raise TypeError(
        f"datatype {datatype.name} is not supported; supported are those of {', '.join(DTYPES)}, "
        f"and MPI.BYTE moves the bytes of anything else"
    )


def _of_loops(combiner: str, facts: dict[str, Any], inner: Element, extent: int, order_c: int) -> Element:
    """A datatype whose inner entries lie at equal distances."""
    offset = 0
    if combiner in ("DUP", "RESIZED"):
        loops: Dims = ()
    elif combiner == "CONTIGUOUS":
        loops = ((facts["count"], inner.extent),)
    elif combiner in ("VECTOR", "HVECTOR"):
        unit = inner.extent if combiner == "VECTOR" else 1
        loops = ((facts["count"], facts["stride"] * unit), (facts["blocklength"], inner.extent))
    elif combiner == "SUBARRAY":
        loops, offset = _subarray(facts, inner.extent, order_c)
    else:
        raise TypeError(
            f"derived datatypes made by {combiner.lower()} are not supported; copy the elements into a contiguous "
            f"array (numpy indexing does it) or make one call per part"
        )
    if inner.places:
        return _scattered(inner.dtype, extent, np.add.outer(offset + _visited(loops), inner.starts()).ravel())
    return Element(inner.dtype, extent, loops + inner.dims, offset + inner.offset)


#: Constructor of blocks -> (field with the block lengths, True if displacements are in bytes).
_BLOCKS = {
    "INDEXED": ("blocklengths", False),
    "HINDEXED": ("blocklengths", True),
    "INDEXED_BLOCK": ("blocklength", False),
    "HINDEXED_BLOCK": ("blocklength", True),
    "STRUCT": ("blocklengths", True),
}


def _of_blocks(combiner: str, facts: dict[str, Any], inner: Sequence[Element], extent: int) -> Element:
    """A datatype whose inner entries lie in blocks of any lengths at any displacements."""
    if not inner:
        raise TypeError("a structure without fields is not supported")
    dtype = inner[0].dtype if all(each.dtype is inner[0].dtype for each in inner) else BYTES
    lengths, in_bytes = _BLOCKS[combiner]
    displs = np.array(facts["displacements"], np.int64)
    each = np.broadcast_to(np.array(facts[lengths], np.int64), displs.shape)
    if combiner != "STRUCT":
        return _scattered(dtype, extent, _in_blocks(displs if in_bytes else displs * inner[0].extent, each, inner[0]))
    fields = [_in_blocks(displs[i : i + 1], each[i : i + 1], field) for i, field in enumerate(inner)]
    if dtype is BYTES:
        sizes = (np.arange(field.dtype.itemsize) for field in inner)
        fields = [np.add.outer(starts, each).ravel() for starts, each in zip(fields, sizes, strict=True)]
    return _scattered(dtype, extent, np.concatenate(fields))


def _in_blocks(starts: Array, lengths: Array, inner: Element) -> Array:
    """Byte offsets of the elements in blocks of an inner datatype."""
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    starts = np.add.outer(np.repeat(starts, lengths) + within * inner.extent, inner.starts())
    return starts.ravel()


def _scattered(dtype: DType, extent: int, starts: Array) -> Element:
    """An entry with elements at these byte offsets; a loop if they are equidistant."""
    if not len(starts):
        return Element(dtype, extent, ((0, dtype.itemsize),))
    steps = np.diff(starts)
    if not len(steps) or (steps == steps[0]).all():
        step = int(steps[0]) if len(steps) else dtype.itemsize
        return Element(dtype, extent, ((len(starts), step),), int(starts[0]))
    return Element(dtype, extent, (), 0, packed_places(starts))


def _visited(dims: Dims) -> Array:
    at = np.zeros(1, np.int64)
    for count, stride in dims:
        at = np.add.outer(at, np.arange(count, dtype=np.int64) * stride).ravel()
    return at


def _subarray(facts: dict[str, Any], extent: int, order_c: int) -> tuple[Dims, int]:
    """(loops, byte offset of the first element) of a subarray datatype."""
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
