"""Arrays in the fake GPU's memory, for the ranks' scripts. It is host memory, so that tests can read it.

``FAKEGPU_LAYOUT``, such as ``nvidia:2,amd:2``, gives each rank the fake library of its vendor (``FAKEGPU_NVIDIA``,
``FAKEGPU_AMD``) and hides the others: import this module before a Communicator is created. Arrays of ``host``
ranks are numpy's.
"""

import ctypes
import os
import time
import weakref

import numpy as np
from parts import Gate as Gate
from parts import ndarray as ndarray

from ucc_hetero import device
from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.native.libraries import lib
from ucc_hetero.planner.topology import emulated_vendors


def _choose():
    layout = os.environ["FAKEGPU_LAYOUT"]
    ranks = sum(int(part.partition(":")[2]) for part in layout.split(","))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
    mine = emulated_vendors(layout, ranks)[rank]
    for row in VENDORS.values():
        if row.setting:
            library = os.environ[f"FAKEGPU_{row.name.upper()}"] if row.name == mine else "none"
            os.environ[f"UCCH_{row.setting}"] = library
            if row.name == mine:  # and not the compiler of a torch for GPUs
                os.environ.setdefault("UCCH_RTC_LIB", library)


_choose()


def runtime():
    (found,) = device.available()
    return found


_dropped = []


def begin_case():
    """Read settings of devices again, as each case of a crew has its own; free the memory of earlier cases."""
    for each in device.available():
        library = ctypes.CDLL(each.path)
        while _dropped:
            library.fakegpu_forget(ctypes.c_void_p(_dropped.pop()))
        library.fakegpu_settings()
        lib.ucch_device_bind(each.code, device.place_of().device, each.queues)


def kernel(name, stream, memory, n, value):
    args = ctypes.c_void_p(stream), ctypes.c_void_p(memory), ctypes.c_size_t(n), ctypes.c_float(value)
    assert getattr(ctypes.CDLL(runtime().path), f"fakegpu_{name}")(*args) == 0


class Array:
    """``n`` elements on the current device, with the protocol of both vendors' libraries."""

    def __init__(self, n, dtype=np.float32):
        self.dtype, self.size = np.dtype(dtype), n
        self.runtime = runtime()
        self.block = self.runtime.alloc(max(1, n * self.dtype.itemsize))
        weakref.finalize(self, _dropped.append, self.block.handle).atexit = False
        memory = (ctypes.c_char * self.block.nbytes).from_address(self.block.handle)
        #: The memory itself, which a real GPU would not expose.
        self.peek = np.frombuffer(memory, self.dtype, n)

    @property
    def __cuda_array_interface__(self):
        data = self.block.handle, False
        return {"shape": (self.size,), "typestr": self.dtype.str, "data": data, "version": 3, "strides": None}

    def set(self, values):
        self.peek[:] = values
        return self

    def fill(self, stream, value):
        """A slow kernel that runs in stream order. float32 only."""
        kernel("fill", stream.handle, self.block.handle, self.size, value)

    def scale(self, stream, value):
        """Multiply by ``value`` on the stream."""
        kernel("scale", stream.handle, self.block.handle, self.size, value)

    def copied(self, stream):
        host = self._landing()
        self.runtime.copy(host.handle, self.block.handle, self.block.nbytes, stream.handle)
        done = self.runtime.event()
        done.record(stream.handle)
        while not done.done():  # a hanging job is killed
            time.sleep(1e-4)
        memory = (ctypes.c_char * self.block.nbytes).from_address(host.handle)
        found = np.frombuffer(memory, self.dtype, self.size).copy()
        _idle.append(host)
        return found

    def _landing(self):
        """Reusable pinned memory: HIP frees none while a stream waits."""
        room = self.block.nbytes
        fit = next((block for block in _idle if block.nbytes >= room), None)
        if fit is None:
            return self.runtime.alloc(room, pinned=True)
        _idle.remove(fit)
        return fit


_idle = []


class Graph:
    """Work given to a stream within ``with Graph(stream) as graph:``, to be replayed."""

    def __init__(self, stream):
        self.library, self.stream = ctypes.CDLL(runtime().path), ctypes.c_void_p(stream.handle)
        self.cuda = runtime().vendor == "nvidia"
        self.made, self.exec = ctypes.c_void_p(), ctypes.c_void_p()

    def _call(self, name, *args):
        status = getattr(self.library, ("cu" if self.cuda else "hip") + name)(*args)
        assert status == 0, f"{name}: {status}"

    def __enter__(self):
        self._call("StreamBeginCapture_v2" if self.cuda else "StreamBeginCapture", self.stream, 0)
        return self

    def __exit__(self, kind, *_):
        try:
            self._call("StreamEndCapture", self.stream, ctypes.byref(self.made))
        except AssertionError:
            if kind is None:
                raise
            return
        where = ctypes.byref(self.exec), self.made
        if self.cuda:
            self._call("GraphInstantiateWithFlags", *where, ctypes.c_ulonglong(0))
        else:
            self._call("GraphInstantiate", *where, None, None, ctypes.c_size_t(0))

    def replay(self, stream):
        self._call("GraphLaunch", self.exec, ctypes.c_void_p(stream.handle))

    def close(self):
        self._call("GraphExecDestroy", self.exec)
        self._call("GraphDestroy", self.made)


class HostArray(np.ndarray):
    """The same for a rank without a device."""

    def __new__(cls, n, dtype=np.float32):
        """``n`` elements of separate memory."""
        return np.zeros(n, dtype).view(cls)

    @property
    def peek(self):
        return np.asarray(self)

    def set(self, values):
        self[:] = values
        return self


if not device.available():
    Array = HostArray
