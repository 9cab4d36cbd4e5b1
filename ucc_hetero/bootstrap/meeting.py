"""Ranks come together to make a communicator: they take their turns, and tell each other what all have to know."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

from .. import env, log
from .._version import __version__
from ..device import bind
from ..errors import AgreementError, CollectiveTimeout, PeerError, UCCHError
from ..machine import nics
from ..machine.discover import host_identity
from ..machine.facts import Facts, unpacked
from ..native.libraries import ffi, lib
from ..planner.rules import NO_TABLE, Table, read_table
from ..transport import wires
from . import agreement, faults, process, settings
from .board import PAGES, offer, pages, take_back
from .known import Known
from .process import MOST_SPARE, Job, Spare
from .timely import MAKING, Timely, not_met, timely

#: The longest pause after a failed attempt, in seconds.
_PAUSE = 0.002

_creating = threading.RLock()


class Turn:
    """A context in which this process has its turn to create something, and so has every other rank of it: one thread
    at a time, the same one on every rank that takes part.

    libucc sends what it exchanges during a creation under one tag: threads that create teams at the same time would
    take each other's messages, and locks taken in different orders on different ranks would wait for ever.
    ``everyone(ready)`` tells the ranks whether this one is ready and returns whether all are; collective among them,
    and repeated by all until they are.
    """

    def __init__(self, everyone: Callable[[bool], bool]) -> None:
        self._everyone = everyone

    def __enter__(self) -> None:
        while True:
            ready = _creating.acquire(blocking=False)
            together = False
            try:
                together = self._everyone(ready)
            finally:
                if ready and not together:
                    _creating.release()
            if together:
                return
            time.sleep(random.uniform(0, _PAUSE))

    def __exit__(self, *error: object) -> None:
        _creating.release()


def alone() -> threading.RLock:
    """Held while this process destroys something: libucc returns its number to the table that creations exchange.

    A table that changes on its way makes ranks choose different numbers for one team.
    """
    return _creating


#: Communicators that a process can have.
MOST_COMMS = 4096

#: Communicator numbers in use by this process, a bit each; the last one claimed, and the first above it that may be
#: in use.
_ids = bytearray(MOST_COMMS // 8)
_last, _next_used = [-1], [MOST_COMMS]


def numbers_taken() -> tuple[int, int]:
    """(the last number that this process has claimed, the first one above it that may be in use)."""
    return _last[0], _next_used[0]


def free_number(following: int, ask: Callable[[bytes], Iterable[bytes]]) -> int:
    """The first number from ``following`` on that is free on all of these ranks; collective among them.

    A communicator's number is its rest by `MOST_COMMS`. Messages that were not received may still be on their way when
    their communicator is freed: the number that these ranks claim is above all that they have claimed before. ``ask``
    exchanges the numbers in use, as bits.
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

#: Measured choices that communicators of this process were made with, by the file's name.
_tables: dict[str, Table] = {}


class Said(NamedTuple):
    """What ranks have told each other that may not have known each other, rank by rank: facts, numbers in the whole
    job, names of jobs that they could use. And the measured choices of all, and what the next communicator goes by."""

    facts: list[Facts]
    places: list[int]
    offers: list[tuple[str, ...]]
    table: Table
    bids: Bids


