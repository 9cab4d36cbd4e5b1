"""Numbers of communicators: part of every message tag, and one on all ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UCCHError

#: Communicator numbers in use by this process, a bit each, and the last one taken.
_ids = bytearray(512)
_last = [-1]


def taken() -> tuple[int, bytes]:
    """(the last number that this process has taken, those in use as bits)."""
    return _last[0], bytes(_ids).rstrip(b"\0")


def claim(everyone: Iterable[tuple[int, bytes]]) -> int:
    """A number that is free on every rank; the one that has been free for longest, as far as possible.

    Messages that were not received may still be on their way when their communicator is freed: its number rests.
    """
    numbers, used = list(everyone), 0
    for _, ids in numbers:
        used |= int.from_bytes(ids, "little")
    count = 8 * len(_ids)
    first = 1 + max(last for last, _ in numbers)
    for number in range(first, first + count):
        number %= count
        if not used >> number & 1:
            _ids[number >> 3] |= 1 << (number & 7)
            _last[0] = number
            return number
    raise UCCHError(f"{count} communicators exist already; Free those that are no longer used")


def release(number: int) -> None:
    """Let a number be used again."""
    _ids[number >> 3] &= ~(1 << (number & 7))
