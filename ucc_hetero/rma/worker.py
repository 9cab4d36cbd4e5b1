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

#: Seconds for which peers may go on using a worker's regions when it is closed.
_PATIENCE = 2.0
#: Seconds for which what is on its way to peers may take then.
_LEAVING = 5.0


def _may_open(process: int) -> bool:
    """True if this process may open another's memory, as it may where both have the same user and rights."""
    try:
        os.readlink(f"/proc/{process}/fd/0")
    except PermissionError:
        return False
    except OSError:  # it has closed that file, or has ended
        return True
    return True


class Notification(NamedTuple):
    """A notification that has come: from which peer, and what it says. The data in front of it is there.

    What :meth:`Worker.wait_notification` returns.
    """

    peer: Endpoint | None
    data: bytes


class Counter(Handle):
    """A counter of this worker, which notifications of peers count up; made by :meth:`Worker.counter`.

    Attributes:
        number: The ``counter`` argument of :meth:`Endpoint.put` and :meth:`Endpoint.notify` at the peers.
    """

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number

    @property
    def value(self) -> int:
        """How often it has been counted up."""
        return int(lib.ucch_rma_counter(self.worker.native, self.number))

    def wait(
        self, least: int, *, peer: Endpoint | None = None, stream: Any = None, timeout: float | None = None
    ) -> Request:
        """Wait until the counter has reached ``least``.

        Args:
            least: The value to wait for.
            peer: The endpoint whose end makes the wait fail.
            stream: A stream that waits, too. Where streams cannot wait for memory the host waits before this returns.
            timeout: Seconds; the worker's by default.

        Returns:
            Request: Done when the counter has reached ``least``.

        Raises:
            ValueError: If the worker is closed.
            CollectiveTimeout: From the request, at the deadline.
            PeerError: From the request, if ``peer`` has ended.
        """
        theirs = peer.native if peer is not None else ffi.NULL
        order = {"what": lib.UCCH_RMA_AWAIT, "counter": self.number, "least": least}
        seconds = self.worker.timeout if timeout is None else timeout
        request = begin(self.worker.native, theirs, order, f"the wait for counter {self.number}", None, None, seconds)
        if stream is not None:
            request.Wait(stream)
        return request

    def close(self) -> None:
        """Give it back: waits for it fail, and what peers still count is ignored."""
        number, self.number = self.number, -1
        if number >= 0:
            self.worker._end_counter(number)


class Worker(Core):
    """This process as peers reach it, with its regions, counters and notifications.

    Args:
        timeout: Seconds after which a transfer fails that is given no other; UCCH_TIMEOUT by default.

    Attributes:
        address: Bytes for a peer's :meth:`connect`; good as long as the worker is.

    Raises:
        LibraryError: If libucp cannot make a worker.
    """

    def __init__(self, timeout: float | None = None) -> None:
        super().__init__(timeout)
        # Of one user, too: others' processes cannot open our memory.
        where = repr((host_identity().memory, os.geteuid()))
        self._host = hashlib.blake2b(where.encode(), digest_size=16).digest()
        #: For a peer to :meth:`connect`: bytes, good as long as the worker is.
        self._interfaces = tuple(nics.interfaces().values())
        self.address = Address(self.uid, self._host, os.getpid(), self._interfaces, self._worker.address).pack()
        #: Held while there is made what threads may ask for at the same time.
        self._making = threading.Lock()
        self._counters = 0
        self._wires = -1
        self._free: list[int] = []

    def register(self, memory: Any) -> Region:
        """Let peers reach memory.

        Args:
            memory: A :class:`Memory`, or a contiguous array of the host's or of this process's device. It stays alive.

        Returns:
            Region: Its ``descriptor`` goes to the peers.

        Raises:
            BufferError: If the memory is empty, read-only or not contiguous.
            DeviceError: If the memory is of a device that this process cannot use.
        """
        region = Region(self, memory)
        self.regions.add(region)
        return region

    def connect(self, address: bytes) -> Endpoint:
        """Connect with a worker, which has to connect as well.

        Args:
            address: The peer's :attr:`address`.

        Returns:
            Endpoint: The one to this peer that exists, if it is alive, or a new one.

        Raises:
            FormatError: If it is no address, or one of another version.
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
        return endpoint

    def _offer_wires(self, peer: Address) -> None:
        """Let peers of other hosts reach network threads of this process's, which are made at need: for this one."""
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
        """Make a counter; a worker has up to 1,024 at a time.

        Returns:
            Counter: Its ``number`` goes to the peers.

        Raises:
            ValueError: If there are as many already.
        """
        with self._making:
            if self._free:
                return Counter(self, self._free.pop())
            if self._counters == lib.UCCH_RMA_COUNTERS:
                raise ValueError(f"a worker has {lib.UCCH_RMA_COUNTERS} counters at most: close some")
            self._counters += 1
            return Counter(self, self._counters - 1)

    def _end_counter(self, number: int) -> None:
        """Have a counter back: what peers still count there is ignored."""
        if self._native is not None:
            self._free.append(lib.ucch_rma_counter_next(self._native, number))

    def notifications(self) -> list[Notification]:
        """Take the notifications that have come.

        Returns:
            list[Notification]: In the order in which they came; each is returned once.
        """
        return list(iter(self._next, None))

    def wait_notification(self, timeout: float | None = None) -> Notification:
        """Wait for the next notification.

        Args:
            timeout: Seconds; the worker's by default.

        Returns:
            Notification: Its peer and its data. What was put before it by that peer is there.

        Raises:
            CollectiveTimeout: If none comes in time.
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
        nbytes = lib.ucch_notice_take(self.native, sender, data)
        if nbytes < 0:
            return None
        return Notification(self.peers.get(int(sender[0])), bytes(ffi.buffer(data, nbytes)))

    def info(self) -> dict[str, Any]:
        """Describe the worker.

        Returns:
            dict: ``transports`` of libucp, and ``peers``: each one's number with ``alive`` or ``lost``.
        """
        return {
            "transports": self.context.transports(),
            "peers": {f"{uid:016x}": "alive" if peer.alive else "lost" for uid, peer in list(self.peers.items())},
        }

    def close(self) -> None:
        """End the connections and deregister all regions; transfers under way fail, at the peers, too."""
        if self._native is None:
            return
        until = time.monotonic() + _PATIENCE
        for region in (regions := list(self.regions)):
            region.revoke()  # all before one is waited for: a peer that does not answer is waited for once
        for region in regions:
            with suppress(CollectiveTimeout):
                region.close(until - time.monotonic())
        until = time.monotonic() + _LEAVING
        for peer in list(self.peers.values()):
            peer.leave(until - time.monotonic())  # all before one is waited for, likewise
        progress_until(lambda: all(lib.ucch_peer_left(native) for native in self._gone), until - time.monotonic())
        if lib.ucch_rma_stop(self._native):  # it goes on, for a peer that is stopped or slow
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
    """End network threads before libucp is unloaded; in a process of MPI's bootstrap.exit does, after its last call."""
    if "mpi4py.MPI" not in sys.modules:
        wires.stop()


def connect_all(worker: Worker, comm: Any) -> list[Endpoint]:
    """Connect with all ranks of a communicator; collective.

    Args:
        worker: This rank's.
        comm: A :class:`~ucc_hetero.Communicator`, or one of mpi4py's.

    Returns:
        list[Endpoint]: One for each rank, this one among them; connected when it returns.
    """
    mpi = getattr(comm, "mpi", comm)
    peers = [worker.connect(address) for address in mpi.allgather(worker.address)]
    mpi.Barrier()
    return peers
