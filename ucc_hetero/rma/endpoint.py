"""Endpoints: a peer, its regions, and transfers to and from them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .. import env
from ..buffers.buffer import Array
from ..device.rank import bound
from ..docstrings import forms
from ..errors import PeerError
from ..native.libraries import c_text, ffi, lib, owned, piece
from ..native.waiting import progress_until
from ..transport import wires
from .region import Core, Region, Sided
from .request import ENDED, Request, begin, failure
from .wire_format import Address, Descriptor

#: Statistics of a peer -> their numbers in the engine.
_COUNTS = {
    "puts": lib.UCCH_RMA_PUT,
    "gets": lib.UCCH_RMA_GET,
    "failed": lib.UCCH_RMA_FAILED,
    "bytes": lib.UCCH_RMA_BYTES,
    "notifications": lib.UCCH_RMA_NOTICES,
}
_PUT, _GET = lib.UCCH_RMA_PUT, lib.UCCH_RMA_GET
_NAMES = {_PUT: "put", _GET: "get"}


class Target(Sided):
    """A peer's region, opened by :meth:`Endpoint.open`.

    Attributes:
        nbytes: Length of the region in bytes.
        memory: Vendor of the memory, or ``host``.
        peer: Endpoint that has opened it.
    """

    _kind = "ucch_target *"

    def __init__(self, peer: Endpoint, descriptor: Descriptor, native: Any) -> None:
        self.peer, self.nbytes, self.memory = peer, descriptor.nbytes, descriptor.memory
        self._have(native)
        #: Freed with this object, which transfers keep alive: another thread may close the endpoint and its targets.
        self._memory = owned(native, lib.ucch_target_free)
        #: Why this process's device cannot reach it directly; empty if it can, or should not.
        self.lack = ""

    def __repr__(self) -> str:
        return f"<Target of {self.nbytes} bytes of {self.memory} memory>"

    @property
    def stale(self) -> bool:
        """True if the peer has closed the region."""
        return bool(self.native.is_stale)

    def close(self) -> None:
        """Release the region.

        Raises:
            ValueError: Transfers to it are under way.
        """
        if self.engine:
            if self.native.users:
                raise ValueError("transfers to this Target are under way: wait for them before it is closed")
            native, self.engine = self.native, 0
            lib.ucch_target_close(native)


@forms
class Endpoint(Sided):
    """A connection with a peer's worker; made by :meth:`Worker.connect`.

    Transfers complete in any order; each request tells when its data is there.
    """

    _kind, _raises = "ucch_peer *", PeerError

    def __init__(self, worker: Core, address: Address, near: bool) -> None:
        self.worker, self.uid, self.near = worker, address.uid, near
        status = ffi.new("int *")
        self._address = ffi.from_buffer(address.worker)
        process = address.process if near else 0
        patience = 0.0 if near else wires.HEARTBEATS * env.get("HEARTBEAT")
        about = self._address, len(self._address), process, patience
        native = lib.ucch_peer_new(worker.native, self.uid, *about, status)
        if status[0]:
            raise failure("the connection", status[0])
        self._have(native)
        self._targets: list[Target] = []
        self._closing = threading.Lock()

    @property
    def alive(self) -> bool:
        """False once this process knows that the peer has ended."""
        engine = self.engine  # read once, as another thread may close it
        return engine != 0 and lib.ucch_peer_status(ffi.cast(self._kind, engine)) == 0

    def counts(self) -> dict[str, int]:
        """Return statistics of this peer.

        Returns:
            dict[str, int]: ``puts`` and ``gets`` that ended well, ``failed`` transfers, ``bytes`` moved,
            ``notifications`` sent.

        Raises:
            PeerError: The endpoint is closed.
        """
        return {name: int(self.native.counts[which]) for name, which in _COUNTS.items()}

    def info(self, local: Region, target: Target) -> dict[str, str]:
        """Describe the paths between two regions.

        Args:
            local: A region of this worker.
            target: A region of the peer.

        Returns:
            dict[str, str]: Paths of ``put`` and ``get``, and where the ``peer`` is; ``not direct`` says why devices of
            one vendor do not reach each other's memory.
        """
        where = "on this host" if self.near else "on another host"
        may = self.near or self.worker.by_hardware
        if may and {local.memory, target.memory} == {"host"}:
            more = ", the kernel single pieces of up to 1 MiB" if self.native.by_kernel else ""
            return {"put": f"direct: libucp writes{more}", "get": f"direct: libucp reads{more}", "peer": where}
        if local.memory == target.memory and target.native.seen:
            return {"put": "direct: our device writes", "get": "direct: our device reads", "peer": where}
        staged = "staged: through pinned memory that both processes see"
        if not self.near:
            wires = lib.ucch_peer_wires(self.native)
            staged = f"staged: through pinned memory of both sides, by {wires} wires"
        found = {"put": staged, "get": f"{staged}, pushed by the owner", "peer": where}
        return found | ({"not direct": target.lack} if local.memory == target.memory != "host" else {})

    def open(self, descriptor: bytes, timeout: float = 30.0) -> Target:
        """Open a region of the peer.

        Args:
            descriptor: The peer's :attr:`Region.descriptor`.
            timeout: Seconds to wait for the peer's answer.

        Returns:
            Target: The region, for :meth:`put` and :meth:`get`.

        Raises:
            FormatError: ``descriptor`` is not a descriptor, or is one of another version.
            ValueError: The region belongs to another process.
            RefusedError: The peer has closed the region.
            CollectiveTimeout: The peer did not answer in time.
            PeerError: The peer has ended.
        """
        found = Descriptor.unpack(descriptor)
        if found.uid != self.uid:
            raise ValueError("the descriptor is of a region of another process, not of this endpoint's peer")
        # Made before the request is sent: if the owner closes the region right after its answer, this becomes stale.
        native = lib.ucch_target_new(self.native, found.region, found.base, found.nbytes, found.memory != "host")
        target = Target(self, found, native)
        try:
            asks = {"what": lib.UCCH_RMA_OPEN, "region": found.region, "bytes": found.nbytes}
            self._start(asks, "the question for a region", None, None, timeout).Wait()
            if found.memory != "host":
                target.lack = self._borrow(found, native)
            elif found.key and (status := lib.ucch_target_key(native, ffi.from_buffer(found.key))) < 0:
                raise failure("the key of a region", status)
        except BaseException:
            target.close()
            raise
        self._targets.append(target)
        return target

    def _borrow(self, found: Descriptor, native: Any) -> str:
        """Map a region of the same vendor on this host into this device. Returns empty, or the reason why not."""
        place = bound()
        if not self.near:
            return "its process is on another host, or in another container"
        if place is None or place.vendor != found.memory:
            return f"this process had no {found.memory} device when it opened the region"
        if len(found.key) != lib.UCCH_RMA_LENT:
            return "its owner's driver does not lend it, as none does memory of pools and torch's expandable segments"
        status = lib.ucch_target_borrow(native, ffi.from_buffer(found.key))
        if status == lib.UCCH_FAIL_DEVICE:
            return c_text(lib.ucch_device_error())
        if status:
            raise failure("the question for a region", status)
        return ""

    def put(
        self,
        local: Region,
        target: Target,
        local_offsets: Any = 0,
        remote_offsets: Any = 0,
        lengths: Any = None,
        *,
        notify: bytes | None = None,
        counter: int | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> Request:
        """Write pieces of ``local`` to a region of the peer.

        Offsets and lengths are in bytes: numbers for one piece, or lists of equal length for up to a million pieces.
        Lists are integer arrays of numpy; arrays of uint64 are not copied, and must not change until the request
        completes.

        Args:
            local: A region of this worker.
            target: A region of the peer.
            local_offsets: Where the pieces begin in ``local``.
            remote_offsets: Where the pieces begin in ``target``.
            lengths: Lengths of the pieces; all of ``local`` by default.
            notify: Notification for the peer's worker, delivered when the data is there.
            counter: Number of a counter of the peer, incremented when the data is there.
            stream: The transfer starts when this stream gets to it.
            timeout: Seconds; the worker's by default.

        Returns:
            Request: Complete when the data is there. ``local`` must not change until then.

        Raises:
            ValueError: A piece does not fit, lists differ in length, a region belongs to another worker or peer, or
                ``notify`` is too long.
            TypeError: An offset or a length is not an integer, ``local`` no region, ``target`` no opened region of the
                peer, or ``notify`` not bytes.
            PeerError: The endpoint is closed, or (from the request) the peer has ended.
            RefusedError: From the request, if the peer has closed the region.
            CollectiveTimeout: From the request, after the timeout.
            NotSupported: ``stream`` is being captured in a graph.
            DeviceError: There is a ``stream``, but this process has no device.
        """
        return self._transfer(
            _PUT, local, target, local_offsets, remote_offsets, lengths, notify, counter, stream, timeout
        )

    def get(
        self,
        local: Region,
        target: Target,
        local_offsets: Any = 0,
        remote_offsets: Any = 0,
        lengths: Any = None,
        *,
        notify: bytes | None = None,
        counter: int | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> Request:
        """Read pieces of the peer's region into ``local``, as :meth:`put`, with its arguments and errors.

        Returns:
            Request: Complete when the data is in ``local``.
        """
        return self._transfer(
            _GET, local, target, local_offsets, remote_offsets, lengths, notify, counter, stream, timeout
        )

    def flush(self, timeout: float | None = None) -> Request:
        """Wait for all earlier transfers with this peer.

        Args:
            timeout: Seconds; the worker's by default.

        Returns:
            Request: Complete when all data is in the peer's memory (puts) or in this process's (gets).

        Raises:
            PeerError: The endpoint is closed, or (from the request) the peer has ended.
            CollectiveTimeout: From the request, after the timeout.
        """
        return self._start({"what": lib.UCCH_RMA_FLUSH}, "flush", None, None, timeout)

    def notify(
        self, data: bytes = b"", *, counter: int | None = None, stream: Any = None, timeout: float | None = None
    ) -> Request:
        """Send a notification behind all earlier transfers and notifications.

        Args:
            data: The notification.
            counter: Number of a counter of the peer to increment as well.
            stream: The notification is sent when this stream gets to it.
            timeout: Seconds; the worker's by default.

        Returns:
            Request: Complete when the notification was sent and all earlier transfers are complete.

        Raises:
            ValueError: ``data`` is too long, or ``counter`` is not a counter's number.
            PeerError: The endpoint is closed, or (from the request) the peer has ended.
            CollectiveTimeout: From the request, after the timeout.
        """
        order = {"what": lib.UCCH_RMA_FLUSH, **_told(data, counter)}
        return self._start(order, "notification", order, stream, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for transfers under way, then close the connection. Transfers that are not done in time fail.

        Args:
            timeout: Seconds to wait.
        """
        self.leave(timeout, timeout)

    def leave(self, timeout: float = 5.0, wait: float = 0.0) -> None:
        """Stop all transfers. libucp closes the connection afterwards: wait up to ``wait`` seconds for that."""
        with self._closing:  # also called by the thread that reads the peer's messages, and by one that connects again
            if not self.engine:
                return
            native, self.engine = self.native, 0
            for target in self._targets:
                if target.engine and not target.native.users:
                    target.close()
            lib.ucch_peer_leave(native, timeout)
            if wait > 0:
                progress_until(lambda: lib.ucch_peer_left(native), wait)
            self.worker.forget(self, native)

    def lose(self) -> None:
        """Mark the peer as dead: its transfers fail now. Nothing else changes."""
        with self._closing:  # else the peer may be freed while this thread waits for the engine
            if self.engine:
                lib.ucch_peer_lose(self.native)

    def _transfer(
        self,
        what: int,
        local: Region,
        target: Target,
        mine: Any,
        theirs: Any,
        lengths: Any,
        notify: bytes | None,
        counter: int | None,
        stream: Any,
        timeout: float | None,
    ) -> Request:
        if notify is None and counter is None and stream is None:  # short transfers complete here, without making lists
            seconds = self.worker.timeout if timeout is None else timeout
            try:
                found = piece(self.engine, what, local.engine, target.engine, mine, theirs, lengths, seconds)
            except AttributeError:  # local is not a Region, or target not a Target: refused below
                found = 0
            if found == 1:
                return ENDED
            if found:
                native = owned(ffi.cast("ucch_transfer *", found), lib.ucch_transfer_free)
                return Request(native, lib.ucch_transfer_op(native), _NAMES[what], (local, target))
        for name, side, kind, made_by in (
            ("local", local, Region, "Worker.register"), ("target", target, Target, "Endpoint.open"),
        ):  # fmt: skip
            if not isinstance(side, kind):
                got = type(side).__name__
                raise TypeError(f"{name}: must be a {kind.__name__}, which {made_by} returns, not {got}")
        if target.peer is not self:
            raise ValueError("target: it is a region of another peer, not of this endpoint's")
        if local.worker is not self.worker:
            raise ValueError("local: it is a region of another worker than this endpoint's")
        fitting = _lists(local.nbytes, target.nbytes, mine, theirs, lengths)
        order = self._listed(what, local, target, fitting)
        if notify is not None or counter is not None:
            order |= _told(notify, counter)
        return self._start(order, _NAMES[what], (local, target, fitting, order), stream, timeout)

    def put_rows(
        self,
        local: Region,
        target: Target,
        lists: tuple[Array, Array, Array],
        rows: Any,
        counter: int,
        stream: Any,
        timeout: float | None,
    ) -> Request:
        """Put lists of uint64 that fit, such as those of pages. ``rows``: see :meth:`Conversion.native`."""
        order = self._listed(_PUT, local, target, lists) | _told(None, counter)
        if rows is not None:
            order["rows"] = rows
        return self._start(order, "pages", (local, target, lists, order), stream, timeout)

    def _listed(self, what: int, local: Region, target: Target, lists: tuple[Array, Array, Array]) -> dict[str, Any]:
        try:
            sides = local.native, target.native
        except ValueError:
            _ = self.native  # raises PeerError: an endpoint closes its targets when its peer ends
            raise
        mine, theirs, lengths = lists
        return {
            "what": what,
            "local": sides[0],
            "target": sides[1],
            "n": len(mine),
            "mine": ffi.from_buffer("uint64_t *", mine),
            "theirs": ffi.from_buffer("uint64_t *", theirs),
            "lengths": ffi.from_buffer("uint64_t *", lengths),
        }

    def _start(self, order: dict[str, Any], what: str, keep: object, stream: Any, timeout: float | None) -> Request:
        seconds = self.worker.timeout if timeout is None else timeout
        return begin(ffi.NULL, self.native, order, what, keep, stream, seconds)


