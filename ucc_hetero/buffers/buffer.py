"""Descriptions of memory for communication calls: Buffer, VBuffer, and Layout for memory that is not contiguous."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..types import DType

Array: TypeAlias = np.ndarray[Any, Any]

#: Function that asks the loaded GPU runtimes about an address: address -> (vendor, device number).
PointerVendor: TypeAlias = Callable[[int], tuple[str, int]]

#: Nested loops over memory, outermost first: (count, stride in bytes).
Dims: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of elements that are not contiguous: nested loops over ``dims``, from the buffer's address on.

    The buffer's elements are numbers ``first``, ``first + 1``, ... in loop order (last dimension fastest). If loops
    cannot describe them, ``places`` holds the byte offset of each element instead.
    """

    dims: Dims
    first: int = 0
    places: bytes = b""

    @property
    def total(self) -> int:
        return len(self.places) // 8 if self.places else prod(count for count, _ in self.dims)


@dataclass(slots=True)  # not frozen: every call makes Buffers, and frozen ones take three times as long to make
class Buffer:
    """Elements in memory, of the host or of a device.

    Attributes:
        ptr: Address of the first element.
        count: Number of elements.
        dtype: Type of the elements.
        vendor: Vendor of the device, or ``host``.
        device: Number of the device; 0 for ``host``.
        owner: Object that keeps the memory alive while the Buffer exists.
        readonly: True if the memory may not be written to.
        layout: None for contiguous memory; otherwise a transfer needs ``pack`` before or ``copy`` after it.
    """

    ptr: int
    count: int
    dtype: DType
    vendor: str
    device: int
    owner: object = field(repr=False, compare=False)
    readonly: bool
    layout: Layout | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements when packed."""
        return self.count * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return self.layout is None


@dataclass(frozen=True, slots=True)
class VBuffer:
    """One segment of ``buffer`` per rank: ``counts[r]`` elements from element ``displs[r]`` on.

    ``buffer`` spans the whole memory that the caller passed, also between segments. If it is not contiguous, ``displs``
    count elements of the packed copy. For a datatype with gaps ``blocks`` has the segments themselves, ``buffer`` the
    memory they lie in, and ``displs`` their positions when packed one after the other.
    """

    buffer: Buffer
    counts: tuple[int, ...]
    displs: tuple[int, ...]
    blocks: tuple[Buffer, ...] = ()

    @property
    def dense(self) -> bool:
        """True if the segments follow each other from element 0 on without gaps."""
        return self.displs == tuple(accumulate(self.counts, initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of an ``MPI.Datatype`` in host memory, from an address on. ``owner`` keeps the memory alive."""

    address: int
    count: int
    datatype: Any
    owner: object

    def span(self, count: int) -> tuple[int, int]:
        """(first, past-the-end) byte of the first ``count`` entries, relative to the address."""
        datatype = self.datatype
        first = datatype.true_lb
        return first, first + (count - 1) * datatype.extent + datatype.true_extent if count else first


class Memory(NamedTuple):
    """An exporter's description of its memory, before a message's count and dtype are applied.

    ``native`` is the exporter's own dtype object, used only if the caller names no datatype. ``dims`` is None for
    contiguous memory (C or Fortran order).
    """

    ptr: int
    nbytes: int
    itemsize: int
    native: object
    vendor: str
    device: int
    owner: object
    readonly: bool
    dims: Dims | None


def merge(dims: Iterable[tuple[int, int]], itemsize: int) -> Dims:
    """The same elements in the same order with as few loops as possible: one if they are contiguous."""
    out: list[tuple[int, int]] = []
    for count, stride in dims:
        if count == 0:
            return ((0, itemsize),)
        if count == 1:
            continue
        if out and out[-1][1] == count * stride:
            count *= out.pop()[0]
        out.append((count, stride))
    return tuple(out) or ((1, itemsize),)


def packed_places(starts: Array) -> bytes:
    """Byte offsets of elements, in a form that can be compared and hashed."""
    return starts.astype(np.int64).tobytes()


def unpacked_places(places: bytes) -> Array:
    return np.frombuffer(places, np.int64)


