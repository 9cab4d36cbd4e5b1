"""Membership of a communicator: its ranks' agreed facts, islands, number, tested teams, and arrival board."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from ..bindings import quarantine
from ..device import bind
from ..errors import CollectiveError, PeerError, UCCHError
from ..native.libraries import lib
from ..native.waiting import progress_until
from ..planner.collectives import Call, elements
from ..planner.plan import Plan
from ..planner.select import Tuning, choose, make_plan
from ..planner.topology import Topology
from ..trace import flight
from ..trace.timeline import communicator
from ..transport import wires
from ..transport.channels import Channels, join
from . import creations, faults, process
from .board import Board
from .known import Known
from .links import Links
from .meeting import MOST_COMMS, Exchanged, Seat, meeting_of, release_number
from .teams import Teams
from .timely import MAKING, Timely, timely

#: Counts of four-byte elements of the calls whose teams every communicator makes at creation.
USUAL_COUNTS = (1, 1 << 12, 1 << 18, 1 << 24)


class Membership:
    """This rank's part in one communicator. Collective to create and to close over ``mpi``, which stays private.

    ``timeout``: seconds to wait for the other ranks while teams are made. ``seat``: what the ranks have agreed on, if
    they know each other. ``queues``: make channels if calls on devices need them. ``AgreementError`` on every rank if
    their facts do not fit together."""

    def __init__(self, mpi: Any, timeout: float, seat: Seat | None = None, queues: bool = True) -> None:
        self.mpi = timely(mpi, timeout, MAKING)
        self.links: Links | None = None
        self._recorded, self._queues = 0, queues
        self._unwatch: Callable[[], object] = bool
        #: Channels; and why there are none although devices of several islands could have some.
        self.channels: Channels | None = None
        self.lacks = ""
        self._graphs: tuple[Channels | None, Topology, str] | None = None
        try:
            if seat is not None:
                self._try(lambda: seat, timeout)
            else:
                with meeting_of(self.mpi) as exchanged:
                    exchanged.bids.agree(self.mpi.allgather)
                    self.mpi.allgather(None)  # ranks that have passed this may send
                    self._try(partial(self._meet, exchanged), timeout)
        except BaseException:
            faults.give_up(self.mpi)
            raise

    def _try(self, take: Callable[[], Seat], timeout: float) -> None:
        #: Any thread may discard messages while another one closes; the number of a closed communicator may be
        #: another's.
        self._discarding, self._is_closed = threading.RLock(), False
        try:
            self._create(take(), min(self.mpi.seconds, timeout))
        except BaseException:
            self.part()
            quarantine.keep(self)  # the libraries still use parts of it
            if hasattr(self, "job"):
                process.abandon_job(self.job)
            if hasattr(self, "id"):
                self.release_id()
            raise
        self.job.used = True
        self.teams.timeout = timeout

    def _meet(self, exchanged: Exchanged) -> Seat:
        """The seat of ranks that may not have met before; collective."""
        rank = int(self.mpi.Get_rank())
        process.meet(exchanged.facts, rank)
        self._watch(partial(process.ended, exchanged.facts, rank))
        runtime = bind(process.here(self.mpi)[0])
        self.job = process.job_of(self.mpi, exchanged.facts, exchanged.offers, runtime)
        known = Known(self.job, exchanged.facts, exchanged.places, exchanged.table, runtime)
        return exchanged.bids.seat(known, range(known.size), self.mpi.seconds)

    def _create(self, seat: Seat, seconds: float) -> None:
        """Set up arrival board, channels and teams; collective, unless the seat is ready."""
        #: Number of the communicator, part of every message tag; and the number that no other one of its processes has.
        self.id, self._claimed, known = seat.id, seat.claimed, seat.known
        self.known, self.job, self.facts, self.rank, self.size = known, known.job, known.facts, known.rank, known.size
        self.bare, self.topology, self.tuning, self.staged = known.bare, known.topology, known.tuning, known.staged
        self.island, self.device, self.runtime = known.island, known.device, known.runtime
        self.place = known.device.place
        self.teams = Teams(seat, seconds)
        self.board = board = Board(known, seat.page, seat.claimed + 1)  # before teams are made: to see deaths
        board.id, times = self.id, seat.claimed // MOST_COMMS
        board.number = self._recorded = communicator(board.native, self.id, times, known.places, self.rank)
        if known.far:
            self.links = Links(known, board, seat.claimed, self.mpi)
        self._watch(board.dead_ranks)
        if self._queues and not known.bare.flat:
            self._join_channels()
        if not seat.has_teams:
            self._make_teams()

    def _join_channels(self) -> None:
        memory = None if self.runtime is None else self.runtime.memory_type
        native_in_stream = self.island.size == 1 or (
            memory is not None and not self.device.by_host and self.job.vendors_library(memory)
        )
        self.channels, self.lacks = self._join(self.bare, native_in_stream)
        self.tuning = replace(self.tuning, queued=self.channels is not None)

    def _join(self, topology: Topology, native_in_stream: bool) -> tuple[Channels | None, str]:
        return join(self.mpi, topology, self.facts, self.runtime, native_in_stream, self._claimed)

    def _make_teams(self) -> None:
        """Make the teams that usual calls need and that a rank cannot make by itself; all ranks learn whether all
        work."""
        self.teams.poll_hook, self.teams.together = partial(self._check, time.monotonic()), True
        failure = self._first_teams()
        if failure is not None:
            self.board.leave()  # others may be waiting for this rank in a team's first call
        everyone = self.mpi.allgather(str(failure) if failure else "")
        if failure is not None:
            raise failure
        for rank, text in enumerate(everyone):
            if text:
                raise CollectiveError(f"rank {rank} could not create its teams: {text}")
        self.teams.poll_hook, self.teams.together = None, False

    def retune(self, tuning: Tuning) -> None:
        """Choose by other rules from now on, which need other teams; collective."""
        self.tuning = replace(tuning, queued=self.channels is not None)
        self._make_teams()

    def _check(self, began: float) -> None:
        """Raise if the teams, whose making began at ``began``, can no longer be made."""
        if not faults.lacking(self.mpi):
            self.mpi.check_peers()
        if (peer := self.board.rank_of(self.board.cut(time.monotonic() - began))) >= 0:
            text = wires.cut_text(self.board.link_to(peer))
            raise CollectiveError(f"rank {self.rank}: no connection with rank {peer}: {text}")
        for rank in range(self.size):
            if rank != self.rank and self.board.fate(rank) == lib.UCCH_LEFT:
                raise CollectiveError(f"rank {self.rank}: rank {rank} could not create its teams")

    def _watch(self, find_dead: Callable[[], list[int]]) -> None:
        """Let ``find_dead`` find deaths from now on, for an exchange that does not notice them itself."""
        if not isinstance(self.mpi, Timely):
            self._unwatch()
            self._unwatch = self.mpi.watch(find_dead)

    def _first_teams(self) -> UCCHError | None:
        """Make and test the teams that usual calls need. Returns the failure, if any.

        A team is made by all its ranks together. If a first call made its teams, non-blocking calls on several
        communicators, in another order on each rank, would deadlock: calls in host memory use messages instead.
        """
        try:
            for ranks, link in self.known.main:
                self.teams.get(ranks, link)
            if not self.known.one_team:
                for plan in self._usual_plans():
                    self.teams.prepare(step for *_, step in plan.steps_of(self.rank))
        except BaseException as error:
            if not faults.lacking(self.mpi):  # the other ranks notice it themselves
                self.mpi.Revoke()
                raise
            if not isinstance(error, UCCHError):
                raise
            return error
        return None

    def _usual_plans(self) -> Iterator[Plan]:
        """Plans, in one fragment, of calls of all sizes whose counts every rank knows, with root 0 if rooted."""
        for collective in ("barrier", "allreduce", "bcast", "reduce", "allgather", "reduce_scatter_block"):
            root = 0 if collective in ("bcast", "reduce") else -1
            for count in USUAL_COUNTS:
                call = Call(collective, self.size, () if collective == "barrier" else (count,), root)
                choice = choose(self.topology, collective, elements(call) * 4, self.tuning)
                yield make_plan(self.topology, call, choice._replace(fragments=1), self.rank)

    @cached_property
    def meets_on_board(self) -> bool:
        """True if short calls use the arrival board: once such a call has ended here, no rank needs this one for it."""
        tuning, few = self.tuning, self.size <= lib.UCCH_PARCEL_RANKS
        return few and self.board.shows_all and self.topology.flat and not (tuning.user or tuning.measured)

    def fabric(self) -> tuple[str, ...]:
        """Fabric of vendors whose ranks are on several hosts, and why; empty if there are none."""
        return (self.job.split.why,) if self.job.split.why and not self.topology.one_host else ()

    def rings(self) -> tuple[str, ...]:
        """Rings of this rank and their peers, or why it has none; empty if no call would use them."""
        if self.channels is not None:
            return (self.channels.describe(),)
        return (f"none ({self.lacks})",) if self.lacks else ()

    @property
    def graph_channels(self) -> Channels | None:
        """The channels that :meth:`for_graphs` returns, if they have been made."""
        return self.channels or (self._graphs and self._graphs[0]) or None

    def for_graphs(self) -> tuple[Channels | None, Topology, str]:
        """(channels for captured calls, topology for them, why there are none); made by the first call,
        collectively."""
        if self.channels is not None or not self.topology.flat:
            return self.channels, self.topology, self.lacks
        if self._graphs is None:
            apart, mode = self.bare.apart(), lib.ucch_capture_mode(lib.UCCH_RELAXED)  # outside of the capture
            try:
                found = self._join(apart, False)
            finally:
                lib.ucch_capture_mode(mode)
            self._graphs = found[0], apart, found[1]
        return self._graphs

    def creation(self, ranks: Sequence[int] | None = None, tag: int | None = None) -> AbstractContextManager[None]:
        """A context in which this thread creates a communicator from ``ranks`` of this one (None: all)."""
        places = self.known.places if ranks is None else [self.known.places[rank] for rank in ranks]
        return creations.creation(places, self._claimed, tag)

    def leave(self) -> None:
        """Let other ranks know that this one makes no more calls; not while a thread of it creates a communicator."""
        if not creations.under_way(self._claimed):
            self.board.leave()

    def discard_users(self) -> None:
        """Discard messages of users that were not received; not those of collectives, whose tags have another bit."""
        here = self.job.process
        # Offers are discarded as such: their senders are told.
        users = here.worker.handle, self.id << 52, 0xFFF << 52 | 1 << 51 | 1 << lib.UCCH_OFFER_BIT
        with self._discarding:
            if self._is_closed:
                return
            with suppress(PeerError):  # a dead sender does not wait
                while self.channels is not None and (peer := self.channels.discard(*users)) >= 0:
                    self.channels.reach(peer, here.connection(self.facts[peer], self.rank, peer).handle)
            lib.ucch_discard_all(*users)

    def _all_channels(self) -> list[Channels]:
        both = self.channels, self._graphs and self._graphs[0]
        return [channels for channels in both if channels is not None]

    def await_quiet(self, hopeless: Callable[[], object]) -> None:
        """Wait until the rings are empty, ``hopeless()`` is true, or the time limit has passed."""
        progress_until(lambda: all(map(Channels.quiet, self._all_channels())), self.teams.timeout, hopeless)

    def close(self, *, together: bool) -> None:
        """Free teams and board; collective. ``together``: all ranks are known to do so."""
        with self._discarding:
            self._is_closed = True
        self.job.process.discard(self.id)
        for channels in self._all_channels():
            channels.close(self.teams.timeout)
        self.part()
        self.teams.close(self.board.close(together=together), together=together)
        self.release_id()

    def abandon(self) -> None:
        """Leave a communicator that has failed. What libraries or other ranks may still use stays."""
        self.part()
        self.release_id()
        for channels in self._all_channels():
            channels.let_go()

    def part(self) -> None:
        """Stop watching ranks of other hosts, and recording."""
        self._unwatch()
        self._unwatch = bool
        flight.forget(self._recorded)
        if self.links is not None:
            self.links.close()

    def release_id(self) -> None:
        with self._discarding:
            self._is_closed = True
        creations.forget(self._claimed)
        release_number(self.id)
