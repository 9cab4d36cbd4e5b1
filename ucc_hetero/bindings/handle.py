"""Native objects and memory as both libraries' classes have them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from ..native.libraries import ffi, lib

T = TypeVar("T")


class Handle(ABC):
    """A native object that is closed once, explicitly or at the end of a ``with`` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release the native object; a second call does nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def locked(function: Callable[..., T], *arguments: Any) -> T:
    """Call libucc or libucp while this thread holds the engine's lock: neither bears two calls at a time."""
    has = ffi.new("int *")
    try:
        lib.ucch_lock_noted(has)
        return function(*arguments)
    finally:
        lib.ucch_unlock_noted(has)


def memory(data: Any, *, writable: bool = False) -> tuple[Any, int, object]:
    """(pointer, bytes, what to keep alive) of a buffer or an (address, bytes) pair."""
    if isinstance(data, tuple):
        return ffi.cast("void *", data[0]), data[1], None
    keep = ffi.from_buffer(data, require_writable=writable)
    return keep, len(keep), keep


class Present(Generic[T]):
    """Objects for as long as something else refers to them.

    They can be listed while other threads add some: a walk through a ``WeakSet`` fails then.
    """

    def __init__(self) -> None:
        self._found: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, one: T) -> None:
        """Have one more."""
        self._found[id(one)] = one

    def all(self) -> list[T]:
        """Those that there are now."""
        return [one for ref in self._found.valuerefs() if (one := ref()) is not None]


class Kept(dict[int, T], Generic[T]):
    """Things that are kept until they are busy no more. Any thread may add some and look for those that are over.

    What is busy is never out of it, wherever Ctrl-C or another thread comes: libucp or MPI may be writing there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._looked_at: dict[int, object] = {}

    def add(self, one: T) -> None:
        """Keep one more."""
        self[id(one)] = one

    def take(self, one: T) -> bool:
        """Keep it no longer: True for the one caller that it was kept for."""
        return self.pop(id(one), None) is not None

    def all(self) -> list[T]:
        """Those that are kept now."""
        return list(self.values())

    def sweep(self, busy: Callable[[T], object]) -> None:
        """Let go what is not busy any more. Of several threads one at a time asks that of a thing."""
        for one in self.all():
            key, me = id(one), object()
            try:
                if self._looked_at.setdefault(key, me) is me and key in self and not busy(one):
                    self.take(one)
            finally:
                try:  # no calls here: Ctrl-C would come behind them
                    if self._looked_at[key] is me:
                        del self._looked_at[key]
                except KeyError:
                    pass
