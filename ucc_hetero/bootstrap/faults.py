"""The exchange among ranks that make communicators: deaths, as MPI (ULFM) or torch's store sees them; deadlines."""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeVar

from ..bindings import quarantine
from ..errors import CollectiveTimeout, PeerError, UCCHError
from ..native.aside import Aside, Watchdog
from ..native.libraries import ffi, lib
from ..native.waiting import progress_until

_T = TypeVar("_T")

#: Open MPI's variable that ``mpirun --with-ft ulfm`` sets.
_FT = "OMPI_MCA_mpi_ft_enable"

#: Exceptions of MPI's calls (``MPI.Exception``) and of the store's where a process has failed.
EXCHANGE_ERRORS = (RuntimeError, OSError)

#: Seconds that a call in another thread has the processor for itself, where all ranks come to it at once.
_ALONE_S = 2e-3

#: Seconds without news of a death after which there are taken to be no more.
_SETTLED_S = 0.05


def lacking(mpi: Any) -> str:
    """Why ranks that exchange over ``mpi`` cannot go on after a death, with the cure; empty where they can."""
    return "" if hasattr(mpi, "world") else mpi_lacks()  # an exchange that is not MPI's


@cache
def mpi_lacks() -> str:
    """The same of ranks that exchange over MPI."""
    from mpi4py import MPI

    name = MPI.get_vendor()[0]
    if name == "Open MPI":
        if os.environ.get(_FT, "").lower() in ("1", "y", "yes", "true", "enabled", "t"):
            return ""
        return "mpirun ends the job when a rank dies, unless Open MPI 5's is told to go on: mpirun --with-ft ulfm"
    try:
        MPI.COMM_SELF.Is_revoked()
    except NotImplementedError:
        return f"{name} cannot go on after a death: use Open MPI 5 and mpirun --with-ft ulfm"
    return ""


def revoked(mpi: Any) -> bool:
    """True if some rank has revoked ``mpi``, as far as this one has heard; looks for news."""
    if hasattr(mpi, "Iprobe"):
        with suppress(*EXCHANGE_ERRORS):
            mpi.Iprobe()  # MPI hears of it in calls that make progress
    return bool(mpi.Is_revoked())


def give_up(mpi: Any) -> None:
    """Have the other ranks of a store's exchange fail at once where this one has: they would wait as long once more."""
    if hasattr(mpi, "watch"):
        with suppress(*EXCHANGE_ERRORS):
            mpi.Revoke()


def dead_ranks(mpi: Any) -> list[int]:
    """Ranks of ``mpi`` that have died, as far as its exchange knows."""
    if hasattr(mpi, "dead"):
        return list(mpi.dead())
    failed, everyone = mpi.Get_failed(), mpi.Get_group()
    try:
        return sorted(type(failed).Translate_ranks(failed, list(range(failed.Get_size())), everyone))
    finally:
        failed.Free()
        everyone.Free()


def settle(mpi: Any) -> None:
    """Wait until no death has been heard of for a moment: Open MPI 5.0.11 may crash if it hears of one in
    ``Comm_dup``."""
    dead, until = dead_ranks(mpi), time.monotonic() + _SETTLED_S

    def settled() -> bool:
        nonlocal dead, until
        revoked(mpi)
        if dead != (now := dead_ranks(mpi)):
            dead, until = now, time.monotonic() + _SETTLED_S
        return time.monotonic() > until

    progress_until(settled)


def leave(status: int) -> None:
    """Have the process end without ``MPI_Finalize``, in which Open MPI 5.0.11 may wait for ranks that have died.

    After everything else: of what Python calls at its end the last comes first, and MPI's was earlier. With a status
    other than 0 it counts as dead.
    """
    lib.ucch_leave_with(status)
    _at_the_end("ucch_leave")


def leave_late() -> None:
    """Have the process end some seconds after Python has, in case a rank dies while others are in ``MPI_Finalize``."""
    _at_the_end("ucch_leave_late")


def _at_the_end(name: str) -> None:
    ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))))


