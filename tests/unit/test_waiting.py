"""One wait during which progress is made."""

import threading
import time
from itertools import count
from types import SimpleNamespace

import pytest

from ucc_hetero.bindings.handle import locked
from ucc_hetero.native import waiting
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


def test_looks_are_apart_and_none_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, looks = [0.0], []

    def asked() -> bool:
        seconds[0] += 1.0
        return False

    def hopeless() -> bool:
        looks.append(seconds[0])
        return len(looks) == 3

    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=lambda nap: None)
    monkeypatch.setattr(waiting, "time", clock)
    assert not progress_until(asked, hopeless=hopeless, spin=10.0, apart=4.0)
    assert looks == [10.0, 14.0, 18.0]
    looks.clear()
    assert not progress_until(asked, 5.0, hopeless, apart=4.0)
    assert len(looks) == 2


def test_a_limit_holds_while_another_thread_has_the_lock() -> None:
    """As one that waits in a library for a peer which never comes."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        locked(lambda: (taken.set(), over.wait()))

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        taken.wait()
        assert not progress_until(lambda: False, 0.01)
    finally:
        over.set()
        thread.join()
