"""Registered memory, and a worker as its regions and endpoints know it."""

from __future__ import annotations

import os
from typing import Any

from .. import env
from ..bindings import ucx
from ..bindings.handle import Handle
from ..device import kernels
from ..errors import CollectiveTimeout
from ..machine.ucx_transports import tcp_connections, without_devices
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until
from ..types import DTYPES
from .memory import Memory
from .wire_format import Descriptor

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
