"""Registered memory, and a worker as its regions and endpoints know it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .. import env
from ..bindings import ucx
from ..bindings.handle import Handle
from ..buffers import as_buffer
from ..device import Block, DeviceRuntime, Place, bind, kernels, own_device, place_of, pointer_vendor
from ..device.rank import bound
from ..errors import CollectiveTimeout, DeviceError
from ..machine.ucx_transports import tcp_connections, without_devices
from ..machine.vendors import VENDORS
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until
from ..types import DTYPES
from .wire_format import Descriptor


class _Bytes:
    """Allocated device memory, as arrays of its vendor describe theirs."""

    def __init__(self, block: Block) -> None:
        self.block = block
        interface = {"shape": (block.nbytes,), "typestr": "|u1", "data": (block.handle, False), "version": 2}
        for name in VENDORS[block.runtime.vendor].interfaces:
            setattr(self, name, interface)


class Memory(Handle):
    """Memory of the host or of this process's device: an array's, or with :meth:`allocate` its own.

    Args:
        array: A contiguous array, which stays alive.

    Attributes:
        array: The array.
        nbytes: Its length.
        vendor: Vendor of the memory, or ``host``.

    Raises:
        BufferError: If the array is empty, read-only or not contiguous.
        DeviceError: If the array is of a device that this process cannot use.
    """

    def __init__(self, array: Any) -> None:
        found = as_buffer(array, writable=True, argument="memory", rank=0, pointer_vendor=pointer_vendor)
        if not found.contiguous or not found.nbytes:
            raise BufferError("memory: a region is contiguous and not empty")
        #: The array, for whatever takes arrays of its vendor.
        self.array, self._keep = array, found.owner
        #: Where it lies; ``vendor`` is ``host`` for the host's.
        self.address, self.nbytes, self.vendor = found.ptr, found.nbytes, found.vendor
        self._runtime = None if found.vendor == "host" else _runtime(Place(found.vendor, found.device))

    @classmethod
    def allocate(cls, nbytes: int, on: str = "device") -> Memory:
        """Memory of this process's ``device``, or of the ``host`` where that is asked for or there is no device.

        Args:
            nbytes: How many bytes, 1 or more; what is in them is not defined.
            on: ``device`` or ``host``.

        Returns:
            The memory, which is given back by :meth:`close`.

        Raises:
            ValueError: For another ``on``, or less than a byte.
            DeviceError: When the device has not so many bytes left.
        """
        if on not in ("device", "host") or nbytes < 1:
            raise ValueError(f"allocate: {nbytes} bytes on {on!r}: one or more, on 'device' or 'host', are wanted")
        runtime = bind(place_of()) if on == "device" else None
        if runtime is None:
            return cls(np.empty(nbytes, np.uint8))
        with own_device():
            return cls(_Bytes(runtime.alloc(nbytes)))

    def copy(self, source: Any) -> None:
        """Have in it what is in ``source``: an array on any side, or another Memory; done when it returns.

        Args:
            source: As many bytes as here.

        Raises:
            ValueError: When there are more bytes or fewer.
        """
        other = source if isinstance(source, Memory) else Memory(source)
        if other.nbytes != self.nbytes:
            raise ValueError(f"source: {other.nbytes} bytes, and there are {self.nbytes} here")
        runtime = self._runtime or other._runtime
        if runtime is None:
            ffi.memmove(ffi.cast("char *", self.address), ffi.cast("char *", other.address), self.nbytes)
            return
        with own_device(), runtime.stream() as stream:
            runtime.copy(self.address, other.address, self.nbytes, stream.handle)
            stream.synchronize()

    def close(self) -> None:
        """Give allocated memory back; nothing may use it any more."""
        if isinstance(self.array, _Bytes):
            self.array.block.close()


def _runtime(place: Place) -> DeviceRuntime:
    """The runtime of a device, which the engine works with from now on."""
    now = bound()
    if now is not None and now.device == place.device and now != place:
        place = now  # a library that stands in for a vendor's: it has another vendor's memory
    runtime = bind(place)
    if runtime is None:
        raise DeviceError(f"memory is of {place.vendor} device {place.device}, whose runtime is not here")
    return runtime


#: Transports between hosts of which the hardware puts: what all names of theirs begin with.
_HARDWARE = ("rc_", "dc_")
_BYTE = DTYPES["uint8"].code


class Core(Handle):
    """What of a :class:`Worker` its regions and endpoints use: libucp's context, its number, and the engine's side."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = float(env.get("TIMEOUT")) if timeout is None else timeout
        mine = os.getpid() & lib.UCCH_RMA_PROCESS  # for who reads records of transfers
        self.uid = int.from_bytes(os.urandom(8), "little") & ~(2 * lib.UCCH_RMA_PROCESS) | mine << 1 | 1
        # No transport of devices: their memory goes through slots of ours, and a second context of libucp's that
        # opens what peers have allocated would end the process (transport/bounce.py).
        users = os.environ.get("UCX_TLS", "")
        with env.meanwhile(tcp_connections()):
            self.context = ucx.Context({"TLS": without_devices(users, shared=True)}, sleeps=True)
            self._worker = self.context.worker()
        status, transports = ffi.new("int *"), self.context.transports()
        #: True if libucp's puts between hosts are the hardware's.
        self.by_hardware = any(name.startswith(_HARDWARE) for name in transports)
        by_kernel = "cma" in transports and "xpmem" not in transports  # with which it takes no call of the kernel's
        self._native: Any = lib.ucch_rma_new(self._worker.handle, self.uid, self.by_hardware, by_kernel, status)
        ucx.check("ucp_worker_set_am_recv_handler", status[0])
        #: Until they are closed: peers write to their memory.
        self.regions: set[Region] = set()
        #: By the number of a peer, its endpoint; and the engine's sides of those that were closed.
        self.peers: dict[int, Any] = {}
        self._gone: list[Any] = []

    @property
    def native(self) -> Any:
        """The engine's side of it; ``ValueError`` once it is closed."""
        if self._native is None:
            raise ValueError("this Worker is closed")
        return self._native

    def forget(self, peer: Any, native: Any) -> None:
        """Leave a peer that is being closed out of the list."""
        uid: int = peer.uid
        if self.peers.get(uid) is peer:
            del self.peers[uid]
        self._gone.append(native)


