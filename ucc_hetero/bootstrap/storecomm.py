"""MPI's functions for making and freeing communicators, over torch's Store or a similar one: for ranks without MPI.

Only addresses and facts of the ranks are exchanged here; data of calls goes over UCC and UCX.
"""

from __future__ import annotations

import json
import math
import operator
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

from ..errors import CollectiveError, CollectiveTimeout, PeerError
from ..native.libraries import load
from ..native.waiting import progress_until

_T = TypeVar("_T")

#: Seconds between checks whether a wait is hopeless, and between polls for an agreement.
_CHECK_S = 0.02
_POLL_S = 1e-3
#: Bytes of the number that precedes a rank's data in an exchange; and of one value, which our own store limits.
_NUMBER, _PIECE = 8, 1 << 17
#: Seconds that the rank which may host the store waits for the others at the end.
_PATIENCE = 10.0


def begin_without_mpi() -> None:
    """Prepare for a first communicator without MPI."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False  # only MPI's constants are needed
    load()


class _World(NamedTuple):
    """This process's rank in the whole job."""

    rank: int
    size: int

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


class _Exchange:
    """An active exchange: each rank's bytes are under a key of its own."""

    def __init__(self, comm: StoreComm, keys: list[str], take: Callable[[list[bytes]], None]) -> None:
        self._comm, self._store, self._keys, self._take = comm, comm.store, keys, take
        self._done = False

    def Test(self) -> bool:
        """True once all values have arrived, which are then taken. ``PeerError`` if a rank has died or the exchange was
        revoked."""
        if not self._taken():
            try:
                self._comm.check_peers()
            except PeerError:  # a rank may have ended after the last value had come
                if not self._taken():
                    raise
        return self._done

    def _taken(self) -> bool:
        if not self._done and self._store.check(self._keys):
            self._take([self._store.get(key) for key in self._keys])
            self._done = True  # now: where this was interrupted the next call takes them
        return self._done

    def missing(self) -> list[int]:
        return [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]


class _Receive:
    """A receive of the next word of a rank. A cancelled one leaves the word to the next receive."""

    def __init__(self, comm: StoreComm, word: Any, source: int, tag: int) -> None:
        self._comm, self._word, self._source, self._tag = comm, word, source, tag
        self._done = False

    def Test(self) -> bool:
        """True once the word has arrived, which is then taken. ``PeerError`` if its source has died or the exchange was
        revoked."""
        if not self._done:
            word = self._comm.next_word(self._source, self._tag)
            if word is None:
                self._comm.check_peers(self._source)
            else:
                self._done, self._word[0] = True, word
        return self._done

    def Cancel(self) -> None:
        """Cancel; no state has to be undone."""


