"""Waits during which progress is made, and blocking calls in threads of their own, which have a limit."""

import _thread
import os
import threading
import time
from itertools import count
from types import SimpleNamespace
from typing import NoReturn

import pytest

from ucc_hetero.bindings.handle import locked
from ucc_hetero.native import aside, waiting
from ucc_hetero.native.aside import Aside
from ucc_hetero.native.waiting import progress_until


def gone() -> NoReturn:
    raise RuntimeError("the peer is gone")


def test_until_it_is_done_or_hopeless() -> None:
    for how in ({}, {"hopeless": lambda: False}):
        turns = count()
        assert progress_until(lambda: next(turns) == 5, **how) and next(turns) == 6  # noqa: B023
    turns = count()
    assert not progress_until(lambda: False, hopeless=lambda: next(turns) == 5) and next(turns) == 6
    assert progress_until(lambda: True, 0.02, lambda: True)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        progress_until(lambda: False, hopeless=gone)


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
    assert len(looks) == 2 and seconds[0] == 24.0


def test_a_limit_holds_while_another_thread_has_the_lock() -> None:
    """As one that waits in a library for a peer which never comes."""
    taken, over = threading.Event(), threading.Event()
    holder = Aside(lambda: locked(lambda: (taken.set(), over.wait())))
    taken.wait()
    try:
        assert not progress_until(lambda: False, 0.01)
    finally:
        over.set()
        assert holder.ended(600)


def test_calls_aside() -> None:
    thread = Aside(threading.get_ident)
    assert thread.ended(600) and thread.ended() and thread.result() != threading.get_ident()
    failed = Aside(gone)
    assert failed.ended(600)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        failed.result()
    go = threading.Event()
    late = Aside(go.wait)
    assert not late.ended(0.01)
    go.set()
    assert late.ended(600) and late.result()


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


def test_a_thread_that_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for whose first frame there is no memory; threading.Thread.start() never returns then."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    monkeypatch.setattr(aside, "_idle", [])
    assert not Aside(time.time).ended(0.01)


def test_at_pythons_end_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins no thread for functions of ``atexit``; another reason is an error."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(refusals.pop())

    refusals = ["can't start new thread", "can't create new thread at interpreter shutdown"]
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    monkeypatch.setattr(aside, "_idle", [])
    assert Aside(threading.get_ident).result() == threading.get_ident()
    with pytest.raises(RuntimeError, match="start new thread"):
        Aside(time.time)
