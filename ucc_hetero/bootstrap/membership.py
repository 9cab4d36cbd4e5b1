"""Membership of a communicator: agreed facts of its ranks; islands, a number, tried teams, the arrival board."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

from .. import env, log
from ..bindings import quarantine
from ..device import bind
from ..errors import CollectiveError, PeerError, UCCHError
from ..machine.facts import Facts
from ..native.libraries import lib
from ..planner.collectives import Call, elements
from ..planner.plan import Plan
from ..planner.select import Tuning, agreed, choose, make_plan
from ..planner.topology import Topology, levels_of, link_weights, numbered, share_hosts
from ..trace import flight
from ..trace.timeline import communicator
from ..transport.carriers import warn_idle
from ..transport.channels import Channels, join
from ..transport.paths import Device, staged
from . import faults, numbers, process
from .board import Board, ended, meet
from .links import Links
from .meeting import Known, met
from .teams import MOST_SPARE, Teams
from .timely import limit, timely

#: Elements of four bytes in the calls whose teams every communicator has from its beginning.
USUAL_COUNTS = (1, 1 << 12, 1 << 18, 1 << 24)


class Membership:
    """This rank's part in one communicator. Collective to create and to close over ``mpi``, which stays private.

    ``timeout`` is that of waiting for the other ranks while teams are made, in seconds. Raises :class:`AgreementError`
    on every rank when their facts do not fit together.
    """

    def __init__(self, mpi: Any, timeout: float, known: Known | None = None) -> None:
        self.mpi = timely(mpi, timeout, "the making of a communicator")
        self.links: Links | None = None
        self._recorded = 0
        self._unwatch: Callable[[], object] = bool
        self.rank, self.size = int(mpi.Get_rank()), int(mpi.Get_size())
        try:
            with met(self.mpi) if known is None else nullcontext(known) as known:
                self._try(known, timeout)
        except BaseException:
            faults.give_up(self.mpi)
            raise

    def _try(self, known: Known, timeout: float) -> None:
        self.facts = known.facts
        self.place, _ = process.here(self.mpi)
        self.runtime = bind(self.place)
        #: Any thread may discard messages while another one closes; and a closed one's number may be another's.
        self._discarding, self._is_closed = threading.RLock(), False
        self._claimed = numbers.claim(each.taken for each in known.claims)
        #: True if it was another communicator's before, of which messages may have come since.
        self._again = self._claimed >= numbers.MOST
        #: Number of the communicator, part of every message tag.
        self.id = self._claimed % numbers.MOST
        try:
            self._create(known, timeout)
        except BaseException:
            self.part()
            quarantine.keep(self)  # the libraries go on with what they have of it
            if hasattr(self, "job"):
                process.forsake(self.job)
            self.release_id()
            raise
        self.job.used = True
        self.teams.timeout = timeout

    def _create(self, known: Known, timeout: float) -> None:
        """Come together: the job, channels, teams, the arrival board; collective."""
        meet(self.facts, self.rank)
        self._watch(partial(ended, self.facts, self.rank))
        self._group(known)
        if self._again:
            self.discard()  # before an exchange: ranks that are past it may send
        members, seconds = [self.job.index[f.process] for f in self.facts], limit(self.mpi, timeout)
        self.teams = Teams(self.job, members, self.rank, self._claimed, seconds, known.spare())
        hosts, pages = [f.host.memory for f in self.facts], [each.page for each in known.claims]
        self.board = Board(self.rank, hosts, pages, self.teams.page)
        if far := len({f.host.memory for f in self.facts}) > 1:  # deaths there are heard of while teams are made
            self._join_board(self.mpi.allgather(self.board.mapped))
        self._join_channels()
        mapped = self._make_teams(far)
        if not far:
            self._join_board(mapped)

    def _group(self, known: Known) -> None:
        """The ranks' job, islands, and what they choose algorithms by."""
        self.job = known.job or process.job_of(self.mpi, self.facts, known.offers, self.runtime)
        #: For communicators made from this one.
        self.known = known._replace(job=self.job, claims=[])
        islands = tuple([self.job.topology.island_of[self.job.index[f.process]] for f in self.facts])
        said = dict(self.facts[self.rank].settings)  # alike on all ranks, whatever has been changed since
        wanted = env.get("STAGING", said)
        #: ``bare`` has the islands alone: what tables of measured choices go by.
        self.bare, self.topology, self.tuning, self.staged = _chosen_by(
            tuple(self.facts), islands, wanted, env.get("TUNE", said), known.table.text
        )
        if wanted == "direct" and not (self.tuning.plain or self.bare.flat or self.rank):
            _say_of_messages()
        self.island = self.topology.islands[self.topology.island_of[self.rank]]
        self.device = Device.of(self.rank, self.island.ranks, self.facts, self.runtime)

    def _join_board(self, mapped: list[bool]) -> None:
        """The arrival board, and what connects those of several hosts."""
        self.board.join(mapped)
        self.board.id, self.board.processes = self.id, [f.process for f in self.facts]
        self.board.number = self._recorded = communicator(self.board.native, self.id, self.known.places, self.rank)
        if max(self.board.hosts) > 0:
            self.links = Links(self.mpi, self.board, self.board.hosts, [f.process for f in self.facts])
        self._watch(self.board.dead_ranks)

    def _join_channels(self) -> None:
        """Channels among devices, where calls can be queued."""
        #: Channels, and why there are none where devices of several islands could have some.
        self.channels, self.lacks = None, ""
        self._graphs: tuple[Channels | None, Topology, str] | None = None
        if not self.bare.flat:
            memory = None if self.runtime is None else self.runtime.memory_type
            native_in_stream = self.island.size == 1 or (
                memory is not None and not self.device.by_host and self.job.vendors_library(memory)
            )
            self.channels, self.lacks = join(self.mpi, self.bare, self.facts, self.runtime, native_in_stream)
            self.tuning = replace(self.tuning, queued=self.channels is not None)
        warn_idle(self.rank, self.facts)

    def _make_teams(self, far: bool) -> list[bool]:
        """The teams that usual calls need; all ranks learn whether all of them work, and who has the board's page."""
        self.job.drop_spare(self.teams.timeout, MOST_SPARE)  # in this rank's turn, as libucc destroys teams then
        if self.teams.page is not None and self.topology.flat and not (far or self._again):
            return [True] * self.size  # nothing can fail any more
        self.teams.look, self.teams.together = faults.watch(self.mpi), True
        # Teams of one island that were another communicator's: all ranks have all of them.
        failure = self._first_teams() if far or not (self.teams.reused and self.topology.flat) else None
        everyone = self.mpi.allgather((self.board.mapped, str(failure) if failure else ""))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(everyone):
            if text:
                raise CollectiveError(f"rank {rank} could not create its teams: {text}")
        self.teams.look, self.teams.together = None, False
        return [mapped for mapped, _ in everyone]

    def _watch(self, look: Callable[[], list[int]]) -> None:
        """Have ``look`` find deaths from now on, for an exchange that does not find out itself."""
        if hasattr(self.mpi, "watch"):
            self._unwatch()
            self._unwatch = self.mpi.watch(look)

    def _first_teams(self) -> UCCHError | None:
        """Make the teams that usual calls need and try them: why that fails, if it does.

        A team is made by all its ranks together. Non-blocking calls on several communicators, in an order of each
        rank's own, would wait for each other where the first call of a kind made its teams.
        """
        try:
            if self.island.size > 1:
                self.teams.get(self.island.ranks, "native")
            if not self.topology.flat:
                self.teams.get(tuple(range(self.size)), "bridge")
                for plan in self._usual_plans():
                    self.teams.prepare(step for *_, step in plan.steps_of(self.rank))
        except BaseException as error:
            if self.teams.look is not None:  # as it is the others who look
                self.mpi.Revoke()
                raise
            if not isinstance(error, UCCHError):
                raise
            return error
        return None

    def _usual_plans(self) -> Iterator[Plan]:
        """Plans of calls of all sizes whose counts every rank knows, from or to rank 0 if to one.

        In one fragment each: the others are on the same teams, but for slivers that unlike islands cut differently.
        """
        for collective in ("barrier", "allreduce", "bcast", "reduce", "allgather", "reduce_scatter_block"):
            root = 0 if collective in ("bcast", "reduce") else -1
            for count in USUAL_COUNTS:
                call = Call(collective, self.size, () if collective == "barrier" else (count,), root)
                choice = choose(self.topology, collective, elements(call) * 4, self.tuning)
                yield make_plan(self.topology, call, choice._replace(fragments=1), self.rank)

    def fabric(self) -> tuple[str, ...]:
        """Fabric of vendors whose ranks are on several hosts, and why; nothing where there are none."""
        return (self.job.split.why,) if self.job.split.why and not self.topology.one_host else ()

    def rings(self) -> tuple[str, ...]:
        """Rings of this rank and their peers, or why it has none; empty where no call would use them."""
        if self.channels is not None:
            return (self.channels.describe(),)
        return (f"none ({self.lacks})",) if self.lacks else ()

    @property
    def graph_channels(self) -> Channels | None:
        """Those that :meth:`for_graphs` gives, as far as they are there."""
        return self.channels or (self._graphs and self._graphs[0]) or None

    def for_graphs(self) -> tuple[Channels | None, Topology, str]:
        """Channels for calls that are captured in graphs, among which islands, and why there are none.

        Devices of one vendor, whose library such calls are left to otherwise, get theirs with the first; collective.
        """
        if self.channels is not None or not self.topology.flat:
            return self.channels, self.topology, self.lacks
        if self._graphs is None:
            apart, mode = self.bare.apart(), lib.ucch_capture_mode(lib.UCCH_RELAXED)  # of no concern to the capture
            try:
                found = join(self.mpi, apart, self.facts, self.runtime, False)
            finally:
                lib.ucch_capture_mode(mode)
            self._graphs = found[0], apart, found[1]
        return self._graphs

    def discard(self) -> None:
        """Throw away messages under this communicator's number that were not received."""
        lib.ucch_discard_all(self.job.process.worker.handle, self.id << 52, 0xFFF << 52)

    def discard_users(self) -> None:
        """The same of users' messages alone, as a collective may be under way: its tags have a bit of their own."""
        here = self.job.process
        # Offers are thrown away as what they are: their senders are told.
        users = here.worker.handle, self.id << 52, 0xFFF << 52 | 1 << 51 | 1 << lib.UCCH_OFFER_BIT
        with self._discarding:
            if self._is_closed:
                return
            with suppress(PeerError):  # it has died, and does not wait
                while self.channels is not None and (peer := self.channels.discard(*users)) >= 0:
                    self.channels.reach(peer, here.endpoint(self.facts[peer], self.rank, peer).handle)
            lib.ucch_discard_all(*users)

    def close(self, *, together: bool) -> None:
        """Release teams and board; collective. ``together``: all ranks are known to do so."""
        with self._discarding:
            self._is_closed = True
        self.discard()
        for channels in (self.channels, self._graphs and self._graphs[0]):
            if channels is not None:
                channels.close(self.teams.timeout)
        self.part()
        self.teams.close(self.board.close(clear=together), together=together)
        self.release_id()

    def part(self) -> None:
        """Hear no more of the ranks of other hosts, nor be recorded."""
        self._unwatch()
        self._unwatch = bool
        flight.forget(self._recorded)
        if self.links is not None:
            self.links.close()

    def release_id(self) -> None:
        """Let the communicator's number be used again."""
        with self._discarding:
            self._is_closed = True
        numbers.release(self.id)


@lru_cache(maxsize=64)
def _chosen_by(
    facts: tuple[Facts, ...], islands: tuple[int, ...], staging: str, rules: str, table: str
) -> tuple[Topology, Topology, Tuning, bool]:
    """The islands alone, the topology, the rules by which ranks choose algorithms, and True if messages are staged;
    kept for their next communicator."""
    hosts = numbered(f.host.node for f in facts)
    plain = not any(f.device_memory for f in facts)
    levels = levels_of([f.group for f in facts])
    if plain or share_hosts(islands, hosts):  # no vendor's library knows of hosts, or joins what is on one
        levels.append(hosts)
    bare = Topology.group([f.vendor for f in facts], hosts, (), levels, islands)
    weighted = replace(bare, weights=link_weights(hosts, [f.link_speed for f in facts]))
    return bare, *agreed(bare, weighted, rules, table, plain=plain), staged(facts, staging)


@cache
def _say_of_messages() -> None:
    log.log("mem").warning(
        "UCCH_STAGING=direct is about messages alone: collectives of several vendors' devices are queued in streams, "
        "or go by way of the host (docs/gpu.md)"
    )
