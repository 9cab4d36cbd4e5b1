"""Registered memory, and the part of a worker that regions and endpoints use."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .. import env
from ..bindings import ucx
from ..bindings.handle import Handle
from ..buffers import Buffer, as_buffer
from ..device import Block, DeviceRuntime, Place, bind, kernels, own_device, place_of, pointer_vendor
from ..device.rank import bound
from ..errors import CollectiveTimeout, DeviceError
from ..machine.ucx_transports import tcp_connections, without_devices
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until
from ..types import DTYPES
from .wire_format import Descriptor


class Memory(Handle):
    """Memory of the host or of this process's device: an array's, or its own (:meth:`allocate`).

    Args:
        array: A contiguous array, which is kept alive.

    Attributes:
        array: The array.
        nbytes: Its length in bytes.
        vendor: Vendor of the memory, or ``host``.

    Raises:
        BufferError: The array is empty, read-only or not contiguous.
        DeviceError: The array is on a device that this process cannot use.
    """

    def __init__(self, array: Any) -> None:
        found, self._runtime = _found(array, "memory", writable=True)
        #: The array, for libraries that take arrays of its vendor.
        self.array, self._keep = array, found.owner
        #: Address, length and vendor (``host`` for host memory).
        self.address, self.nbytes, self.vendor = found.ptr, found.nbytes, found.vendor

    @classmethod
    def allocate(cls, nbytes: int, on: str = "device") -> Memory:
        """Allocate memory on this process's device, or on the host if asked for or if there is no device.

        Args:
            nbytes: Length in bytes, at least 1. The content is undefined.
            on: ``device`` or ``host``.

        Returns:
            The memory; free it by :meth:`close`.

        Raises:
            ValueError: ``on`` is something else, or ``nbytes`` is below 1.
            DeviceError: The device does not have that much memory left.
        """
        if on not in ("device", "host") or nbytes < 1:
            raise ValueError(f"allocate: {nbytes} bytes on {on!r}; needs 1 or more, on 'device' or 'host'")
        runtime = bind(place_of()) if on == "device" else None
        if runtime is None:
            return cls(np.empty(nbytes, np.uint8))
        with own_device():
            return cls(runtime.alloc(nbytes))

    def copy(self, source: Any) -> None:
        """Copy ``source`` into this memory; complete on return.

        Args:
            source: An array or Memory of the same length in bytes, on the host or a device.

        Raises:
            ValueError: The lengths differ.
            BufferError: The array is empty or not contiguous.
        """
        array = source.array if isinstance(source, Memory) else source
        found, theirs = _found(array, "source", writable=False)
        if found.nbytes != self.nbytes:
            raise ValueError(f"source: {found.nbytes} bytes, but this memory has {self.nbytes}")
        runtime = self._runtime or theirs
        if runtime is None:
            ffi.memmove(ffi.cast("char *", self.address), ffi.cast("char *", found.ptr), self.nbytes)
            return
        with own_device(), runtime.stream() as stream:
            runtime.copy(self.address, found.ptr, self.nbytes, stream.handle)
            stream.synchronize()

    def close(self) -> None:
        """Free allocated memory, which must not be in use any more."""
        if isinstance(self.array, Block):
            self.array.close()


def _found(array: Any, argument: str, *, writable: bool) -> tuple[Buffer, DeviceRuntime | None]:
    """An array's memory, and the runtime of its device if it is on one."""
    found = as_buffer(array, writable=writable, argument=argument, rank=None, pointer_vendor=pointer_vendor)
    if not found.contiguous or not found.nbytes:
        raise BufferError(f"{argument}: the array must be contiguous and not empty")
    return found, None if found.vendor == "host" else _runtime(Place(found.vendor, found.device))


def _runtime(place: Place) -> DeviceRuntime:
    """The runtime of a device; the engine uses it from now on."""
    now = bound()
    if now is not None and now.device == place.device and now != place:
        place = now  # a library stands in for the vendor's: memory is the other vendor's
    runtime = bind(place)
    if runtime is None:
        raise DeviceError(f"memory is on {place.vendor} device {place.device}, but its runtime is not loaded")
    return runtime


#: Most seconds to wait for peers to release a region.
_PATIENCE_S = 10.0
#: Prefixes of the transports between hosts whose puts the hardware executes.
_HARDWARE = ("rc_", "dc_")
_BYTE = DTYPES["uint8"].code


