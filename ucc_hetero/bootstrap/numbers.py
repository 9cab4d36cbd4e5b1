"""Numbers of communicators: part of every message tag, and one on all ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UCCHError

#: Communicators that a process can have.
MOST = 4096

#: Communicator numbers in use by this process, a bit each, and the last one claimed.
_ids = bytearray(MOST // 8)
_last = [-1]


def taken() -> tuple[int, bytes]:
    """(the last number that this process has claimed, those in use as bits)."""
    return _last[0], bytes(_ids).rstrip(b"\0")


def claim(everyone: Iterable[tuple[int, bytes]]) -> int:
    """A number above all that these ranks have claimed before. A communicator's number is its rest by `MOST`: one that
    is free on every rank.

    Messages that were not received may still be on their way when their communicator is freed: its number rests.
    """
    numbers, used = list(everyone), 0
    for _, ids in numbers:
        used |= int.from_bytes(ids, "little")
    first = 1 + max(last for last, _ in numbers)
    for claimed in range(first, first + MOST):
        number = claimed % MOST
        if not used >> number & 1:
            _ids[number >> 3] |= 1 << (number & 7)
            _last[0] = claimed
            return claimed
    raise UCCHError(f"{MOST} communicators exist already; Free those that are no longer used")


def release(number: int) -> None:
    """Let a number be used again."""
    _ids[number >> 3] &= ~(1 << (number & 7))
