"""Reading the memory of array-likes: numpy, torch, the buffer protocol, DLPack, ``__cuda_array_interface__``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import numpy as np

from ..machine.vendors import INTERFACES
from . import dlpack
from .buffer import Memory, PointerVendor, merge

_WAYS_IN = "a numpy array, a torch tensor, or an object with the buffer protocol, DLPack or "

_exports_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(("PyObject_CheckBuffer", ctypes.pythonapi))


def memory_of(obj: object, pointer_vendor: PointerVendor | None) -> Memory:
    """Return the memory that ``obj`` exports.

    Protocols are tried in this order: numpy, torch, PEP 3118, DLPack, ``__cuda_array_interface__``. If one fails the
    next is tried; if all fail, the first error is raised.
    """
    if isinstance(obj, np.ndarray):
        return _of_numpy(obj)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _of_torch(obj, torch)
    failure: Exception | None = None
    for protocol in (_of_buffer, _of_dlpack, _of_device_interface):
        try:
            memory = protocol(obj, pointer_vendor)
        except (BufferError, TypeError, ValueError) as error:
            failure = failure or error
        else:
            if memory is not None:
                return memory
    raise failure or TypeError(f"{_shown(obj)} exports no memory; pass {_WAYS_IN}{' or '.join(INTERFACES)}")


def _shown(obj: object) -> str:
    text = repr(obj)
    return f"{text if len(text) < 60 else text[:56] + ' ...'} ({type(obj).__name__})"


def _of_numpy(array: np.ndarray[Any, Any]) -> Memory:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise TypeError("the mask of a masked array would be lost; pass its .filled() or its .data")
    dtype = array.dtype
    if dtype.hasobject:
        raise TypeError(f"datatype {dtype} holds Python objects; use the lower-case methods, which pickle")
    strides = None if array.flags.forc else array.strides
    where = array.ctypes.data, "host", 0
    return _described(where, array.shape, strides, dtype.itemsize, dtype, array, readonly=not array.flags.writeable)


def _described(
    where: tuple[int, str, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    itemsize: int,
    native: object,
    owner: object,
    *,
    readonly: bool,
) -> Memory:
    """Memory of elements in ``shape`` at (address, vendor, device). ``strides`` are in bytes; None if contiguous."""
    (ptr, vendor, device), count, dims = where, prod(shape), None
    if strides is not None:
        loops = tuple(zip(shape, strides, strict=True))
        dims = merge(loops, itemsize)
        if ((count, itemsize),) in (dims, merge(reversed(loops), itemsize)):  # contiguous, in C's order or Fortran's
            dims = None
    return Memory(ptr, count * itemsize, itemsize, native, vendor, device, owner, readonly, dims)


def _of_torch(tensor: Any, torch: Any) -> Memory:
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} has no single block of memory; pass .to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        raise BufferError("the tensor is a lazy conjugate or negative; pass .resolve_conj().resolve_neg()")
    if tensor.device.type == "meta":
        raise TypeError("a meta tensor has no memory; pass a materialised one")
    # torch uses one device type name for several vendors; the DLPack device type distinguishes them.
    vendor, device = ("host", 0) if tensor.is_cpu else dlpack.placement(*tensor.__dlpack_device__())
    itemsize = tensor.element_size()
    strides = None if tensor.is_contiguous() else tuple(step * itemsize for step in tensor.stride())
    where = tensor.data_ptr(), vendor, device
    if not where[0] and tensor.numel():
        raise TypeError(f"a {type(tensor).__name__} has no memory of its own; pass the tensor inside it")
    return _described(where, tuple(tensor.shape), strides, itemsize, tensor.dtype, tensor, readonly=False)


def _of_buffer(obj: Any, _: PointerVendor | None) -> Memory | None:
    if not _exports_buffer(obj):
        return None
    # The array holds the export: a bytearray, for instance, cannot be resized while the Buffer exists.
    return _of_numpy(np.asarray(memoryview(obj)))


def _of_dlpack(obj: Any, _: PointerVendor | None) -> Memory | None:
    if not (hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__")):
        return None
    device_type, device_id = obj.__dlpack_device__()
    vendor, device = dlpack.placement(device_type, device_id)
    tensor = dlpack.read(dlpack.export(obj, int(device_type)))
    itemsize = -(-tensor.dtype.bits * tensor.dtype.lanes // 8)
    strides = None if tensor.strides is None else tuple(n * itemsize for n in tensor.strides)
    readonly = tensor.readonly or dlpack.of_jax(obj)
    where = tensor.ptr, vendor, device
    return _described(where, tensor.shape, strides, itemsize, tensor.dtype, tensor.capsule, readonly=readonly)


def _of_device_interface(obj: Any, pointer_vendor: PointerVendor | None) -> Memory | None:
    name = next((name for name in INTERFACES if hasattr(obj, name)), "")
    interface = getattr(obj, name) if name else None
    if interface is None:
        return None
    if not isinstance(interface, dict):
        raise TypeError(f"{name} of {_shown(obj)} is a {type(interface).__name__}, not a dict")
    if interface.get("mask") is not None:
        raise BufferError("the mask of a masked array would be lost; pass the data without it")
    ptr, readonly = interface["data"]
    where = ptr or 0, *_whose(ptr or 0, pointer_vendor)
    dtype = np.dtype(interface["typestr"])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    strides = None if strides is None else tuple(strides)
    return _described(where, shape, strides, dtype.itemsize, dtype, obj, readonly=bool(readonly))


def _whose(ptr: int, pointer_vendor: PointerVendor | None) -> tuple[str, int]:
    """Ask the GPU runtimes: libraries of several vendors export the same interface."""
    if ptr == 0:  # an empty array
        return "host", 0
    if pointer_vendor is None:
        raise BufferError(
            f"its array interface does not tell the vendor of pointer {ptr:#x}, and no GPU runtime is loaded to ask; "
            f"pass an object with __dlpack__, or make the vendor's runtime library available"
        )
    return pointer_vendor(ptr)


#: (all properties of an array except its address, the address).
Description = tuple[Hashable, int]


def describe_fast(array: Any) -> Description | None:
    """A key that is equal for arrays that differ in the address alone, and the address. None: use :func:`as_buffer`."""
    kind = type(array)
    if kind not in _readers:
        _readers[kind] = _reader(kind)
    read = _readers[kind]
    return read(array) if read is not None else None


def _reader(kind: type) -> Callable[[Any], Description | None] | None:
    name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return {"torch.Tensor": _torch, "torch.Parameter": _torch, "cupy.ndarray": _cupy}.get(name)


def _torch(tensor: Any) -> Description | None:
    try:
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        address = tensor.data_ptr()
    except RuntimeError:  # the tensor has no single block of memory
        return None
    if not address:  # no memory: a meta tensor, or one without elements
        return None
    return ("torch", tensor.dtype, tensor.numel(), tensor.get_device(), tensor.requires_grad), address


def _cupy(array: Any) -> Description | None:
    if not array.flags.c_contiguous:
        return None
    return ("cupy", array.dtype, array.size, array.data.device_id), array.data.ptr


#: Type -> its function for :func:`describe_fast`; None if it has none.
_readers: dict[type, Callable[[Any], Description | None] | None] = {}
