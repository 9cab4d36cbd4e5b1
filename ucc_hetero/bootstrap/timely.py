"""MPI collectives that create communicators, with a timeout and errors that name ranks.

MPI's own collectives wait for ever for a stopped rank, and their errors name neither the dead rank nor a remedy.
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
from ..native.threaded import Watchdog
from ..native.waiting import progress_until
from . import faults

_T = TypeVar("_T")

#: What the exchanges of a new communicator's ranks are for, in error messages.
MAKING = "the making of a communicator"

#: Seconds for which a waiting rank polls without pauses: the other ranks mostly arrive within them.
_SPIN_S = 2e-4

#: Bytes of a rank's slot in the first exchange, and of the object's length at the slot's beginning.
_SHORT, _LENGTH = 384, 4

#: Seconds for which an exchange may still succeed after a rank died or revoked the communicator.
_GRACE_S = 0.2

#: Kinds of roll-call messages: the question of a rank that has timed out, and the answer of a rank that waits in the
#: same collective.
_QUESTION, _PRESENT = b"?", b"!"
#: Most ranks of a caller's communicator for a `_RollCall`: it connects each rank with all others.
_MOST_ROLLED = 64
#: Seconds in which ranks answer a roll call, and between a waiting rank's checks for questions.
_ROLL_S, _ANSWER_S = 2.0, 1e-2


@cache
def largest_tag() -> int:
    """MPI's largest tag. Roll-call messages use it, as a script hardly does."""
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


class MessageRollCall:
    """Roll calls over an MPI communicator: ranks that have timed out in a collective find out who else waits in it.

    Messages are sent only in jobs in which a rank was missing. A message has a kind, a hash of the ranks that wait
    together, and the sender's number among these.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        #: Received messages, by the hash of the ranks that wait together.
        self.received: dict[bytes, list[bytes]] = {}

    def receive(self) -> None:
        with suppress(*faults.EXCHANGE_ERRORS):  # the collective's own error says more
            while matched := self._mpi.Improbe(tag=largest_tag()):
                message = bytearray(1 + 2 * _LENGTH)
                matched.Recv(message)
                self.received.setdefault(bytes(message[1 : 1 + _LENGTH]), []).append(bytes(message))

    def send(self, message: bytes, rank: int) -> None:
        with suppress(*faults.EXCHANGE_ERRORS):
            sent = self._mpi.Isend(message, rank, largest_tag())
            quarantine.keep((sent, message), sent.Test, has_abandoned)

    def translate(self, mpi: Any) -> list[int]:
        """Ranks in this communicator of all ranks of ``mpi``; empty if one is missing here or this communicator is
        revoked."""
        if not faults.mpi_lacks() and faults.revoked(self._mpi):
            return []
        theirs, ours = mpi.Get_group(), self._mpi.Get_group()
        places = list(type(ours).Translate_ranks(theirs, list(range(mpi.Get_size())), ours))
        theirs.Free()
        ours.Free()
        return places if min(places) >= 0 else []


#: Those over communicators of jobs, which no caller knows.
_private_rolls: dict[Any, MessageRollCall] = {}


def allow_roll_calls(mpi: Any) -> None:
    """Make roll calls over ``mpi``, which belongs to this package, whenever it has all ranks concerned.

    Without such a communicator they are made over the one that the ranks wait on.
    """
    if isinstance(mpi, Timely):
        _private_rolls[mpi] = MessageRollCall(mpi)


def stop_roll_calls(mpi: Any) -> None:
    """Make no more roll calls over ``mpi``."""
    _private_rolls.pop(mpi, None)


class _RollCall:
    """A request that completes once all ranks have arrived; until then it knows which ones have.

    Each rank is the root of a scatter, which tells every other rank that the root has arrived. No receive of the caller
    can take its messages.
    """

    def __init__(self, mpi: Any) -> None:
        size, rank = mpi.Get_size(), mpi.Get_rank()
        outgoing, received = bytes(size), memoryview(bytearray(size))
        self._pending: list[Any] = []
        with quarantine.unless_over((self, outgoing, received)):
            for root in range(size):
                mine = [outgoing, ([1] * size, None)] if root == rank else None
                self._pending.append(mpi.Iscatterv(mine, received[root : root + 1], root))

    def Test(self) -> bool:
        while self._pending and self._pending[-1].Test():
            self._pending.pop()
        return not self._pending

    def missing(self) -> list[int]:
        return [rank for rank, request in enumerate(self._pending) if not request.Test()]


@cache
def _roll_called_key() -> int:
    """Attribute key of callers' communicators whose ranks have had a `_RollCall`. Since then they share a communicator
    of this package, over which they make roll calls."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