class Seat:
    """What the ranks of a new communicator have agreed upon: its number, as ``claimed``, and what an earlier one left.

    ``file`` is what the first one of this host offers for the arrival board, ``spare`` numbers of what all of them
    could use again, in one order on all, ``seconds`` the most that the end of an old team may take.
    """

    def __init__(self, known: Known, claimed: int, file: int, spare: Sequence[int], seconds: float) -> None:
        self.known, self.claimed, self.file, self.seconds = known, claimed, file, seconds
        claim_number(claimed)
        #: Part of every message tag.
        self.id = claimed % MOST_COMMS
        #: What the communicator leaves, and has been left, is known to all of its ranks by this number.
        self.left_by, self.spare = claimed * PAGES, Spare(known.members, {}, None)
        for each in spare:
            found = known.job.spare.get(each)
            if found is not None and found.members == known.members:
                self.left_by, self.spare = each, known.job.spare.pop(each)
                break
        # In this rank's turn, as libucc destroys teams then. Only now: the oldest may be what the ranks are about to
        # use, although this one has freed more since it offered that.
        known.job.drop_spare(seconds, MOST_SPARE)

    def take_page(self, mpi: Any) -> None:
        """Have a page of a new file where only that is lacking to be `ready`; collective then."""
        known = self.known
        if self.ready or not known.makes_teams_alone(self.claimed):
            return
        found = pages(known, self.file)
        try:
            if not all(timely(mpi, self.seconds, MAKING).allgather(bool(found))):
                return
        except BaseException:
            release_number(self.id)
            raise
        if known.near[0] == known.rank:
            take_back()
        self.spare = self.spare._replace(page=found[0])
        for i, page in enumerate(found[1:], 1):
            known.job.spare[self.claimed * PAGES + i] = Spare(known.members, {}, page)

    @property
    def ready(self) -> bool:
        """True if each rank makes the communicator by itself, with nothing that can fail; the same on all of them."""
        seen = self.spare.page is not None or self.known.size == 1
        return seen and self.known.makes_teams_alone(self.claimed)

    def give_back(self) -> None:
        """Free the communicator, which is `ready`, and in which this rank has made no call: it waits for no other."""
        known, page = self.known, self.spare.page
        if page is not None:
            lib.ucch_board_give_back(page.address, known.rank, self.claimed + 1, True)
        known.job.process.discard(self.id)
        known.job.spare[self.left_by] = self.spare
        release_number(self.id)


class Bids:
    """What ranks say as they come to make a communicator, which has its number and its page by that (base/words.c)."""

    def __init__(self, size: int) -> None:
        self._size, self._claimed = size, -1
        #: What this rank says, and what all do.
        self.mine, self.all = ffi.new("ucch_words *"), ffi.new("ucch_words[]", size)
        self._ranks, self._spare = ffi.new("int[]", size), ffi.new("int64_t[]", MOST_SPARE)

    def say(self, ready: bool, job: Job | None = None) -> None:
        """Write down what this rank says: if it is ``ready``, and for a communicator of this job, or of any."""
        mine = self.mine
        mine.ready = ready
        if ready and (job is None or job.sound()):
            mine.ready, spare = _GOES_ON, process.spare(job)
            mine.last, mine.next_used = numbers_taken()
            mine.file, mine.spares, mine.spare[0 : len(spare)] = offer(self._size), len(spare), spare

    def heard(self) -> bool:
        self._claimed = lib.ucch_words_claim(self.all, self._size)
        return self._claimed != _NOT_READY

    def agree(self, ask: Callable[[Any], Iterable[Any]]) -> bool:
        """Agree on the new communicator's number, by ``ask`` where one may be in use; False where a rank wants no more
        of its job."""
        if self._claimed == lib.UCCH_ASK:
            self._claimed = free_number(1 + max(each.last for each in self.all), ask)
        if self._claimed >= MOST_COMMS:
            # Before any rank is past what all ranks have to come to: those that are may send.
            process.process().discard(self._claimed % MOST_COMMS)
        return self._claimed >= 0

    def seat(self, known: Known, ranks: Sequence[int] | None, seconds: float) -> Seat:
        """This rank's seat among these ``ranks`` of all that are ``known``, or those of its color in the order of their
        keys."""
        if ranks is None:
            count = lib.ucch_words_ranks(self.all, self._size, known.rank, self._ranks)
            ranks = ffi.unpack(self._ranks, count)
        else:
            self._ranks[0 : len(ranks)] = ranks
        spare = ffi.unpack(self._spare, lib.ucch_words_spare(self.all, self._ranks, len(ranks), self._spare))
        part = known.part(ranks)
        return Seat(part, self._claimed, self.all[ranks[part.near[0]]].file, spare, seconds)


@lru_cache(maxsize=1)
def _whereabouts() -> tuple[tuple[str, ...], frozenset[int]]:
    """The node of this process and its addresses, asked for once: that takes half the time of a later communicator."""
    return host_identity().node, frozenset(nics.interfaces().values())


