"""Numbers of communicators: part of every message tag, and one on all ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import UCCHError

#: Communicators that a process can have.
MOST = 4096

#: Communicator numbers in use by this process, a bit each; the last one claimed, and the first above it that may be
#: in use.
_ids = bytearray(MOST // 8)
_last, _next_used = [-1], [MOST]


def taken() -> tuple[int, int]:
    """(the last number that this process has claimed, the first one above it that may be in use)."""
    return _last[0], _next_used[0]


def free(following: int, ask: Callable[[bytes], Iterable[bytes]]) -> int:
    """The first number from ``following`` on that is free on all of these ranks; collective among them.

    A communicator's number is its rest by `MOST`. Messages that were not received may still be on their way when their
    communicator is freed: the number that these ranks claim is above all that they have claimed before. ``ask``
    exchanges the numbers in use, as bits.
    """
    bits = 0
    for each in ask(bytes(_ids)):
        bits |= int.from_bytes(each, "little")
    claimed = next((each for each in range(following, following + MOST) if not bits >> each % MOST & 1), -1)
    if claimed < 0:
        raise UCCHError(f"{MOST} communicators exist already; Free those that are no longer used")
    own, after = int.from_bytes(_ids, "little"), claimed + 1
    while after < claimed + MOST and not own >> after % MOST & 1:
        after += 1
    _next_used[0] = after
    return claimed


def claim(claimed: int) -> None:
    _ids[claimed % MOST >> 3] |= 1 << (claimed & 7)
    _last[0] = claimed


def release(number: int) -> None:
    _ids[number >> 3] &= ~(1 << (number & 7))