def _told(data: Any, counter: int | None) -> dict[str, Any]:
    """Fields of an ``ucch_order`` for a notification."""
    if counter is not None and not 0 <= counter < 1 << 31:
        raise ValueError(f"counter: {counter} is not the number of a counter")
    told: dict[str, Any] = {"tells": 1, "counter": 0 if counter is None else counter + 1}
    if data is not None and not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"notify: must be bytes, not {type(data).__name__}")
    if not data:
        return told
    if len(data) > lib.UCCH_RMA_NOTICE:
        raise ValueError(f"notify: {len(data)} bytes; a notification may have {lib.UCCH_RMA_NOTICE}")
    return told | {"notification": ffi.from_buffer(data), "notification_bytes": len(data)}


def _lists(here: int, there: int, local: Any, remote: Any, lengths: Any) -> tuple[Array, Array, Array]:
    """Lists of equal length. ``ValueError`` names the first piece that does not fit."""
    size = here if lengths is None else lengths
    is_one = type(local) is type(remote) is type(size) is int and min(local, remote, size) >= 0
    if is_one and local + size <= here and remote + size <= there:
        one = np.array((local, remote, size), np.uint64)  # more numpy calls would take longer than the transfer
        return one[:1], one[1:2], one[2:]
    given = {"local_offsets": local, "remote_offsets": remote, "lengths": here if lengths is None else lengths}
    found = {name: _list(name, value) for name, value in given.items()}
    count = max(len(each) for each in found.values())
    if count > lib.UCCH_RMA_ENTRIES:
        raise ValueError(f"{count} pieces; a transfer may have {lib.UCCH_RMA_ENTRIES}")
    for name, each in found.items():
        if len(each) != count and len(each) != 1:
            raise ValueError(f"{name}: {len(each)} entries, but another list has {count}")
        if len(each) != count:
            found[name] = np.full(count, each[0], np.uint64)
    mine, theirs, sizes = found.values()
    for name, offsets, room in (("local_offsets", mine, here), ("remote_offsets", theirs, there)):
        i = lib.ucch_pieces_outside(room, count, *(ffi.from_buffer("uint64_t *", each) for each in (offsets, sizes)))
        if i >= 0:
            raise ValueError(f"{name}[{i}]: {sizes[i]} bytes at {offsets[i]} do not fit into the region's {room} bytes")
    return mine, theirs, sizes


def _list(name: str, value: Any) -> Array:
    array = np.atleast_1d(np.asarray(value))
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise TypeError(f"{name}: must be a number, or a list or array of integers, not {value!r:.60}")
    if array.dtype.kind == "i" and array.min() < 0:
        raise ValueError(f"{name}[{int(array.argmin())}]: {array.min()} is negative")
    return np.ascontiguousarray(array, np.uint64)
