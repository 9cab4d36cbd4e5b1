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
from .board import Page, offer
from .turns import turn

#: Measured choices that communicators of this process were made with, by the file's name.
_tables: dict[str, Table] = {}


class Claim(NamedTuple):
    """What a rank that has its turn says of each communicator: ``taken`` of :mod:`.numbers`, numbers that had teams it
    could use again, and a page for the arrival board."""

    taken: tuple[int, bytes]
    spare: tuple[int, ...]
    page: Page


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


class Known(NamedTuple):
    """What the ranks of a new communicator know of each other, rank by rank, and the measured choices of all.

    ``job``: what ``offers`` come to, where that is known.
    """

    facts: list[Facts]
    places: list[int]
    claims: list[Claim]
    table: Table
    offers: Sequence[tuple[str, ...]] = ()
    job: process.Job | None = None

    def spare(self) -> set[int]:
        """Numbers whose teams all ranks could use again."""
        return set.intersection(*(set(each.spare) for each in self.claims))


class _Meeting:
    """The ranks of ``mpi`` while they hold their turns at creating, and what they come to know of each other."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._rank, self._size = int(mpi.Get_rank()), int(mpi.Get_size())
        #: What is wrong with this rank's settings.
        self._mistake = settings.read(process.world_of(mpi).Get_rank()) or process.lacks_files()
        self.known: Known | None = None

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
        self.known = Known(facts, places, claims, table, offers)

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


def _claim(size: int) -> Claim:
    return Claim(numbers.taken(), process.spare(), offer(size))


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
def met(mpi: Any) -> Iterator[Known]:
    """Hold this rank's turn at creating while all ranks of ``mpi`` hold theirs; several threads may be here.

    Raises :class:`AgreementError` on every rank when their facts do not fit together.
    """
    meeting = _Meeting(mpi)
    with turn(meeting.come):
        assert meeting.known is not None, "all have told each other everything"
        _tables[meeting.known.table.path] = meeting.known.table
        yield meeting.known


@contextmanager
def met_again(
    everyones: Callable[[Any], list[Any]], mpi: Any, parent: Known
) -> Iterator[Callable[[Any], Known | None]]:
    """Hold this rank's turn while all ranks of ``mpi``, which ``parent`` is about, hold theirs to make a communicator
    of some of them; ``everyones`` exchanges what each says.

    Yields what tells, of the new communicator's exchange, what its ranks know of each other: what they knew before; or
    None where a rank wants no more of their job.
    """
    claims: list[Claim | None] = []

    def come(ready: bool) -> bool:
        usable = ready and parent.job is not None and parent.job.sound()
        mine = _claim(len(parent.facts)) if usable else None
        everyone = everyones((ready, mine))
        claims[:] = [claim for _, claim in everyone]
        return all(each for each, _ in everyone)

    def among(made: Any) -> Known | None:
        ours, theirs = made.Get_group(), mpi.Get_group()
        ranks = type(ours).Translate_ranks(ours, list(range(ours.Get_size())), theirs)
        ours.Free()
        theirs.Free()
        facts, places, said = ([of[rank] for rank in ranks] for of in (parent.facts, parent.places, claims))
        return None if None in claims else parent._replace(facts=facts, places=places, claims=said)

    with turn(come):
        yield among
