"""MPI's collectives by which communicators are made, with a deadline and errors that name ranks.

MPI's own wait for ever for a rank that was stopped, and its errors say neither who died nor what to do.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeVar
from zlib import crc32

from ..bindings import quarantine
from ..errors import CollectiveTimeout, PeerError, UCCHError
from ..native.aside import Watchdog
from ..native.waiting import progress_until
from . import faults

_T = TypeVar("_T")

#: What exchanges of a new communicator's ranks are for.
MAKING = "the making of a communicator"

#: Seconds in which a rank that waits looks without a pause: the others most often come within them.
_SPIN_S = 2e-4

#: Bytes of a rank's object, behind those of its length, that travel in one exchange.
_SHORT, _LENGTH = 384, 4

#: Seconds that an exchange may go on after the death of one of its ranks, or after one has given its ranks up.
_LEFT_S = 0.2

#: A question that a rank asks the others once it has waited in vain, and the answer of those that wait for the same.
_ASKED, _HERE = b"?", b"!"
#: Ranks of a roll at most: each connects with all others, and sends each a message.
_MOST_ROLLED = 64
#: Seconds in which they answer, and between their looks for questions.
_ROLL_S, _ANSWER_S = 2.0, 1e-2


@cache
def largest_tag() -> int:
    """MPI's largest tag, that of this package's questions: one that a script hardly takes."""
    from mpi4py import MPI

    tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(tag, int)
    return tag


def _end_job(what: str) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    late = "not all ranks got through in time (UCCH_TIMEOUT)"
    print(f"ucc_hetero: rank {rank}: {what}: {late}; ends the job", file=sys.stderr, flush=True)
    MPI.COMM_WORLD.Abort(1)


_watchdog = Watchdog(_end_job)


class Words:
    """Words over one of MPI's communicators, by which ranks that wait for others in vain tell each other so.

    Only jobs in which a rank was missing have such messages: a word, which ranks wait together, and the number of the
    one of them that says it.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        #: What has come, by the ranks that wait together.
        self.heard: dict[bytes, list[bytes]] = {}

    def listen(self) -> None:
        with suppress(*faults.EXCHANGE_ERRORS):  # the collective's own error says it better
            while message := self._mpi.Improbe(tag=largest_tag()):
                said = bytearray(1 + 2 * _LENGTH)
                message.Recv(said)
                self.heard.setdefault(bytes(said[1 : 1 + _LENGTH]), []).append(bytes(said))

    def say(self, said: bytes, place: int) -> None:
        with suppress(*faults.EXCHANGE_ERRORS):
            sent = self._mpi.Isend(said, place, largest_tag())
            quarantine.keep((sent, said), sent.Test, unmet)

    def places(self, mpi: Any) -> list[int]:
        """The numbers here of the ranks of another communicator; none unless all can be talked with here."""
        if not faults.mpi_lacks() and faults.revoked(self._mpi):
            return []
        theirs, ours = mpi.Get_group(), self._mpi.Get_group()
        places = list(type(ours).Translate_ranks(theirs, list(range(mpi.Get_size())), ours))
        theirs.Free()
        ours.Free()
        return places if min(places) >= 0 else []


#: Those over communicators of jobs.
_private: dict[Any, Words] = {}


def talk_over(mpi: Any) -> None:
    """Have ranks that wait for others in vain say so over this communicator of ours, where it has all of them; without
    one it is the communicator that they wait on."""
    if isinstance(mpi, Timely):
        _private[mpi] = Words(mpi)


def be_silent(mpi: Any) -> None:
    """Use a communicator for that no more."""
    _private.pop(mpi, None)


class _Roll:
    """A request that ends once all ranks have come: each says so by a collective of its own, from which every other one
    hears it by itself, and which no receive of a caller's sees."""

    def __init__(self, mpi: Any) -> None:
        size, rank = mpi.Get_size(), mpi.Get_rank()
        said, heard = bytes(size), memoryview(bytearray(size))
        self._due: list[Any] = []
        with quarantine.unless_over((self, said, heard)):
            for root in range(size):
                mine = [said, ([1] * size, None)] if root == rank else None
                self._due.append(mpi.Iscatterv(mine, heard[root : root + 1], root))

    def Test(self) -> bool:
        while self._due and self._due[-1].Test():
            self._due.pop()
        return not self._due

    def missing(self) -> list[int]:
        return [rank for rank, request in enumerate(self._due) if not request.Test()]


