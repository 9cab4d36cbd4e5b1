"""One GPU runtime, as the rest of the package uses it. Device numbers are the runtime's, from 0."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import env
from ..errors import DeviceError, NotSupported
from ..machine import vendors
from ..machine.vendors import STREAMS, VENDORS
from ..native.libraries import c_text, ffi, lib

#: Kinds of memory: unknown to the runtime, pinned host memory, device memory, managed memory.
KINDS = {
    lib.UCCH_MEMORY_UNKNOWN: "unknown",
    lib.UCCH_MEMORY_PINNED: "pinned",
    lib.UCCH_MEMORY_DEVICE: "device",
    lib.UCCH_MEMORY_MANAGED: "managed",
}


class Pointer(NamedTuple):
    """A runtime's answer about an address: kind (``unknown``, ``pinned``, ``device`` or ``managed``) and device."""

    kind: str
    device: int


class DeviceRuntime:
    """A loaded runtime library. Failed calls raise :class:`~ucc_hetero.errors.DeviceError` with the runtime's reason.

    ``code`` is the runtime's number in the native engine, ``path`` its file.
    """

    def __init__(self, vendor: str, code: int, path: str) -> None:
        self.vendor, self.code, self.path = vendor, code, path
        #: Its functions (cffi_build/gpu/ops.h). Each returns 0, or a code for :meth:`check`.
        self.ops = lib.ucch_device_ops(code)

    def __repr__(self) -> str:
        return f"<DeviceRuntime of {self.vendor} from {self.path}>"

    def check(self, call: str, code: int) -> None:
        """Raise the runtime's error for a code other than 0."""
        if code:
            lib.ucch_device_check(self.code, code, call.encode())
            raise self.failure()

    def failure(self, call: str = "") -> DeviceError:
        """The error for the reason that the engine recorded last in this thread."""
        reason = c_text(lib.ucch_device_error())
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
        """The runtime's traits as bits (``UCCH_EAGER`` and the following ones, cffi_build/api/constants.h)."""
        return self._int("traits", self.ops.traits)

    @property
    def eager(self) -> bool:
        """True if kernels are loaded before their first launch. A load at the launch would wait for the device."""
        return bool(self.traits & lib.UCCH_EAGER)

    @property
    def holds(self) -> bool:
        """True if a stream may wait for work that has not started: that work must not be behind the stream in a queue.

        HIP's streams share a few hardware queues (four, or GPU_MAX_HW_QUEUES), in which a waiting stream blocks those
        behind it. Such a stream may then only wait for work that is queued already, unless the user says that there are
        enough queues.
        """
        wanted = str(env.get("HOLD"))
        return self.eager and (wanted == "y" or (wanted == "auto" and bool(self.traits & lib.UCCH_OWN_QUEUES)))

    @property
    def queues(self) -> int:
        """Queues that run a device's streams if these may wait (`holds`), else 0."""
        variable, default = vendors.VENDORS[self.vendor].queues
        number = os.environ.get(variable, "")
        return 0 if not self.holds else max(1, int(number) if number.isdecimal() else default)

    def target(self, device: int) -> str:
        """Compiler target of a device. Empty if neither the runtime nor the kernel's files tell it.

        Also empty if the runtime was told to treat the device as another model.
        """
        text = ffi.new("char[]", 64)
        self.check(f"target of device {device}", self.ops.target(device, text, 64))
        compiler = vendors.VENDORS[self.vendor].compiler
        if text[0] != b"\0" or compiler is None or any(name.startswith(compiler.override) for name in os.environ):
            return c_text(text)
        bus = self.bus(device).partition(".")[0]  # without a partition number
        return next((found.arch for found in vendors.devices() if found.pci.partition(".")[0] == bus), "")

    def version(self) -> str:
        number = self._int("version", self.ops.version)
        return f"{number // 1000}.{number % 1000 // 10}"

    def count(self) -> int:
        return self._int("count", self.ops.count)

    def current(self) -> int | None:
        """The calling thread's device. None if it has selected none, which some runtimes cannot tell from device 0."""
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
        """PCI address as in sysfs: ``0000:3b:00.0``."""
        self._known(device)
        text = ffi.new("char[32]")
        self.check(f"PCI address of device {device}", self.ops.bus(device, text, 32))
        return c_text(text).lower()

    # --- memory -------------------------------------------------------------------------------------------------------

    def pointer(self, address: int) -> Pointer:
        found = lib.ucch_device_pointer(self.code, address)
        if found < 0:
            raise self.failure(f"address {address:#x}: ")
        return Pointer(KINDS[found & 3], found >> 2)

    @cached_property
    def memory_type(self) -> int:
        """The memory type of device memory in UCC and UCX (``ucc_memory_type_t``)."""
        return int(lib.ucch_device_memory_type(self.code))

    def room(self) -> int:
        out = ffi.new("size_t *")
        self.check("free memory", self.ops.room(out))
        return int(out[0])

    def alloc(self, nbytes: int, *, pinned: bool = False) -> Block:
        """Allocate memory on the current device, or pinned host memory. Only ``close`` frees it, no finalizer does."""
        what = f"{nbytes} bytes of {'pinned' if pinned else 'device'} memory"
        new, free = (self.ops.pinned, self.ops.unpin) if pinned else (self.ops.alloc, self.ops.release)
        return Block(self, self._handle(what, new, nbytes), free, nbytes)

    def flag(self) -> int:
        """Address of a word, initially 0, for host and streams. It is never freed. HIP's streams wait for no other
        memory."""
        return self._handle("flag", self.ops.flag)

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Copy between any two kinds of memory, in ``stream``."""
        to, of, at = (ffi.cast("void *", a) for a in (dst, src, stream))
        self.check("copy", self.ops.copy(to, of, nbytes, at))

    # --- streams and events -------------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """Make a stream on the current device, without ordering against the default stream."""
        return Stream(self, self._handle("stream", self.ops.stream_new), self.ops.stream_free)

    def event(self) -> Event:
        return Event(self, self._handle("event", self.ops.event_new), self.ops.event_free)

    def wait_event(self, stream: int, event: Event) -> None:
        """Make later work in ``stream`` wait for the event."""
        at, what = ffi.cast("void *", stream), ffi.cast("void *", event.handle)
        self.check("wait for an event", self.ops.stream_wait(at, what))

    def wait_value(self, stream: int, word: int, least: int) -> None:
        """Make later work in ``stream`` wait until the 32-bit word at ``word`` is at least ``least``."""
        at, what = ffi.cast("void *", stream), ffi.cast("void *", word)
        self.check("wait for a value", self.ops.stream_hold(at, what, least))

    def write_value(self, stream: int, word: int, value: int) -> None:
        """Write a 32-bit word when ``stream`` gets to it."""
        at, what = ffi.cast("void *", stream), ffi.cast("void *", word)
        self.check("write a value", self.ops.stream_write(at, what, value))


class _Handle:
    def __init__(self, runtime: DeviceRuntime, handle: int, free: Callable[[Any], int]) -> None:
        self.runtime, self.handle, self._free = runtime, handle, free

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the handle. May be called again."""
        handle, self.handle = self.handle, 0
        if handle:
            self.runtime.check("release", self._free(ffi.cast("void *", handle)))


