"""The arrays of messages: their memory, and the way on which libucp moves it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..bindings.ucc import MemType
from ..bootstrap.membership import Membership
from ..buffers import Buffer, as_buffer
from ..buffers.exporters import describe_fast
from ..calls.preparation import BoundedDict
from ..device import pointer_vendor
from ..transport.bounce import Bounce
from ..transport.paths import MessagePaths
from ..types import DTYPES

#: The buffer of messages to and from MPI.PROC_NULL.
_NOTHING = Buffer(0, 0, DTYPES["uint8"], "host", 0, None, False)


class Arrays:
    """The arrays of one communicator's messages; ``null`` is MPI's ``PROC_NULL``.

    Only the first of several arrays that differ in nothing but the address goes through :func:`as_buffer`, which takes
    ten times as long as the rest. Whether the memory belongs to this rank's device is checked each time: a freed array
    is an error, not a crash.
    """

    def __init__(self, members: Membership, null: int) -> None:
        self._rank, self._device, self._null = members.rank, members.device, null
        self.paths = MessagePaths(members.rank, members.facts, members.topology, members.staged)
        self._bounce: Bounce | None = None
        #: (fast description of an array, writable) -> buffer without owner.
        self._known: BoundedDict[tuple[Hashable, bool], Buffer] = BoundedDict()

    def bind(self, array: Any, peer: int, *, writable: bool) -> Buffer:
        """Return the buffer of an array; internal calls may pass a buffer. Errors as in :func:`as_buffer`.

        For peer ``PROC_NULL`` the array is not used at all.
        """
        if peer == self._null:
            return _NOTHING
        if type(array) is Buffer:
            return array
        seen = describe_fast(array)
        if seen is None:
            return self._as_buffer(array, writable)
        like = self._known.get((seen[0], writable))
        if like is not None:
            return Buffer(seen[1], like.count, like.dtype, like.vendor, like.device, array, like.readonly)
        found = self._as_buffer(array, writable)
        if found.layout is None and found.count:
            # Without the array as owner: the cache would keep its memory alive.
            plain = found.ptr, found.count, found.dtype, found.vendor, found.device, None, found.readonly
            self._known.keep((seen[0], writable), Buffer(*plain))
        return found

    def _as_buffer(self, array: Any, writable: bool) -> Buffer:
        return as_buffer(array, writable=writable, argument="buf", rank=self._rank, pointer_vendor=pointer_vendor)

    def on_device(self, buffer: Buffer) -> bool:
        """True if the buffer is on this rank's device. Raises if it is on another device."""
        if buffer.vendor == "host":
            return False
        self._device.check((("buf", buffer),))
        return True

    def bounce_for(self, buffer: Buffer, peer: int, *, in_stream: bool = False, copied: bool = False) -> Bounce | None:
        """The bounce buffers of a message through host memory; None if UCX moves the caller's memory itself.

        ``copied``: the data is copied now, as for a buffered send. ``in_stream``: see :meth:`.MessagePaths.wanted`.
        Raises if the buffer is on another device.
        """
        device = self._device
        if peer == self._null or not self.on_device(buffer):
            return None
        if not (copied or self.paths.wanted(peer, in_stream=in_stream)):
            return None
        if self._bounce is None:
            assert device.runtime is not None
            self._bounce = Bounce(device.runtime)
        return self._bounce

    def memory(self, buffer: Buffer) -> int:
        """libucp's memory type of a buffer that :meth:`bounce_for` has checked."""
        return int(MemType.HOST) if buffer.vendor == "host" else self._device.memory
