"""One GPU runtime as the rest of the package sees it. Device numbers are the runtime's own, from 0."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import env
from ..errors import DeviceError, NotSupported
from ..machine import vendors
from ..machine.vendors import STREAMS, VENDORS
from ..native.libraries import ffi, lib

#: Kinds of memory behind an address: not known to the runtime, pinned host memory, device memory, managed memory.
KINDS = {
    lib.UCCH_MEMORY_UNKNOWN: "unknown",
    lib.UCCH_MEMORY_PINNED: "pinned",
    lib.UCCH_MEMORY_DEVICE: "device",
    lib.UCCH_MEMORY_MANAGED: "managed",
}


class Pointer(NamedTuple):
    """A runtime's answer about an address: ``unknown``, ``pinned``, ``device`` or ``managed``, and whose device."""

    kind: str
    device: int


class DeviceRuntime:
    """A loaded runtime library. Calls that fail raise :class:`~ucc_hetero.errors.DeviceError` with its reason.

    ``code`` is the native engine's number of the runtime, ``path`` the file it came from.
    """

    def __init__(self, vendor: str, code: int, path: str) -> None:
        self.vendor, self.code, self.path = vendor, code, path
        #: Its functions (cffi_build/gpu/ops.h); each returns 0, or a code for :meth:`check`.
        self.ops = lib.ucch_device_ops(code)

    def __repr__(self) -> str:
        return f"<DeviceRuntime of {self.vendor} from {self.path}>"

    def check(self, call: str, code: int) -> None:
        """Raise what the library says of a code that is not 0."""
        if code:
            lib.ucch_device_check(self.code, code, call.encode())
            raise self.failure()

    def failure(self, call: str = "") -> DeviceError:
        """The error for the reason that the engine has last noted in this thread."""
        reason = ffi.string(lib.ucch_device_error()).decode(errors="replace")
        return DeviceError(f"{self.vendor} runtime ({self.path}): {call}{reason}")

    def _int(self, call: str, function: Any) -> int:
        out = ffi.new("int *")
        self.check(call, function(out))
        return int(out[0])

    def _handle(self, call: str, function: Any, *args: Any) -> int:
        out = ffi.new("void **")
        self.check(call, function(out, *args))
        return int(ffi.cast("uintptr_t", out[0]))

    # --- devices ------------------------------------------------------------------------------------------------------

    @cached_property
    def traits(self) -> int:
        """The runtime's traits, bit by bit (``UCCH_EAGER`` and those beside it, cffi_build/api/constants.h)."""
        return self._int("traits", self.ops.traits)

    @property
    def eager(self) -> bool:
        """True if no kernel is loaded at its first launch, which waits for the device."""
        return bool(self.traits & lib.UCCH_EAGER)

    @property
    def holds(self) -> bool:
        """True if streams may wait for work that has not begun: nothing that this work needs may be behind them in a
        queue.

        HIP's streams share a few queues (four, or GPU_MAX_HW_QUEUES), in which each holds up those behind it. A stream
        may wait there for what has been queued before; for more only if the user says that there are enough.
        """
        wanted = str(env.get("HOLD"))
        return self.eager and (wanted == "y" or (wanted == "auto" and bool(self.traits & lib.UCCH_OWN_QUEUES)))

    def target(self, device: int) -> str:
        """Target of kernels for a device; empty where neither the runtime nor the kernel's files say.

        Nor is it said where the runtime was told to take the device for another one.
        """
        text = ffi.new("char[]", 64)
        self.check(f"target of device {device}", self.ops.target(device, text, 64))
        compiler = vendors.VENDORS[self.vendor].compiler
        if text[0] != b"\0" or compiler is None or any(name.startswith(compiler.override) for name in os.environ):
            return str(ffi.string(text).decode())
        bus = self.bus(device).partition(".")[0]  # of any partition
        return next((found.arch for found in vendors.devices() if found.pci.partition(".")[0] == bus), "")

    def version(self) -> str:
        number = self._int("version", self.ops.version)
        return f"{number // 1000}.{number % 1000 // 10}"

    def count(self) -> int:
        return self._int("count", self.ops.count)

    def current(self) -> int | None:
        """The calling thread's device; None where it has not chosen one, which cannot always be told from the first."""
        device = self._int("current device", self.ops.current)
        return None if device < 0 else device

    def use(self, device: int) -> None:
        self._known(device)
        self.check(f"device {device}", self.ops.use(device))

    def _known(self, device: int) -> None:
        count = self.count()
        if not 0 <= device < count:
            raise DeviceError(f"device {device} does not exist: the {self.vendor} runtime sees {count} device(s)")

    def bus(self, device: int) -> str:
        """PCI address, as sysfs spells it: ``0000:3b:00.0``."""
        self._known(device)
        text = ffi.new("char[32]")
        self.check(f"PCI address of device {device}", self.ops.bus(device, text, 32))
        return str(ffi.string(text).decode()).lower()

    # --- memory -------------------------------------------------------------------------------------------------------

    def pointer(self, address: int) -> Pointer:
        found = lib.ucch_device_pointer(self.code, address)
        if found < 0:
            raise self.failure(f"address {address:#x}: ")
        return Pointer(KINDS[found & 3], found >> 2)

    @cached_property
    def memory_type(self) -> int:
        """The memory type under which UCC and UCX know the device memory (``ucc_memory_type_t``)."""
        return int(lib.ucch_device_memory_type(self.code))

    def room(self) -> int:
        out = ffi.new("size_t *")
        self.check("free memory", self.ops.room(out))
        return int(out[0])

    def alloc(self, nbytes: int, *, pinned: bool = False) -> Block:
        """Memory of the current device, or pinned host memory; freed by ``close``, never behind your back."""
        what = f"{nbytes} bytes of {'pinned' if pinned else 'device'} memory"
        return Block(self, self._handle(what, self.ops.pinned if pinned else self.ops.alloc, nbytes), nbytes, pinned)

    def flag(self) -> int:
        """Address of a word, 0, that the host and streams see and that is kept: HIP's streams wait for no other."""
        return self._handle("flag", self.ops.flag)

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy in ``stream``, between any two kinds of memory; done when the stream gets there."""
        to, of, at = (ffi.cast("void *", a) for a in (dst, src, stream))
        self.check("copy", self.ops.copy(to, of, nbytes, at))

    # --- streams and events -------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """A stream of the current device, not ordered with its default stream."""
        return Stream(self, self._handle("stream", self.ops.stream_new))

    def event(self) -> Event:
        return Event(self, self._handle("event", self.ops.event_new))

    def wait_event(self, stream: int, event: Event) -> None:
        """Let what follows in ``stream`` wait for what came before the event."""
        at, what = ffi.cast("void *", stream), ffi.cast("void *", event.handle)
        self.check("wait for an event", self.ops.stream_wait(at, what))

    def wait_value(self, stream: int, word: int, least: int) -> None:
        """Let what follows in ``stream`` wait until the 4 bytes at ``word`` have reached ``least``."""
        at, what = ffi.cast("void *", stream), ffi.cast("void *", word)
        self.check("wait for a value", self.ops.stream_hold(at, what, least))

    def write_value(self, stream: int, word: int, value: int) -> None:
        """Write 4 bytes when ``stream`` gets there."""
        at, what = ffi.cast("void *", stream), ffi.cast("void *", word)
        self.check("write a value", self.ops.stream_write(at, what, value))


class _Handle(ABC):
    def __init__(self, runtime: DeviceRuntime, handle: int) -> None:
        self.runtime, self.handle = runtime, handle

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Release it; a second call does nothing."""
        handle, self.handle = self.handle, 0
        if handle:
            self._release(ffi.cast("void *", handle))

    @abstractmethod
    def _release(self, handle: Any) -> None:
        """Give it back to the runtime."""