class StoreComm:
    """The methods of ``MPI.Comm`` that membership, jobs, boards, recovery and the end of a process use.

    All ranks make the same exchanges in the same order; the n-th has n in its keys. ``seconds``: how long a rank waits
    for the other ranks. ``deaths``: deaths among the first communicator's ranks; ``ids``: the ranks of this one among
    those.
    """

    def __init__(
        self, store: Any, prefix: str, rank: int, deaths: Deaths, ids: Sequence[int], world: _World, seconds: float
    ) -> None:
        self.store, self._prefix, self._rank, self._size = store, prefix, rank, len(ids)
        self._deaths, self._ids = deaths, tuple(ids)
        self.world = world
        #: Seconds that a rank waits for the others.
        self.seconds = seconds or math.inf
        self._count = self._agreed = self._acked = 0
        self._checked, self._revoked = 0.0, False
        #: Number of words sent, by (rank, tag), and taken.
        self._sent: dict[tuple[int, int], int] = {}
        self._taken: dict[tuple[int, int], int] = {}
        #: Exchanges that this rank has begun and not completed, and those whose keys are still in the store.
        self._open: set[int] = set()
        self._kept: deque[int] = deque()

    @classmethod
    def first(
        cls, store: Any, rank: int, ranks: Sequence[int], size: int, seconds: float, deaths: Deaths | None = None,
        place: str = "",
    ) -> StoreComm:  # fmt: skip
        """A communicator of ranks that have none yet: ``ranks`` of a job of ``size``, which meet at ``place`` in the
        store."""
        deaths = deaths or Deaths(store, ranks[rank], place)
        return cls(store, place or _place(), rank, deaths, ranks, _World(ranks[rank], size), seconds)

    def _part(self, prefix: str, ranks: Sequence[int]) -> StoreComm:
        ids = [self._ids[rank] for rank in ranks]
        place = ranks.index(self._rank)
        return StoreComm(self.store, prefix, place, self._deaths, ids, self.world, self.seconds)

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    #: Seconds between a waiter's polls of the store, which all ranks use.
    check_s = 0.5

    def Get_name(self) -> str:
        return self._prefix

    def _next(self) -> str:
        self._count += 1
        return f"{self._prefix}/{self._count}"

    def _begin(self, mine: bytes, take: Callable[[list[bytes]], None], *, for_all: bool = True) -> _Exchange:
        """Begin an exchange, whose result all ranks get, or (not ``for_all``) the first one.

        With its bytes each rank tells up to which exchange it has completed all: the keys of those are deleted, alike
        on all ranks.
        """
        place, number = self._next(), self._count
        self._open.add(number)
        self._kept.append(number)
        self.store.set(f"{place}/{self._rank}", (min(self._open) - 1).to_bytes(_NUMBER, "little") + mine)

        def come(parts: list[bytes]) -> None:
            take([part[_NUMBER:] for part in parts])
            self._open.discard(number)
            seen = min(int.from_bytes(part[:_NUMBER], "little") for part in parts)
            while for_all and self._kept and self._kept[0] <= seen:
                self._forget(f"{self._prefix}/{self._kept.popleft()}/{self._rank}")

        return _Exchange(self, [f"{place}/{rank}" for rank in range(self._size)], come)

    def _forget(self, key: str) -> None:
        with suppress(NotImplementedError, RuntimeError):  # stores that cannot delete
            self.store.delete_key(key)

    def _finish(self, exchange: _Exchange) -> None:
        if not progress_until(exchange.Test, self.seconds, step=1e-4, longest=1e-2):
            raise CollectiveTimeout(
                f"rank {self._rank}: rank(s) {exchange.missing()} did not come to make or release {self._prefix} "
                f"within {self.seconds:g} s"
            )

    def allgather(self, thing: Any) -> list[Any]:
        found: list[Any] = []
        self._finish(self._begin(pickle.dumps(thing), lambda parts: found.extend(map(pickle.loads, parts))))
        return found

    def gather(self, thing: Any) -> list[Any] | None:
        data, found = pickle.dumps(thing), [b""] * self._size

        def take(parts: list[bytes]) -> None:
            found[:] = map(operator.add, found, parts)

        for at in range(0, max(self.allgather(len(data))), _PIECE):
            exchange = self._begin(data[at : at + _PIECE], take, for_all=False)
            if self._rank:
                self._open.discard(self._count)
            else:
                self._finish(exchange)
        return None if self._rank else list(map(pickle.loads, found))

    def Iallgather(self, src: Any, dst: Any) -> _Exchange:
        into = memoryview(dst).cast("B")

        def take(parts: list[bytes]) -> None:
            into[:] = b"".join(parts)

        return self._begin(bytes(memoryview(src).cast("B")), take)

    def Iallreduce(self, mine: Any, worst: Any, op: Any = None) -> _Exchange:
        """The minimum of one number per rank: the only reduction that is needed."""

        def take(parts: list[bytes]) -> None:
            worst[0] = min(int(part) for part in parts)

        return self._begin(str(int(mine[0])).encode(), take)

    def Dup(self) -> StoreComm:
        return self._part(self._next(), range(self._size))

    def Split(self, color: int, key: int = 0) -> StoreComm:
        rows = self.allgather((color, key))
        members = sorted((k, r) for r, (c, k) in enumerate(rows) if c == color)
        return self._part(f"{self._next()}/{color}", [rank for _, rank in members])

    def Send(self, word: Any, dest: int, tag: int = 0) -> None:
        """Send one small number."""
        number = self._sent[dest, tag] = self._sent.get((dest, tag), 0) + 1
        self.store.set(f"{self._prefix}/word/{self._rank}/{dest}/{tag}/{number}", str(int(word[0])))

    def Irecv(self, word: Any, source: int, tag: int = 0) -> _Receive:
        return _Receive(self, word, source, tag)

    def next_word(self, source: int, tag: int) -> int | None:
        """Take the next small number from ``source``; None if it has not arrived."""
        number = self._taken.get((source, tag), 0) + 1
        key = f"{self._prefix}/word/{source}/{self._rank}/{tag}/{number}"
        if not self.store.check([key]):
            return None
        word = int(self.store.get(key))
        self._taken[source, tag] = number
        self._forget(key)
        return word

    def Free(self) -> None:
        """Leave; the first rank, whose process may host the store, leaves last."""
        left = f"{self._prefix}/left"
        self.store.add(left, 1)
        if self._rank == 0:
            here = partial(self.store.add, left, 0)
            patience = min(_PATIENCE, self.seconds)
            if progress_until(lambda: here() >= self._size - len(self.dead()), patience, step=1e-3, longest=2e-3):
                for number in self._kept:  # no rank reads these keys any more
                    for rank in range(self._size):
                        self._forget(f"{self._prefix}/{number}/{rank}")
                self._kept.clear()
                self._forget(left)

    # --- after deaths -------------------------------------------------------------------------------------------------

    def check_peers(self, source: int | None = None) -> None:
        """Raise :class:`PeerError` if a rank (only ``source``, if given) has died, or a rank has revoked the
        communicator."""
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return
        self._checked = now
        if self.Is_revoked():
            raise PeerError(f"rank {self._rank}: another rank has given {self._prefix} up")
        dead = self.dead()
        if source in dead or (source is None and dead):
            raise PeerError(f"rank {self._rank}: rank(s) {dead} of {self._prefix} died")

    def dead(self) -> list[int]:
        gone = self._deaths.gone()
        return [rank for rank, number in enumerate(self._ids) if number in gone]

    def watch(self, find_dead: Callable[[], Iterable[int]]) -> Callable[[], None]:
        """Let ``find_dead`` find dead ranks, for all ranks that meet in the store. Returns a function that stops
        this."""
        return self._deaths.watch(lambda: [self._ids[rank] for rank in find_dead()])

    def named(self, call: Callable[[], _T]) -> _T:
        """The result of a call that uses an exchange of some of the ranks; its errors name ranks that have died."""
        try:
            return call()
        except PeerError as error:
            if dead := self.dead():
                raise PeerError(f"rank {self._rank}: rank(s) {dead} of {self._prefix} died") from error
            raise

    def announce_failure(self) -> None:
        """Tell all ranks that meet in the store that this rank has failed and takes part in nothing any more."""
        self._deaths.own()

    def Revoke(self) -> None:
        self._revoked = True
        self.store.set(f"{self._prefix}/revoked", "1")

    def Is_revoked(self) -> bool:
        self._revoked = self._revoked or self.store.check([f"{self._prefix}/revoked"])
        return self._revoked

    def Get_failed(self) -> Ranks:
        return Ranks(tuple(self.dead()))

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge deaths, so that :meth:`Agree` accepts them. Returns how many are acknowledged."""
        known = len(self.dead())
        self._acked = max(self._acked, known if num_to_ack is None else min(num_to_ack, known))
        return self._acked

    def Agree(self, flag: int) -> int:
        """Bitwise and over all living ranks. ``PeerError`` unless all have acknowledged all deaths."""
        words, dead = self._settle(f"{flag} {self._acked}")
        flags, acked = zip(*(map(int, word.split()) for word in words.values()), strict=True)
        if min(acked) < len(dead):
            raise PeerError(f"rank {self._rank}: rank(s) {dead} died")
        return int(reduce(operator.and_, flags))

    def Shrink(self) -> StoreComm:
        """A communicator of the living ranks."""
        words, _ = self._settle("")
        ranks = sorted(words)
        if self._rank not in ranks:
            raise PeerError(f"rank {self._rank}: the other ranks took this one for dead and have gone on without it")
        return self._part(f"{self._prefix}/agreed/{self._agreed}/rest", ranks)

    def _settle(self, word: str) -> tuple[dict[int, str], list[int]]:
        """(every living rank's word, the dead ranks), the same on all of them.

        A rank that finds that all but the dead have arrived writes down the dead; the first list written is valid.
        """
        self._agreed += 1
        place = f"{self._prefix}/agreed/{self._agreed}"
        self.store.set(f"{place}/{self._rank}", word)
        missing: list[int] = []

        def settled() -> bool:
            if self.store.check([f"{place}/all"]):
                return True
            dead = self.dead()
            missing[:] = [r for r in range(self._size) if r not in dead and not self.store.check([f"{place}/{r}"])]
            if not missing:
                words = {r: self.store.get(f"{place}/{r}").decode() for r in range(self._size) if r not in dead}
                self.store.compare_set(f"{place}/all", "", json.dumps([list(words.items()), dead]))
            return not missing

        if not progress_until(settled, self.seconds, step=1e-4, longest=_POLL_S):
            raise CollectiveTimeout(
                f"rank {self._rank}: rank(s) {missing} of {self._prefix} live and did not come within "
                f"{self.seconds:g} s"
            )
        words, dead = json.loads(self.store.get(f"{place}/all"))
        return dict(words), dead


class Ranks(NamedTuple):
    """A group of ranks, with the interface of MPI's groups."""

    ranks: tuple[int, ...]

    def Get_size(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def Free(self) -> None:
        """No resource has to be freed."""


class Deaths:
    """Deaths among the ranks that meet in a store, by number. Deaths that one rank's boards show are written to the
    store, where all ranks read them in the same order.

    The two sides of a cut network take each other for dead. The first to write it is right: what dead ranks write about
    others is ignored. ``number``: this rank's, ``place``: where in the store.
    """

    def __init__(self, store: Any, number: int, place: str = "") -> None:
        self._store, self._number = store, number
        self._prefix = f"{place or _place()}/deaths"
        #: Entries read from the store: the rank that reported, and the ranks that it reported dead. Several threads may
        #: read the same entry.
        self._said: dict[int, tuple[int, list[int]]] = {}
        #: Functions that look for deaths, and return the numbers of the dead.
        self._finders: list[Callable[[], Iterable[int]]] = []

    def watch(self, find_dead: Callable[[], Iterable[int]]) -> Callable[[], None]:
        """Let ``find_dead`` find deaths from now on. Returns a function that stops this."""
        self._finders.append(find_dead)
        return partial(self._finders.remove, find_dead)

    def gone(self) -> list[int]:
        """Numbers of the ranks known to be dead, in the same order on all ranks."""
        found, known = {number for find_dead in list(self._finders) for number in find_dead()}, self._known()
        new = sorted(found - {*known, self._number})
        if new and self._number not in known:
            self._write(new)
            known = self._known()
        return known

    def own(self) -> None:
        """Tell the other ranks that this rank is gone."""
        self._write([self._number])

    def _write(self, numbers: list[int]) -> None:
        """Append an entry in one step: this rank may die at any moment, and ranks do not read past a missing entry."""
        word, written = json.dumps([self._number, numbers]).encode(), b""
        while written != word:
            self._known()
            written = self._store.compare_set(f"{self._prefix}/{len(self._said)}", b"", word)

    def _known(self) -> list[int]:
        while self._store.check([key := f"{self._prefix}/{(at := len(self._said))}"]):
            self._said[at] = json.loads(self._store.get(key))
        gone: list[int] = []
        for by, numbers in list(self._said.values()):
            if by not in gone:
                gone += [number for number in numbers if number not in gone]
        return gone


def _place() -> str:
    """Where the job's ranks meet in the store: torchrun may restart them with a store that still has old keys."""
    return f"ucch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


# --- ranks that join later ------------------------------------------------------------------------------------------


#: Seconds in which a newcomer must answer, else it is gone; and seconds between polls of the store.
_ANSWER_S, _NAP_S = 5.0, 1e-2
_PLACE = "ucch/growth"


def arrive(store: Any, seconds: float) -> StoreComm:
    """Join the existing ranks: returns the exchange among all. ``CollectiveTimeout`` after ``seconds``."""
    until = time.monotonic() + (seconds or math.inf)
    while True:
        number = store.add(f"{_PLACE}/came", 1)
        called = f"{_PLACE}/called/{number}"
        if not progress_until(partial(store.check, [called]), until - time.monotonic(), longest=_NAP_S):
            raise CollectiveTimeout(f"no rank of a communicator has called Grow() with this store within {seconds:g} s")
        place = store.get(called).decode()
        store.set(f"{place}/here/{number}", "")
        listed = f"{place}/list"
        if progress_until(partial(store.check, [listed]), 2 * _ANSWER_S, longest=_NAP_S):
            before, numbers = json.loads(store.get(listed))
            if number in numbers:
                size = before + len(numbers)
                return StoreComm.first(store, before + numbers.index(number), range(size), size, seconds, place=place)


def let_in(mpi: Any, store: Any, least: int, seconds: float) -> StoreComm | None:
    """Collective: the exchange with all newcomers so far; None if fewer than ``least`` have arrived.

    ``CollectiveError`` on all ranks if the first one cannot ask the store.
    """
    rank, before = int(mpi.Get_rank()), int(mpi.Get_size())
    mine: tuple[str, int, str] = "", 0, ""
    failure: Exception | None = None
    if rank == 0:
        try:
            mine = *_call(store, before, least), ""
        except Exception as error:  # torch's stores have kinds of their own
            failure, mine = error, ("", 0, f"{type(error).__name__}: {error}")
    place, count, why = mpi.allgather(mine)[0]
    if why:
        raise CollectiveError(f"rank {rank}: Grow: rank 0 cannot ask the store: {why}") from failure
    size = before + count
    return StoreComm.first(store, rank, range(size), size, seconds, place=place) if count else None


def _call(store: Any, before: int, least: int) -> tuple[str, int]:
    """(place in the store where all meet, number of newcomers that have answered)."""
    came, done = store.add(f"{_PLACE}/came", 0), store.add(f"{_PLACE}/done", 0)
    new = range(done + 1, came + 1)
    if len(new) < least:
        return "", 0
    place = f"{_PLACE}/{store.add(f'{_PLACE}/times', 1)}"
    store.add(f"{_PLACE}/done", len(new))
    for number in new:
        store.set(f"{_PLACE}/called/{number}", place)
    keys = {number: f"{place}/here/{number}" for number in new}
    progress_until(partial(store.check, list(keys.values())), _ANSWER_S, longest=_NAP_S)
    numbers = [number for number, key in keys.items() if store.check([key])]
    store.set(f"{place}/list", json.dumps([before, numbers]))
    return place, len(numbers)
