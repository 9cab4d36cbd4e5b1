"""One wait during which progress is made."""

import time
from itertools import count

import pytest

from ucc_hetero.native.waiting import progress_until


def test_until_it_is_done() -> None:
    turns = count()
    assert progress_until(lambda: next(turns) == 5)
    assert next(turns) == 6


def test_until_it_is_hopeless_or_time_is_up() -> None:
    turns = count()
    assert not progress_until(lambda: False, hopeless=lambda: next(turns) == 5)
    assert next(turns) == 6
    began = time.monotonic()
    assert not progress_until(lambda: False, 0.02)
    assert time.monotonic() - began >= 0.02
    assert progress_until(lambda: True, 0.02, lambda: True)


def test_what_a_look_raises_is_passed_on() -> None:
    def look() -> None:
        raise RuntimeError("the peer is gone")

    with pytest.raises(RuntimeError, match="the peer is gone"):
        progress_until(lambda: False, hopeless=look)