class Stream(_Handle):
    """Work in order, asynchronous to the host. ``handle`` is the runtime's."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has done everything."""
        handle = ffi.cast("void *", self.handle)
        self.runtime.check("synchronize", self.runtime.ops.stream_sync(handle))

    def _release(self, handle: Any) -> None:
        self.runtime.check("stream", self.runtime.ops.stream_free(handle))


class Event(_Handle):
    """A point in a stream."""

    def record(self, stream: int) -> None:
        """Mark the point that ``stream`` has reached when all work given to it so far is done."""
        event, at = ffi.cast("void *", self.handle), ffi.cast("void *", stream)
        self.runtime.check("record", self.runtime.ops.event_record(event, at))

    def done(self) -> bool:
        """True when the stream has passed the point."""
        return bool(self.runtime._int("event", partial(self.runtime.ops.event_done, ffi.cast("void *", self.handle))))

    def _release(self, handle: Any) -> None:
        self.runtime.check("event", self.runtime.ops.event_free(handle))


class Block(_Handle):
    """Allocated memory. ``handle`` is its address."""

    def __init__(self, runtime: DeviceRuntime, address: int, nbytes: int, pinned: bool) -> None:
        super().__init__(runtime, address)
        self.nbytes, self.pinned = nbytes, pinned

    def _release(self, handle: Any) -> None:
        ops = self.runtime.ops
        self.runtime.check("free", (ops.unpin if self.pinned else ops.release)(handle))


