"""Creations of communicators that are under way when the program ends: those complete that all ranks have begun."""

import random
import threading

import pytest

from ucc_hetero.bootstrap import creations


class Thread:
    """A thread in a creation, until `leave`."""

    def __init__(self, *what):
        self._what, self._goes, self._in = what, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._create)
        self._thread.start()
        assert self._in.wait(60)
        self.ident = self._thread.ident

    def _create(self):
        with creations.creation(*self._what):
            self._in.set()
            assert self._goes.wait(60)

    def leave(self):
        self._goes.set()
        self._thread.join(60)


class Ranks:
    """Other ranks, by number: how many creations each has begun."""

    def __init__(self, begun):
        self._begun = begun

    def allgather(self, mine):
        return [mine, *self._begun.items()]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name, value in {"_begun": {}, "_active": {}, "_completing": set(), "_over": False}.items():
        monkeypatch.setattr(creations, name, value)


def test_creations_that_all_ranks_have_begun():
    """Of three ranks, of which this is the first, with one thread for each communicator."""
    places, expected, begun = (0, 1, 2), {}, {1: {}, 2: {}}
    for claimed in range(-1, 20):
        mine, theirs = random.randrange(1, 4), [random.randrange(5) for _ in begun]
        for _ in range(mine - 1):
            Thread(places, claimed).leave()
        expected[Thread(places, claimed)] = min(theirs) >= mine
        for rank, number in zip(begun, theirs, strict=True):
            begun[rank][creations.Key(places, claimed)] = number
    creations.agree(Ranks(begun), 0)
    assert [creations.completes(thread.ident) for thread in expected] == [*expected.values()]
    with pytest.raises(SystemExit), creations.creation(places):
        raise AssertionError("none is begun any more")
    for thread in expected:
        thread.leave()
        assert not creations.completes(thread.ident)


def test_what_is_under_way():
    """Of a communicator's creations; its number may have a new use once it is freed."""
    one, other = Thread((0, 1), 7), Thread((0, 1), 8, 3)
    assert [creations.under_way(claimed) for claimed in (7, 8, 9)] == [True, True, False]
    one.leave()
    assert not creations.under_way(7)
    creations.forget(7)
    again, theirs = Thread((0, 1), 7), {creations.Key((0, 1), 7): 1, creations.Key((0, 1), 8, 4): 1}  # another tag
    creations.agree(Ranks({1: theirs}), 0)
    assert creations.completes(again.ident) and not creations.completes(other.ident)
    again.leave()
    other.leave()