class Stream(_Handle):
    """A stream. ``handle`` is the runtime's."""

    def synchronize(self) -> None:
        """Block the host until the stream's work is complete."""
        handle = ffi.cast("void *", self.handle)
        self.runtime.check("synchronize", self.runtime.ops.stream_sync(handle))


class Event(_Handle):
    """An event in a stream."""

    def record(self, stream: int) -> None:
        """Record the event behind all work in ``stream``."""
        event, at = ffi.cast("void *", self.handle), ffi.cast("void *", stream)
        self.runtime.check("record", self.runtime.ops.event_record(event, at))

    def done(self) -> bool:
        """True once the stream has passed the event."""
        return bool(self.runtime._int("event", partial(self.runtime.ops.event_done, ffi.cast("void *", self.handle))))


class Block(_Handle):
    """Allocated memory, which describes itself as its vendor's arrays of bytes do. ``handle`` is its address."""

    def __init__(self, runtime: DeviceRuntime, address: int, free: Callable[[Any], int], nbytes: int) -> None:
        super().__init__(runtime, address, free)
        self.nbytes = nbytes
        _describe(self, self, (nbytes,), "|u1")


def _describe(array: object, block: Block, shape: tuple[int, ...], typestr: str) -> None:
    """Let ``array`` tell where its elements are, as arrays of the vendor do."""
    for name in VENDORS[block.runtime.vendor].interfaces:
        setattr(array, name, {"shape": shape, "typestr": typestr, "data": (block.handle, False), "version": 2})


# --- streams of PyTorch, CuPy and other libraries -> the runtime's handle ---------------------------------------------


#: Attributes with the handle: of CuPy; of numba and cuda.core.
_ATTRIBUTES = ("ptr", "handle")


def stream_handle(stream: Any) -> int:
    """The handle of a stream: an integer (0 is the default stream), or a stream object.

    Takes streams of torch, CuPy and this package, and objects with an attribute that a vendor's row lists
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


def uncaptured(stream: Any) -> int:
    """The handle of a stream for work in which hosts take part. ``NotSupported`` while it is being captured."""
    handle = stream_handle(stream)
    if lib.ucch_stream_captures(handle):
        raise NotSupported(
            "a transfer cannot be captured in a graph, as hosts take part in it; call it outside of captures"
        )
    return handle


# --- vectors in the memory that a rank communicates from, for measurements and checks ---------------------------------


Array = npt.NDArray[Any]


class Vector:
    """``values`` in memory of ``runtime``'s device; in host memory if ``runtime`` is None."""

    def __init__(self, values: Array, runtime: DeviceRuntime | None) -> None:
        self.runtime = runtime
        self.host = np.ascontiguousarray(values)
        self.block = runtime.alloc(max(self.host.nbytes, 1)) if runtime else None
        if self.runtime and self.block:
            self._copy(self.runtime, self.block.handle, self.host.ctypes.data)
            _describe(self, self.block, self.host.shape, self.host.dtype.str)

    @property
    def buffer(self) -> Any:
        """The buffer for a communicator's methods."""
        return self if self.block else self.host

    def get(self) -> Array:
        if self.runtime and self.block:
            self._copy(self.runtime, self.host.ctypes.data, self.block.handle)
        return self.host

    def _copy(self, runtime: DeviceRuntime, dst: int, src: int) -> None:
        with runtime.stream() as stream:  # calls without a stream do not wait for other work of the device
            runtime.copy(dst, src, self.host.nbytes, stream.handle)
            stream.synchronize()

    def close(self) -> None:
        if self.block:
            self.block.close()