class Core(Handle):
    """The part of a :class:`Worker` that regions and endpoints use: libucp's context, its number, the engine's
    object."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = float(env.get("TIMEOUT")) if timeout is None else timeout
        mine = os.getpid() & lib.UCCH_RMA_PROCESS  # lets tools that read flight records find the process
        self.uid = int.from_bytes(os.urandom(8), "little") & ~(2 * lib.UCCH_RMA_PROCESS) | mine << 1 | 1
        # Without device transports: device memory goes through slots in pinned memory, and a second UCX context that
        # opens a peer's allocation by CUDA IPC would abort the process (transport/bounce.py).
        users = os.environ.get("UCX_TLS", "")
        with env.meanwhile(tcp_connections()):
            self.context = ucx.Context({"TLS": without_devices(users, shared=True)}, sleeps=True)
            self._worker = self.context.worker()
        status, transports = ffi.new("int *"), self.context.transports()
        #: True if the hardware executes puts between hosts.
        self.by_hardware = any(name.startswith(_HARDWARE) for name in transports)
        by_kernel = "cma" in transports and "xpmem" not in transports  # xpmem copies without system calls
        self._native: Any = lib.ucch_rma_new(self._worker.handle, self.uid, self.by_hardware, by_kernel, status)
        ucx.check("ucp_worker_set_am_recv_handler", status[0])
        #: The open regions, to whose memory peers may write.
        self.regions: set[Region] = set()
        #: Number of a peer -> its endpoint; native objects of closed endpoints.
        self.peers: dict[int, Any] = {}
        self._gone: list[Any] = []

    @property
    def native(self) -> Any:
        """The engine's object. ``ValueError`` once the worker is closed."""
        if self._native is None:
            raise ValueError("this Worker is closed")
        return self._native

    def forget(self, peer: Any, native: Any) -> None:
        """Remove a peer that is being closed."""
        uid: int = peer.uid
        if self.peers.get(uid) is peer:
            del self.peers[uid]
        self._gone.append(native)


class Sided:
    """An object with a native part: ``engine`` is its address, 0 once it is closed."""

    engine: int
    _kind: str
    _raises: type[Exception] = ValueError

    def _have(self, native: Any) -> None:
        """Set the native part, which is NULL without memory."""
        if not native:
            raise MemoryError(f"no memory for a {type(self).__name__}")
        self.engine = int(ffi.cast("uintptr_t", native))

    @property
    def native(self) -> Any:
        """The native part. Once closed: ``ValueError``, of an :class:`Endpoint` :class:`PeerError`."""
        if not self.engine:
            raise self._raises(f"this {type(self).__name__} is closed")
        return ffi.cast(self._kind, self.engine)


class Region(Sided, Handle):
    """Registered memory that peers may write to and read; made by :meth:`Worker.register`.

    Attributes:
        descriptor: Bytes for a peer's :meth:`Endpoint.open`; valid until the region is closed.
        nbytes: Its length in bytes.
        memory: Vendor of the memory, or ``host``.
        worker: Worker with which it is registered.
    """

    _kind = "ucch_region *"

    def __init__(self, worker: Core, memory: Any) -> None:
        engine = worker.native
        found = memory if isinstance(memory, Memory) else Memory(memory)
        self.worker, self.nbytes, self.memory, self._owner = worker, found.nbytes, found.vendor, found
        self._registered: ucx.Memory | None = None
        on_device = found.vendor != "host"
        if on_device:
            kernels.ready(lib.UCCH_PIECES, 0, _BYTE, _BYTE)  # the kernel that moves lists of pieces, if any
        else:
            self._registered = worker.context.register((found.address, found.nbytes))
        number = int.from_bytes(os.urandom(8), "little")
        handle = self._registered.handle if self._registered else ffi.NULL
        base = ffi.cast("void *", found.address)
        self._have(lib.ucch_region_new(engine, number, base, found.nbytes, on_device, handle))
        lent = ffi.new("char[]", lib.UCCH_RMA_LENT)
        #: True for device memory that devices of peers may map.
        self.lent = on_device and lib.ucch_region_lend(self.native, lent) == 0
        key = self._registered.key if self._registered else bytes(ffi.buffer(lent)) if self.lent else b""
        #: Bytes for a peer's :meth:`Endpoint.open`; valid until the region is closed.
        self.descriptor = Descriptor(worker.uid, number, found.address, found.nbytes, found.vendor, key).pack()

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes of {self.memory} memory>"

    def close(self, timeout: float | None = None) -> None:
        """Withdraw the region from all peers and deregister it. Afterwards no peer reads or writes it.

        Waits for transfers under way.

        Args:
            timeout: Seconds to wait. By default 10, or the worker's timeout if that is shorter, counted from a peer's
                last answer: closing many regions waits for a silent peer only once.

        Raises:
            CollectiveTimeout: A peer that is alive did not release it in time; the region stays registered.
        """
        if not self.engine:
            return
        native, patience = self.native, -1.0
        if timeout is None:
            timeout = patience = min(_PATIENCE_S, self.worker.timeout or _PATIENCE_S)
        self.revoke()
        progress_until(lambda: not lib.ucch_region_users(native, patience), timeout or -1.0)  # 0 would mean no limit
        if lib.ucch_region_users(native, -1.0):
            raise CollectiveTimeout(f"{self!r} is still in use after {timeout:g} s, and stays registered")
        self.release()

    def revoke(self) -> None:
        """Ask all peers, once, to release the region."""
        lib.ucch_region_revoke(self.native)

    def release(self) -> None:
        """Deregister the region; nothing may use it any more."""
        if self.engine:
            native, self.engine = self.native, 0
            self.worker.regions.discard(self)
            lib.ucch_region_free(native)
            if self._registered is not None:
                self._registered.close()
