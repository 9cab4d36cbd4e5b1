"""HIP by its own entry points, as far as the questions about AMD devices need it: one device, one process."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from ...device.kernels import image
from ...device.kernels.sources import source
from ...device.registry import report, runtime_of

__all__ = ["Hip", "HipError", "Word"]

MAPPED, FINE_GRAINED, SIGNAL = 3, 1, 2
COPY, NON_BLOCKING, FIRST, NO_TIMING, NOT_READY, GREATER_EQUAL = 4, 1, -1, 2, 600, 0
SHARE_BYTES = 64
#: Seconds for what takes microseconds where nothing is in its way; how many times longer all waits may take, where the
#: processor is busy with other things.
PATIENCE = 2.0
ROOM = float(os.environ.get("PROBE_ROOM", 1))


class HipError(RuntimeError):
    """A call that HIP refused."""


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
        """Whether the host sees it reach ``least`` in time."""
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
            raise HipError(report("amd"))
        self.runtime, self.device = runtime, device
        self.lib = ctypes.CDLL(runtime.path)
        self.major = int(runtime.version().partition(".")[0])
        self._kernels: dict[int, ctypes.c_void_p] = {}
        self.use(device)

    def status(self, name: str, *arguments: Any) -> int:
        """Call and return the status."""
        return int(getattr(self.lib, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call, or raise what HIP calls the failure."""
        status = self.status(name, *arguments)
        if status:
            named = getattr(self.lib, "hipGetErrorName", None)
            if named is not None:
                named.restype = ctypes.c_char_p
            words = named(status).decode() if named is not None else ""
            raise HipError(f"{name} says {status} {words}".strip())

    def _made(self, name: str, *arguments: Any) -> int:
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def use(self, device: int) -> None:
        self.call("hipSetDevice", device)

    def alloc(self, nbytes: int) -> int:
        return self._made("hipMalloc", ctypes.c_size_t(nbytes))

    def fine(self, nbytes: int) -> int:
        return self._made("hipExtMallocWithFlags", ctypes.c_size_t(nbytes), FINE_GRAINED)

    def pinned(self, nbytes: int) -> int:
        return self._made("hipHostMalloc", ctypes.c_size_t(nbytes), MAPPED)

    def register(self, address: int, nbytes: int) -> None:
        self.call("hipHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MAPPED)

    def seen(self, address: int) -> int:
        """Where the device sees pinned memory of the host."""
        return self._made("hipHostGetDevicePointer", ctypes.c_void_p(address), 0)

    def word(self) -> Word:
        """A word in pinned memory: what kernels wait for."""
        host = self.pinned(4096)
        ctypes.memset(host, 0, 4096)
        return Word(host, self.seen(host))

    def signal(self) -> Word:
        """A word of signal memory: what streams wait for."""
        at = self._made("hipExtMallocWithFlags", ctypes.c_size_t(8), SIGNAL)
        ctypes.memset(at, 0, 8)
        return Word(at, at)

    def share(self, address: int) -> bytes:
        handle = Share()
        self.call("hipIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return ctypes.string_at(ctypes.byref(handle), SHARE_BYTES)

    def open_shared(self, handle: bytes) -> int:
        share = Share.from_buffer_copy(handle)
        return self._made("hipIpcOpenMemHandle", share, ctypes.c_uint(1 if self.major >= 6 else 0))

    def stream(self) -> int:
        return self._made("hipStreamCreateWithPriority", NON_BLOCKING, FIRST)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        to, of, at = (ctypes.c_void_p(each) for each in (dst, src, stream))
        self.call("hipMemcpyAsync", to, of, ctypes.c_size_t(nbytes), COPY, at)

    def wait_value(self, stream: int, word: Word, least: int) -> None:
        at, where = ctypes.c_void_p(stream), ctypes.c_void_p(word.device)
        every = ctypes.c_uint32(0xFFFFFFFF)
        self.call("hipStreamWaitValue32", at, where, ctypes.c_uint32(least), ctypes.c_uint(GREATER_EQUAL), every)

    def write_value(self, stream: int, word: Word, value: int) -> None:
        at, where = ctypes.c_void_p(stream), ctypes.c_void_p(word.device)
        self.call("hipStreamWriteValue32", at, where, ctypes.c_uint32(value), ctypes.c_uint(0))

    def event(self, stream: int) -> ctypes.c_void_p:
        """An event where the stream is now."""
        event = ctypes.c_void_p(self._made("hipEventCreateWithFlags", NO_TIMING))
        self.call("hipEventRecord", event, ctypes.c_void_p(stream))
        return event

    def passed(self, event: ctypes.c_void_p) -> bool:
        status = self.status("hipEventQuery", event)
        if status not in (0, NOT_READY):
            raise HipError(f"hipEventQuery says {status}")
        return status == 0

    def finishes(self, stream: int, seconds: float = PATIENCE) -> bool:
        """Whether the stream does all it was given in time."""
        event = self.event(stream)
        return until(lambda: self.passed(event), seconds)

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
