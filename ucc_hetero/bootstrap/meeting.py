"""Ranks come together to make a communicator: they take their turns, and tell each other what all have to know."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .. import env, log
from .._version import __version__
from ..device import bind
from ..errors import AgreementError, UCCHError
from ..machine import nics
from ..machine.discover import host_identity
from ..machine.facts import Facts, unpacked
from ..native.libraries import ffi, lib
from ..planner.rules import NO_TABLE, Table, read_table
from ..transport import wires
from . import agreement, numbers, process, settings
from .board import PAGES, offer
from .known import Known
from .process import MOST_SPARE
from .turns import Turn

_GOES_ON, _NOT_READY = lib.UCCH_GOES_ON, lib.UCCH_NOT_READY

#: Measured choices that communicators of this process were made with, by the file's name.
_tables: dict[str, Table] = {}


class Claim(NamedTuple):
    """What a rank that has its turn says of the communicator to be made.

    ``last`` and ``next_used`` are `taken` of :mod:`.numbers`, ``file`` is one for the arrival board, ``spare`` has the
    numbers of what it could use again.
    """

    last: int
    next_used: int
    file: int
    spare: Sequence[int]


class Words(NamedTuple):
    """What a rank says to ranks that may not know it.

    ``place``: its number in the whole job. ``unchanged`` are the jobs to which it has given the facts that it would
    give now.
    """

    process: str
    place: int
    offer: tuple[str, ...]
    unchanged: tuple[str, ...]
    claim: Claim | None


class Said(NamedTuple):
    """What ranks have told each other that may not have known each other, rank by rank, and the measured choices of
    all."""

    facts: list[Facts]
    places: list[int]
    claims: list[Claim]
    offers: list[tuple[str, ...]]
    table: Table


class Seat:
    """What the ranks of a new communicator have agreed upon: its number, and what an earlier one of theirs has left.

    Args:
        known: What they know of each other.
        claimed: The number, as they have claimed it (:mod:`.numbers`).
        file: What the first one of this host offers for the arrival board.
        spare: Numbers of what all of them could use again, in one order on all.
        seconds: The most that the end of an old team may take.
    """

    def __init__(self, known: Known, claimed: int, file: int, spare: Sequence[int], seconds: float) -> None:
        self.known, self.claimed, self.file = known, claimed, file
        numbers.claim(claimed)
        #: Part of every message tag.
        self.id = claimed % numbers.MOST
        #: What the communicator leaves, and has been left, is known to all of its ranks by this number.
        self.left_by, self.spare = known.job.take_spare(known.members, spare, claimed * PAGES)
        # In this rank's turn, as libucc destroys teams then. Only now: the oldest may be what the ranks are about to
        # use, although this one has freed more since it offered that.
        known.job.drop_spare(seconds, MOST_SPARE)

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
        numbers.release(self.id)


class _Meeting:
    """The ranks of ``mpi`` while they hold their turns at creating, and what they come to know of each other."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._rank, self._size = int(mpi.Get_rank()), int(mpi.Get_size())
        #: What is wrong with this rank's settings.
        self._mistake = settings.read(process.world_of(mpi).Get_rank()) or process.lacks_files()
        self.said: Said | None = None

    def come(self, ready: bool) -> bool:
        """Exchange words, and facts where these ranks do not have those of a job in common. True if all ranks are
        ready; collective. ``ValueError`` on all of them where settings of one are wrong."""
        everyone = self._mpi.allgather((self._mistake or ready, *self._said_again(ready)))
        if mistakes := {rank: each for rank, (each, *_) in enumerate(everyone) if isinstance(each, str)}:
            raise settings.wrong(mistakes, self._rank, self._size)
        words = [each for _, each, _ in everyone if each is not None]
        common = set.intersection(*(set(each.unchanged) for each in words)) if len(words) == self._size else set()
        job = next((job for job in process.all_jobs() if job.name in common), None)
        if job is None:
            return self._exchange(ready)
        self._know([job.facts[job.index[each.process]] for each in words], words, everyone[0][2])
        return all(each for each, *_ in everyone)

    def _know(self, facts: list[Facts], words: list[Words], table: Table) -> None:
        places, claims, offers = ([getattr(each, of) for each in words] for of in ("place", "claim", "offer"))
        self.said = Said(facts, places, claims, offers, table)

    def _said_again(self, ready: bool) -> tuple[Words | None, Table]:
        """The words and the table of a rank that has had communicators before; none where it has more to say."""
        if not process.begun():
            return None, NO_TABLE
        try:
            return self._say(ready)[1:]
        except (UCCHError, ValueError):
            return None, NO_TABLE

    def _say(self, ready: bool) -> tuple[Facts, Words, Table]:
        """This rank's facts, words and table."""
        place, number = process.here(self._mpi)
        bind(place)  # first: UCX and UCC look for a device when they begin
        mine = process.process().facts(place, __version__)
        unchanged = tuple(job.name for job in process.all_jobs() if job.facts[job.rank] == mine)
        claim = Claim(*numbers.taken(), offer(self._size), process.spare()) if ready else None
        words = Words(mine.process, number, process.offer(), unchanged, claim)
        return mine, words, _table() if self._rank == 0 else NO_TABLE

    def _exchange(self, ready: bool) -> bool:
        """Exchange facts, too. A rank that cannot take part says why to all."""
        self._divide_ports()
        failure: Exception | None = None
        try:
            facts, words, table = self._say(ready)
            mine: Any = facts.packed(), words, table, ready
            log.set_rank(words.place, facts.vendor)
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
        found = [unpacked(each[0]) for each in everyone]
        try:
            agreement.judge(found)
        except AgreementError as differ:
            raise settings.told(differ, self._rank) from None
        self._know(found, [e[1] for e in everyone], everyone[0][2])
        return all(e[3] for e in everyone)

    def _divide_ports(self) -> None:
        """Let all ports of a host carry data, where there are several and libucp has not begun yet; and none whose
        address another host has, too."""
        begun, allowed = process.begun(), os.environ.get("UCX_NET_DEVICES", "")
        offer = () if begun else nics.ports(allowed)
        mine = frozenset(nics.interfaces().values())
        everyone = self._mpi.allgather((host_identity().node, offer, mine))
        nodes, offers, found = zip(*everyone, strict=True)
        repeated = nics.repeated(nodes, found)
        offers = tuple(tuple(port for port in each if port.address not in repeated) for each in offers)
        spread = nics.spread(nodes, offers, self._rank)
        if not begun:
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
    """Hold this rank's turn at creating while all ranks of ``mpi`` hold theirs; several threads may be here.

    Raises :class:`AgreementError` on every rank when their facts do not fit together.
    """
    meeting = _Meeting(mpi)
    with Turn(meeting.come):
        assert meeting.said is not None, "all have told each other everything"
        _tables[meeting.said.table.path] = meeting.said.table
        yield meeting.said


