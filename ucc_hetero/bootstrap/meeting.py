"""Creation of communicators: ranks take turns at it, and exchange what all of them have to know."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from .. import env, log
from .._version import __version__
from ..bindings.ucc import Team
from ..device import bind
from ..errors import AgreementError, CollectiveTimeout, PeerError, UCCHError, ranks_text
from ..machine import nics
from ..machine.discover import host_identity
from ..machine.facts import Facts, unpacked
from ..native.libraries import ffi, lib
from ..planner.rules import NO_TABLE, Table, read_table
from ..planner.topology import ranks_by
from ..transport import wires
from . import agreement, faults, process, settings
from .known import Known
from .pages import Page
from .process import MOST_SPARE, Job, Spare
from .timely import Timely, note_abandoned

#: Longest pause after a failed attempt, in seconds.
_PAUSE = 0.002

#: Held while this process creates something together with other ranks, and while it destroys a team: libucc returns the
#: team's number to the table that creations exchange. If that changed during an exchange, ranks would choose different
#: numbers for one team.
creating = threading.RLock()

#: With the process id it tells this process from all others, also from its parent.
_NAME = os.urandom(8)


class Turn:
    """A context in which this process and every other rank that takes part may create something; one thread at a time
    in each process, the same creation on every rank.

    libucc sends all its exchanges during a creation under one tag: threads that created teams at the same time would
    receive each other's messages. Locks that ranks take in different orders would deadlock: so a rank tries to take its
    own, ``everyone(ready)`` tells the other ranks whether it has, and returns whether all have. That is collective
    among them, and repeated until all have.

    The first time, ranks only come together, unless no other thread could need the lock: a rank that has not come may
    be in another creation, which waits for another thread of this rank.
    """

    def __init__(self, everyone: Callable[[bool], bool]) -> None:
        self._everyone = everyone

    def __enter__(self) -> None:
        for attempt in count():
            ready = (attempt > 0 or threading.active_count() == 1) and creating.acquire(blocking=False)
            together = False
            try:
                together = self._everyone(ready)
            finally:
                if ready and not together:
                    creating.release()
            if together:
                return
            if attempt:
                time.sleep(random.uniform(0, _PAUSE))

    def __exit__(self, *error: object) -> None:
        creating.release()


#: Most communicators that a process can have.
MOST_COMMS = 4096

#: Communicator numbers that this process uses, one bit each; the last number that it claimed, and the first one above
#: it that may be in use.
_ids = bytearray(MOST_COMMS // 8)
_last, _next_used = [-1], [MOST_COMMS]


def numbers_taken() -> tuple[int, int]:
    """(last number that this process has claimed, first one above it that may be in use)."""
    return _last[0], _next_used[0]


def free_number(following: int, ask: Callable[[bytes], Iterable[bytes]]) -> int:
    """The first number from ``following`` on that is free on all of these ranks; collective among them.

    A communicator's id is its number modulo `MOST_COMMS`. Unreceived messages of a freed communicator may still arrive,
    so ranks claim a number above all that they have claimed before. ``ask`` exchanges the numbers in use, as bits.
    """
    bits = 0
    for each in ask(bytes(_ids)):
        bits |= int.from_bytes(each, "little")
    claimed = next((each for each in range(following, following + MOST_COMMS) if not bits >> each % MOST_COMMS & 1), -1)
    if claimed < 0:
        raise UCCHError(f"{MOST_COMMS} communicators exist already; Free those that are no longer used")
    own, after = int.from_bytes(_ids, "little"), claimed + 1
    while after < claimed + MOST_COMMS and not own >> after % MOST_COMMS & 1:
        after += 1
    _next_used[0] = after
    return claimed


def claim_number(claimed: int) -> None:
    _ids[claimed % MOST_COMMS >> 3] |= 1 << (claimed & 7)
    _last[0] = claimed


def release_number(number: int) -> None:
    _ids[number >> 3] &= ~(1 << (number & 7))


_GOES_ON, _NOT_READY = lib.UCCH_GOES_ON, lib.UCCH_NOT_READY

#: Measured tables that communicators of this process have used, by file name.
_tables: dict[str, Table] = {}


class Exchanged(NamedTuple):
    """What the ranks of a caller's MPI communicator have exchanged: rank by rank their facts, numbers in the whole job,
    and names of jobs that they could use again; the measured choices of all; and their bids."""

    facts: list[Facts]
    places: list[int]
    offers: list[tuple[str, ...]]
    table: Table
    bids: Bids


class Seat:
    """A rank's part in a new communicator: what its ranks have agreed upon, and what an earlier communicator of them
    left.

    ``claimed`` is the communicator's number. ``spare`` holds numbers of what all ranks could use again, in the same
    order on all, ``seconds`` is the most that destroying an old team may take.
    """

    def __init__(self, known: Known, claimed: int, spare: Sequence[int], seconds: float) -> None:
        self.known, self.claimed = known, claimed
        job = known.job
        left = (each for each in spare if each in job.spare and job.spare[each].kind == known.kind)
        again = next(left, None)
        #: Teams, and memory that this rank shares with others of its host.
        _, self.teams, self.page = Spare(known.kind, {}, known.page(claimed)) if again is None else job.spare.pop(again)
        claim_number(claimed)
        #: Part of every message tag.
        self.id = claimed % MOST_COMMS
        # In this rank's turn, as libucc destroys teams then. Only now: the oldest may be what the ranks are about to
        # use, although this one has freed more since it offered that.
        job.drop_spare(seconds, MOST_SPARE)

    @property
    def has_teams(self) -> bool:
        """True if each rank has the teams that usual calls need, or makes them by itself; the same on all ranks."""
        return bool(self.teams) or self.known.makes_teams_alone(self.claimed)

    @property
    def ready(self) -> bool:
        """True if each rank can create the communicator by itself, at any time; the same on all ranks."""
        return self.has_teams and not (self.known.far or self.known.may_queue)

    def leave(self, teams: dict[tuple[tuple[int, ...], str], Team], page: Page | None) -> None:
        """Leave teams and a cleared page to the next communicator of these ranks."""
        if teams or page is not None:
            self.known.job.spare[self.claimed] = Spare(self.known.kind, teams, page)

    def give_back(self) -> None:
        """Free the communicator, which is `ready`; this rank has made no call in it, so it waits for no other rank."""
        known = self.known
        if self.page is not None:
            lib.ucch_board_give_back(self.page.address, known.near.index(known.rank), self.claimed + 1, True)
        known.job.process.discard(self.id)
        self.leave(self.teams, self.page)
        release_number(self.id)


class Bids:
    """Bids: what each rank says when it comes to create a communicator; they determine its number and its page
    (base/bids.c)."""

    def __init__(self, size: int) -> None:
        self._size, self._claimed = size, -1
        #: This rank's bid, and those of all ranks.
        self.mine, self.all = ffi.new("ucch_bid *"), ffi.new("ucch_bid[]", size)
        self._ranks, self._spare = ffi.new("int[]", size), ffi.new("int64_t[]", MOST_SPARE)

    def write(self, ready: bool, job: Job | None = None) -> None:
        """Write this rank's bid: whether it is ``ready``, and for a communicator of this ``job`` (None: of any)."""
        mine = self.mine
        mine.ready = ready
        if ready and (job is None or job.sound()):
            mine.ready, spare = _GOES_ON, process.spare(job)
            mine.last, mine.next_used = numbers_taken()
            mine.spares, mine.spare[0 : len(spare)] = len(spare), spare

    def evaluate(self) -> bool:
        self._claimed = lib.ucch_bids_claim(self.all, self._size)
        return self._claimed != _NOT_READY

    def agree(self, ask: Callable[[Any], Iterable[Any]]) -> bool:
        """Agree on the new communicator's number, by an exchange with ``ask`` if numbers may be in use.

        Returns False if a rank wants no more communicators of its job.
        """
        if self._claimed == lib.UCCH_ASK:
            self._claimed = free_number(1 + max(each.last for each in self.all), ask)
        if self._claimed >= MOST_COMMS:
            # Before any rank is past what all ranks have to come to: those that are may send.
            process.process().discard(self._claimed % MOST_COMMS)
        return self._claimed >= 0

    def seat(self, known: Known, ranks: Sequence[int] | None, seconds: float) -> Seat:
        """This rank's seat in a communicator of ``ranks`` of ``known``; None: of the ranks with its color, ordered by
        key."""
        if ranks is None:
            count = lib.ucch_bids_ranks(self.all, self._size, known.rank, self._ranks)
            ranks = ffi.unpack(self._ranks, count)
        else:
            self._ranks[0 : len(ranks)] = ranks
        spare = ffi.unpack(self._spare, lib.ucch_bids_spare(self.all, self._ranks, len(ranks), self._spare))
        return Seat(known.part(ranks), self._claimed, spare, seconds)


