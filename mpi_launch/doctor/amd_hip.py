"""One AMD device of one process, by the engine's own operations.

Addresses are numbers here: a process asks one question and ends, and nothing is given back.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from ...device.kernels import image
from ...device.kernels.sources import source
from ...device.registry import report, runtime_of
from ...errors import DeviceError
from ...native.libraries import ffi, lib

#: Seconds for what takes microseconds where nothing is in its way; how many times longer all waits may take, where the
#: processor is busy with other things.
PATIENCE = 2.0
ROOM = float(os.environ.get("PROBE_ROOM", 1))


class Word:
    """Four bytes that the host and the device see, each at its own address; they only grow."""

    def __init__(self, host: int, device: int) -> None:
        self.device = device
        self._at = ctypes.c_uint32.from_address(host)

    @property
    def value(self) -> int:
        return self._at.value

    @value.setter
    def value(self, number: int) -> None:
        self._at.value = number

    def reaches(self, least: int, seconds: float = PATIENCE) -> bool:
        """True if the host sees it reach ``least`` in time."""
        return until(lambda: self.value >= least, seconds)


def until(done: Callable[[], bool], seconds: float) -> bool:
    """Look until it is so, or the time is over."""
    end = time.monotonic() + seconds * ROOM
    while not done():
        if time.monotonic() > end:
            return False
    return True


class Hip:
    """The runtime that ucc_hetero would use, and a device of it."""

    def __init__(self, device: int = 0) -> None:
        runtime = runtime_of("amd")
        if runtime is None:
            raise DeviceError(report("amd"))
        self.runtime, self.device = runtime, device
        self._kernels: dict[int, int] = {}
        #: Images of kernels, which HIP does not copy.
        self._images: list[Any] = []
        runtime.use(device)

    def _made(self, operation: str, *arguments: Any) -> int:
        """The address that an operation of the engine's (cffi_build/gpu/ops.h) gives last."""
        out = ffi.new("void **")
        self.runtime.check(operation, getattr(self.runtime.ops, operation)(*arguments, out))
        return int(ffi.cast("uintptr_t", out[0]))

    def alloc(self, nbytes: int) -> int:
        return self.runtime.alloc(nbytes).handle

    def pinned(self, nbytes: int) -> int:
        return self.runtime.alloc(nbytes, pinned=True).handle

    def register(self, address: int, nbytes: int) -> None:
        self.runtime.check("host_register", self.runtime.ops.host_register(_pointer(address), nbytes))

    def word(self) -> Word:
        """A word in pinned memory: what kernels wait for."""
        host = self.pinned(4096)
        ctypes.memset(host, 0, 4096)
        return Word(host, self._made("mapped", _pointer(host)))

    def signal(self) -> Word:
        """A word of signal memory: what streams wait for."""
        at = self.runtime.flag()
        return Word(at, at)

    def stream(self) -> int:
        return self.runtime.stream().handle

    def finishes(self, stream: int, seconds: float = PATIENCE) -> bool:
        """True if the stream does all it was given in time."""
        event = self.runtime.event()
        event.record(stream)
        return until(event.done, seconds)

    def ends(self, stream: int, what: str) -> None:
        """Wait until the stream has done all it was given. ``DeviceError`` names ``what`` that does not end."""
        if not self.finishes(stream, 20):
            raise DeviceError(f"{what} does not end")

    # --- kernels ------------------------------------------------------------------------------------------------------

    def compiled(self, kind: int, op: int = 0, dtype: int = 0, to: int = 0) -> bytes:
        """Machine code of one of the engine's kernels."""
        return image("amd", source(kind, op, dtype, to) or "", self.device)

    def load(self, code: bytes) -> int:
        """The kernel of a compiled text."""
        self._images.append(ffi.new("char[]", code))
        return self._made("kernel", self._images[-1])

    def kernel(self, kind: int) -> int:
        if kind not in self._kernels:
            self._kernels[kind] = self.load(self.compiled(kind))
        return self._kernels[kind]

    def launch(
        self, kernel: int, stream: int, src: int, dst: int, number: int, blocks: int = 1, threads: int = 1
    ) -> None:
        """Launch a kernel that takes two addresses, a number, and a factor, which is 0."""
        values = ffi.new("uint64_t[4]", [src, dst, number, 0])
        each = ffi.new("void *[4]", [values + i for i in range(4)])
        status = self.runtime.ops.launch(_pointer(kernel), blocks, threads, each, _pointer(stream))
        self.runtime.check("launch", status)

    def awaits(self, stream: int, address: int, value: int) -> None:
        """A kernel that waits for a word."""
        self.launch(self.kernel(lib.UCCH_AWAIT), stream, 0, address, value)

    def posts(self, stream: int, address: int, value: int) -> None:
        """The same one, which writes it."""
        self.launch(self.kernel(lib.UCCH_AWAIT), stream, address, 0, value << 32)


def _pointer(address: int) -> Any:
    return ffi.cast("void *", address)
