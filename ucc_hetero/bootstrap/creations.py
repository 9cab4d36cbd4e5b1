"""Communicators that threads of this process are creating, and which of them complete although the program ends.

The ranks of a communicator agree to create it and then call MPI, which nothing interrupts. A rank that left in between
would keep the others in MPI.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Key(NamedTuple):
    """Identifies the creations that all of these ranks make in one order."""

    #: Ranks in the whole job.
    places: tuple[int, ...]
    #: Number of the communicator from which they create; -1: one of the caller's, which are not told apart.
    claimed: int = -1
    #: Create_group's tag; None: another call.
    tag: int | None = None


_lock = threading.Lock()
#: Creations that this process has begun.
_begun: dict[Key, int] = {}
#: By thread: the creation that it is in, and its place in their order.
_active: dict[int, tuple[Key, int]] = {}
#: Threads whose creations all their ranks have begun.
_completing: set[int] = set()
#: No thread begins one any more.
_over = False


@contextmanager
def creation(places: Sequence[int], claimed: int = -1, tag: int | None = None) -> Iterator[None]:
    """A context in which this thread creates a communicator together with other ranks; for the arguments see `Key`."""
    thread, key = threading.get_ident(), Key(tuple(places), claimed, tag)
    try:
        with _lock:
            if _over:
                raise SystemExit
            _begun[key] = _begun.get(key, 0) + 1
            _active[thread] = key, _begun[key]
        yield
    finally:
        with _lock:
            _active.pop(thread, None)
            _completing.discard(thread)


def forget(claimed: int) -> None:
    """A communicator is freed: none is created from it any more."""
    with _lock:
        for key in [key for key in _begun if key.claimed == claimed]:
            del _begun[key]


def under_way(claimed: int) -> bool:
    """True if a thread creates a communicator from the one with this number."""
    with _lock:
        return any(key.claimed == claimed for key, _ in _active.values())


def places_of(mpi: Any) -> list[int]:
    """Ranks in the whole job of an MPI communicator's ranks."""
    from mpi4py import MPI

    theirs, world = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return list(MPI.Group.Translate_ranks(theirs, list(range(mpi.Get_size())), world))
    finally:
        theirs.Free()
        world.Free()


def agree(mpi: Any) -> None:
    """Begin no creation from now on, and find those that all their ranks have begun. Collective."""
    from mpi4py import MPI

    global _over
    with _lock:
        _over = True
    begun = dict(mpi.allgather((MPI.COMM_WORLD.Get_rank(), _begun)))
    with _lock:
        for thread, (key, number) in _active.items():
            if all(begun.get(each, {}).get(key, 0) >= number for each in key.places):
                _completing.add(thread)


def completes(thread: int) -> bool:
    """True if the thread is in a creation that all ranks have begun."""
    return thread in _completing
