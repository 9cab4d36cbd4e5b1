"""Workers: this process as peers reach it, with its regions, counters and notifications."""

from __future__ import annotations

import atexit
import hashlib
import os
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from ..bindings import quarantine
from ..bindings.handle import Handle
from ..errors import CollectiveTimeout
from ..machine import launchers, nics
from ..machine.discover import host_identity
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until, wait_in_slices
from ..transport import wires
from .endpoint import Endpoint
from .region import Core, Region
from .request import Request, begin
from .wire_format import Address

#: Seconds that peers get to release a worker's regions when it is closed.
_PATIENCE = 2.0
#: Seconds that data on its way to peers gets after that.
_LEAVING = 5.0


def _may_open(process: int) -> bool:
    """True if this process may open another one's memory: both have the same user and capabilities."""
    try:
        os.readlink(f"/proc/{process}/fd/0")
    except PermissionError:
        return False
    except OSError:  # the process has closed the file, or has exited
        return True
    return True


class Notification(NamedTuple):
    """A notification: the peer that sent it, and its bytes. Data that the peer put before is there.

    Returned by :meth:`Worker.wait_notification`.
    """

    peer: Endpoint | None
    data: bytes


class Counter(Handle):
    """A counter of this worker that peers' transfers and notifications increment; made by :meth:`Worker.counter`.

    Attributes:
        number: The ``counter`` argument of :meth:`Endpoint.put` and :meth:`Endpoint.notify` at the peers.
    """

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number

    @property
    def value(self) -> int:
        """The current count."""
        return int(lib.ucch_rma_counter(self.worker.native, self.number))

    def wait(
        self, least: int, *, peer: Endpoint | None = None, stream: Any = None, timeout: float | None = None
    ) -> Request:
        """Wait until the counter has reached ``least``.

        Args:
            least: The value to wait for.
            peer: Endpoint; the wait fails if this peer ends.
            stream: Stream that waits too. If streams cannot wait for memory, the host waits before this returns.
            timeout: Seconds; the worker's by default.

        Returns:
            Request: Complete when the counter has reached ``least``.

        Raises:
            ValueError: ``least`` is negative, or the worker is closed.
            CollectiveTimeout: From the request, after the timeout.
            PeerError: From the request, if ``peer`` has ended.
        """
        theirs = peer.native if peer is not None else ffi.NULL
        if least < 0:
            raise ValueError(f"least: {least}; a counter begins at 0")
        order = {"what": lib.UCCH_RMA_AWAIT, "counter": self.number, "least": least}
        seconds = self.worker.timeout if timeout is None else timeout
        request = begin(self.worker.native, theirs, order, f"the wait for counter {self.number}", None, None, seconds)
        if stream is not None:
            request.Wait(stream)
        return request

    def close(self) -> None:
        """Release the counter. Waits for it fail, and later increments by peers are ignored."""
        number, self.number = self.number, -1
        if number >= 0:
            self.worker._end_counter(number)


