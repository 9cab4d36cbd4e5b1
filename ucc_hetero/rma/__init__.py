"""One-sided communication between any two processes of any vendors: put, get, flush, notifications, counters::

    worker = rma.Worker()
    region = worker.register(array)                    # host memory, or a device's
    peer = worker.connect(address_of_the_peer)         # its worker.address; both sides connect
    theirs = peer.open(descriptor_of_the_peers_region) # its region.descriptor
    peer.put(region, theirs, local, remote, lengths, notify=b"done").Wait()

It does not need MPI; :func:`connect_all` exchanges addresses over a communicator.
"""

from __future__ import annotations

from .agent import Agent, AgentPeer, Certificates
from .channel import ChannelError
from .endpoint import Endpoint, Target
from .pages import PageTable, PageTarget, Receipt
from .region import Memory, Region
from .request import Request, Requests
from .wire_format import FormatError
from .worker import Counter, Notification, Worker, connect_all

__all__ = [
    "Agent", "AgentPeer", "Certificates", "ChannelError", "Counter", "Endpoint", "FormatError", "Memory",
    "Notification", "PageTable", "PageTarget", "Receipt", "Region", "Request", "Requests", "Target", "Worker",
    "connect_all",
]  # fmt: skip
