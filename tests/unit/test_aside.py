"""Calls in threads of their own: their results, errors and limits, and threads that never begin."""

import _thread
import threading
import time

import pytest

from ucc_hetero.native.aside import Aside


def test_results_and_errors() -> None:
    thread = Aside(threading.get_ident)
    assert thread.ended(600) and thread.ended() and thread.result() != threading.get_ident()
    failed = Aside(lambda: [].pop())
    assert failed.ended(600)
    with pytest.raises(IndexError):
        failed.result()


def test_a_limit() -> None:
    go = threading.Event()
    late = Aside(go.wait)
    assert not late.ended(0.01)
    go.set()
    assert late.ended(600) and late.result()


def test_a_thread_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for whose first frame there is no memory; threading.Thread.start() never returns then."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    assert not Aside(time.time).ended(0.01)
