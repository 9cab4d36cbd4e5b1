"""Elements that are not contiguous, to and from a contiguous copy on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ucc_hetero.buffers.model import Buffer, Dims, Layout

__all__ = ["pack", "unpack"]

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


def pack(buffer: Buffer) -> Buffer:
    """A contiguous, writable host copy of a buffer's elements, in their logical order.

    A contiguous buffer is returned as it is, without a copy. Host memory only.
    """
    if buffer.layout is None:
        return buffer
    view = _view(buffer, buffer.layout)
    first = buffer.layout.first
    if buffer.count == view.size:
        packed = np.ascontiguousarray(view).reshape(-1)
    else:
        packed = view.flat[first : first + buffer.count]
    if np.may_share_memory(packed, view):
        packed = packed.copy()
    return Buffer(packed.ctypes.data, buffer.count, buffer.dtype, "host", 0, packed, False)


def unpack(packed: Buffer, target: Buffer) -> None:
    """Write the elements of ``packed``, which ``pack(target)`` made, to where ``target`` has them.

    Does nothing where ``pack`` made no copy. Raises ``BufferError`` if ``target`` is read-only.
    """
    if packed is target:
        return
    if target.readonly:
        raise BufferError("cannot unpack into read-only memory")
    if target.layout is None or packed.layout is not None or packed.count != target.count:
        raise ValueError(f"{packed!r} is not the packed form of {target!r}")
    size = target.dtype.itemsize
    source = np.asarray(_Raw(packed.ptr, ((packed.count, size),), size, True, packed.owner))
    view = _view(target, target.layout)
    if target.count == view.size:
        view[...] = source.reshape(view.shape)
    else:
        first = target.layout.first
        view.flat[first : first + target.count] = source


def _view(buffer: Buffer, layout: Layout) -> np.ndarray[Any, Any]:
    if buffer.vendor != "host":
        raise BufferError(f"strided elements in {buffer.vendor} memory cannot be packed on the host")
    raw = _Raw(buffer.ptr, layout.dims, buffer.dtype.itemsize, buffer.readonly, buffer.owner)
    return np.asarray(raw)
