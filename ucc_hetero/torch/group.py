"""The process group: torch's methods on top, communicators underneath."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import log
from ..api.comm import Communicator, runner_of
from ..bindings import quarantine
from ..bindings.handle import Kept
from ..bootstrap.faults import EXCHANGE_ERRORS
from ..calls.request import poll_hooks, run_poll_hooks
from ..native.waiting import progress_until
from .collectives import Collectives, PointToPoint
from .dispatch import Dispatch, GroupComm
from .fabric_messages import FabricMessages
from .not_compiled import not_compiled
from .work import NO_LIMIT, Work, limit_of

#: Seconds that other ranks are given to destroy the same group.
_PATIENCE_S = 5.0


def _needs_cpp(what: str, way_out: str) -> Callable[..., Any]:
    """A method that raises ``NotImplementedError``."""

    def method(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{what} needs a backend in C++, which ucch is not: {way_out}")

    return method


@not_compiled
class ProcessGroupUCCH(Collectives, PointToPoint, dist.ProcessGroup):
    """A process group of torch over a :class:`~ucc_hetero.Communicator`: what ``init_process_group("ucch")`` and
    ``new_group`` make.

    Collectives run in the order in which they were posted. ``timeout`` holds for calls that bring none of their own. A
    failed call leaves the group unusable, as in NCCL. With a communicator ``hosts``, collectives on host tensors run on
    that, in an order of their own.
    """

    def __init__(
        self,
        comm: Communicator,
        name: str,
        timeout: timedelta,
        store: Any,
        fabric: FabricMessages | None = None,
        hosts: Communicator | None = None,
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self._open(comm, name, timeout, hosts)
        self._fabric = fabric
        self._store, self._monitored = store, 0

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Barrier of the hosts. On rank 0 the error names the first missing rank, or all of them."""
        self._check_usable()
        self._monitored += 1
        seconds = (self.seconds or NO_LIMIT) if timeout is None else timeout.total_seconds()
        key = f"ucch/monitored/{self._monitored}"
        monitored_barrier(self._store, key, (self.rank(), self.size()), seconds, wait_all_ranks)

    # --- coalescing ---------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        """Collect the Works of the following calls, to wait for all at once. The calls start immediately."""
        self._batch.works = []

    def _end_coalescing(self, device: Any = None) -> Work:
        """Return one Work for this thread's calls since :meth:`_start_coalescing`."""
        works, self._batch.works = self._batch.works, None
        return works[0] if works and len(works) == 1 else self._combined(works or [])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # --- the end ------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Fail every call that is under way. May be called from any thread. The group is unusable afterwards."""
        if not self.usable or self._inherited:
            return
        self._aborted = "abort() was called"
        for comm in self._every_comm():
            if not comm.runner.broken:
                comm.runner.abandon(self._aborted)
            with suppress(*EXCHANGE_ERRORS):  # a peer may have died
                if not comm.communicator.Is_revoked():
                    quarantine.keep(_vote(comm.communicator, well=False))
        for work in list(self.in_flight):
            work.let_go()
        if self._fabric is not None:
            self._fabric.abort()
        quarantine.keep(self)

    def shutdown(self) -> None:
        """Finish what was posted, then release the communicators together with the other ranks.

        torch destroys all groups one after the other, ordered by name. The first of our groups already announces that
        this rank leaves all of them, so that a peer that waits in one of them does not hang. Each group is then
        released in its own turn: between them NCCL groups may be destroyed, which also waits for other ranks.
        """
        every = _all_are_destroyed()
        with _left([*c10d._world.pg_names] if every else [self]):
            for each in _by_name(_leaving.all()):
                if every and each.name >= self._name:
                    _end(each, each.seconds, every=True)
                elif not every:
                    patience = min(each.seconds or _PATIENCE_S, _PATIENCE_S)
                    _end(each, patience if each.name == self._name else -1.0, every=False)

    def _finish(self) -> None:
        """Finish what was posted, and tell the other ranks that no more calls will come."""
        self._closed = True
        self._settle()
        with self._lock:
            threads = list(self._callbacks.values())
        until = time.monotonic() + _PATIENCE_S
        ended = [each.stop(max(0.0, until - time.monotonic())) for each in threads]
        self._settle()  # calls that callbacks have posted
        self._ended = True
        for comm in self._every_comm():
            if not all(ended) and not comm.runner.broken:
                comm.runner.abandon("a callback did not end")  # the callback may still use the communicator
            comm.runner.board.leave()  # a peer that waits for a call of this rank gets an error

    def _leave(self) -> list[_Leaving]:
        """Announce that this rank leaves the group's communicators. Returns those that have to be released."""
        if self._fabric is not None:
            self._fabric.close(self.seconds)
        comms = [self._comms[at] for at in sorted(self._comms, reverse=True)]
        votes = [(comm, _leave(comm.communicator)) for comm in comms]
        return [_Leaving(comm, self._name, self.seconds, vote) for comm, vote in votes if vote is not None]

    def _every_comm(self) -> list[GroupComm]:
        return list(self._comms.values())

    def _settle(self) -> None:
        for work in list(self.in_flight):
            try:
                work.settle()
            except Exception as failure:
                log.log("torch").warning("group %s was destroyed after a failed call: %s", self._name, failure)

    # --- what torch asks ----------------------------------------------------------------------------------------------

    rank, size = getRank, getSize = Dispatch.rank, Dispatch.size

    def name(self) -> str:
        return "ucch"

    _get_backend_name = name

    def getBackendName(self) -> str:
        """The name by which the script asked for the group, as in ``get_backend``: DDP logs it.

        Never ``gloo``: DDP's logger would then look for torch's Gloo backend inside this group.
        """
        asked = c10d._world.pg_map.get(self, ("gloo",))[0]
        return self.name() if asked == "gloo" else asked

    # The base class keeps name and description in C++ backends, and this group has none.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[Any]:
        kinds = ["cpu"]
        if torch.accelerator.is_available():
            kinds.append(torch.accelerator.current_accelerator().type)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: Any = None) -> ProcessGroupUCCH:
        return self

    get_backend = _get_backend
    supports_splitting = supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = supports_abort_hooks = supports_completion_hooks = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def get_group_store(self) -> Any:
        """The store in which the ranks met, with the group's prefix."""
        return self._store

    # torch's versions look for a C++ backend; without one, one of them ends the process, and hooks are never called.
    split_group = _needs_cpp("split_group of a group", "use dist.split_group or dist.new_group")
    merge_remote_group = get_reconfigure_handle = reconfigure = _needs_cpp(
        "another membership", "ucc_hetero.torch.process_group makes a group of ranks that meet in a store"
    )
    new_window = _needs_cpp("a window", "ucc_hetero.rma has one-sided transfers")
    register_pre_hook = register_post_hook = register_abort_hook = _needs_cpp(
        "a hook of calls", "modes of torch's dispatcher (CommDebugMode) see the calls"
    )

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of later calls."""
        self.seconds = limit_of(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from the first one on."""

    def _get_sequence_number_for_group(self) -> int:
        return self._posted

    @property
    def usable(self) -> bool:
        """True if the group has been neither destroyed nor aborted."""
        return not (self._closed or self._aborted)

    @property
    def _inherited(self) -> bool:
        """True in a forked child of the rank: the child must not end the parent's group."""
        return bool(self._comms[0].runner.orphaned)

    @property
    def communicator(self) -> Communicator:
        """The communicator underneath, for ``plan_summary()``, ``stats()`` and ``topology``."""
        return self._comms[0].communicator


