"""Ranks that come later: those that are there let them in, and all of them meet in a store (torch's, or :mod:`.store`).

A newcomer takes a number and waits to be called. The first of the ranks that are there calls all newcomers that have
come; those that answer are the last ranks of the new communicator, in the order of their numbers.
"""

from __future__ import annotations

import json
import math
import time
from functools import partial
from typing import Any

from ..errors import CollectiveTimeout
from ..native.waiting import progress_until
from .storecomm import StoreComm

#: Seconds in which a newcomer must answer, or it is gone; and between looks at the store.
_ANSWER_S, _LOOK_S = 5.0, 1e-2
_PLACE = "ucch/growth"


def arrive(store: Any, seconds: float) -> StoreComm:
    """Be let in by the ranks that are there: the exchange among all. ``CollectiveTimeout`` after ``seconds``."""
    until = time.monotonic() + (seconds or math.inf)
    while True:
        number = store.add(f"{_PLACE}/came", 1)
        called = f"{_PLACE}/called/{number}"
        if not progress_until(partial(store.check, [called]), until - time.monotonic(), longest=_LOOK_S):
            raise CollectiveTimeout(f"no rank of a communicator has called Grow() with this store within {seconds:g} s")
        place = store.get(called).decode()
        store.set(f"{place}/here/{number}", "")
        listed = f"{place}/list"
        if progress_until(partial(store.check, [listed]), 2 * _ANSWER_S, longest=_LOOK_S):
            before, numbers = json.loads(store.get(listed))
            if number in numbers:
                return _meet(store, place, before + numbers.index(number), before + len(numbers), seconds)


def let_in(mpi: Any, store: Any, least: int, seconds: float) -> StoreComm | None:
    """Call all newcomers that have come by now: the exchange among all; None if fewer than ``least`` have.
    Collective."""
    rank, before = int(mpi.Get_rank()), int(mpi.Get_size())
    place, count = mpi.allgather(_call(store, before, least) if rank == 0 else ("", 0))[0]
    return _meet(store, place, rank, before + count, seconds) if count else None


def _call(store: Any, before: int, least: int) -> tuple[str, int]:
    """(where in the store all meet, how many newcomers have answered)."""
    came, done = store.add(f"{_PLACE}/came", 0), store.add(f"{_PLACE}/done", 0)
    new = range(done + 1, came + 1)
    if len(new) < least:
        return "", 0
    place = f"{_PLACE}/{store.add(f'{_PLACE}/times', 1)}"
    store.add(f"{_PLACE}/done", len(new))
    for number in new:
        store.set(f"{_PLACE}/called/{number}", place)
    keys = {number: f"{place}/here/{number}" for number in new}
    progress_until(partial(store.check, list(keys.values())), _ANSWER_S, longest=_LOOK_S)
    numbers = [number for number, key in keys.items() if store.check([key])]
    store.set(f"{place}/list", json.dumps([before, numbers]))
    return place, len(numbers)


def _meet(store: Any, place: str, rank: int, size: int, seconds: float) -> StoreComm:
    return StoreComm.first(store, rank, range(size), size, seconds, place=place)
