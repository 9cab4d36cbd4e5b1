"""Device memory that no library must move itself: copied to pinned host memory, sent from there, and back.

libucp 1.22 opens a peer's allocation once per UCX context, and two contexts of one process (a native team's, and that
of messages) must not open the same one over CUDA IPC: it aborts with "Element already exists" (seen on H200s).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..buffers import Buffer
from ..device import DeviceRuntime, Event, own_device
from ..errors import DeviceError
from ..native.libraries import ffi, lib


class _Pinned:
    """Borrowed pinned memory, given back when the last reference is dropped."""

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
    """Copies between one device's memory and pinned memory, in a stream of its own that the host waits for."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        with own_device():
            self._stream = runtime.stream()

    def memory_for(self, original: Buffer, *, pinned: bool = True) -> Buffer:
        """Host memory for as much as ``original`` holds; it takes no room before it is written to if not ``pinned``."""
        if pinned:
            memory: Any = _Pinned(original.nbytes)
            address = memory.address
        else:
            memory = np.empty(original.nbytes, np.uint8)
            address = memory.ctypes.data
        return Buffer(address, original.count, original.dtype, "host", 0, memory, False)

    def down(self, original: Buffer, pinned: Buffer, stream: int | None = None) -> None:
        """Fetch what is to be sent; it must be ready, or be so when ``stream`` gets there, which then does the copy."""
        self._copy(pinned.ptr, original.ptr, original.nbytes, stream)

    def up(self, pinned: Buffer, original: Buffer, nbytes: int, stream: int | None = None) -> None:
        """Bring what was received to where it belongs, or let ``stream`` do so."""
        self._copy(original.ptr, pinned.ptr, nbytes, stream)

    def mark(self, stream: int) -> Event:
        """The point that ``stream`` has reached when it has done all that it was given."""
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
            self._runtime.check("copy", lib.ucch_device_move(to, of, nbytes, at, stream is None))
