"""mpi4py's buffer forms as Buffer and VBuffer: applies and checks counts, displacements and datatypes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np

from ..types import BYTES, DTYPES, DType
from . import mpi_datatypes
from .buffer import Buffer, Entries, Layout, Memory, PointerVendor, VBuffer, bounds, merge, packed_places, scattered
from .dtypes import BY_NUMPY, dtype_of
from .exporters import memory_of
from .mpi_datatypes import Element

#: Length of the memory that ``MPI.BOTTOM`` stands for: the datatype's absolute addresses define the rest.
_ANYWHERE = 1 << 62

_ndarray = np.ndarray
_writable_bytes: Any = ctypes.c_char.from_buffer
_addressof = ctypes.addressof
#: dtype -> an entry that consists of one element.
_PLAIN = {name: Element(dtype, dtype.itemsize, ()) for name, dtype in DTYPES.items()}
#: numpy's long double types and their type codes -> an entry of their bytes, as of ``MPI.LONG_DOUBLE``.
_WIDE: dict[object, Element] = {
    spelling: Element(BYTES, wide.itemsize, ((wide.itemsize, 1),))
    for wide in map(np.dtype, "gG")
    for spelling in (wide, wide.type, wide.char)
}

_FORMS = "pass buf, [buf, dtype], [buf, count] or [buf, count, dtype]"
_WFORMS = "pass [buf, types], [buf, (counts, displs), types] or [buf, counts, displs, types]"
_VFORMS = "pass buf, [buf, counts], [buf, (counts, displs)] or [buf, (counts, displs), dtype]"


def is_in_place(buf: object) -> bool:
    """True for ``None`` and ``MPI.IN_PLACE``: the input is in the receive buffer."""
    module = sys.modules.get("mpi4py.MPI")  # a caller that passes MPI.IN_PLACE has imported it
    return buf is None or (module is not None and buf is module.IN_PLACE)


def as_buffer(
    spec: object,
    *,
    writable: bool,
    argument: str,
    rank: int | None,
    blocks: int = 1,
    pointer_vendor: PointerVendor | None = None,
) -> Buffer:
    """Find the elements that a buffer argument names.

    Without a count these are all elements of the memory. Counts and displacements are in entries of the datatype.

    Args:
        spec: ``buf``, ``[buf, dtype]``, ``[buf, count]``, ``[buf, count, dtype]``, ``[buf, (count, displ), dtype]`` or
            ``[buf, count, displ, dtype]``, as a list or tuple.
        writable: True if data will be received here.
        argument: The argument's name, for error messages.
        rank: The caller's rank, for error messages; None if it has none.
        blocks: Number of equal parts of the buffer, such as the communicator's size for ``Allgather``'s receive buffer.
            As in MPI a given count is that of one part; ``Buffer.count`` is that of all parts.
        pointer_vendor: Function that tells whose memory a bare device pointer is.

    Returns:
        Buffer: The elements.

    Raises:
        TypeError: The object exports no memory, or the datatype is not supported.
        ValueError: The counts do not fit.
        BufferError: The memory is read-only, or its exporter refuses access.
    """
    if type(spec) is _ndarray:
        dtype = BY_NUMPY.get(spec.dtype)
        count = spec.size
        # Other arrays than C-contiguous, aligned, writable ones take the general path below.
        if dtype is not None and count and spec.flags.carray and (blocks < 2 or not count % blocks):
            start = _writable_bytes(spec)
            return Buffer(_addressof(start), count, dtype, "host", 0, spec, False)
    try:
        buf, number, displ, datatype = _split(spec)
        memory, element = _resolve(buf, datatype, writable, pointer_vendor)
        if memory is None:
            return _nothing(element, 0 if number is None else _natural(number, "count"))
        entries = _entries(memory, element.extent, element.dtype, number, displ, blocks)
        return _select(memory, element, entries, _natural(displ, "displacement") * element.extent, writable)
    except (BufferError, TypeError, ValueError) as error:
        raise _located(error, argument, rank, spec) from error


def as_vbuffer(
    spec: object, size: int, *, writable: bool, argument: str, rank: int, pointer_vendor: PointerVendor | None = None
) -> VBuffer:
    """Find the segments, one per rank, that a buffer argument names; see :func:`as_buffer`.

    ``spec`` is ``buf``, ``[buf, dtype]``, ``[buf, counts]``, ``[buf, (counts, displs)]``, ``[buf, counts, dtype]``,
    ``[buf, (counts, displs), dtype]`` or ``[buf, counts, displs, dtype]``. Counts and displacements are sequences, or
    one number: the count of every rank, or the distance between successive ranks' segments. Without counts the memory
    is divided evenly, with one entry more for the first ranks. Without displacements segments follow each other. A
    tuple in second place is always ``(counts, displs)``; pass counts alone as a list or an array.
    """
    try:
        buf, counts, displs, datatype = _split_v(spec)
        memory, element = _resolve(buf, datatype, writable, pointer_vendor)
        if memory is None or (element.dense and element.extent and memory.nbytes < _ANYWHERE):
            return _segments(memory, element, counts, displs, size, writable)
        sizes = _counts(
            counts, size, _entries(memory, element.extent, element.dtype, None, 0, 1) if counts is None else 0
        )
        starts = [displ * element.extent for displ in _displs(displs, sizes, size)]
        blocks = _blocks(memory, [element] * size, sizes, starts, writable)
        lengths = tuple(block.count for block in blocks)
        where = Buffer(memory.ptr, sum(lengths), element.dtype, memory.vendor, memory.device, memory.owner, False)
        return VBuffer(where, lengths, tuple(accumulate(lengths, initial=0))[:-1], blocks)
    except (BufferError, TypeError, ValueError) as error:
        raise _located(error, argument, rank) from error


def as_blocks(
    spec: object, size: int, *, writable: bool, argument: str, rank: int, pointer_vendor: PointerVendor | None = None
) -> tuple[Buffer, ...]:
    """Find the blocks, one per rank with a datatype of its own, that a buffer argument names; see :func:`as_buffer`.

    ``spec`` is ``[buf, types]`` (one entry each, all from the start), ``[buf, (counts, displs), types]`` or
    ``[buf, counts, displs, types]``, with displacements in bytes.
    """
    try:
        buf, counts, displs, datatypes = _split_w(spec)
        if len(datatypes) != size:
            raise ValueError(f"{len(datatypes)} datatypes given for a communicator of {size}; give one per rank")
        elements = [_element(datatype) for datatype in datatypes]
        memory, _ = _resolve(
            buf, "uint8", writable, pointer_vendor, vouched=all(map(mpi_datatypes.is_datatype, datatypes))
        )
        sizes = [1] * size if counts is None else _listed(counts, "counts", size)
        starts = [0] * size if displs is None else _listed(displs, "displacements", size)
        if memory is None:
            return tuple(_nothing(element, count) for element, count in zip(elements, sizes, strict=True))
        return _blocks(memory, elements, sizes, starts, writable)
    except (BufferError, TypeError, ValueError) as error:
        raise _located(error, argument, rank) from error


def as_entries(spec: object, *, writable: bool, argument: str, rank: int) -> Entries:
    """Find the entries of an MPI datatype that an argument names. Host memory only; see :func:`as_buffer`."""
    try:
        buf, number, displ, datatype = _split(spec)
        memory = _memory(buf, datatype, writable, None) or Memory(0, 0, 1, None, "host", 0, None, False, None)
        if memory.vendor != "host":
            raise TypeError(f"{memory.vendor} memory, but this call works on host memory only: copy it to the host")
        if memory.dims is not None:
            raise BufferError("the array is not contiguous; pass numpy.ascontiguousarray(array)")
        if not mpi_datatypes.is_datatype(datatype):
            datatype = mpi_datatypes.datatype_of(dtype_of(memory.native if datatype is None else datatype))
        start, extent = _natural(displ, "displacement"), datatype.extent
        count = _entries(memory, extent, datatype.name, number, displ, 1)
        entries = Entries(memory.ptr + start * extent, count, datatype, memory.owner)
        if start * extent + entries.span(count)[1] > memory.nbytes:
            raise ValueError(
                f"{count} entries of {extent} bytes from entry {start} on exceed its {memory.nbytes} bytes"
            )
        return entries
    except (BufferError, TypeError, ValueError) as error:
        raise _located(error, argument, rank, spec) from error


def _blocks(
    memory: Memory, elements: Sequence[Element], sizes: Sequence[int], starts: Sequence[int], writable: bool
) -> tuple[Buffer, ...]:
    """A Buffer for each rank: ``sizes[r]`` entries of datatype ``elements[r]`` from byte ``starts[r]`` on."""
    blocks = []
    for rank, (element, count, start) in enumerate(zip(elements, sizes, starts, strict=True)):
        try:
            blocks.append(_select(memory, element, count, start if count else 0, writable))
        except ValueError as error:
            raise ValueError(f"the segment of rank {rank} (of {len(sizes)}): {error}") from error
    return tuple(blocks)


def _segments(memory: Memory | None, element: Element, counts: Any, displs: Any, size: int, writable: bool) -> VBuffer:
    """The segments of the ranks, for a datatype whose entries have no gaps."""
    buffer, per_entry = _whole(memory, element, counts is None)
    entries = buffer.count // per_entry if per_entry else 0
    sizes = _counts(counts, size, entries)
    starts = _displs(displs, sizes, size)
    for rank, (count, displ) in enumerate(zip(sizes, starts, strict=True)):
        if count and displ + count > entries:
            raise ValueError(
                f"the segment of rank {rank} (of {size}), {count} entries from entry {displ} on, exceeds the buffer "
                f"of {entries}"
            )
    if writable and displs is not None:
        _check_disjoint(sizes, starts)
    if per_entry != 1:
        sizes, starts = [n * per_entry for n in sizes], [n * per_entry for n in starts]
    return VBuffer(buffer, tuple(sizes), tuple(starts))


def _located(error: Exception, argument: str, rank: int | None, spec: object = None) -> Exception:
    where = "" if rank is None else f" on rank {rank}"
    text = f"{argument}{where}: {_no_message(spec) or error}"
    if isinstance(error, BufferError):
        return BufferError(text)
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def _no_message(spec: object) -> str:
    """An error text if a list of numbers was passed as data; empty otherwise."""
    if isinstance(spec, (list, tuple)) and spec:
        kind = type(spec).__name__
        if all(isinstance(each, (int, float, complex, np.number)) for each in spec):
            return f"a {kind} of numbers is not a buffer: pass numpy.array of it (a list means [array, count, dtype])"
        if len(spec) > 1 and all(hasattr(each, "shape") for each in spec):
            return f"a {kind} of arrays is not a message: pass one array (a list means [array, count, dtype])"
    return ""


def _is_datatype(item: object) -> bool:
    """True for an object that is a datatype and cannot be a count."""
    return (
        isinstance(item, (str, type, np.dtype, DType))
        or mpi_datatypes.is_datatype(item)
        or type(item).__module__ == "torch"
    )


def _split(spec: Any) -> tuple[Any, Any, Any, Any]:
    """(buffer, count, displacement, datatype). None for what is not given; the displacement is then 0."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, 0, None
    buf, count, displ, datatype = _by_position(spec, _FORMS)
    if isinstance(count, (list, tuple)):
        if len(count) != 2 or displ is not None:
            raise ValueError(f"count {count!r} is neither a number nor (count, displ); {_FORMS}")
        count, displ = count
    return buf, count, 0 if displ is None else displ, datatype