class _Meeting:
    """The ranks of ``mpi`` while they hold their turns at creating, and what they come to know of each other."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._rank, self._size = int(mpi.Get_rank()), int(mpi.Get_size())
        #: What is wrong with this rank's settings.
        self._mistake = settings.read(process.world_of(mpi).Get_rank()) or process.lacks_files()
        self._ports: Any = None
        if not self._mistake:
            ports = () if process.begun() else nics.ports(os.environ.get("UCX_NET_DEVICES", ""))
            node, addresses = _whereabouts()
            self._ports = node, ports, addresses

    def come(self, ready: bool) -> bool:
        """True if all ranks are ready; collective. ``ValueError`` on all of them where settings of one are wrong."""
        come, self._everyones_ports = zip(*self._mpi.allgather((self._mistake or ready, self._ports)), strict=True)
        if mistakes := {rank: each for rank, each in enumerate(come) if isinstance(each, str)}:
            raise settings.wrong(mistakes, self._rank, self._size)
        return all(come)

    def _say(self) -> tuple[Any, ...]:
        place, number = process.here(self._mpi)
        bind(place)  # first: UCX and UCC look for a device when they begin
        facts, bids = process.process().facts(place, __version__), Bids(self._size)
        log.set_rank(number, facts.vendor)
        bids.say(True)
        table = _table() if self._rank == 0 else NO_TABLE
        return facts.packed(), number, process.offer(), table, bytes(ffi.buffer(bids.mine))

    def exchange(self) -> Said:
        """Tell each other everything. A rank that cannot take part says why to all."""
        self._divide_ports()
        failure: Exception | None = None
        mine: Any
        try:
            mine = self._say()
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
        bids.heard()
        _tables[tables[0].path] = tables[0]
        return Said(facts, list(places), list(offers), tables[0], bids)

    def _divide_ports(self) -> None:
        """Let all ports of a host carry data, if libucp has not begun; none whose address another host has, too."""
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
    """Measured choices, as this rank finds them; those of an earlier communicator where its host lacks the file."""
    path = env.get("TUNE_FILE")
    try:
        return read_table(path)
    except ValueError:
        if path not in _tables:
            raise
        return _tables[path]


@contextmanager
def met(mpi: Any) -> Iterator[Said]:
    """Hold this rank's turn at creating while all ranks of ``mpi`` hold theirs; several threads may be here."""
    meeting = _Meeting(mpi)
    with Turn(meeting.come):
        yield meeting.exchange()


class Again:
    """The ranks of a communicator as they make others of some of them; ``exchange`` brings all bids, in a call of a
    name."""

    def __init__(self, known: Known, exchange: Callable[[str, Bids], None]) -> None:
        self._known, self._exchange = known, exchange
        self.bids = Bids(known.size)
        #: Which call all of them make, and which ranks are to be in a communicator with this one, in which order: color
        #: and key, as in MPI's ``Split``.
        self.call: tuple[str, int, int] = "", 0, 0
        #: Held while they make one.
        self.turn = Turn(self._come)

    def _come(self, ready: bool) -> bool:
        bids = self.bids
        what, bids.mine.color, bids.mine.key = self.call
        bids.say(ready, self._known.job)
        self._exchange(what, bids)
        return bids.heard()


#: Tags by which ranks of a communicator come to Create_group.
_TAGS = 256


def all_ready(known: Known, number: int, ranks: Sequence[int], tag: int, mpi: Timely, ready: bool) -> bool:
    """True if all of these ranks have their turns at creating, as they tell each other by messages of the job's.

    Open MPI 5.0.11 may hang where threads of a process make communicators at the same time, one by
    ``MPI_Comm_create_group``. ``tag`` tells those of several threads apart. ``CollectiveTimeout`` if one does not come
    in time, ``PeerError`` if one has died.
    """
    where = f"rank {known.rank}: Create_group: rank(s)"

    def look() -> None:
        if not faults.lacking(mpi) and (dead := sorted({*faults.dead_ranks(mpi)} & {*ranks})):
            raise PeerError(f"{where} {dead} died")

    places = [known.members[rank] for rank in ranks]
    own = MOST_COMMS + number * _TAGS + tag % _TAGS  # beyond those of teams
    least = mpi.named(partial(known.job.least, places, own, int(ready), mpi.seconds, look))
    if least < 0:
        not_met()
        raise CollectiveTimeout(f"{where} [{ranks[-2 - least]}] did not come within {mpi.seconds:g} s (UCCH_TIMEOUT)")
    return bool(least)
