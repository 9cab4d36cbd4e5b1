"""The process group: torch's methods on one side, communicators on the other."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import env, log
from ..comm import Communicator
from ..errors import UCCHError
from ..native import lib
from ..request import Request
from ..types import OPS
from . import futures
from .collectives import Collectives, Messages
from .futures import Callbacks
from .lane import Lane
from .layout import Finish
from .streams import Side, device_of, mean_of
from .uncompiled import uncompiled
from .work import Source, Work, Works, seconds_of, torch_error

__all__ = ["ProcessGroupUCCH"]

#: Seconds that an asynchronous call is given to finish before its caller goes on.
_MOMENT = 20e-6
#: Calls that nobody waited for are looked after when there are more than this.
_MANY = 64


@uncompiled
class ProcessGroupUCCH(Collectives, Messages, dist.ProcessGroup):
    """A process group of torch over a :class:`~ucc_hetero.Communicator`.

    Collectives are posted in program order and run in that order. ``timeout`` is that of every call, unless the call
    brings its own; a call that fails leaves the group unusable, as NCCL's do.
    """

    #: Posted and not yet collected; keeps their tensors alive.
    in_flight: set[Work]

    def __init__(self, comm: Communicator, name: str, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._place = comm.rank, comm.size
        self._lanes = {0: Lane(comm, self.check_aborted)}
        self._sides: dict[Any, Side] = {}
        self._callbacks: dict[int, Callbacks] = {}
        self._lock = threading.Lock()
        self._name, self._desc = name, ""
        self._seconds = _limit(timeout)
        self._aborted = ""
        self._closed = False
        self._posted = 0
        self.in_flight = set()

    # --- posting ------------------------------------------------------------------------------------------------------

    def _lane(self) -> Lane:
        """The lane of the calling thread: calls that callbacks post have one of their own (:mod:`.futures`)."""
        at = futures.level()
        lane = self._lanes.get(at)
        if lane is None:
            # Collective; every rank runs the same callbacks in the same order, and so comes here.
            lane = self._lanes[at] = Lane(Communicator._adopt(self._lanes[0].comm.mpi.Dup()), self.check_aborted)
        return lane

    def _timeout(self, opts: Any) -> float:
        own = seconds_of(getattr(opts, "timeout", None))
        return own or self._seconds

    def post(
        self,
        name: str,
        send: Any,
        recv: Any,
        opts: Any,
        outputs: Sequence[Any],
        op: Any = None,
        root: int = -1,
        counts: Any = None,
        finish: Finish = None,
    ) -> Work:
        """Start a collective; one that its caller would only wait for runs to its end here."""
        self._usable()
        lane, seconds = self._lane(), self._timeout(opts)
        asynchronous = getattr(opts, "asyncOp", True)
        self._posted += 1
        device = device_of(recv, send)
        try:
            if device is not None:
                side = self._sides.get(device) or self._sides.setdefault(device, Side(device))

                if op is OPS["AVG"]:
                    op, finish = OPS["SUM"], mean_of(recv, self.size(), finish)

                def start(stream: int) -> tuple[Request, bool]:
                    return lane.start_on(stream, name, send, recv, op, root, counts, seconds)

                request, ready = side.run(start, (send, recv), finish, asynchronous=asynchronous)
                return Work(self, outputs, (request,), None if ready else finish, (send, recv), ready=ready)
            if not asynchronous:
                lane.call(name, send, recv, op, root, counts, seconds)
                if finish is not None:
                    finish()
                return Work(self, outputs)
            request = lane.start(name, send, recv, op, root, counts, seconds)
        except UCCHError as failure:
            raise self._translated(failure) from failure
        work = Work(self, outputs, (request,), finish, (send, recv))
        work.poll(_MOMENT)
        return work

    def post_message(
        self, tensor: Any, peer: int, tag: int, outgoing: bool, outputs: Sequence[Any], finish: Finish
    ) -> Work:
        """Start a send to, or a receive from, group rank ``peer`` (-1: any)."""
        self._usable()
        lane = self._lanes[0]
        if not tensor.is_cpu:
            torch.cuda.current_stream(tensor.device).synchronize()  # messages are the host's: the data has to be there
        source = Source() if not outgoing else None
        try:
            if outgoing:
                request = lane.send(tensor, peer, tag, self._seconds)
            else:
                request = lane.receive(tensor, peer, tag, self._seconds)
        except UCCHError as failure:
            raise self._translated(failure) from failure
        work = Work(self, outputs, (request,), finish, tensor, source)
        work.poll(_MOMENT)
        return work

    def together(self, works: list[Work]) -> Work:
        """One Work for several calls."""
        return works[0] if len(works) == 1 else Works(self, works)

    def done(self, outputs: Sequence[Any]) -> Work:
        """The Work of a call that has nothing to do."""
        return Work(self, outputs)

    def _usable(self) -> None:
        self.check_aborted()
        if self._closed:
            raise dist.DistBackendError(f"process group {self._name!r} has been destroyed")
        if len(self.in_flight) > _MANY:
            for work in list(self.in_flight):
                work.is_completed()

    def _translated(self, failure: UCCHError) -> Exception:
        return torch_error(failure)

    # --- coalescing ---------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        """Begin to collect calls whose Works are then waited for together; they start at once."""
        self._collected = list(self.in_flight)

    def _end_coalescing(self, device: Any = None) -> Work:
        """The Work of the calls since :meth:`_start_coalescing`."""
        before = set(self._collected)
        return self.together([work for work in self.in_flight if work not in before])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # --- futures ------------------------------------------------------------------------------------------------------

    def callbacks(self, at: int) -> Callbacks:
        """What runs the callbacks of a level."""
        with self._lock:
            found = self._callbacks.get(at)
            if found is None:
                found = self._callbacks[at] = Callbacks(at, self._name)
            return found

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_aborted(self) -> None:
        """Raise when the group has been aborted."""
        if self._aborted:
            raise dist.DistBackendError(f"process group {self._name!r} was aborted: {self._aborted}")

    def abort(self) -> None:
        """End every call that is under way with an error, from any thread; the group cannot be used any more."""
        if self._aborted or self._closed:
            return
        self._aborted = "abort() was called"
        for lane in self._lanes.values():
            if not lane.run.broken:
                lane.run._break(self._aborted)
            _unmet.append(_vote(lane.comm, False))
        _aborted.append(self)

    def shutdown(self) -> None:
        """Finish what was posted, then release the communicators together with the other ranks."""
        if self._closed or self._aborted:
            return
        self._closed = True
        for work in list(self.in_flight):
            try:
                work.wait()
            except RuntimeError as failure:
                log.log("torch").warning("group %s was destroyed after a failed call: %s", self._name, failure)
        futures.stop_callbacks(list(self._callbacks.values()))
        self._callbacks.clear()
        for at in sorted(self._lanes, reverse=True):
            _leave(self._lanes[at].comm, self._seconds, self._name)

    # --- what torch asks ----------------------------------------------------------------------------------------------

    def getRank(self) -> int:
        """This process's rank in the group."""
        return self._place[0]

    def getSize(self) -> int:
        """Number of ranks of the group."""
        return self._place[1]

    rank, size = getRank, getSize

    def getBackendName(self) -> str:
        """``ucch``."""
        return "ucch"

    name = _get_backend_name = getBackendName

    # The base class keeps the name and description in its C++ backends, and there is none here.
    def getGroupName(self) -> str:
        """The name torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name torch gives the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """The group's description."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Take the group's description."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[Any]:
        kinds = ["cpu"]
        if torch.accelerator.is_available():
            kinds.append(torch.accelerator.current_accelerator().type)
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: Any = None) -> ProcessGroupUCCH:
        return self

    supports_splitting = supports_coalescing = supports_tensor_alloc = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of the calls to come."""
        self._seconds = _limit(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: calls have been counted from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._posted

    @property
    def communicator(self) -> Communicator:
        """The communicator underneath, for ``plan_summary()``, ``stats()`` and ``topology``."""
        return self._lanes[0].comm


#: Groups that were aborted: the libraries may still use the tensors of their calls.
_aborted: list[ProcessGroupUCCH] = []


def _limit(timeout: timedelta | None) -> float:
    """Seconds that a call may take: torch's, or UCCH_TIMEOUT's where that is set and shorter. 0: for ever."""
    seconds = seconds_of(timeout)
    ours = env.get("TIMEOUT") if os.environ.get(f"{env.PREFIX}TIMEOUT", "").strip() else float("inf")
    if ours == float("inf"):
        return seconds
    return min(seconds, ours) if seconds else float(ours)


def _vote(comm: Communicator, fine: bool) -> tuple[Any, Any, Any]:
    """Tell the other ranks that this one leaves, and whether all is in order: (request, ours, the worst of all)."""
    from mpi4py import MPI

    mine, worst = array("i", [fine]), array("i", [0])
    return comm.mpi.Iallreduce(mine, worst, op=MPI.MIN), mine, worst


def _leave(comm: Communicator, seconds: float, name: str) -> None:
    """Release a communicator once all its ranks are about to; leave it to the end of the process otherwise."""
    run = comm._run
    vote = request, _, worst = _vote(comm, not (run.broken or run.busy))
    end, pause = time.monotonic() + (seconds or float("inf")), 0.0
    while not request.Test():
        lib.ucch_progress_once()  # peers may still need our side of a transfer
        time.sleep(pause)
        pause = min(pause + 1e-5, 1e-3)
        if time.monotonic() > end:
            _unmet.append(vote)
            run._break("other ranks did not destroy the group")
            log.log("torch").warning(
                "group %s on rank %d: other ranks did not destroy it within %g s; it is left to the end of the process",
                name, comm.rank, seconds,
            )  # fmt: skip
            return
    if worst[0]:
        comm.Free()
    elif not run.broken:
        run._break("a rank of it failed")


#: Votes that nobody waits for any more, with their memory.
_unmet: list[object] = []
