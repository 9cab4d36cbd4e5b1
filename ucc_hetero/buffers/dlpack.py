"""DLPack through ctypes: the structures of ``dlpack.h`` 1.x, and how they are read from a capsule."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..machine.vendors import DLPACK
from .dtypes import DLPackType

_READ_ONLY = 1 << 0
_IS_COPIED = 1 << 1


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


# Prototypes of our own: the function objects of ctypes.pythonapi are shared with every other library.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A capsule's contents. ``strides`` count elements; None means C order.

    ``capsule`` is the exporter's and is not renamed: it still owns the export, and its destructor calls the exporter's
    deleter once, when the last reference is dropped.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DLPackType
    readonly: bool
    capsule: object


def placement(device_type: int, device_id: int) -> tuple[str, int]:
    """Vendor and device number for a ``__dlpack_device__`` value. ``TypeError`` for unsupported kinds of devices."""
    vendor = DLPACK.get(int(device_type))
    if vendor is None:
        raise TypeError(f"memory of DLPack device type {int(device_type)} is not supported; copy it to the host")
    return vendor, 0 if vendor == "host" else int(device_id)


def of_jax(obj: Any) -> bool:
    """True for JAX arrays. JAX computes them in a stream that it does not expose, and they are read-only, which their
    capsules may not tell."""
    return hasattr(obj, "block_until_ready")


def export(obj: Any, device_type: int) -> object:
    """Ask ``obj`` for a capsule without a copy, and without synchronising a stream; JAX arrays are waited for."""
    if of_jax(obj):
        obj.block_until_ready()
    # -1 means "do not synchronise". The protocol allows no stream for host memory, and JAX would use -1 as a handle.
    stream = {} if DLPACK.get(device_type) == "host" or of_jax(obj) else {"stream": -1}
    try:
        return obj.__dlpack__(**stream, max_version=(1, 0), copy=False)
    except TypeError:  # exporters older than DLPack 1.0 lack these keywords
        return obj.__dlpack__(**stream)


def read(capsule: object) -> Tensor:
    """Read a DLPack capsule. ``BufferError`` if it was consumed, has a newer major version, or holds a copy."""
    flags = 0
    tensor: _Tensor
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _ManagedVersioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.version.major != 1:
            raise BufferError(f"DLPack version {versioned.version.major}.{versioned.version.minor} is not supported")
        tensor, flags = versioned.tensor, versioned.flags
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Managed.from_address(_pointer(capsule, b"dltensor")).tensor
    else:
        raise BufferError(f"__dlpack__ returned {capsule!r}, which is not an unused DLPack capsule")
    if flags & _IS_COPIED:
        raise BufferError("its __dlpack__ exports a copy, so a transfer would not reach its own memory")
    ndim = tensor.ndim
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[:ndim]),
        tuple(tensor.strides[:ndim]) if tensor.strides else None,
        DLPackType(tensor.code, tensor.bits, tensor.lanes),
        bool(flags & _READ_ONLY),
        capsule,
    )
