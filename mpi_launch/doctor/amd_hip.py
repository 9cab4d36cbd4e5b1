"""One AMD device of one process: the library's runtime, and entry points of HIP that only the engine calls.

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

MAPPED, FINE_GRAINED, SHARE_BYTES = 3, 1, 64
#: Seconds for what takes microseconds where nothing is in its way; how many times longer all waits may take, where the
#: processor is busy with other things.
PATIENCE = 2.0
ROOM = float(os.environ.get("PROBE_ROOM", 1))


class Share(ctypes.Structure):
    """A handle of device memory, by value."""

    _fields_ = [("bytes", ctypes.c_char * SHARE_BYTES)]


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
        self.lib = ctypes.CDLL(runtime.path)
        self._kernels: dict[int, ctypes.c_void_p] = {}
        runtime.use(device)

    def call(self, name: str, *arguments: Any) -> None:
        """Call an entry point of HIP's, or raise what it says."""
        if status := getattr(self.lib, name)(*arguments):
            raise DeviceError(f"{name} says {status}")

    def _made(self, name: str, *arguments: Any) -> int:
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def alloc(self, nbytes: int) -> int:
        return self.runtime.alloc(nbytes).handle

    def pinned(self, nbytes: int) -> int:
        return self.runtime.alloc(nbytes, pinned=True).handle

    def fine(self, nbytes: int) -> int:
        return self._made("hipExtMallocWithFlags", ctypes.c_size_t(nbytes), FINE_GRAINED)

    def register(self, address: int, nbytes: int) -> None:
        self.call("hipHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MAPPED)

    def word(self) -> Word:
        """A word in pinned memory: what kernels wait for."""
        host = self.pinned(4096)
        ctypes.memset(host, 0, 4096)
        return Word(host, self._made("hipHostGetDevicePointer", ctypes.c_void_p(host), 0))

    def signal(self) -> Word:
        """A word of signal memory: what streams wait for."""
        at = self.runtime.flag()
        return Word(at, at)

    def share(self, address: int) -> bytes:
        handle = Share()
        self.call("hipIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open_shared(self, handle: bytes) -> int:
        enable_peers = int(self.runtime.version().partition(".")[0]) >= 6
        return self._made("hipIpcOpenMemHandle", Share.from_buffer_copy(handle), ctypes.c_uint(enable_peers))

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

    def load(self, code: bytes) -> ctypes.c_void_p:
        """The kernel of a compiled text; HIP does not copy ``code``, which stays."""
        kept = ctypes.create_string_buffer(code, len(code) + 1)
        _kept.append(kept)
        module = ctypes.c_void_p(self._made("hipModuleLoadData", kept))
        return ctypes.c_void_p(self._made("hipModuleGetFunction", module, b"ucch"))

    def compiled(self, kind: int, op: int = 0, dtype: int = 0, to: int = 0) -> bytes:
        """Machine code of one of the engine's kernels."""
        return image("amd", source(kind, op, dtype, to) or "", self.device)

    def kernel(self, kind: int) -> ctypes.c_void_p:
        if kind not in self._kernels:
            self._kernels[kind] = self.load(self.compiled(kind))
        return self._kernels[kind]

    def launch(self, kernel: ctypes.c_void_p, stream: int, *arguments: Any, blocks: int = 1, threads: int = 1) -> None:
        held = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        self.call("hipModuleLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), held, None)

    def on_word(self, kind: int, stream: int, address: int, value: int) -> None:
        """A kernel that waits for a word, or writes it."""
        where = (ctypes.c_void_p(None), ctypes.c_void_p(address), ctypes.c_ulonglong(value), ctypes.c_double(0))
        self.launch(self.kernel(kind), stream, *where)


#: Images of kernels that are loaded.
_kept: list[Any] = []
