"""Elements that are not contiguous, to and from a contiguous copy on the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .buffer import Array, Buffer, Dims, unpacked_places

#: Elements are copied as opaque bits, whatever they mean.
_BITS = {1: "|u1", 2: "=u2", 4: "=u4", 8: "=u8", 16: "=c16"}


class _Raw:
    """Memory at an address, as numpy imports it: strides of either sign."""

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
    """Copy the elements of ``source`` to ``target``, both of which may have gaps; as many of the same type. Host only.

    The one way in which this package copies host memory: it takes whole Buffers, which keep their memory.
    Raises ``BufferError`` if ``target`` is read-only.
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
    """A contiguous, writable host copy of a buffer's elements, in their logical order.

    A contiguous buffer is returned as it is, without a copy. Host memory only.
    """
    if buffer.layout is None:
        return buffer
    packed = empty_like(buffer)
    copy(buffer, packed)
    return packed


def empty_like(buffer: Buffer) -> Buffer:
    """New host memory for as many elements of the same type, without gaps."""
    memory = np.empty(buffer.nbytes, np.uint8)
    return Buffer(memory.ctypes.data, buffer.count, buffer.dtype, "host", 0, memory, False)


def _read(buffer: Buffer) -> Array:
    outof, where = _elements(buffer)
    values: Array = outof[where]
    return values


def _elements(buffer: Buffer) -> tuple[Any, Any]:
    """An array (or its flat iterator) over a buffer's memory, and the index of its elements in that."""
    if buffer.vendor != "host":
        raise BufferError(f"strided elements in {buffer.vendor} memory cannot be packed on the host")
    layout, size = buffer.layout, buffer.dtype.itemsize
    if layout is not None and layout.places:
        starts = unpacked_places(layout.places)[layout.first :][: buffer.count]
        low = int(starts.min())
        span = int(starts.max()) - low
        # Elements that start at any byte are read through an array that has one at every byte.
        step = 1 if ((starts - low) % size).any() else size
        raw = _Raw(buffer.ptr + low, ((span // step + 1, step),), size, buffer.readonly, buffer.owner)
        return np.asarray(raw), (starts - low) // step
    dims = ((buffer.count, size),) if layout is None else layout.dims
    view = np.asarray(_Raw(buffer.ptr, dims, size, buffer.readonly, buffer.owner))
    if layout is None or buffer.count == view.size:
        return view, ...
    return view.flat, slice(layout.first, layout.first + buffer.count)
