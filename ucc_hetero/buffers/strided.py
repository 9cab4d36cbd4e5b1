"""Elements that are not contiguous, to and from a contiguous copy on the host."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np

from ucc_hetero.buffers.model import Buffer, Dims

__all__ = ["copy", "empty_like", "pack", "unpack", "view_of"]

Array: TypeAlias = np.ndarray[Any, Any]

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
        return
    if not source.count:
        return
    outof, into = view_of(source), view_of(target)
    if target.count == into.size:
        into[...] = _elements(source, outof).reshape(into.shape)
    else:
        assert target.layout is not None  # without one a view has as many elements
        first = target.layout.first
        into.flat[first : first + target.count] = _elements(source, outof)


def pack(buffer: Buffer) -> Buffer:
    """A contiguous, writable host copy of a buffer's elements, in their logical order.

    A contiguous buffer is returned as it is, without a copy. Host memory only.
    """
    if buffer.layout is None:
        return buffer
    packed = empty_like(buffer)
    copy(buffer, packed)
    return packed


def unpack(packed: Buffer, target: Buffer) -> None:
    """Write the elements of ``packed``, which ``pack(target)`` made, to where ``target`` has them.

    Does nothing where ``pack`` made no copy. Raises ``BufferError`` if ``target`` is read-only.
    """
    if packed is target:
        return
    if packed.layout is not None or target.layout is None or packed.count != target.count:
        raise ValueError(f"{packed!r} is not the packed form of {target!r}")
    copy(packed, target)


def empty_like(buffer: Buffer) -> Buffer:
    """New host memory for as many elements of the same type, without gaps."""
    memory = np.empty(buffer.nbytes, np.uint8)
    return Buffer(memory.ctypes.data, buffer.count, buffer.dtype, "host", 0, memory, False)


def _elements(buffer: Buffer, view: Array) -> Array:
    """The elements that a buffer means of those that a view of its memory has."""
    if buffer.count == view.size:
        return view
    first = buffer.layout.first if buffer.layout is not None else 0
    return view.flat[first : first + buffer.count]


def view_of(buffer: Buffer) -> Array:
    """The elements that a buffer's layout visits, as opaque bits in an array that keeps the memory; host only."""
    if buffer.vendor != "host":
        raise BufferError(f"strided elements in {buffer.vendor} memory cannot be packed on the host")
    size = buffer.dtype.itemsize
    dims = ((buffer.count, size),) if buffer.layout is None else buffer.layout.dims
    return np.asarray(_Raw(buffer.ptr, dims, size, buffer.readonly, buffer.owner))