def bounds(dims: Dims, itemsize: int, places: bytes = b"") -> tuple[int, int]:
    """First and past-the-end byte, relative to the address, that the loops touch; (0, 0) if there are none."""
    if places:
        starts = unpacked_places(places)
        return int(starts.min()), int(starts.max()) + itemsize
    low = high = 0
    for count, stride in dims:
        if count == 0:
            return 0, 0
        low += min(0, (count - 1) * stride)
        high += max(0, (count - 1) * stride)
    return low, high + itemsize


def scattered(dims: Dims, itemsize: int, places: bytes = b"") -> bool:
    """True if no two iterations share a byte. Only recognised if each loop steps over all that inner loops touch."""
    if places:
        return bool((np.diff(np.sort(unpacked_places(places))) >= itemsize).all())
    reach = itemsize
    for count, stride in sorted(dims, key=lambda dim: abs(dim[1])):
        if count > 1 and abs(stride) < reach:
            return False
        reach += max(count - 1, 0) * abs(stride)
    return True


#: Element size -> numpy type in which elements are copied, as opaque bits.
_BITS = {1: "|u1", 2: "=u2", 4: "=u4", 8: "=u8", 16: "=c16"}


class _Raw:
    """Memory at an address, as numpy imports it; strides may be negative."""

    def __init__(self, ptr: int, dims: Dims, itemsize: int, readonly: bool, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (ptr, readonly),
            "shape": tuple(count for count, _ in dims),
            "strides": tuple(stride for _, stride in dims),
            "typestr": np.dtype(_BITS[itemsize]).str,
        }


def copy(source: Buffer, target: Buffer) -> None:
    """Copy the elements of ``source`` to ``target``. Both may have gaps; count and type must be equal. Host memory
    only.

    All copies of host memory in this package come here, so that the Buffers keep the memory alive. Raises
    ``BufferError`` if ``target`` is read-only.
    """
    if target.readonly:
        raise BufferError("cannot copy into read-only memory")
    if (source.count, source.dtype) != (target.count, target.dtype):
        raise ValueError(f"{source!r} cannot be copied to {target!r}")
    if source.layout is None and target.layout is None and source.vendor == target.vendor == "host":
        ctypes.memmove(target.ptr, source.ptr, source.nbytes)
    elif source.count:
        into, where = _elements(target)
        values = _read(source)
        into[where] = values.reshape(into.shape if where is ... else -1)


def pack(buffer: Buffer) -> Buffer:
    """The buffer's elements, contiguous in host memory and in logical order; the buffer itself if it is contiguous."""
    if buffer.layout is None:
        return buffer
    packed = empty_like(buffer)
    copy(buffer, packed)
    return packed


def empty_like(buffer: Buffer) -> Buffer:
    """New contiguous host memory for as many elements of the same type."""
    memory = np.empty(buffer.nbytes, np.uint8)
    return Buffer(memory.ctypes.data, buffer.count, buffer.dtype, "host", 0, memory, False)


def _read(buffer: Buffer) -> Array:
    outof, where = _elements(buffer)
    values: Array = outof[where]
    return values


def _elements(buffer: Buffer) -> tuple[Any, Any]:
    """(an array, or its flat iterator, over a buffer's memory; the index of the buffer's elements in it)."""
    if buffer.vendor != "host":
        raise BufferError(f"strided elements in {buffer.vendor} memory cannot be packed on the host")
    layout, size = buffer.layout, buffer.dtype.itemsize
    if layout is not None and layout.places:
        starts = unpacked_places(layout.places)[layout.first :][: buffer.count]
        low = int(starts.min())
        span = int(starts.max()) - low
        # Elements at unaligned offsets are read through an array with one (overlapping) element at every byte.
        step = 1 if ((starts - low) % size).any() else size
        raw = _Raw(buffer.ptr + low, ((span // step + 1, step),), size, buffer.readonly, buffer.owner)
        return np.asarray(raw), (starts - low) // step
    dims = ((buffer.count, size),) if layout is None else layout.dims
    view = np.asarray(_Raw(buffer.ptr, dims, size, buffer.readonly, buffer.owner))
    if layout is None or buffer.count == view.size:
        return view, ...
    return view.flat, slice(layout.first, layout.first + buffer.count)
