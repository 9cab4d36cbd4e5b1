"""Calls in threads of their own: their results, errors and limits, and threads that never begin."""

import _thread
import os
import threading
import time

import pytest

from ucc_hetero.native import aside
from ucc_hetero.native.aside import Aside


def test_results_and_errors() -> None:
    thread = Aside(threading.get_ident)
    assert thread.ended(600) and thread.ended() and thread.result() != threading.get_ident()
    failed = Aside(lambda: [].pop())
    assert failed.ended(600)
    with pytest.raises(IndexError):
        failed.result()


def test_a_thread_that_has_ended_its_call_is_given_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a child of the process, which has none of its threads, starts one."""
    first = Aside(threading.get_ident)
    while not aside._idle:
        os.sched_yield()
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", None)
        again = Aside(threading.get_ident)
        assert again.ended(600) and again.result() == first.result()
    while not aside._idle:
        os.sched_yield()
    child = os.fork()
    if not child:
        os._exit(not Aside(threading.get_ident).ended(600))
    assert os.waitpid(child, 0)[1] == 0


def test_a_limit() -> None:
    go = threading.Event()
    late = Aside(go.wait)
    assert not late.ended(0.01)
    go.set()
    assert late.ended(600) and late.result()


def test_a_thread_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for whose first frame there is no memory; threading.Thread.start() never returns then."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    monkeypatch.setattr(aside, "_idle", [])
    assert not Aside(time.time).ended(0.01)