class Sided:
    """An object that has a side in the engine: ``engine`` is its address, 0 once it is closed."""

    engine: int
    _kind: str
    _raises: type[Exception] = ValueError

    def _have(self, native: Any) -> None:
        """Begin with it."""
        self.engine = int(ffi.cast("uintptr_t", native))

    @property
    def native(self) -> Any:
        """It; ``ValueError``, of an :class:`Endpoint` :class:`PeerError`, once it is closed."""
        if not self.engine:
            raise self._raises(f"this {type(self).__name__} is closed")
        return ffi.cast(self._kind, self.engine)


class Region(Sided, Handle):
    """Registered memory that peers may write to and read; made by :meth:`Worker.register`.

    Attributes:
        descriptor: Bytes that tell a peer of it, for :meth:`Endpoint.open`; good until it is closed.
        nbytes: Its length.
        memory: Vendor of the memory, or ``host``.
        worker: The worker that it was registered with.
    """

    _kind = "ucch_region *"

    def __init__(self, worker: Core, memory: Any) -> None:
        engine = worker.native
        found = memory if isinstance(memory, Memory) else Memory(memory)
        self.worker, self.nbytes, self.memory, self._owner = worker, found.nbytes, found.vendor, found
        self._registered: ucx.Memory | None = None
        on_device = found.vendor != "host"
        if on_device:
            kernels.ready(lib.UCCH_PIECES, 0, _BYTE, _BYTE)  # lists go by it, if there is one
        else:
            self._registered = worker.context.register((found.address, found.nbytes))
        number = int.from_bytes(os.urandom(8), "little")
        handle = self._registered.handle if self._registered else ffi.NULL
        base = ffi.cast("void *", found.address)
        self._have(lib.ucch_region_new(engine, number, base, found.nbytes, on_device, handle))
        lent = ffi.new("char[]", lib.UCCH_RMA_LENT)
        #: True if it is device memory that devices of peers may reach themselves.
        self.lent = on_device and lib.ucch_region_lend(self.native, lent) == 0
        key = self._registered.key if self._registered else bytes(ffi.buffer(lent)) if self.lent else b""
        #: For a peer to :meth:`Endpoint.open` it: bytes, good until it is closed.
        self.descriptor = Descriptor(worker.uid, number, found.address, found.nbytes, found.vendor, key).pack()

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes of {self.memory} memory>"

    def close(self, timeout: float = 10.0) -> None:
        """Take it back from all peers and deregister it: afterwards nothing is written to it or read from it.

        Waits for transfers that are under way.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            CollectiveTimeout: If a peer that is alive does not let go in time; the region then stays registered.
        """
        if not self.engine:
            return
        native = self.native
        self.revoke()
        left = timeout or -1.0  # 0 would be for ever
        if not progress_until(lambda: not lib.ucch_region_users(self.worker.native, native), left):
            raise CollectiveTimeout(f"{self!r} is still used after {timeout:g} s: it stays registered")
        self.release()

    def revoke(self) -> None:
        """Ask all peers to let go of it, once."""
        lib.ucch_region_revoke(self.worker.native, self.native)

    def release(self) -> None:
        """Deregister it, when nothing can use it any more."""
        if self.engine:
            native, self.engine = self.native, 0
            self.worker.regions.discard(self)
            lib.ucch_region_free(self.worker.native, native)
            if self._registered is not None:
                self._registered.close()
