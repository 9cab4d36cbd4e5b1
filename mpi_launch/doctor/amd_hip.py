"""One AMD device, used by one process through the engine's own operations.

Addresses are plain numbers, and nothing is freed: a process answers one question and exits.
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

#: Timeout in seconds for operations that take microseconds; factor for all timeouts, for hosts with busy cores.
PATIENCE = 2.0
ROOM = float(os.environ.get("PROBE_ROOM", 1))


class Word(ctypes.c_uint32):
    """A 32-bit word that host and device see, the device at its address ``device``. It only grows."""

    device: int

    def reaches(self, least: int, seconds: float = PATIENCE) -> bool:
        """True if the host sees a value of at least ``least`` in time."""
        return until(lambda: self.value >= least, seconds)


def until(done: Callable[[], bool], seconds: float) -> bool:
    """Poll ``done`` until it is true or the time is over. Returns its last value."""
    end = time.monotonic() + seconds * ROOM
    while not done():
        if time.monotonic() > end:
            return False
    return True


class Hip:
    """The HIP runtime that ucc_hetero would use, and one of its devices."""

    def __init__(self, device: int = 0) -> None:
        runtime = runtime_of("amd")
        if runtime is None:
            raise DeviceError(report("amd"))
        self.runtime, self.device = runtime, device
        self._kernels: dict[int, int] = {}
        #: Images of kernels, kept alive because HIP does not copy them.
        self._images: list[Any] = []
        runtime.use(device)

    def _made(self, operation: str, *arguments: Any) -> int:
        """Call an engine operation (cffi_build/gpu/ops.h) whose last argument is an output address; return the
        output."""
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
        """Allocate a word in pinned memory, for kernels that wait."""
        host = self.pinned(4096)
        ctypes.memset(host, 0, 4096)
        return self._word(host, self._made("mapped", _pointer(host)))

    def signal(self) -> Word:
        """Allocate a word of signal memory, for streams that wait."""
        at = self.runtime.flag()
        return self._word(at, at)

    def _word(self, host: int, device: int) -> Word:
        word = Word.from_address(host)
        word.device = device
        return word

    def stream(self) -> int:
        return self.runtime.stream().handle

    def finishes(self, stream: int, seconds: float = PATIENCE) -> bool:
        """True if the stream completes its work in time."""
        event = self.runtime.event()
        event.record(stream)
        return until(event.done, seconds)

    def ends(self, stream: int, what: str) -> None:
        """Wait until the stream has completed its work. Otherwise ``DeviceError`` with ``what``."""
        if not self.finishes(stream, 20):
            raise DeviceError(f"{what} does not end")

    # --- kernels ------------------------------------------------------------------------------------------------------

    def compiled(self, kind: int, op: int = 0, dtype: int = 0, to: int = 0) -> bytes:
        """Machine code of one of the engine's kernels."""
        return image("amd", source(kind, op, dtype, to) or "", self.device)

    def load(self, code: bytes) -> int:
        """Load a kernel from machine code."""
        self._images.append(ffi.new("char[]", code))
        return self._made("kernel", self._images[-1])

    def kernel(self, kind: int) -> int:
        if kind not in self._kernels:
            self._kernels[kind] = self.load(self.compiled(kind))
        return self._kernels[kind]

    def launch(
        self, kernel: int, stream: int, src: int, dst: int, number: int, blocks: int = 1, threads: int = 1
    ) -> None:
        """Launch a kernel with two addresses, a number, and a factor of 0 as arguments."""
        values = ffi.new("uint64_t[4]", [src, dst, number, 0])
        each = ffi.new("void *[4]", [values + i for i in range(4)])
        status = self.runtime.ops.launch(_pointer(kernel), blocks, threads, each, _pointer(stream))
        self.runtime.check("launch", status)

    def awaits(self, stream: int, address: int, value: int) -> None:
        """Launch a kernel that waits for a word."""
        self.launch(self.kernel(lib.UCCH_AWAIT), stream, 0, address, value)

    def posts(self, stream: int, address: int, value: int) -> None:
        """Launch the same kernel so that it writes the word."""
        self.launch(self.kernel(lib.UCCH_AWAIT), stream, address, 0, value << 32)


def _pointer(address: int) -> Any:
    return ffi.cast("void *", address)