class Worker(Core):
    """This process as peers reach it, with its regions, counters and notifications.

    Args:
        timeout: Timeout in seconds of transfers that have none of their own; UCCH_TIMEOUT by default.

    Attributes:
        address: Bytes for a peer's :meth:`connect`; valid until the worker is closed.

    Raises:
        LibraryError: If libucp cannot make a worker.
    """

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__(timeout)
        # The user is part of the key: processes of other users cannot open this one's memory.
        where = repr((host_identity().memory, os.geteuid()))
        self._host = hashlib.blake2b(where.encode(), digest_size=16).digest()
        #: Bytes for a peer's :meth:`connect`; valid until the worker is closed.
        self._interfaces = tuple(nics.interfaces().values())
        self.address = Address(self.uid, self._host, os.getpid(), self._interfaces, self._worker.address).pack()
        #: Held while an object is made that several threads may ask for at once.
        self._making = threading.Lock()
        self._counters = 0
        self._wires = -1
        self._free: list[int] = []

    def register(self, memory: Any) -> Region:
        """Register memory, so that peers can read and write it.

        Args:
            memory: A :class:`Memory`, or a contiguous array on the host or on this process's device. It is kept
                alive.

        Returns:
            Region: The region. Send its ``descriptor`` to the peers.

        Raises:
            BufferError: The memory is empty, read-only or not contiguous.
            DeviceError: The memory is on a device that this process cannot use.
        """
        region = Region(self, memory)
        self.regions.add(region)
        return region

    def connect(self, address: bytes) -> Endpoint:
        """Connect with a peer's worker. The peer has to connect with this worker too, before or after: until then its
        answers are waited for, and what it has sent is kept.

        Args:
            address: The peer's :attr:`address`.

        Returns:
            Endpoint: The existing endpoint of this peer if it is alive, else a new one.

        Raises:
            FormatError: ``address`` is not an address, or is one of another version.
        """
        found = Address.unpack(address)
        with self._making:
            known: Endpoint | None = self.peers.get(found.uid)
            if known is not None and known.alive:
                return known
            if known is not None:
                known.close()
            near = found.host == self._host and _may_open(found.process)
            if not near:
                self._offer_wires(found)
            self.peers[found.uid] = endpoint = Endpoint(self, found, near)
            lib.ucch_peer_known(endpoint.native)
        return endpoint

    def _offer_wires(self, peer: Address) -> None:
        """Make this process's network threads reachable for a peer on another host; start them if there are none."""
        if self._wires >= 0:
            return
        wires.leave_out(nics.repeated([self._host, peer.host], [self._interfaces, peer.interfaces]))
        wires.share(launchers.number("LOCAL_WORLD_SIZE", os.environ, 1))
        packed: list[bytes] = []
        for pair in wires.addresses(wires.wanted()):
            packed.append(b"".join(struct.pack("=I", len(one)) + one for one in pair))
        while sum(map(len, packed)) > lib.UCCH_RMA_REACH:
            packed.pop()
        self._wires = len(packed)
        addresses = b"".join(packed)
        if lib.ucch_rma_reach(self.native, self._wires, addresses, len(addresses)):
            raise MemoryError("no memory for the addresses of network threads")

    def counter(self) -> Counter:
        """Make a counter. A worker can have 1,024 at a time.

        Returns:
            Counter: The counter. Send its ``number`` to the peers.

        Raises:
            ValueError: The worker has 1,024 counters already.
        """
        with self._making:
            if self._free:
                return Counter(self, self._free.pop())
            if self._counters == lib.UCCH_RMA_COUNTERS:
                raise ValueError(f"a worker has {lib.UCCH_RMA_COUNTERS} counters at most: close some")
            self._counters += 1
            return Counter(self, self._counters - 1)

    def _end_counter(self, number: int) -> None:
        """Take a counter back. Later increments by peers are ignored."""
        if self._native is not None:
            self._free.append(lib.ucch_rma_counter_next(self._native, number))

    def notifications(self) -> list[Notification]:
        """Take all notifications that have arrived.

        Returns:
            list[Notification]: In order of arrival; each is returned once.

        Raises:
            MemoryError: There was no memory for one, or too many came before this worker had connected with their
                sender. It is raised once, and later calls return the others.
        """
        return list(iter(self._next, None))

    def wait_notification(self, timeout: float | None = None) -> Notification:
        """Wait for the next notification.

        Args:
            timeout: Seconds; the worker's by default.

        Returns:
            Notification: Its peer and its bytes. Data that the peer put before is there.

        Raises:
            CollectiveTimeout: None came in time.
            MemoryError: As for :meth:`notifications`.
        """
        seconds = self.timeout if timeout is None else timeout
        until = time.monotonic() + seconds

        def come(at_most: float) -> Notification | None:
            known = lib.ucch_doorbell_count()
            lib.ucch_progress_once()
            if (found := self._next()) is not None:
                return found
            left = until - time.monotonic()
            if left <= 0:
                raise CollectiveTimeout(f"no notification has come in {seconds:g} s")
            lib.ucch_doorbell_wait(known, min(left, at_most))
            return None

        return wait_in_slices(come)

    def _next(self) -> Notification | None:
        sender, data = ffi.new("uint64_t *"), ffi.new("char[]", lib.UCCH_RMA_NOTICE)
        nbytes = lib.ucch_notification_take(self.native, sender, data)
        if nbytes == lib.UCCH_FAIL_MEMORY:
            raise MemoryError("a notification of a peer is lost: there was no room for it")
        if nbytes < 0:
            return None
        return Notification(self.peers.get(int(sender[0])), bytes(ffi.buffer(data, nbytes)))

    def info(self) -> dict[str, Any]:
        """Return information about the worker.

        Returns:
            dict: ``transports`` of libucp, and ``peers``: number of a peer -> ``alive`` or ``lost``.

        Raises:
            ValueError: The worker is closed.
        """
        _ = self.native
        return {
            "transports": self.context.transports(),
            "peers": {f"{uid:016x}": "alive" if peer.alive else "lost" for uid, peer in list(self.peers.items())},
        }

    def close(self) -> None:
        """Close the connections and deregister all regions. Transfers under way fail, on the peers too."""
        if self._native is None:
            return
        until = time.monotonic() + _PATIENCE
        for region in (regions := list(self.regions)):
            region.revoke()  # first ask all peers, then wait: a peer that does not answer costs its timeout once
        for region in regions:
            with suppress(CollectiveTimeout):
                region.close(until - time.monotonic())
        until = time.monotonic() + _LEAVING
        for peer in list(self.peers.values()):
            peer.leave(until - time.monotonic())  # likewise
        progress_until(lambda: all(lib.ucch_peer_left(native) for native in self._gone), until - time.monotonic())
        if lib.ucch_rma_stop(self._native):  # the engine keeps running for a peer that is stopped or slow
            for region in self.regions:
                region.engine = 0
            quarantine.keep((self._worker, self.context, [*self.regions]))
            self._native = None
            return
        for region in list(self.regions):
            region.release()
        self._worker.close()
        for native in self._gone:
            lib.ucch_peer_free(native)
        native, self._native = self._native, None
        lib.ucch_rma_free(native)
        self.context.close()


@atexit.register
def _at_exit() -> None:
    """Stop network threads before libucp is unloaded. In a process with MPI, bootstrap.exit does so instead."""
    if "mpi4py.MPI" not in sys.modules:
        wires.stop()


def connect_all(worker: Worker, comm: Any) -> list[Endpoint]:
    """Connect with all ranks of a communicator. Collective.

    Args:
        worker: This rank's worker.
        comm: A :class:`~ucc_hetero.Communicator`, or a communicator of mpi4py.

    Returns:
        list[Endpoint]: The endpoints in rank order, this rank included; connected on return.
    """
    mpi = getattr(comm, "mpi", comm)
    peers = [worker.connect(address) for address in mpi.allgather(worker.address)]
    mpi.Barrier()
    return peers