class Again:
    """The ranks of a communicator as they make others of some of them, one after the other.

    Args:
        known: What they know of each other.
        exchange: In a call of this name, brings all the bytes of each rank's `mine`, into `all`.
    """

    def __init__(self, known: Known, exchange: Callable[[str], None]) -> None:
        self._known, self._exchange = known, exchange
        self.mine, self.all = ffi.new("ucch_words *"), ffi.new("ucch_words[]", known.size)
        self._ranks, self._spare = ffi.new("int[]", known.size), ffi.new("int64_t[]", MOST_SPARE)
        #: Which call all of them make, and which ranks are to be in a communicator with this one, in which order: color
        #: and key, as in MPI's ``Split``.
        self.call: tuple[str, int, int] = "", 0, 0
        #: Held while they make one.
        self.turn = Turn(self._come)
        self._claimed = -1

    def _come(self, ready: bool) -> bool:
        """True if all ranks have their turns; collective."""
        mine, known = self.mine, self._known
        what, mine.color, mine.key = self.call
        mine.ready = ready
        if ready and known.job.sound():
            mine.ready, spare = _GOES_ON, process.spare(known.job)
            mine.last, mine.next_used = numbers.taken()
            mine.file, mine.spares, mine.spare[0 : len(spare)] = offer(known.size), len(spare), spare
        self._exchange(what)
        self._claimed = lib.ucch_words_claim(self.all, known.size)
        return self._claimed != _NOT_READY

    def agree(self, ask: Callable[[bytes], Iterable[bytes]]) -> bool:
        """Agree on the number of the new communicator. False where a rank wants no more of their job. ``ask`` as for
        :func:`.numbers.agree`."""
        if self._claimed == lib.UCCH_ASK:
            last, next_used = zip(*((each.last, each.next_used) for each in self.all), strict=True)
            self._claimed = numbers.agree(last, next_used, ask)
        if self._claimed >= numbers.MOST:
            # Before MPI makes its communicator, which all ranks have to come to: those that are past it may send.
            self._known.job.process.discard(self._claimed % numbers.MOST)
        return self._claimed >= 0

    def seat(self, ranks: Sequence[int] | None, seconds: float) -> Seat:
        """This rank's seat in the new communicator of these ranks, or of those of its color."""
        if ranks is None:
            count = lib.ucch_words_ranks(self.all, self._known.size, self._known.rank, self._ranks)
            ranks = ffi.unpack(self._ranks, count)
        else:
            self._ranks[0 : len(ranks)] = ranks
        known, spares = self._known.part(ranks), lib.ucch_words_spare(self.all, self._ranks, len(ranks), self._spare)
        file = self.all[ranks[known.near[0]]].file
        return Seat(known, self._claimed, file, ffi.unpack(self._spare, spares), seconds)