def _all_are_destroyed() -> bool:
    """True inside torch's ``destroy_process_group`` of the default group, which destroys all groups."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename != c10d.__file__:
        frame = frame.f_back
    asked = frame.f_locals.get("group") if frame.f_code.co_name == "destroy_process_group" else frame
    return asked is None or asked == dist.GroupMember.WORLD


def end_all(groups: Iterable[dist.ProcessGroup]) -> None:
    """Finish what was posted in all groups in use, then release them together with the other ranks."""
    with _left(groups):
        for each in _by_name(_leaving.all()):
            _end(each, each.seconds, every=True)


@contextmanager
def _left(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """Finish what was posted in these groups, and announce that this rank leaves them.

    Inside this context, messages without a receive are discarded: their senders wait until the data is taken.
    """
    ours = [group for group in groups if isinstance(group, ProcessGroupUCCH) and group.usable and not group._inherited]
    ours.sort(key=ProcessGroupUCCH.getGroupName, reverse=True)  # one order on all ranks
    comms = [comm for group in ours for comm in group._every_comm()]

    def discard() -> None:
        for comm in {*comms, *(each.comm for each in _leaving.all())}:
            if not comm.runner.broken:
                comm.runner.members.discard_users()

    poll_hooks.append(discard)
    try:
        for group in ours:
            group._finish()
        for group in ours:
            for each in group._leave():
                _leaving.add(each)
        yield
    finally:
        poll_hooks.remove(discard)


class _Vote(NamedTuple):
    """A pending vote of all ranks on leaving a communicator. ``mine``: 1 if no call failed here; ``least``: the
    minimum."""

    request: Any
    mine: Any
    least: Any


def _vote(comm: Communicator, *, well: bool) -> _Vote:
    """Tell the other ranks that this one leaves a communicator, and whether all its calls have succeeded."""
    from mpi4py import MPI

    mine, least = array("i", [well]), array("i", [0])
    return _Vote(comm.mpi.Iallreduce(mine, least, op=MPI.MIN), mine, least)


class _Leaving(NamedTuple):
    """A communicator that this rank leaves, the name of its group, the time limit, and the vote."""

    comm: GroupComm
    name: str
    seconds: float
    vote: _Vote


#: Communicators that this rank leaves and that are not released yet.
_leaving: Kept[_Leaving] = Kept()


def _by_name(leaving: Iterable[_Leaving]) -> list[_Leaving]:
    """The entries of this process, in the order in which all ranks release them."""
    here = [each for each in leaving if not each.comm.runner.orphaned]
    return sorted(here, key=lambda each: each.name, reverse=True)


def _leave(comm: Communicator) -> _Vote | None:
    """Announce that this rank leaves. Returns the vote, or None if the other ranks cannot be told any more."""
    runner = runner_of(comm)
    try:
        return _vote(comm, well=not (runner.broken or runner.busy))
    except EXCHANGE_ERRORS:  # of MPI or the store
        runner.abandon("a rank of it died")
        return None


def _end(leaving: _Leaving, seconds: float, every: bool) -> None:
    """Release a communicator once all its ranks leave it. If they do not, leave it to a later call or to the exit."""
    comm, name, _, vote = leaving
    runner = comm.runner
    if not _leaving.take(leaving):
        return  # another thread releases it

    def died() -> bool:
        run_poll_hooks()
        return bool(runner.board.dead() >= 0)

    try:
        with quarantine.unless_over(vote):
            together = progress_until(vote.request.Test, seconds, died)
    except EXCHANGE_ERRORS:
        runner.abandon("a rank of it died")
        return
    if not together and not every and runner.board.dead() < 0:
        _leaving.add(leaving)
    elif not together:
        quarantine.keep(vote)
        dead = runner.board.dead()
        runner.abandon(f"rank {dead} died" if dead >= 0 else "other ranks did not destroy the group")
        if dead < 0:
            log.log("torch").warning(
                "group %s on rank %d: other ranks did not destroy it within %g s; it is left to the end of the process",
                name, comm.communicator.rank, seconds,
            )  # fmt: skip
    elif vote.least[0]:
        if not every:
            runner.timeout = _PATIENCE_S  # a rank that has voted may be busy elsewhere by now
        comm.communicator.Disconnect()
    elif not runner.broken:
        runner.abandon("a rank of it failed")


# --- a barrier that names missing ranks, over the group's store -------------------------------------------------------


#: Value that rank 0 puts into the store when all ranks have arrived.
_ALL = b"all"
#: Extra seconds for which other ranks wait for rank 0's verdict.
_GRACE = 1.0


def monitored_barrier(store: Any, key: str, place: tuple[int, int], seconds: float, wait_all_ranks: bool) -> None:
    """Wait for all ranks by keys with prefix ``key``. As with gloo, the error on rank 0 names the missing ranks."""
    rank, size = place
    if rank == 0:
        _collect(store, key, size, seconds, wait_all_ranks)
        return
    store.set(f"{key}/{rank}", b"here")
    done = f"{key}/done"
    if not _came(store, done, seconds + _GRACE):
        found = f"nothing came within {seconds:g} s"
    elif (word := store.get(done)) != _ALL:
        found = word.decode()
    else:
        return
    raise dist.DistBackendError(
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
        f"rank 0: {found}"
    )


def _collect(store: Any, key: str, size: int, seconds: float, wait_all_ranks: bool) -> None:
    """On rank 0: wait for the keys of the other ranks, and tell them the result."""
    end = time.monotonic() + seconds
    missing: list[int] = []
    for other in range(1, size):
        left = end - time.monotonic()
        if left <= 0 and not missing:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1000:g} ms.")
        if not _came(store, f"{key}/{other}", max(left, 1e-3)):
            missing.append(other)
            if not wait_all_ranks:
                break
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    verdict = f"{who} failed to pass monitoredBarrier in {seconds * 1000:g} ms" if missing else ""
    store.set(f"{key}/done", verdict.encode() or _ALL)
    if missing:
        raise dist.DistBackendError(f"Rank 0: {verdict}")


def _came(store: Any, key: str, seconds: float) -> bool:
    if store.check([key]):
        return True
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:  # the store's timeout
        return False
    return True
