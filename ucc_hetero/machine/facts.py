"""Facts that a rank publishes about itself before the first communication."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from .discover import HostIdentity
from .fabric import NO_FABRIC, Fabric
from .rdma import RdmaPort


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a rank publishes before the first communication. ``process`` is unique in the job."""

    process: str
    package: str
    ucc: str
    ucx: str
    memory_types: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    byteorder: str
    host: HostIdentity
    vendor: str
    device: int
    #: Address of the rank's UCP worker, for messages.
    address: bytes
    #: PCI address of the rank's device; empty for a rank without one.
    board: str = ""
    #: UCX's name of the memory of the rank's device; empty for a rank without one.
    device_memory: str = ""
    #: True if the runtime loads kernels at their first launch, which waits for the device. Streams of this rank may be
    #: waiting for other ranks then, so what these need from it must not need the driver.
    lazy_loading: bool = False
    #: Total speed of the host's links in Mbit/s; 0 if unknown.
    link_speed: int = 0
    #: Place of the host in the network (UCCH_GROUP): names joined by ``/``, outermost first.
    group: str = ""
    #: UCX transports that the rank has (``tcp``, ``rc_mlx5``, ``cuda_ipc``, ...), sorted.
    transports: tuple[str, ...] = ()
    #: Active RDMA ports of the host that the rank's UCX does not support.
    idle_ports: tuple[RdmaPort, ...] = ()
    #: Algorithms that the program has registered, as ``collective@name`` joined by spaces.
    algorithms: str = ""
    #: Names of the vendors registered in this process, joined by spaces.
    vendors: str = ""
    #: Process id on its host; 0 if unknown.
    pid: int = 0
    #: Fabric that joins the host to others, for the vendor's library.
    fabric: Fabric = NO_FABRIC

    def __hash__(self) -> int:
        return hash(self.process)  # cheap: facts are looked up whenever ranks make a communicator

    @property
    def joined(self) -> Hashable:
        """Equal for ranks that one vendor's fabric joins: devices of one host, or of hosts with RDMA that the vendor's
        library uses."""
        return (self.vendor, self.fabric.kind or self.host.node)

    def packed(self) -> bytes:
        return pickle.dumps(self)


@lru_cache(maxsize=1 << 13)
def unpacked(data: bytes) -> Facts:
    """Unpickle a rank's facts. Cached, as most ranks take part in several communicators."""
    found = pickle.loads(data)
    assert isinstance(found, Facts)
    return found
