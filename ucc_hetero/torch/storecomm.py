"""MPI's calls for making and releasing communicators, over a torch Store: for jobs that torchrun starts.

Nothing of a call goes this way: the ranks exchange their addresses and facts here, and data over UCC and UCX.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import CollectiveTimeout
from ..native.libraries import lib

__all__ = ["StoreComm"]

#: Seconds that the rank which may host the store stays for the others at the end.
_PATIENCE = 10.0


class _World(NamedTuple):
    """This process's place in the whole job."""

    rank: int
    size: int

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


class _Exchange:
    """An exchange that has begun: each rank's bytes under a key of its own."""

    def __init__(self, store: Any, keys: list[str], take: Callable[[list[bytes]], None]) -> None:
        self._store, self._keys, self._take = store, keys, take
        self._done = False

    def Test(self) -> bool:
        """Whether everything has come; takes it then."""
        if not self._done and self._store.check(self._keys):
            self._done = True
            self._take([self._store.get(key) for key in self._keys])
        return self._done

    def Cancel(self) -> None:
        """Nothing has to be taken back."""


class StoreComm:
    """The few methods of ``MPI.Comm`` that membership, jobs, boards and the end of a process use.

    Ranks make the same exchanges in the same order; the n-th one has the n-th number in its keys. ``seconds`` is how
    long a rank waits for the others.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, world: tuple[int, int], seconds: float) -> None:
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self.world, self._seconds = _World(*world), seconds
        self._count = 0
        self._words: dict[tuple[int, int, int], int] = {}

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def Get_name(self) -> str:
        return self._prefix

    def _next(self) -> str:
        self._count += 1
        return f"{self._prefix}/{self._count}"

    def _begin(self, mine: bytes, take: Callable[[list[bytes]], None]) -> _Exchange:
        place = self._next()
        self._store.set(f"{place}/{self._rank}", mine)
        return _Exchange(self._store, [f"{place}/{rank}" for rank in range(self._size)], take)

    def _finish(self, exchange: _Exchange) -> None:
        end, pause = time.monotonic() + (self._seconds or float("inf")), 0.0
        while not exchange.Test():
            lib.ucch_progress_once()  # peers may need our side of a transfer before they come here
            time.sleep(pause)
            pause = min(pause + 1e-4, 1e-2)
            if time.monotonic() > end:
                raise CollectiveTimeout(
                    f"rank {self._rank}: other ranks did not come to make or release {self._prefix} within "
                    f"{self._seconds:g} s"
                )

    def allgather(self, thing: Any) -> list[Any]:
        """Every rank's object."""
        found: list[Any] = []
        self._finish(self._begin(pickle.dumps(thing), lambda parts: found.extend(map(pickle.loads, parts))))
        return found

    def gather(self, thing: Any) -> list[Any] | None:
        """Every rank's object on the first rank."""
        found: list[Any] = []
        exchange = self._begin(pickle.dumps(thing), lambda parts: found.extend(map(pickle.loads, parts)))
        if self._rank:
            return None
        self._finish(exchange)
        return found

    def Iallgather(self, src: Any, dst: Any) -> _Exchange:
        """Every rank's bytes into ``dst``."""
        into = memoryview(dst).cast("B")

        def take(parts: list[bytes]) -> None:
            into[:] = b"".join(parts)

        return self._begin(bytes(memoryview(src).cast("B")), take)

    def Iallreduce(self, mine: Any, worst: Any, op: Any = None) -> _Exchange:
        """The least of every rank's one number: the only reduction that is needed."""

        def take(parts: list[bytes]) -> None:
            worst[0] = min(int(part) for part in parts)

        return self._begin(str(int(mine[0])).encode(), take)

    def Dup(self) -> StoreComm:
        """The same ranks, with keys of their own."""
        return StoreComm(self._store, self._next(), self._rank, self._size, self.world, self._seconds)

    def Split(self, color: int, key: int = 0) -> StoreComm:
        """The ranks of one colour."""
        rows = self.allgather((color, key))
        members = sorted((k, r) for r, (c, k) in enumerate(rows) if c == color)
        place = members.index((key, self._rank))
        prefix = f"{self._next()}/{color}"
        return StoreComm(self._store, prefix, place, len(members), self.world, self._seconds)

    def _word(self, source: int, dest: int, tag: int) -> str:
        number = self._words[source, dest, tag] = self._words.get((source, dest, tag), 0) + 1
        return f"{self._prefix}/word/{source}/{dest}/{tag}/{number}"

    def Send(self, word: Any, dest: int, tag: int = 0) -> None:
        """One small number."""
        self._store.set(self._word(self._rank, dest, tag), str(int(word[0])))

    def Irecv(self, word: Any, source: int, tag: int = 0) -> _Exchange:
        """The next small number of ``source``."""

        def take(parts: list[bytes]) -> None:
            word[0] = int(parts[0])

        return _Exchange(self._store, [self._word(source, self._rank, tag)], take)

    def Free(self) -> None:
        """Leave; the first rank, whose process may host the store, goes last."""
        left = f"{self._prefix}/left"
        gone = self._store.add(left, 1)
        end = time.monotonic() + _PATIENCE
        while self._rank == 0 and gone < self._size and time.monotonic() < end:
            time.sleep(0.002)
            gone = self._store.add(left, 0)
