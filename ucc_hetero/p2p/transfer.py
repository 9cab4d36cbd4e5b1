"""One message of a communicator: its native object, its memory, and its tag in UCX."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from ..bootstrap.faults import EXCHANGE_ERRORS
from ..bootstrap.timely import largest_tag
from ..buffers import Buffer, copy, pack
from ..native.libraries import lib, owned
from ..transport.bounce import Bounce

#: Bits of a UCX tag, high to low: communicator (12), message of a program (1), offer (1), message of this package's own
#: calls (1; ``UCCH_OWN_BIT``), answer (1), source rank (17), MPI tag (31).
SOURCE_SHIFT, COMM_SHIFT = lib.UCCH_SOURCE_BIT, 52
TAG_MASK = (1 << SOURCE_SHIFT) - 1
OWN = 1 << lib.UCCH_OWN_BIT
SOURCE_MASK = OWN - 1 - TAG_MASK


def source_and_tag(code: int) -> tuple[int, int]:
    return (code & SOURCE_MASK) >> SOURCE_SHIFT, code & TAG_MASK


def object_waits(mpi: Any, source: int, tag: int) -> bool:
    """True if a Python object has arrived over ``mpi``, which no receive of a buffer matches."""
    if hasattr(mpi, "world"):  # the ranks met in a store: no MPI
        return False
    with suppress(*EXCHANGE_ERRORS):
        return bool(mpi.Iprobe(source, min(tag, largest_tag())))
    return False


class Transfer:
    """A message by libucp: its native object, its memory, peer and tag."""

    __slots__ = (
        "begin", "begins", "bounce", "buffer", "handle", "lanes", "offered", "op", "original", "owner",
        "peer", "pinned", "stream", "sync", "tag", "what",
    )  # fmt: skip

    def __init__(
        self,
        what: str,
        original: Buffer,
        peer: int,
        tag: int,
        bounce: Bounce | None = None,
        stream: int | None = None,
        *,
        pinned: bool = True,
        native: tuple[Any, object] | None = None,
    ) -> None:
        """``pinned``: with ``bounce``, receive into pinned memory. ``native``: a message that has begun, and its
        owner."""
        made = native or (owned(lib.ucch_message_new(), lib.ucch_message_free), None)
        self.handle, self.owner = made
        self.op = lib.ucch_message_op(self.handle)
        self.what, self.peer, self.tag = what, peer, tag
        #: The caller's memory.
        self.original = original
        self.bounce = bounce
        #: Stream in which the message starts; None for a start now.
        self.stream = stream
        self.pinned = pinned
        #: Contiguous memory that is sent or received: the caller's, or a copy of it.
        self.buffer = self._staged()
        #: The native function that starts it with the buffer that it was last started with; None before.
        self.begin: Callable[[float], Any] | None = None
        self.begins: Buffer | None = None
        self.sync = False
        #: True for a send that libucp only matches while a lane moves the data; the lanes, kept alive for that.
        self.offered, self.lanes = False, None

    def _staged(self) -> Buffer:
        if self.bounce is None:
            return pack(self.original)
        staged = self.bounce.memory_for(self.original, pinned=self.pinned)
        if self.what != "receive":
            self.bounce.down(self.original, staged, self.stream)
        return staged

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    @property
    def moved(self) -> bool:
        """True if a copy of the caller's memory is sent or received instead of the memory itself."""
        return self.buffer is not self.original

    def held(self) -> bool:
        """True if libucp or a stream still uses the memory, even if the transfer has ended for the caller."""
        return bool(lib.ucch_message_held(self.handle))

    def cancel(self) -> None:
        lib.ucch_message_cancel(self.handle)

    def refill(self) -> None:
        """Copy the caller's data again, before a persistent send is started."""
        if self.bounce is not None or self.original.layout is not None:
            self.buffer = self._staged()

    def spread(self) -> None:
        if self.bounce is None:
            if self.buffer is not self.original:
                copy(self.buffer, self.original)
        elif not self.handle.by_lane:
            self.bounce.up(self.buffer, self.original, self.envelope()[2])

    def envelope(self) -> tuple[int, int, int]:
        info = self.handle.info
        return (*source_and_tag(int(info.sender_tag)), int(info.length))


class LaneMessage:
    """A message in a stream that uses a lane (p2p/lane.c). Like a :class:`Transfer`, but never cancelled or
    restarted."""

    __slots__ = ("address", "handle", "how", "keep", "nbytes", "op", "peer", "stream", "tag")

    bounce, moved = None, False

    def __init__(self, how: int, address: int, nbytes: int, peer: int, tag: int, stream: int, keep: object) -> None:
        """``how``: flags ``UCCH_LANE_MESSAGE_*``. ``keep``: object that keeps the memory alive."""
        self.handle = owned(lib.ucch_lane_message_new(), lib.ucch_lane_message_free)
        self.op = lib.ucch_lane_message_op(self.handle)
        self.how, self.peer, self.tag, self.stream = how, peer, tag, stream
        self.address, self.nbytes, self.keep = address, nbytes, keep

    @property
    def what(self) -> str:
        if self.how & lib.UCCH_LANE_MESSAGE_RECV:
            return "receive"
        return "synchronous send" if self.how & lib.UCCH_LANE_MESSAGE_SYNC else "send"

    def held(self) -> bool:
        return bool(lib.ucch_lane_message_held(self.handle))

    def cancel(self) -> None:
        """Do nothing: messages of lanes cannot be cancelled."""

    def spread(self) -> None:
        """Do nothing: the data arrived in the caller's memory."""

    def envelope(self) -> tuple[int, int, int]:
        return self.peer, int(self.handle.found_tag), int(self.handle.found_bytes)


#: A message by libucp or by lanes.
AnyTransfer: TypeAlias = Transfer | LaneMessage
