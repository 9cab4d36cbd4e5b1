"""Turns at creating teams and communicators: one thread at a time, the same one on every rank that takes part.

libucc sends what it exchanges during a creation under one tag. Threads that create teams at the same time, each with a
communicator of its own, would take each other's messages, and locks taken in different orders on different ranks would
wait for each other for ever.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

#: The longest pause after a failed attempt, in seconds.
_PAUSE = 0.002

_creating = threading.RLock()


class Turn:
    """A context in which this process has its turn to create something, and so has every other rank of it.

    ``everyone(ready)`` tells the ranks whether this one is ready and returns whether all are; collective among them,
    and repeated by all until they are.
    """

    def __init__(self, everyone: Callable[[bool], bool]) -> None:
        self._everyone = everyone

    def __enter__(self) -> None:
        while True:
            ready = _creating.acquire(blocking=False)
            together = False
            try:
                together = self._everyone(ready)
            finally:
                if ready and not together:
                    _creating.release()
            if together:
                return
            time.sleep(random.uniform(0, _PAUSE))

    def __exit__(self, *error: object) -> None:
        _creating.release()


def alone() -> threading.RLock:
    """Held while this process destroys something: libucc returns its number to the table that creations exchange.

    A table that changes on its way makes ranks choose different numbers for one team.
    """
    return _creating