# --- streams of PyTorch, CuPy and others, turned into the runtime's handle --------------------------------------------


#: CuPy's; numba's and cuda.core's.
_ATTRIBUTES = ("ptr", "handle")


def stream_handle(stream: Any) -> int:
    """The handle of a stream: an integer (0 is the default stream), or an object that has or gives one.

    Takes torch's and CuPy's streams, ours, and everything with an attribute that a vendor's row has for them
    (``__cuda_stream__``: a pair of version and handle). ``TypeError`` for anything else.
    """
    if isinstance(stream, int):
        return stream
    for name in STREAMS:
        found = getattr(stream, name, None)
        if type(found) is int:
            return found
        if found is not None and name.startswith("__"):
            return int((found() if callable(found) else found)[1])
    for name in (*STREAMS, *_ATTRIBUTES):
        value = getattr(stream, name, None)
        if value is not None and not callable(value):
            return int(getattr(value, "value", value) or 0)
    raise TypeError(f"stream {stream!r} is neither a stream of torch, CuPy or numba nor an integer handle")


def uncaptured(stream: Any, what: str) -> int:
    """The handle of a stream for something that hosts take part in: ``NotSupported`` while it is being captured."""
    handle = stream_handle(stream)
    if lib.ucch_stream_captures(handle):
        raise NotSupported(f"{what} cannot be captured in a graph, as hosts take part in it; do it outside of graphs")
    return handle


# --- numbers of our own in the memory that a rank's buffers live in, for measurements and checks ----------------------


Array = npt.NDArray[Any]


class Vector:
    """``values`` in the memory of ``runtime``'s device, or for None in the host's."""

    def __init__(self, values: Array, runtime: DeviceRuntime | None) -> None:
        self.runtime = runtime
        self.host = np.ascontiguousarray(values)
        self.block = runtime.alloc(max(self.host.nbytes, 1)) if runtime else None
        if self.runtime and self.block:
            self._copy(self.runtime, self.block.handle, self.host.ctypes.data)
            interface = {
                "shape": self.host.shape,
                "typestr": self.host.dtype.str,
                "data": (self.block.handle, False),
                "version": 2,
            }
            for name in VENDORS[runtime.vendor].interfaces if runtime else ():
                setattr(self, name, interface)

    @property
    def buffer(self) -> Any:
        """The buffer to pass to a communicator."""
        return self if self.block else self.host

    def get(self) -> Array:
        if self.runtime and self.block:
            self._copy(self.runtime, self.host.ctypes.data, self.block.handle)
        return self.host

    def _copy(self, runtime: DeviceRuntime, dst: int, src: int) -> None:
        with runtime.stream() as stream:  # calls without a stream do not wait for the device's other work
            runtime.copy(dst, src, self.host.nbytes, stream.handle)
            stream.synchronize()

    def close(self) -> None:
        if self.block:
            self.block.close()