@lru_cache(maxsize=1)
def _whereabouts() -> tuple[tuple[str, ...], frozenset[int]]:
    """Node of this process and its addresses. Cached: to look them up takes half the time of a later communicator."""
    return host_identity().node, frozenset(nics.interfaces().values())


class _Meeting:
    """The ranks of ``mpi`` while all hold their turns at creating, and what they exchange."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._rank, self._size = int(mpi.Get_rank()), int(mpi.Get_size())
        #: What is wrong with this rank's settings, else an empty string.
        self._mistake = settings.read(process.world_of(mpi).Get_rank()) or process.lacks_files()
        self._ports: Any = None
        if not self._mistake:
            ports = () if process.begun() else nics.ports(os.environ.get("UCX_NET_DEVICES", ""))
            node, addresses = _whereabouts()
            self._ports = node, ports, addresses

    def come(self, ready: bool) -> bool:
        """True if all ranks are ready; collective. Raises on all ranks ``ValueError`` if settings of one are wrong, and
        ``AgreementError`` if two are threads of one process, which never have their turns at the same time."""
        mine = self._mistake or ready, self._ports, (_NAME, os.getpid())
        come, self._everyones_ports, processes = zip(*self._mpi.allgather(mine), strict=True)
        if mistakes := {rank: each for rank, each in enumerate(come) if isinstance(each, str)}:
            raise settings.wrong(mistakes, self._rank, self._size)
        for ranks in ranks_by(processes).values():
            if len(ranks) > 1:
                text = f"{ranks_text(ranks)} are one process: start a process for each rank, not a thread"
                raise settings.told(AgreementError(text), self._rank)
        return all(come)

    def _describe_self(self) -> tuple[Any, ...]:
        place, number = process.here(self._mpi)
        bind(place)  # first: UCX and UCC look for a device when they begin
        facts, bids = process.process().facts(place, __version__), Bids(self._size)
        log.set_rank(number, facts.vendor)
        bids.write(True)
        table = _table() if self._rank == 0 else NO_TABLE
        return facts.packed(), number, process.offer(), table, bytes(ffi.buffer(bids.mine))

    def exchange(self) -> Exchanged:
        """Exchange everything; collective. A rank that cannot take part tells all why, and all raise."""
        self._divide_ports()
        failure: Exception | None = None
        mine: Any
        try:
            mine = self._describe_self()
        except (UCCHError, ValueError) as error:
            failure, mine = error, f"{type(error).__name__}: {error}"
        everyone = self._mpi.allgather(mine)
        bad = {rank: e for rank, e in enumerate(everyone) if isinstance(e, str)}
        if failure is not None and len(bad) == self._size:
            if len(set(bad.values())) == 1:
                settings.told(failure, self._rank)
            raise failure  # all the same: no need of a list
        if bad:
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in bad.items())
            wrong = AgreementError(f"some ranks of this job cannot take part:\n{lines}")
            raise settings.told(wrong, self._rank) from failure
        packed, places, offers, tables, words = zip(*everyone, strict=True)
        facts, bids = list(map(unpacked, packed)), Bids(self._size)
        try:
            agreement.judge(facts)
        except AgreementError as differ:
            raise settings.told(differ, self._rank) from None
        ffi.memmove(bids.all, b"".join(words), ffi.sizeof(bids.all))
        bids.evaluate()
        _tables[tables[0].path] = tables[0]
        return Exchanged(facts, list(places), list(offers), tables[0], bids)

    def _divide_ports(self) -> None:
        """Let libucp use all ports of this host for data, unless it has begun; except ports whose address another host
        has too."""
        allowed = os.environ.get("UCX_NET_DEVICES", "")
        nodes, offers, found = zip(*self._everyones_ports, strict=True)
        repeated = nics.repeated(nodes, found)
        offers = tuple(tuple(port for port in each if port.address not in repeated) for each in offers)
        spread = nics.spread(nodes, offers, self._rank)
        if not process.begun():
            joining = spread.joining if allowed in ("", "all") else ()
            nics.use(",".join(joining) or nics.without(repeated, allowed), spread.rails)
        wires.spread(spread.shared)


def _table() -> Table:
    """The measured choices of this rank's file, or those of an earlier communicator if this host lacks the file."""
    path = env.get("TUNE_FILE")
    try:
        return read_table(path)
    except ValueError:
        if path not in _tables:
            raise
        return _tables[path]


