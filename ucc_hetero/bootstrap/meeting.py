"""Ranks come together to make a communicator: they take their turns, and tell each other what all have to know."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .. import env, log
from .._version import __version__
from ..device import bind
from ..errors import AgreementError, UCCHError
from ..machine import nics
from ..machine.discover import host_identity
from ..machine.facts import Facts, unpacked
from ..planner.rules import NO_TABLE, Table, read_table
from ..transport import wires
from . import agreement, numbers, process, settings
from .board import offer
from .known import Known
from .process import MOST_SPARE
from .turns import turn

#: Measured choices that communicators of this process were made with, by the file's name.
_tables: dict[str, Table] = {}


class Claim(NamedTuple):
    """What a rank that has its turn says of each communicator: ``taken`` of :mod:`.numbers`, numbers of what it could
    use again, and a file for the arrival board."""

    taken: tuple[int, int]
    spare: tuple[int, ...]
    file: int

    def numbers(self) -> list[int]:
        """The claim as numbers, fewer than `WORDS`."""
        return [*self.taken, self.file, len(self.spare), *self.spare]

    @classmethod
    def of(cls, said: Sequence[int]) -> Claim:
        """The claim that these numbers are."""
        last, used, file, count = said[:4]
        return cls((last, used), tuple(said[4 : 4 + count]), file)


#: Numbers that a rank says which is ready, and has a claim, are two more.
WORDS = 6 + MOST_SPARE


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


class Agreed(NamedTuple):
    """What the ranks of a new communicator have agreed upon: its number as they have claimed it, and what each says.

    ``known``: what they know of each other from the communicator that it is made from.
    """

    claimed: int
    claims: Sequence[Claim]
    known: Known

    def among(self, ranks: Sequence[int]) -> Agreed:
        """The same of some of the ranks, in this order."""
        return Agreed(self.claimed, [self.claims[rank] for rank in ranks], self.known.part(ranks))


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
        words = Words(mine.process, number, process.offer(), unchanged, _claim(self._size) if ready else None)
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


def _claim(size: int, job: process.Job | None = None) -> Claim:
    return Claim(numbers.taken(), process.spare(job), offer(size))


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
    with turn(meeting.come):
        assert meeting.said is not None, "all have told each other everything"
        _tables[meeting.said.table.path] = meeting.said.table
        yield meeting.said


@contextmanager
def met_again(known: Known, mpi: Any, exchange: Callable[[list[int]], list[list[int]]]) -> Iterator[Agreed | None]:
    """Hold this rank's turn while all ranks of ``mpi``, which are ``known``, hold theirs to make a communicator of
    some of them; ``exchange`` tells all up to `WORDS` numbers of each.

    Yields what they have agreed upon; None where a rank wants no more of their job.
    """
    everyone: list[list[int]] = []

    def come(ready: bool) -> bool:
        usable = ready and known.job.sound()
        everyone[:] = exchange([ready, usable, *(_claim(known.size, known.job).numbers() if usable else ())])
        return all(said[0] for said in everyone)

    with turn(come):
        if not all(said[1] for said in everyone):
            yield None
            return
        found = [Claim.of(said[2:]) for said in everyone]
        claimed = numbers.agree([claim.taken for claim in found], mpi.allgather)
        if claimed >= numbers.MOST:
            # Before MPI makes its communicator, which all ranks have to come to: those that are past it may send.
            known.job.process.discard(claimed % numbers.MOST)
        yield Agreed(claimed, found, known)
