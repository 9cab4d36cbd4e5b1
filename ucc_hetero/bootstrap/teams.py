"""UCC teams of a communicator: created at first use, kept with it, in an order that is equal on every rank."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial

from ..bindings import quarantine, ucc
from ..device import free_memory, own_device
from ..errors import (
    CollectiveError,
    CollectiveTimeout,
    DeviceError,
    LibraryError,
    PeerError,
    RefusedError,
    UCCHError,
)
from ..machine.vendors import of_memory
from ..native.libraries import lib
from ..native.waiting import progress_until
from ..planner.algorithms import expand_plan
from ..planner.plan import Plan, Step
from ..types import DTYPES, OPS
from . import agreement
from .faults import EXCHANGE_ERRORS
from .known import MOST_NUMBERS
from .meeting import Seat, Turn, creating
from .pages import Page
from .process import TEAM_IDS

#: Seconds for which libucc may finish creating a team after a rank has refused the call that the team is for. Its
#: messages for a team that some ranks abandon are taken for those of the next one, which then never completes.
_REFUSED_S = 2.0

#: Seconds for which a rank that has said it is ready waits for the answer after such a refusal: ranks that get the
#: answer create the team.
_ANSWER_S = 1.0

#: What each rank says before a team is created; the smallest value of all ranks is the answer.
_ABANDONED, _NOT_READY, _READY = -1, 0, 1

#: Seconds in which a rank's death becomes known; a library may report a failure a moment before.
_DEATH_S = 1.0

#: Advice where a team's first allreduce returned its destination untouched, and where it returned other data.
_UNTOUCHED = (
    "nothing came from the other ranks, as libucp could not connect them; what it prints says why, and "
    "UCX_NET_DEVICES=<interface> chooses the network by which the hosts reach each other"
)
_WRONG = (
    "its libraries cannot be trusted on these ranks: `python -m ucc_hetero info` on each of them shows how they differ"
)


class Teams:
    """The teams of a communicator.

    libucc creates a team without communication if this package chose the team's number and the same ranks had such a
    team before: each rank then creates it by itself, when a call first needs it. The team of an island and that of all
    ranks have such numbers: the seat's, which none of these ranks has used before. Other teams are created by all their
    ranks together, with the communicator; or, for device memory alone, in the first call that needs them.

    A communicator of host memory leaves its teams and its page of the arrival board to the next one of the same ranks.
    Teams for device memory hold memory of the vendor's library, and are destroyed.
    """

    def __init__(self, seat: Seat, timeout: float) -> None:
        known = seat.known
        self._seat, self._known, self.job, self.rank, self.timeout = seat, known, known.job, known.rank, timeout
        self.members, self.far = known.members, known.far
        #: Raises once the call that a new team is for cannot succeed any more.
        self.poll_hook: Callable[[], None] | None = None
        #: True if all ranks hold their turns at creating: then they need not ask each other before each team.
        self.together = False
        #: Time at which a refusal of this call was seen while a team is created; 0 for never.
        self._refused = 0.0
        self._teams = seat.teams
        #: Groups of ranks that have come together for their first call on device memory.
        self._met: set[tuple[int, ...]] = set()

    def get(self, ranks: tuple[int, ...], link: str) -> ucc.Team:
        """The team of these communicator ranks over ``native`` or ``bridge``; collective among them if it is new."""
        team = self._teams.get((ranks, link))
        if team is None:
            team = self._teams[ranks, link] = self._create(ranks, link)
        return team

    def fitted(self, plan: Plan) -> Plan:
        """``plan`` for this rank, by messages where it would have to wait for other ranks to make a team: these may
        wait for this one in the first call of another communicator. Such teams are the same on all of their ranks."""
        needed = {(step.ranks, step.link) for *_, step in plan.steps_of(self.rank) if step.on_team}
        lacking = {each for each in needed if each not in self._teams and not self.by_itself(*each)}
        return expand_plan(plan, self.rank, lambda step: (step.ranks, step.link) in lacking) if lacking else plan

    def prepare(self, steps: Iterable[Step], memory: int | None = None) -> None:
        """Create the teams of a plan that this rank belongs to, in the plan's order, which all ranks follow.

        ``memory`` is the type of device memory that the steps use. In a team's first call on such memory libucc may
        wait for the other ranks and let no other thread enter the libraries; those ranks may wait for a message of this
        one. So this rank waits for them before that call, where messages still progress.
        """
        for step in steps:
            if step.on_team:
                team = self.get(step.ranks, step.link)
                if memory and step.link == "native" and step.ranks not in self._met:
                    self._gather_ranks(step.ranks, memory)
                    if self.job.vendors_library(memory):
                        self._start_vendors_library(team, step.ranks, ucc.MemType(memory))
                    self._met.add(step.ranks)

    def _gather_ranks(self, ranks: tuple[int, ...], memory: int) -> None:
        """Come together before the vendor's library starts, for which every rank must have enough free device
        memory."""
        free, needed = free_memory(), of_memory(memory).set_up_bytes
        if not self._all_ready([self.members[r] for r in ranks], free >= needed):
            short = f"{free >> 20} MiB are free" if free < needed else "another rank has less"
            raise DeviceError(
                f"rank {self.rank}: the vendor's library takes up to {needed >> 20} MiB of device memory for the "
                f"first collective among ranks {list(ranks)}, and {short}: free some, or make a small collective "
                "before the memory is full"
            )

    def _start_vendors_library(self, team: ucc.Team, ranks: tuple[int, ...], kind: ucc.MemType) -> None:
        """Start the vendor's library, by a broadcast that no other library can run
        (:func:`.agreement.leave_broadcasts`).

        If it cannot start, libucc runs every later call by TL/UCP, which does not wait for earlier work of the default
        stream (ec_cuda_executor.c of UCC 1.4): results would be wrong without an error.
        """
        request: ucc.Request | None = None
        failure: LibraryError | None = None
        with own_device():
            try:
                word = self.job.word.handle, 8
                request = team.collective(ucc.Coll.BCAST, src=word, dtype=DTYPES["uint8"], mem_type=kind)
            except LibraryError as error:
                failure = error
            try:
                self._check_all_can_start(ranks, failure)
                assert request is not None, "all ranks can begin, this one too"
                request.post()
                request.wait(self.timeout, self._check_inside)
            except BaseException:
                quarantine.keep(request)  # closed before its end it would count as a failure of the library
                raise
            request.close()

    def _check_all_can_start(self, ranks: tuple[int, ...], failure: LibraryError | None) -> None:
        """Raise ``DeviceError`` unless the vendor's library can start on all of these ranks; ``failure``: why it
        cannot on this one."""
        places = [self.members[r] for r in ranks]
        if failure is None and self._all_ready(places, True):
            return
        if failure is not None:
            with suppress(CollectiveTimeout):  # others may be inside the library, which waits for this rank
                self._all_ready(places, False, _REFUSED_S)
        raise DeviceError(
            f"rank {self.rank}: the vendor's library (NCCL or RCCL) cannot begin among ranks {list(ranks)}"
            f"{'' if failure else ', on another of them'}: NCCL_DEBUG=WARN says why; "
            f"UCC_TLS={agreement.NATIVE_SETTINGS['UCC_TLS']},nccl,rccl on all ranks goes on without it, more slowly"
        ) from failure

    def _create(self, ranks: tuple[int, ...], link: str) -> ucc.Team:
        job, places = self.job, self._known.in_context(ranks, link)
        context = job.native if link == "native" else job.bridge
        if context is None:
            raise CollectiveError(f"rank {self.rank}: no {link} context for a team of ranks {list(ranks)}")
        if self.by_itself(ranks, link):
            with own_device():
                team = context.team(places, self.timeout, None, self._number(ranks, link))
        else:
            with nullcontext() if self.together else Turn(partial(self._all_ready, [self.members[r] for r in ranks])):
                team = self._create_together(context, ranks, link)
        if self.far and len({self._known.hosts[r] for r in ranks}) > 1 and lib.ucch_team_far(team.native):
            raise MemoryError("no memory for a team's tags")
        return team

    def by_itself(self, ranks: tuple[int, ...], link: str) -> bool:
        """True if each of these ranks creates their team by itself; the same on all of them."""
        return self._number(ranks, link) is not None and self._known.makes_alone(ranks, link)

    def _create_together(self, context: ucc.Context, ranks: tuple[int, ...], link: str) -> ucc.Team:
        job, team = self.job, None
        with own_device():
            try:
                places = self._known.in_context(ranks, link)
                team = context.team(places, self.timeout, self._check_inside, self._number(ranks, link))
                self._canary(team, ranks, link)
                return team
            except BaseException as error:
                job.team_abandoned = True
                quarantine.keep(team)  # libucc may still use it
                if isinstance(error, CollectiveTimeout):
                    raise CollectiveTimeout(self._timeout_text(ranks, link, team)) from error
                if isinstance(error, LibraryError) and error.status == ucc.Status.ERR_NO_RESOURCE:
                    raise CollectiveError(
                        f"rank {self.rank}: the {link} team of ranks {list(ranks)}: libucc has "
                        f"{64 * int(TEAM_IDS)} numbers for teams, and all are taken: Free some communicators"
                    ) from error
                self._raise_if_dead(error)
                raise

    def _number(self, ranks: tuple[int, ...], link: str) -> int | None:
        """The number that this package chooses for a new team; None if libucc chooses it."""
        claimed = self._seat.claimed
        return claimed if claimed < MOST_NUMBERS and (ranks, link) in self._known.main else None

    def _raise_if_dead(self, error: BaseException) -> None:
        """Raise ``PeerError`` for an error that a rank's death has caused: libucc may report the failed connection
        before the death is known."""
        if (
            self.poll_hook is not None
            and isinstance(error, UCCHError)
            and not isinstance(error, PeerError | RefusedError)
        ):
            progress_until(self.poll_hook, _DEATH_S)

    def _timeout_text(self, ranks: tuple[int, ...], link: str, team: ucc.Team | None) -> str:
        """Error message for a team that was not created in time. libucc does not tell which rank is missing."""
        step = "not every rank joined" if team is None else "its first allreduce did not end"
        return (
            f"rank {self.rank}: the {link} team of ranks {list(ranks)}: {step} within {self.timeout:g} s "
            "(UCCH_TIMEOUT); what the libraries print on these ranks, of memory say, may tell which one failed"
        )

    def _all_ready(self, places: list[int], ready: bool, seconds: float | None = None) -> bool:
        """True if every rank of a team is ready; all wait for up to ``seconds``."""
        seconds, job = self.timeout if seconds is None else seconds, self.job
        word = _ABANDONED if job.team_abandoned else _READY if ready else _NOT_READY
        poll_hook = self.poll_hook or bool if job.rank == places[0] else partial(self._check_inside, _ANSWER_S)
        try:
            answer = job.min_word(places, self._seat.id, word, seconds, poll_hook)
        except UCCHError:
            raise
        except EXCHANGE_ERRORS as error:  # not a mistake of this call: one of its ranks cannot be reached
            raise PeerError(f"rank {self.rank}: a team of job ranks {places} cannot be made: {error}") from error
        if answer == _ABANDONED:
            raise CollectiveError(
                f"rank {self.rank}: a team of job ranks {places} cannot be made, as one for a call of another "
                "communicator was given up when a rank refused it or was late: free this one, and make a new one"
            )
        if answer < _ABANDONED:
            raise CollectiveTimeout(
                f"rank {self.rank}: a team of job ranks {places}: rank {places[-2 - answer]} of the job did not join "
                f"within {seconds:g} s"
            )
        return answer == _READY

    def _check_inside(self, grace: float = _REFUSED_S) -> None:
        """Look for failures while all ranks create the team. A refused call raises only after ``grace`` seconds: all
        ranks create the team to the end if they can."""
        if self.poll_hook is not None:
            try:
                self.poll_hook()
            except RefusedError:
                self._refused = self._refused or time.monotonic()
                if time.monotonic() > self._refused + grace:  # a rank left before it came here
                    raise

    def _canary(self, team: ucc.Team, ranks: tuple[int, ...], link: str) -> None:
        """Check a team by an allreduce, once for the same ranks: libucc may report success with wrong data."""
        if (link, team.ranks) in self.job.tried:
            return
        mine = array("d", [1.0, float(team.rank)])
        out = array("d", [-1.0, -1.0])
        want = [float(team.size), team.size * (team.size - 1) / 2]
        began = time.monotonic()
        with team.collective(ucc.Coll.ALLREDUCE, src=mine, dst=out, dtype=DTYPES["float64"], op=OPS["SUM"]) as request:
            request.post()
            request.wait(self.timeout, self._check_inside)
        if list(out) != want:
            raise CollectiveError(
                f"rank {self.rank}: the {link} team of ranks {list(ranks)} gave {list(out)} where {want} was due "
                f"({time.monotonic() - began:.3g} s): {_UNTOUCHED if list(out) == [-1.0, -1.0] else _WRONG}"
            )
        self.job.tried.add((link, team.ranks))

    def __len__(self) -> int:
        return len(self._teams)

    def close(self, page: Page | None = None, *, together: bool = True) -> None:
        """Leave the teams and a cleared ``page`` to the next communicator, or destroy the teams, newest first.

        Collective among their members. If not ``together``, the teams are kept: other ranks may still use them.
        """
        teams, self._teams = self._teams, {}
        if not together:
            quarantine.keep(teams)
            return
        left = teams if self._known.tuning.plain else {}
        # Without the lock: a thread that holds its turn may wait for other ranks, and these for this thread.
        self._seat.leave(left, page)
        if left is not teams:
            with creating:
                while teams:
                    teams.popitem()[1].close(self.timeout)
