"""Native objects, and memory for native functions: shared by the classes over libucc and libucp."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from ..native.libraries import ffi, lib

T = TypeVar("T")


class Handle(ABC):
    """A native object that is closed once, explicitly or at the end of a ``with`` statement.

    A forked child that leaves its parent's ``with`` statement closes nothing: peers would take the parent for closed.
    """

    _entered = 0  # the process that has entered it

    @abstractmethod
    def close(self) -> None:
        """Release the native object; a second call does nothing."""

    def __enter__(self) -> Any:
        self._entered = os.getpid()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._entered == os.getpid():
            self.close()


def locked(function: Callable[..., T], *arguments: Any) -> T:
    """Call libucc or libucp while holding the engine's lock: neither may be called by two threads at once."""
    has = ffi.new("int *")
    try:
        lib.ucch_lock_noted(has)
        return function(*arguments)
    finally:
        lib.ucch_unlock_noted(has)


def memory(data: Any, *, writable: bool = False) -> tuple[Any, int, object]:
    """(pointer, bytes, object to keep alive) of a buffer or an ``(address, bytes)`` pair."""
    if isinstance(data, tuple):
        return ffi.cast("void *", data[0]), data[1], None
    keep = ffi.from_buffer(data, require_writable=writable)
    return keep, len(keep), keep


class Present(Generic[T]):
    """A set of objects that does not keep them alive.

    It can be listed while other threads add objects, where iterating over a ``WeakSet`` would fail.
    """

    def __init__(self) -> None:
        self._found: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, one: T) -> None:
        self._found[id(one)] = one

    def all(self) -> list[T]:
        return [one for ref in self._found.valuerefs() if (one := ref()) is not None]


class Kept(dict[int, T], Generic[T]):
    """Objects that are kept alive while they are busy. Any thread may add objects and sweep.

    A busy object never leaves it, even if Ctrl-C or another thread interrupts: libucp or MPI may be writing to its
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._looked_at: dict[int, object] = {}

    def add(self, one: T) -> None:
        self[id(one)] = one

    def take(self, one: T) -> bool:
        """Remove an object. True for the one caller that removed it."""
        return self.pop(id(one), None) is not None

    def all(self) -> list[T]:
        return list(self.values())

    def sweep(self, busy: Callable[[T], object]) -> None:
        """Remove the objects that are no longer busy. Only one thread at a time calls ``busy`` for an object."""
        for one in self.all():
            key, me = id(one), object()
            try:
                if self._looked_at.setdefault(key, me) is me and key in self and not busy(one):
                    self.take(one)
            finally:
                try:  # no calls here: Ctrl-C would be raised behind them
                    if self._looked_at[key] is me:
                        del self._looked_at[key]
                except KeyError:
                    pass