def in_time(what: str, seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a blocking call of MPI's, made in another thread while this one makes progress.

    Peers may need our side of a transfer before they come to it. ``CollectiveTimeout`` after ``seconds`` (0: never).
    Where MPI takes calls of one thread only, it is just called.
    """
    from mpi4py import MPI

    if MPI.Is_initialized() and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return call()
    aside = Aside(call)
    if not aside.ended(_ALONE_S) and not progress_until(aside.ended, seconds):
        raise CollectiveTimeout(f"{what}: not every living rank came within {seconds:g} s")
    return aside.result()


#: Seconds in which a rank that waits looks without a pause: the others most often come within them.
_SPIN_S = 2e-4

#: Bytes of a rank's object, behind those of its length, that travel in one exchange.
_SHORT, _LENGTH = 384, 4

#: Seconds that an exchange may go on after the death of one of its ranks, or after one has given its ranks up.
_LEFT_S = 0.2

#: A question that a rank asks the others once it has waited in vain, and the answer of those that wait for the same.
_ASKED, _HERE = b"?", b"!"
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


class Timely:
    """An ``MPI.Comm`` whose collectives, for ``what``, end after ``seconds`` (0: never), or once a rank of it has
    died."""

    def __init__(self, mpi: Any, seconds: float, what: str) -> None:
        self._mpi, self.seconds, self._what = mpi, seconds or math.inf, what
        #: Ranks that have said that they wait, or have waited, for the others.
        self._come: set[int] = set()
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
        self._wait(self._mpi.Ibarrier, None)
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
        if not mpi_lacks():
            return self.apart(call)
        if not met:
            self._wait(self._mpi.Ibarrier, None)
        return _watchdog.over(call, self.seconds, self._what)

    def apart(self, call: Callable[[], _T]) -> _T:
        """As :meth:`at_once`, in a thread that can be left: ``CollectiveTimeout`` in time, ``PeerError`` after a
        death."""
        what = f"rank {self._mpi.Get_rank()}: {self._what}"
        try:
            return self.named(lambda: in_time(what, self.seconds, call))
        except CollectiveTimeout:
            quarantine.keep(call, bool, unmet)  # another thread is in it still
            raise

    def _wait(self, begin: Callable[[], Any], memory: object) -> None:
        request = self.named(begin)
        done = partial(self.named, request.Test)
        with quarantine.unless_over(memory):
            come = progress_until(done, self.seconds, self.look, longest=1e-4, spin=_SPIN_S, apart=_ANSWER_S)
        if not come:
            quarantine.keep((request, memory), request.Test, unmet)
            missing = self._missing()
            who = f"rank(s) {missing} did not come" if missing else "the ranks did not get through"
            raise CollectiveTimeout(
                f"rank {self._mpi.Get_rank()}: {self._what}: {who} within {self.seconds:g} s (UCCH_TIMEOUT)"
            )

    def look(self) -> None:
        """Answer questions; leave an exchange that a rank takes no part in, as ranks do that wait for a message of it.

        MPI tells no others, and Open MPI 5.0.11 has been seen to go on with an exchange that was revoked meanwhile.
        """
        self._answer()
        if mpi_lacks():
            return
        dead = dead_ranks(self._mpi)
        if not dead and not revoked(self._mpi):
            self._lost = 0.0
            return
        self._lost = self._lost or time.monotonic()
        if time.monotonic() > self._lost + _LEFT_S:
            raise PeerError(self._gone(dead))

    def _gone(self, dead: list[int]) -> str:
        how = f"rank(s) {dead} died" if dead else "another rank died, or has given this communicator up"
        return f"rank {self._mpi.Get_rank()}: {self._what}: {how}; Shrink() goes on with those that live"

    def _answer(self) -> None:
        """Tell ranks that have waited in vain that this one waits, too: a word, and the number of the rank that says
        it."""
        with suppress(*EXCHANGE_ERRORS):  # the collective's own error says it better
            while message := self._mpi.Improbe(tag=largest_tag()):
                said = bytearray(1 + _LENGTH)
                message.Recv(said)
                source = int.from_bytes(said[1:], "little")
                self._come.add(source)
                if said[:1] == _ASKED:
                    self._say(_HERE, source)

    def _say(self, word: bytes, rank: int) -> None:
        said = word + self._mpi.Get_rank().to_bytes(_LENGTH, "little")
        with suppress(*EXCHANGE_ERRORS):
            sent = self._mpi.Isend(said, rank, largest_tag())
            quarantine.keep((sent, said), sent.Test, unmet)

    def _missing(self) -> list[int]:
        """Ranks that do not answer: they have not come, or do not run."""
        others = set(range(self._mpi.Get_size())) - {self._mpi.Get_rank()}
        for rank in others:
            self._say(_ASKED, rank)

        def told() -> bool:
            self._answer()
            return self._come >= others

        progress_until(told, _ROLL_S)
        return sorted(others - self._come)

    def named(self, call: Callable[[], _T]) -> _T:
        """The result of a call of MPI's; what it says of ranks that have died, with their numbers."""
        try:
            return call()
        except EXCHANGE_ERRORS as error:
            if isinstance(error, UCCHError) or mpi_lacks():
                raise
            dead = dead_ranks(self._mpi)
            if not (dead or revoked(self._mpi) or "PROC_FAILED" in str(error)):
                raise
            raise PeerError(self._gone(dead)) from error


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
    except EXCHANGE_ERRORS:  # of ranks that have died
        return False
