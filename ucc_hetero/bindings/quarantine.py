"""Memory and objects that must be kept alive because libucc, libucp, MPI or a stream may still use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from .handle import Kept

#: Objects kept until a condition holds, by owner; and objects kept for ever.
_until: WeakKeyDictionary[object, Kept[tuple[object, Callable[[], object]]]] = WeakKeyDictionary()
_for_ever: list[object] = []


def keep(thing: object, until: Callable[[], object] | None = None, owner: object = None) -> None:
    """Keep an object alive until the process ends, or until :func:`release` of its ``owner`` finds ``until()`` true."""
    if until is None:
        _for_ever.append(thing)
    else:
        _until.setdefault(owner, Kept()).add((thing, until))


@contextmanager
def unless_over(thing: object) -> Iterator[None]:
    """Keep memory that MPI writes to alive if waiting for MPI raises: MPI completes the operation in later calls."""
    try:
        yield
    except BaseException:
        keep(thing)
        raise


def release(owner: object) -> int:
    """Release an owner's objects whose conditions hold. Returns how many remain."""
    kept = _until.get(owner)
    if not kept:
        return 0
    kept.sweep(lambda each: not each[1]())
    return len(kept)
