"""Arrays on real GPUs with the interface of tests/fakegpu/arrays.py, for jobs of random calls; tests compare copies.

A rank uses its device through the HIP runtime ``CASES_HIP`` if ``FAKEGPU_LAYOUT``, such as ``nvidia:1,amd:1``, makes it
AMD's (tests/hipcuda). Import this module before a Communicator is made.
"""

import ctypes
import os
import sys
import time
import weakref
from functools import cache
from typing import Any

import numpy as np
from parts import Gate as Gate
from parts import ndarray as ndarray

from ucc_hetero import device
from ucc_hetero.planner.topology import emulated_vendors

_LAYOUT = os.environ["FAKEGPU_LAYOUT"]
_VENDORS = emulated_vendors(_LAYOUT, sum(int(part.partition(":")[2]) for part in _LAYOUT.split(",")))
os.environ |= (
    {"UCCH_CUDA_LIB": "none", "UCCH_HIP_LIB": os.environ["CASES_HIP"], "HIP_ENABLE_DEFERRED_LOADING": "0"}
    if _VENDORS[int(os.environ["OMPI_COMM_WORLD_RANK"])] == "amd"
    else {"UCCH_HIP_LIB": "none"}
)

#: Bytes copied before inputs arrive, and number of copies: about a millisecond.
LONG, TIMES = 1 << 28, 8
#: Elements of the longest vector.
LONGEST = 6_000_007


@cache
def runtime():
    (found,) = device.available()
    return found


@cache
def _own():
    return runtime().stream()


@cache
def _long():
    return runtime().alloc(LONG), runtime().alloc(LONG)


#: Size -> (memory of freed arrays, events of streams that may still use it). It is reused once these are done: freeing
#: memory would wait for all work of the device.
_idle = {}
_streams = set()


def _take(room):
    """Memory on the device, and pinned memory, of this size."""
    for index, (pair, marks) in enumerate(_idle.get(room, [])):
        if all(mark.done() for mark in marks):
            del _idle[room][index]
            for mark in marks:
                mark.close()
            return pair
    return runtime().alloc(room), runtime().alloc(room, pinned=True)


def _mark(stream):
    event = runtime().event()
    event.record(stream)
    return event


@cache
def _constant(value):
    """The longest vector of a test, filled with one value."""
    return Array(LONGEST).set(value)


class Copy(np.ndarray):
    """A copy of device memory at the time of the read; writes go to the device at once."""

    array: Any = None

    def __array_finalize__(self, parent):
        self.array = getattr(parent, "array", None)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        array = self.array and self.array()
        if array and np.may_share_memory(self, array.copy):
            array.push()


class Array:
    """``n`` elements on the current device, and a copy of them in host memory."""

    def __init__(self, n, dtype=np.float32):
        self.dtype, self.size, self.runtime = np.dtype(dtype), n, runtime()
        room = 1 << max(8, (n * self.dtype.itemsize - 1).bit_length())
        self.nbytes = n * self.dtype.itemsize
        self.block, self.host = self.pair = _take(room)
        self.copy = np.zeros(n, dtype).view(Copy)
        self.copy.array = weakref.ref(self)

    def __del__(self, ends=sys.is_finalizing):
        if not ends() and hasattr(self, "pair"):
            _idle.setdefault(self.block.nbytes, []).append((self.pair, [_mark(stream) for stream in _streams]))

    @property
    def __cuda_array_interface__(self):
        data = self.block.handle, False
        return {"shape": (self.size,), "typestr": self.dtype.str, "data": data, "version": 3, "strides": None}

    @property
    def peek(self):
        self.pull()
        return self.copy

    def _landed(self):
        memory = (ctypes.c_char * max(1, self.nbytes)).from_address(self.host.handle)
        return np.frombuffer(memory, self.dtype, self.size)

    def push(self):
        self._landed()[:] = self.copy
        self.runtime.copy(self.block.handle, self.host.handle, self.nbytes, _own().handle)
        _own().synchronize()

    def pull(self):
        self.copy.view(np.ndarray)[:] = self.copied(_own())

    def set(self, values):
        self.copy[:] = values
        return self

    def fill(self, stream, value):
        """Fill the elements with a value when the stream gets there. float32 only."""
        _streams.add(stream.handle)
        self.runtime.copy(self.block.handle, _constant(value).block.handle, self.nbytes, stream.handle)

    def delay(self, stream):
        _streams.add(stream.handle)
        one, other = _long()
        for _ in range(TIMES):
            self.runtime.copy(one.handle, other.handle, LONG, stream.handle)

    def copied(self, stream):
        self.runtime.copy(self.host.handle, self.block.handle, self.nbytes, stream.handle)
        with self.runtime.event() as done:
            done.record(stream.handle)
            while not done.done():
                time.sleep(1e-4)
        return self._landed().copy()