def _split_v(spec: Any) -> tuple[Any, Any, Any, Any]:
    """(buffer, counts, displacements, datatype). None for what is not given."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    buf, counts, displs, datatype = _by_position(spec, _VFORMS)
    if isinstance(counts, tuple) and len(spec) < 4:
        if len(counts) != 2:
            raise ValueError(f"the tuple {counts!r} is not (counts, displs); pass counts alone as a list or array")
        counts, displs = counts
    return buf, counts, displs, datatype


def _split_w(spec: Any) -> tuple[Any, Any, Any, Any]:
    """(buffer, counts, displacements, datatypes). None for what is not given."""
    counts = displs = None
    if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
        raise TypeError(f"{type(spec).__name__} is not a message with a datatype per rank; {_WFORMS}")
    if len(spec) == 3:
        if not isinstance(spec[1], (list, tuple)) or len(spec[1]) != 2:
            raise ValueError(f"{spec[1]!r} is not (counts, displs); {_WFORMS}")
        counts, displs = spec[1]
    elif len(spec) == 4:
        counts, displs = spec[1:3]
    if not hasattr(spec[-1], "__len__") or isinstance(spec[-1], str):
        raise TypeError(f"{spec[-1]!r} is not a list of datatypes, one per rank; {_WFORMS}")
    return spec[0], counts, displs, spec[-1]


def _by_position(spec: Sequence[Any], forms: str) -> tuple[Any, Any, Any, Any]:
    if len(spec) == 2:
        buf, second = spec
        return (buf, None, None, second) if _is_datatype(second) else (buf, second, None, None)
    if len(spec) == 3:
        return spec[0], spec[1], None, spec[2]
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    raise ValueError(f"a {type(spec).__name__} of {len(spec)} items is not a message; {forms}")


def _resolve(
    buf: object, datatype: object, writable: bool, pointer_vendor: PointerVendor | None, *, vouched: bool = False
) -> tuple[Memory | None, Element]:
    """(memory, or None if ``None`` was passed for an empty buffer; layout of one entry of the datatype)."""
    memory = _memory(buf, datatype, writable, pointer_vendor, vouched=vouched)
    return memory, _element(memory.native if memory is not None and datatype is None else datatype)


def _memory(
    buf: object, datatype: object, writable: bool, pointer_vendor: PointerVendor | None, *, vouched: bool = False
) -> Memory | None:
    """The memory of ``buf``; None for an empty one. ``vouched``: ``buf`` is a bare address, and the blocks' MPI
    datatypes say what lies there."""
    if mpi_datatypes.is_bottom(buf):
        if datatype is None:
            raise TypeError("MPI.BOTTOM needs a datatype of absolute addresses")
        return Memory(0, _ANYWHERE, 1, None, "host", 0, None, False, None)
    if is_in_place(buf):
        if buf is None and datatype is not None:
            return None
        raise TypeError(f"{'None (IN_PLACE)' if buf is None else 'MPI.IN_PLACE'} is not a buffer; pass an array here")
    address = mpi_datatypes.bare_address(buf) if vouched or mpi_datatypes.is_datatype(datatype) else 0
    if address:
        return Memory(address, _ANYWHERE, 1, None, *_whose(address, pointer_vendor), buf, False, None)
    memory = memory_of(buf, pointer_vendor)
    if writable and memory.readonly:
        raise BufferError(f"{type(buf).__name__} is read-only and cannot receive; pass writable memory")
    return memory._replace(owner=buf) if mpi_datatypes.is_memory(buf) else memory


def _whose(address: int, pointer_vendor: PointerVendor | None) -> tuple[str, int]:
    """Vendor and device of a bare address; host if no runtime knows it."""
    if pointer_vendor is not None:
        with suppress(BufferError):
            return pointer_vendor(address)
    return "host", 0


def _element(datatype: object) -> Element:
    if mpi_datatypes.is_datatype(datatype):
        return mpi_datatypes.element_of(datatype)
    wide = _WIDE.get(datatype) if isinstance(datatype, (np.dtype, type, str)) else None
    return wide or _PLAIN[dtype_of(datatype).name]


def _nothing(element: Element, count: int) -> Buffer:
    if count:
        raise ValueError(f"the buffer is None but its count is {count}")
    return Buffer(0, 0, element.dtype, "host", 0, None, False)


def _natural(value: object, what: str) -> int:
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} {value!r} is not an integer") from None
    if number < 0:
        raise ValueError(f"{what} {number} is negative")
    return number


def _entries(memory: Memory, extent: int, kind: object, count: object, displ: object, blocks: int) -> int:
    """The number of entries of the datatype (``kind``) in all blocks together."""
    if count is not None:
        return _natural(count, "count") * max(blocks, 1)
    if memory.nbytes == _ANYWHERE:
        return 0  # as in mpi4py, for which the buffer then has no bytes
    length = memory.nbytes - _natural(displ, "displacement") * extent
    if length < 0:
        raise ValueError(f"displacement {displ} lies outside the {memory.nbytes} bytes of the buffer")
    if length == 0:
        return 0
    if extent <= 0 or length % extent:
        raise ValueError(
            f"{length} bytes are not a whole number of entries of {kind}, {extent} bytes each; give the count"
        )
    if blocks > 1 and length // extent % blocks:
        raise ValueError(
            f"{length // extent} elements cannot be divided evenly among the {blocks} ranks of the communicator; "
            f"pass a buffer of a multiple of {blocks} elements, or a count per rank"
        )
    return length // extent


def _select(memory: Memory, element: Element, entries: int, start: int, writable: bool) -> Buffer:
    """Apply a datatype and a count to memory from byte ``start`` on."""
    size = element.dtype.itemsize
    count = entries * element.per_entry
    if memory.dims is not None:
        _check_relabel(memory, element)
        total, first = Layout(memory.dims).total, start // size
        if first + count > total:
            raise ValueError(f"count {count} from element {first} on exceeds the {total} elements of the buffer")
        return _buffer(memory, element, 0, count, Layout(memory.dims, first), writable)
    dims, places, offset = ((entries, element.extent), *element.dims), b"", start + element.offset
    if element.places:
        dims, places = (), packed_places(np.add.outer(np.arange(entries) * element.extent, element.starts()).ravel())
    elif len(dims) > 1 or element.extent != size:
        dims = merge(dims, size)
    low, high = bounds(dims, size, places) if count else (0, 0)
    outside = high > low and (low + offset < 0 or high + offset > memory.nbytes)
    # An address with the length of the data, which a datatype spreads further: so heat passes tensors with gaps.
    if outside and not (mpi_datatypes.is_memory(memory.owner) and memory.nbytes == count * size):
        raise ValueError(
            f"{entries} entries of {element.dtype} from byte {start} on occupy bytes {low + offset} to "
            f"{high + offset}, and the buffer has {memory.nbytes} bytes; pass a larger buffer or a smaller count"
        )
    plain = not count or (len(dims) == 1 and dims[0][1] == size)
    return _buffer(memory, element, offset, count, None if plain else Layout(dims, 0, places), writable)


def _buffer(memory: Memory, element: Element, offset: int, count: int, layout: Layout | None, writable: bool) -> Buffer:
    if layout is not None:
        if memory.vendor != "host":
            raise BufferError(
                f"strided elements in {memory.vendor} device memory cannot be transferred; "
                f"pass a contiguous copy (.contiguous() in torch, ascontiguousarray in array libraries)"
            )
        if writable and not scattered(layout.dims, element.dtype.itemsize, layout.places):
            raise BufferError("elements of the buffer overlap in memory and cannot receive; pass a contiguous array")
    ptr, dtype = memory.ptr + offset, element.dtype
    return Buffer(ptr, count, dtype, memory.vendor, memory.device, memory.owner, memory.readonly, layout)


def _check_relabel(memory: Memory, element: Element) -> None:
    if element.dims or element.extent != memory.itemsize:
        raise BufferError(
            f"strided memory of {memory.itemsize}-byte elements cannot be read as {element.dtype} with an extent of "
            f"{element.extent} bytes; pass a contiguous copy (np.ascontiguousarray, .contiguous() in torch)"
        )


def _whole(memory: Memory | None, element: Element, exact: bool) -> tuple[Buffer, int]:
    """(all of the memory, elements per entry). ``exact``: the entries must cover it without a rest."""
    if memory is None:
        return _nothing(element, 0), 1
    if exact:
        entries = _entries(memory, element.extent, element.dtype, None, 0, 1)
    else:
        entries = memory.nbytes // element.extent if element.extent else 0
    return _select(memory, element, entries, 0, False), element.per_entry


def _listed(values: Any, what: str, size: int) -> list[int]:
    """A list of one number >= 0 per rank."""
    try:
        numbers = [index(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]
    except TypeError:
        raise TypeError(f"{what} {values!r} are not integers") from None
    if len(numbers) != size:
        raise ValueError(f"{len(numbers)} {what} given for a communicator of size {size}; give one per rank")
    for rank, number in enumerate(numbers):
        if number < 0:
            raise ValueError(f"{what}[{rank}] is {number}, which is negative")
    return numbers


def _is_number(value: object) -> bool:
    return hasattr(value, "__index__") and (not isinstance(value, np.ndarray) or value.ndim == 0)


def _counts(counts: Any, size: int, entries: int) -> list[int]:
    if counts is None:
        each, more = divmod(entries, size)
        return [each + 1] * more + [each] * (size - more)
    if _is_number(counts):
        return [_natural(counts, "count")] * size
    return _listed(counts, "counts", size)


def _displs(displs: Any, counts: list[int], size: int) -> list[int]:
    if displs is None:
        return list(accumulate(counts, initial=0))[:-1]
    if _is_number(displs):
        step = _natural(displs, "displacement")
        return [rank * step for rank in range(size)]
    return _listed(displs, "displs", size)


def _check_disjoint(counts: list[int], displs: list[int]) -> None:
    """Raise if the segments of two ranks overlap: both would be received into the same memory."""
    end, before = 0, -1
    for displ, count, rank in sorted(zip(displs, counts, range(len(counts)), strict=True)):
        if count == 0:
            continue
        if displ < end:
            raise ValueError(f"the segments of ranks {before} and {rank} overlap at entry {displ}")
        end, before = displ + count, rank