class Timely:
    """An ``MPI.Comm`` whose collectives end after ``seconds`` (0: never), or once a rank of it has died.

    ``what`` they are for, as error messages say it. ``caller``: the communicator belongs to the caller, who may receive
    any message that is sent over it: up to 64 ranks send none.
    """

    def __init__(self, mpi: Any, seconds: float, what: str, caller: bool = False) -> None:
        self._mpi, self.seconds, self._what = mpi, seconds or math.inf, what
        #: Ranks known to wait in this collective, or to have waited.
        self._arrived: set[int] = set()
        self._own_rolls = () if caller and mpi.Get_size() <= _MOST_ROLLED else (MessageRollCall(mpi),)
        #: Time at which a waiting rank saw that another has died or revoked the communicator; 0 for never.
        self._lost = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpi, name)

    def allgather(self, obj: Any) -> list[Any]:
        """Every rank's object; in a single exchange if all of them are short."""
        mine = pickle.dumps(obj)
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
        met = self._own_rolls or self._mpi.Get_attr(_roll_called_key())
        self._wait(self._mpi.Ibarrier if met else partial(_RollCall, self._mpi), None)
        if not met:
            self._mpi.Set_attr(_roll_called_key(), True)
        return self.at_once(self._mpi.Dup)

    def forget_roll_call(self) -> None:
        """All ranks have failed to make a communicator of this one: they may share none for roll calls."""
        if self._mpi.Get_attr(_roll_called_key()):
            self._mpi.Delete_attr(_roll_called_key())

    def Split(self, color: int, key: int = 0) -> Any:
        self._wait(self._mpi.Ibarrier, None)
        return self.at_once(lambda: self._mpi.Split(color, key))

    def at_once(self, call: Callable[[], _T], *, met: bool = True) -> _T:
        """The result of a collective that cannot be abandoned, and that MPI refuses on all ranks or on none.

        A rank that has entered it does not need any rank that has not. If a rank is stopped or interrupted within these
        microseconds, a job whose MPI would be ended by a death ends after ``seconds``. ``met``: all ranks have arrived,
        and wait for nothing that this rank has sent. Raises ``PeerError`` if a rank has died.
        """
        if not faults.mpi_lacks():
            return self.apart(call)
        if not met:
            self._wait(self._mpi.Ibarrier, None)
        return _watchdog.over(call, self.seconds, self._what)

    def apart(self, call: Callable[[], _T]) -> _T:
        """The result of a collective that cannot be abandoned, called in a helper thread that can be.

        Raises ``CollectiveTimeout`` if a rank does not arrive within ``seconds``, ``PeerError`` if one has died.
        """
        what = f"rank {self._mpi.Get_rank()}: {self._what}"
        try:
            return self.named(lambda: faults.in_time(what, self.seconds, call))
        except CollectiveTimeout:
            quarantine.keep(call, bool, has_abandoned)  # the helper thread is still in it
            raise

    def _wait(self, begin: Callable[[], Any], memory: object) -> None:
        request = self.named(begin)
        done = partial(self.named, request.Test)
        with quarantine.unless_over((request, memory)):
            come = progress_until(done, self.seconds, self.check_peers, longest=1e-4, spin=_SPIN_S, apart=_ANSWER_S)
        if not come:
            quarantine.keep((request, memory), request.Test, has_abandoned)
            missing = request.missing() if isinstance(request, _RollCall) else self._call_roll()
            who = f"rank(s) {missing} did not come" if missing else "the ranks did not get through"
            raise CollectiveTimeout(
                f"rank {self._mpi.Get_rank()}: {self._what}: {who} within {self.seconds:g} s (UCCH_TIMEOUT)"
            )

    def check_peers(self) -> None:
        """Answer roll calls; raise ``PeerError`` if a rank died or gave up, so that this rank leaves the exchange.

        MPI does not interrupt a pending exchange then: Open MPI 5.0.11 has been seen to go on with one that was
        revoked.
        """
        self._answer()
        if faults.mpi_lacks():
            return
        dead = faults.dead_ranks(self._mpi)
        if not dead and not faults.revoked(self._mpi):
            self._lost = 0.0
            return
        self._lost = self._lost or time.monotonic()
        if time.monotonic() > self._lost + _GRACE_S:
            raise PeerError(self._death_text(dead))

    def _death_text(self, dead: list[int]) -> str:
        how = f"rank(s) {dead} died" if dead else "another rank died, or has given this communicator up"
        return f"rank {self._mpi.Get_rank()}: {self._what}: {how}; Shrink() goes on with those that live"

    def _answer(self) -> None:
        """Tell ranks that have timed out that this rank waits, too."""
        for rolls in (*tuple(_private_rolls.values()), *self._own_rolls):
            rolls.receive()
            places = rolls.translate(self._mpi) if rolls.received else []
            for message in rolls.received.pop(_group_hash(places), ()):
                source = int.from_bytes(message[1 + _LENGTH :], "little")
                self._arrived.add(source)
                if message[:1] == _QUESTION:
                    self._send(_PRESENT, rolls, places, source)

    def _send(self, kind: bytes, rolls: MessageRollCall, places: list[int], rank: int) -> None:
        rolls.send(kind + _group_hash(places) + self._mpi.Get_rank().to_bytes(_LENGTH, "little"), places[rank])

    def _call_roll(self) -> list[int]:
        """Call the roll: the ranks that do not answer have not arrived, or do not run."""
        others = set(range(self._mpi.Get_size())) - {self._mpi.Get_rank()}
        ways = [(rolls, rolls.translate(self._mpi)) for rolls in (*tuple(_private_rolls.values()), *self._own_rolls)]
        ways += [(rolls, [*range(self._mpi.Get_size())]) for rolls in self._own_rolls]  # even if it is revoked
        way = next((way for way in ways if way[1]), None)
        if way is None:
            return []
        for rank in others:
            self._send(_QUESTION, *way, rank)

        def all_answered() -> bool:
            self._answer()
            return self._arrived >= others

        progress_until(all_answered, _ROLL_S)
        return sorted(others - self._arrived)

    def named(self, call: Callable[[], _T]) -> _T:
        """The result of a call of MPI; an error about dead ranks becomes a ``PeerError`` that names them."""
        try:
            return call()
        except faults.EXCHANGE_ERRORS as error:
            if isinstance(error, UCCHError) or faults.mpi_lacks():
                raise
            dead = faults.dead_ranks(self._mpi)
            if not (dead or faults.revoked(self._mpi) or "PROC_FAILED" in str(error)):
                raise
            raise PeerError(self._death_text(dead)) from error


def _group_hash(places: list[int]) -> bytes:
    """The hash that identifies in messages which ranks wait together."""
    return crc32(repr(places).encode()).to_bytes(_LENGTH, "little")


def timely(mpi: Any, seconds: float, what: str) -> Any:
    """``mpi`` as a `Timely`, or as it is if its exchanges have timeouts already (a store's)."""
    return mpi if hasattr(mpi, "world") else Timely(mpi, seconds, what)


def note_abandoned() -> None:
    """Record that this rank has abandoned a call of MPI that other ranks did not enter."""
    quarantine.keep(None, bool, has_abandoned)


def has_abandoned() -> bool:
    """True if a collective of MPI that this rank has abandoned is still pending, as other ranks have not entered it."""
    try:
        return quarantine.release(has_abandoned) > 0
    except faults.EXCHANGE_ERRORS:  # an abandoned call with a dead rank
        return False
