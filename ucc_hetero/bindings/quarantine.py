"""Memory and objects that must not die yet, as libucc, libucp, MPI or a stream may still use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from .handle import Kept

#: What is kept until something has happened, by its owner, and what is kept for ever.
_until: WeakKeyDictionary[object, Kept[tuple[object, Callable[[], object]]]] = WeakKeyDictionary()
_for_ever: list[object] = []


def keep(thing: object, until: Callable[[], object] | None = None, owner: object = None) -> None:
    """Keep something alive until the process ends, or :func:`release` of its ``owner`` finds that ``until()`` is
    true."""
    if until is None:
        _for_ever.append(thing)
    else:
        _until.setdefault(owner, Kept()).add((thing, until))


@contextmanager
def unless_over(thing: object) -> Iterator[None]:
    """Keep what MPI writes to, where the wait for that ends by an exception: MPI goes on with it in later calls."""
    try:
        yield
    except BaseException:
        keep(thing)
        raise


def release(owner: object) -> int:
    """Let an owner's things die that may, and count those that may not."""
    kept = _until.get(owner)
    if not kept:
        return 0
    kept.sweep(lambda each: not each[1]())
    return len(kept)
