"""Bounce buffers for device memory that no library may move itself: copied to pinned host memory, sent, and copied
back.

libucp 1.22 opens a peer's allocation once per UCX context, and two contexts of a process (a native team's, and that of
messages) must not open the same one by CUDA IPC: it aborts with "Element already exists" (seen on H200s).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..buffers import Buffer
from ..device import DeviceRuntime, Event, own_device
from ..errors import DeviceError
from ..native.libraries import ffi, lib


class _Pinned:
    """Pinned memory from the pool, returned when the last reference is dropped."""

    def __init__(self, nbytes: int) -> None:
        with own_device():
            self._memory: Any = lib.ucch_pool_take(1, max(nbytes, 1), ffi.NULL, 1)
        if self._memory == ffi.NULL:
            raise DeviceError(f"no pinned memory for a message of {nbytes} bytes")
        self.address = int(ffi.cast("uintptr_t", self._memory))

    def __del__(self) -> None:
        memory: Any = getattr(self, "_memory", ffi.NULL)
        if memory != ffi.NULL:
            lib.ucch_pool_give(memory)


class Bounce:
    """Copies between a device's memory and pinned memory, in a stream of its own; the host waits for them."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        with own_device():
            self._stream = runtime.stream()

    def memory_for(self, original: Buffer, *, pinned: bool = True) -> Buffer:
        """Host memory of the size of ``original``. Not ``pinned``: takes no memory before it is written."""
        if pinned:
            memory: Any = _Pinned(original.nbytes)
            address = memory.address
        else:
            memory = np.empty(original.nbytes, np.uint8)
            address = memory.ctypes.data
        return Buffer(address, original.count, original.dtype, "host", 0, memory, False)

    def down(self, original: Buffer, pinned: Buffer, stream: int | None = None) -> None:
        """Copy device data to pinned memory. It must be ready, or ready when ``stream``, which then does the copy,
        reaches this point."""
        self._copy(pinned.ptr, original.ptr, original.nbytes, stream)

    def up(self, pinned: Buffer, original: Buffer, nbytes: int, stream: int | None = None) -> None:
        """Copy received data to the device, or let ``stream`` do so."""
        self._copy(original.ptr, pinned.ptr, nbytes, stream)

    def mark(self, stream: int) -> Event:
        """An event behind all current work of ``stream``."""
        with own_device():
            event = self._runtime.event()
            event.record(stream)
        return event

    def wait(self, event: Event) -> None:
        with own_device():
            self._runtime.wait_event(self._stream.handle, event)
            self._stream.synchronize()
            event.close()

    def _copy(self, dst: int, src: int, nbytes: int, stream: int | None) -> None:
        if nbytes:
            to, of, at = (ffi.cast("void *", a) for a in (dst, src, self._stream.handle if stream is None else stream))
            if lib.ucch_device_move(to, of, nbytes, at, stream is None):
                raise self._runtime.failure()