@cache
def _met() -> int:
    """Key of communicators whose ranks have come to a roll, and know a communicator of ours since."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


class Timely:
    """An ``MPI.Comm`` whose collectives end after ``seconds`` (0: never), or once a rank of it has died; ``what`` they
    are for. Over a ``caller``'s of up to 64 ranks nothing is sent that its receives could see."""

    def __init__(self, mpi: Any, seconds: float, what: str, caller: bool = False) -> None:
        self._mpi, self.seconds, self._what = mpi, seconds or math.inf, what
        #: Ranks that have said that they wait, or have waited, for the others.
        self._come: set[int] = set()
        self._own = () if caller and mpi.Get_size() <= _MOST_ROLLED else (Words(mpi),)
        #: When it was seen that a rank has died, or has given up, while this one waits; 0 for never.
        self._lost = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpi, name)

    def allgather(self, thing: Any) -> list[Any]:
        """Every rank's object; in one exchange where all are short."""
        mine = pickle.dumps(thing)
        size, room = self._mpi.Get_size(), _SHORT - _LENGTH
        slots = bytearray(size * _SHORT)
        slot = (len(mine).to_bytes(_LENGTH, "little") + mine[:room]).ljust(_SHORT, b"\0")
        self._wait(lambda: self._mpi.Iallgather(slot, slots), (slot, slots))
        parts = [slots[r * _SHORT : (r + 1) * _SHORT] for r in range(size)]
        lengths = [int.from_bytes(part[:_LENGTH], "little") for part in parts]
        if max(lengths) <= room:
            return [pickle.loads(part[_LENGTH:]) for part in parts]
        found, ends = bytearray(sum(lengths)), accumulate(lengths)
        self._wait(lambda: self._mpi.Iallgatherv(mine, [found, (lengths, None)]), found)
        return [pickle.loads(found[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def Dup(self) -> Any:
        met = self._own or self._mpi.Get_attr(_met())
        self._wait(self._mpi.Ibarrier if met else partial(_Roll, self._mpi), None)
        if not met:
            self._mpi.Set_attr(_met(), True)
        return self.at_once(self._mpi.Dup)

    def Split(self, color: int, key: int = 0) -> Any:
        self._wait(self._mpi.Ibarrier, None)
        return self.at_once(lambda: self._mpi.Split(color, key))

    def at_once(self, call: Callable[[], _T], *, met: bool = True) -> _T:
        """The result of a collective that cannot be left, and that MPI refuses on all ranks or none.

        No rank that has come to it is needed by one that has not. One that is stopped or interrupted in these
        microseconds ends the job after the seconds, where a death would. ``met``: all ranks have come, and wait for
        nothing that this one has sent. ``PeerError`` if a rank has died.
        """
        if not faults.mpi_lacks():
            return self.apart(call)
        if not met:
            self._wait(self._mpi.Ibarrier, None)
        return _watchdog.over(call, self.seconds, self._what)

    def apart(self, call: Callable[[], _T]) -> _T:
        """The result of a collective that cannot be left, made in a thread that can be.

        ``CollectiveTimeout`` if a rank does not come within the seconds, ``PeerError`` if one has died.
        """
        what = f"rank {self._mpi.Get_rank()}: {self._what}"
        try:
            return self.named(lambda: faults.in_time(what, self.seconds, call))
        except CollectiveTimeout:
            quarantine.keep(call, bool, unmet)  # another thread is in it still
            raise

    def _wait(self, begin: Callable[[], Any], memory: object) -> None:
        request = self.named(begin)
        done = partial(self.named, request.Test)
        with quarantine.unless_over((request, memory)):
            come = progress_until(done, self.seconds, self.look, longest=1e-4, spin=_SPIN_S, apart=_ANSWER_S)
        if not come:
            quarantine.keep((request, memory), request.Test, unmet)
            missing = request.missing() if isinstance(request, _Roll) else self._missing()
            who = f"rank(s) {missing} did not come" if missing else "the ranks did not get through"
            raise CollectiveTimeout(
                f"rank {self._mpi.Get_rank()}: {self._what}: {who} within {self.seconds:g} s (UCCH_TIMEOUT)"
            )

    def look(self) -> None:
        """Answer questions; leave an exchange that a rank takes no part in, as ranks do that wait for a message of it.

        MPI tells no others, and Open MPI 5.0.11 has been seen to go on with an exchange that was revoked meanwhile.
        """
        self._answer()
        if faults.mpi_lacks():
            return
        dead = faults.dead_ranks(self._mpi)
        if not dead and not faults.revoked(self._mpi):
            self._lost = 0.0
            return
        self._lost = self._lost or time.monotonic()
        if time.monotonic() > self._lost + _LEFT_S:
            raise PeerError(self._gone(dead))

    def _gone(self, dead: list[int]) -> str:
        how = f"rank(s) {dead} died" if dead else "another rank died, or has given this communicator up"
        return f"rank {self._mpi.Get_rank()}: {self._what}: {how}; Shrink() goes on with those that live"

    def _answer(self) -> None:
        """Tell the ranks that have waited in vain that this one waits, too."""
        for words in (*tuple(_private.values()), *self._own):
            words.listen()
            places = words.places(self._mpi) if words.heard else []
            for said in words.heard.pop(_together(places), ()):
                source = int.from_bytes(said[1 + _LENGTH :], "little")
                self._come.add(source)
                if said[:1] == _ASKED:
                    self._say(_HERE, words, places, source)

    def _say(self, word: bytes, words: Words, places: list[int], rank: int) -> None:
        words.say(word + _together(places) + self._mpi.Get_rank().to_bytes(_LENGTH, "little"), places[rank])

    def _missing(self) -> list[int]:
        """Ranks that do not answer: they have not come, or do not run."""
        others = set(range(self._mpi.Get_size())) - {self._mpi.Get_rank()}
        ways = [(words, words.places(self._mpi)) for words in (*tuple(_private.values()), *self._own)]
        ways += [(words, [*range(self._mpi.Get_size())]) for words in self._own]  # also where it is revoked
        way = next((way for way in ways if way[1]), None)
        if way is None:
            return []
        for rank in others:
            self._say(_ASKED, *way, rank)

        def told() -> bool:
            self._answer()
            return self._come >= others

        progress_until(told, _ROLL_S)
        return sorted(others - self._come)

    def named(self, call: Callable[[], _T]) -> _T:
        """The result of a call of MPI's; what it says of ranks that have died, with their numbers."""
        try:
            return call()
        except faults.EXCHANGE_ERRORS as error:
            if isinstance(error, UCCHError) or faults.mpi_lacks():
                raise
            dead = faults.dead_ranks(self._mpi)
            if not (dead or faults.revoked(self._mpi) or "PROC_FAILED" in str(error)):
                raise
            raise PeerError(self._gone(dead)) from error


def _together(places: list[int]) -> bytes:
    """What stands in words for ranks that wait together."""
    return crc32(repr(places).encode()).to_bytes(_LENGTH, "little")


def timely(mpi: Any, seconds: float, what: str) -> Any:
    """An exchange that ends: MPI's as `Timely`, any other as it is."""
    return mpi if hasattr(mpi, "world") else Timely(mpi, seconds, what)


def not_met() -> None:
    """Take note that this rank has come to a call of MPI's in vain."""
    quarantine.keep(None, bool, unmet)


def unmet() -> bool:
    """True if this rank has given up a collective of MPI's that other ranks have not come to since."""
    try:
        return quarantine.release(unmet) > 0
    except faults.EXCHANGE_ERRORS:  # of ranks that have died
        return False
