"""Facts that a rank publishes about itself before it communicates."""

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
    """Facts that one rank publishes before it communicates. ``process`` is unique in the job."""

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
    #: Streams of the rank wait for those of others while its runtime loads kernels at their first launch, which waits
    #: for the device: what others need of the rank meanwhile must not need the driver.
    lazy_loading: bool = False
    #: Mbit/s that the links of the rank's host carry together; 0 if unknown.
    link_speed: int = 0
    #: Where the rank's host stands (UCCH_GROUP): names joined by ``/``, outermost first.
    group: str = ""
    #: UCX's transports of the rank (``tcp``, ``rc_mlx5``, ``cuda_ipc``, ...), sorted.
    transports: tuple[str, ...] = ()
    #: Active RDMA ports of the rank's host that its UCX does not reach.
    idle_ports: tuple[RdmaPort, ...] = ()
    #: Algorithms that the program has added, as ``collective@name``, joined by spaces.
    algorithms: str = ""
    #: Names of the vendors that the process knows, joined by spaces.
    vendors: str = ""
    #: Number of the process on its host; 0 if unknown.
    pid: int = 0
    #: Fabric that joins the rank's host to others, for its vendor's library.
    fabric: Fabric = NO_FABRIC

    def __hash__(self) -> int:
        return hash(self.process)  # quick: facts are looked up whenever their ranks make a communicator

    @property
    def joined(self) -> Hashable:
        """Equal for ranks that one vendor's own fabric joins: those of its devices on one host, and on hosts with RDMA
        that its library will use."""
        return (self.vendor, self.fabric.kind or self.host.node)

    def packed(self) -> bytes:
        return pickle.dumps(self)


@lru_cache(maxsize=1 << 13)
def unpacked(data: bytes) -> Facts:
    """Facts that a rank has packed; most are the same for each communicator."""
    found = pickle.loads(data)
    assert isinstance(found, Facts)
    return found