@contextmanager
def meeting_of(mpi: Any) -> Iterator[Exchanged]:
    """Hold this rank's turn at creating while all ranks of ``mpi`` hold theirs. Thread-safe."""
    meeting = _Meeting(mpi)
    with Turn(meeting.come):
        yield meeting.exchange()


class SplitMeeting:
    """Creation of further communicators from ranks of an existing one, without MPI.

    ``exchange`` gathers the bids of all its ranks, in a collective call of the given name.
    """

    def __init__(self, known: Known, exchange: Callable[[str, Bids], None]) -> None:
        self._known, self._exchange = known, exchange
        self.bids = Bids(known.size)
        #: Name of the call that all ranks make, and this rank's color and key as in MPI's ``Split``.
        self.call: tuple[str, int, int] = "", 0, 0
        #: Held while they create one.
        self.turn = Turn(self._come)

    def _come(self, ready: bool) -> bool:
        bids = self.bids
        what, bids.mine.color, bids.mine.key = self.call
        bids.write(ready, self._known.job)
        self._exchange(what, bids)
        return bids.evaluate()


#: Number of tags by which ranks of a communicator meet in Create_group.
_TAGS = 256


def all_ready(known: Known, number: int, ranks: Sequence[int], tag: int, mpi: Timely, ready: bool) -> bool:
    """True if all of these ranks hold their turns at creating; they tell each other by messages of the job.

    Open MPI 5.0.11 may hang if threads of a process create communicators at the same time, one of them by
    ``MPI_Comm_create_group``. ``tag`` distinguishes calls of several threads. Raises ``CollectiveTimeout`` if a rank
    does not arrive in time, ``PeerError`` if one has died.
    """
    where = f"rank {known.rank}: Create_group: rank(s)"

    def raise_if_dead() -> None:
        if not faults.lacking(mpi) and (dead := sorted({*faults.dead_ranks(mpi)} & {*ranks})):
            raise PeerError(f"{where} {dead} died")

    places = [known.members[rank] for rank in ranks]
    own = MOST_COMMS + number * _TAGS + tag % _TAGS  # beyond those of teams
    least = mpi.named(partial(known.job.min_word, places, own, int(ready), mpi.seconds, raise_if_dead))
    if least < 0:
        note_abandoned()
        raise CollectiveTimeout(f"{where} [{ranks[-2 - least]}] did not come within {mpi.seconds:g} s (UCCH_TIMEOUT)")
    return bool(least)
