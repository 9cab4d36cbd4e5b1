"""Turns at creating teams and communicators: one thread at a time, the same one on every rank that takes part.

libucc sends what it exchanges during a creation under one tag. Threads that create teams at the same time, each with a
communicator of its own, would take each other's messages, and locks taken in different orders on different ranks would
wait for each other for ever.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: The longest pause after a failed attempt, in seconds.
_PAUSE = 0.002

_creating = threading.RLock()


@contextmanager
def turn(everyone: Callable[[bool], bool]) -> Iterator[None]:
    """Hold this process's turn to create something while every other rank of it holds theirs.

    ``everyone(ready)`` tells the ranks whether this one is ready and returns whether all are; collective among them,
    and repeated by all until they are.
    """
    while True:
        ready = _creating.acquire(blocking=False)
        try:
            together = everyone(ready)
        except BaseException:
            if ready:
                _creating.release()
            raise
        if together:
            break
        if ready:
            _creating.release()
        time.sleep(random.uniform(0, _PAUSE))
    try:
        yield
    finally:
        _creating.release()


def alone() -> threading.RLock:
    """Held while this process destroys something: libucc returns its number to the table that creations exchange.

    A table that changes on its way makes ranks choose different numbers for one team.
    """
    return _creating
