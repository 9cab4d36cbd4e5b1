"""Data of messages: the arrays of sends and receives, told at a glance where possible, and the way their data takes.

Every array is looked at properly once for its kind (:func:`as_buffer`); the next one that looks the same costs a tenth
of that. That it still is memory of this rank's device is asked each time: a freed array is an error, not a crash.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from ..bindings.ucc_enums import MemType
from ..bootstrap.group import Membership
from ..buffers import Buffer, as_buffer, copy, empty_like
from ..buffers.fast_path import glance
from ..device import pointer_vendor
from ..errors import NotSupported
from ..transport.bounce import Bounce
from ..transport.detours import Detours
from ..types import DTYPES
from .program_cache import Kinds

__all__ = ["Contents", "copied", "part_of"]


#: The buffer of a message to or from MPI.PROC_NULL.
_NOTHING = Buffer(0, 0, DTYPES["uint8"], "host", 0, None, False)


class Contents:
    """The arrays of one communicator's messages; ``null`` is the rank that stands for nobody."""

    def __init__(self, members: Membership, null: int) -> None:
        self._rank, self._device, self._null = members.rank, members.device, null
        self.detours = Detours(members.rank, members.facts, members.topology, members.tuning, members.windows.near)
        self._bounces: dict[bool, Bounce] = {}
        #: What arrays are, by what tells their kind apart and whether they are written to.
        self._known: Kinds[tuple[Hashable, bool], Buffer] = Kinds()

    def bind(self, array: Any, peer: int, *, writable: bool) -> Buffer:
        """The buffer that a caller's ``buf`` is, whatever it is in a message to nobody; errors as those of
        :func:`as_buffer`, which the package's own calls have asked already."""
        if peer == self._null:
            return _NOTHING
        if type(array) is Buffer:
            return array
        seen = glance(array)
        if seen is None:
            return self._look(array, writable)
        like = self._known.get((seen[0], writable))
        if like is not None:
            return Buffer(seen[1], like.count, like.dtype, like.vendor, like.device, array, like.readonly)
        found = self._look(array, writable)
        if found.layout is None and found.count:
            # Not the array: that would keep its memory.
            plain = found.ptr, found.count, found.dtype, found.vendor, found.device, None, found.readonly
            self._known.keep((seen[0], writable), Buffer(*plain))
        return found

    def _look(self, array: Any, writable: bool) -> Buffer:
        return as_buffer(array, writable=writable, argument="buf", rank=self._rank, pointer_vendor=pointer_vendor)

    def bounced(self, buffer: Buffer, peer: int) -> Bounce | None:
        """Bounce buffer that moves a message's data by way of the host, where it must not or cannot go straight.

        Every mistake about where the buffer lies raises here.
        """
        device = self._device
        if buffer.vendor == "host" or peer == self._null or not device.holds((("buf", buffer),)):
            return None
        if not self.detours.wanted(peer, buffer.nbytes):
            return None
        spare = self.detours.arenas(peer)
        if spare not in self._bounces:
            assert device.runtime is not None
            self._bounces[spare] = Bounce(device.runtime, spare=spare)
        return self._bounces[spare]

    def memory(self, buffer: Buffer) -> int:
        """The memory type for libucp of a buffer that :meth:`bounced` has seen."""
        return int(MemType.HOST) if buffer.vendor == "host" else self._device.memory


def copied(source: Buffer, rank: int) -> Buffer:
    """A copy of what a buffered send carries."""
    if source.vendor != "host":
        raise NotSupported(f"rank {rank}: buffered sends are for host memory; use Isend")
    kept = empty_like(source)
    copy(source, kept)
    return kept


def part_of(buffer: Buffer, first: int, count: int) -> Buffer:
    """Some of a buffer's elements."""
    about = buffer.dtype, buffer.vendor, buffer.device, buffer.owner, buffer.readonly
    if buffer.layout is None:
        return Buffer(buffer.ptr + first * buffer.dtype.itemsize, count, *about)
    return Buffer(buffer.ptr, count, *about, replace(buffer.layout, first=buffer.layout.first + first))
