"""Numbers of communicators: part of every message tag, and one on all ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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


def agree(last: Sequence[int], next_used: Sequence[int], ask: Callable[[bytes], Iterable[bytes]]) -> int:
    """A number above all that these ranks have claimed before. A communicator's number is its rest by `MOST`: one that
    is free on every rank.

    Messages that were not received may still be on their way when their communicator is freed: its number rests.

    Args:
        last, next_used: `taken` of each rank.
        ask: exchanges the numbers in use, as bits; called on all ranks where the next number may be in use on one.
    """
    following = 1 + max(last)
    if following < min(next_used):
        return following
    bits = 0
    for each in ask(bytes(_ids)):
        bits |= int.from_bytes(each, "little")
    claimed = _free(bits, following)
    own, after = int.from_bytes(_ids, "little"), claimed + 1
    while after < claimed + MOST and not own >> after % MOST & 1:
        after += 1
    _next_used[0] = after
    return claimed


def claim(claimed: int) -> None:
    """Take the number that the ranks have agreed upon."""
    _ids[claimed % MOST >> 3] |= 1 << (claimed & 7)
    _last[0] = claimed


def _free(bits: int, first: int) -> int:
    for claimed in range(first, first + MOST):
        if not bits >> claimed % MOST & 1:
            return claimed
    raise UCCHError(f"{MOST} communicators exist already; Free those that are no longer used")


def release(number: int) -> None:
    """Let a number be used again."""
    _ids[number >> 3] &= ~(1 << (number & 7))
