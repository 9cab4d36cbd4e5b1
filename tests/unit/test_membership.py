"""The numbers of communicators: free on every rank, and not soon used again."""

from __future__ import annotations

import pytest

from ucc_hetero import UCCHError
from ucc_hetero.bootstrap import group

NONE = bytes(512)


@pytest.fixture(autouse=True)
def own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No communicator exists yet."""
    monkeypatch.setattr(group, "_ids", bytearray(512))
    monkeypatch.setattr(group, "_last", [-1])


def taken(*numbers: int) -> bytes:
    bits = bytearray(512)
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return bytes(bits)


def test_numbers_follow_each_other() -> None:
    assert [group._claim([(group._last[0], bytes(group._ids))]) for _ in range(20)] == list(range(20))


def test_a_freed_number_rests() -> None:
    """Messages of its last communicator may still be on their way."""
    assert group._claim([(7, taken(3))]) == 8


def test_all_ranks_find_the_same_number() -> None:
    """The last one anywhere counts, and so does what is taken anywhere."""
    assert group._claim([(4, NONE), (9, taken(10, 12)), (2, taken(11))]) == 13


def test_numbers_begin_again() -> None:
    assert group._claim([(4095, taken(0, 1))]) == 2


def test_no_number_is_left() -> None:
    with pytest.raises(UCCHError, match="4096 communicators"):
        group._claim([(5, b"\xff" * 512)])
