"""For device arrays, fake (arrays.py) and real (tests/gpu/arrays.py): parts of arrays, and gates for streams."""

import ctypes
from types import SimpleNamespace

import numpy as np

from ucc_hetero import device


class Gate:
    """Blocks a stream from here on, until it is opened."""

    def __init__(self, stream):
        (runtime,) = device.available()
        word = runtime.flag()
        self._word = ctypes.c_uint32.from_address(word)
        self._word.value = 0
        runtime.wait_value(stream.handle, word, 1)

    def open(self):
        self._word.value = 1


class ndarray:
    """Elements in the middle of an ``arrays.Array``, as CuPy exposes them: in repeated calls the package reads it
    fast."""

    def __init__(self, array, first, count, dtype):
        self.array, self.dtype, self.size, self.first = array, np.dtype(dtype), count, first
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=array.block.handle + first, device_id=array.runtime.current())

    @property
    def peek(self):
        end = self.first + self.size * self.dtype.itemsize
        return self.array.peek.view(np.uint8)[self.first : end].view(self.dtype)

    @property
    def __cuda_array_interface__(self):
        place = {"data": (self.data.ptr, False), "typestr": self.dtype.str, "shape": (self.size,)}
        return {**self.array.__cuda_array_interface__, **place}


ndarray.__module__ = "cupy"  # the package treats it as CuPy's own
