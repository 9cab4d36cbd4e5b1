"""From a torch call to a started call of ours: on which communicator, as part of which stream, who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ..api.comm import Communicator
from ..calls.arguments import CallSpec
from ..device import stream_handle
from ..errors import UCCHError
from ..machine.vendors import TORCH
from ..native.libraries import lib
from ..types import OPS
from . import futures
from .futures import InOrder
from .group_comm import GroupComm, GroupCommunicator
from .layout import Finish
from .p2p_buffers import P2pBuffers
from .ranges import active, recorded
from .streams import Side, current, device_of, mean_of, refuse_capture
from .uncompiled import uncompiled
from .work import Received, Sent, Source, Work, Works, limit_of, torch_error

__all__ = ["Dispatch"]

#: Seconds that an asynchronous call is given to finish before its caller goes on.
_MOMENT = 20e-6
#: Of so many calls one looks at all that are under way, the others at the oldest ones.
_MANY = 64


#: (outgoing, from anyone) -> the dispatcher's name of a message.
_MESSAGES = {(True, False): "send", (True, True): "send", (False, False): "recv_", (False, True): "recv_any_source_"}


class _Batch(threading.local):
    """The calls that a thread wants to wait for together; None while it does not."""

    works: list[Work] | None = None
    #: The thread is within a call that a profiler records: the calls that it is made of are not recorded.
    recorded = False


@uncompiled
class Dispatch:
    """Base of a process group's methods: start a collective or a message, and return its Work.

    Collectives are posted in program order and run in that order. The limit in seconds is that of every call, unless
    the call brings its own.
    """

    #: Posted and not yet collected, in order; keeps their tensors alive.
    in_flight: dict[Work, None]
    #: Whether a stream was ever left to wait for a message by itself, how many operations of this process had failed
    #: when somebody looked last, and why such a stream had to go on without its data.
    streams_wait = False
    _failures = 0
    _unfit: Exception | None = None

    def _open(self, comm: Communicator, name: str, timeout: timedelta | None) -> None:
        """Begin; takes the place of a constructor, which torch's base class has for itself."""
        self._place = comm.rank, comm.size
        self._comms = {0: GroupComm(comm, self.check_aborted)}
        self._sides: dict[Any, Side] = {}
        self._callbacks: dict[int, InOrder] = {}
        self._p2p_buffers: dict[Any, P2pBuffers] = {}
        self._lock = threading.Lock()
        self._name, self._desc = name, ""
        self._seconds = limit_of(timeout)
        self._aborted = ""
        #: No calls any more but those of callbacks; and none at all.
        self._closed = self._ended = False
        self._posted = 0
        self._batch = _Batch()
        self.in_flight = {}

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._place[0]

    def size(self) -> int:
        """Number of ranks of the group."""
        return self._place[1]

    # --- collectives --------------------------------------------------------------------------------------------------

    def post(
        self,
        call: CallSpec,
        opts: Any,
        outputs: Sequence[Any],
        finish: Finish = None,
        form: str = "",
        inputs: Any = None,
    ) -> Work:
        """Start a collective; one that its caller would only wait for runs to its end here.

        A profiler names it by ``form``, the dispatcher's name, and shows the shapes of ``inputs``: by default those
        that the call's name stands for, and ``outputs``.
        """
        if active._is_profiler_enabled and not self._batch.recorded:
            again = partial(self.post, call, opts, outputs, finish)
            return self._recorded(form or call.name, outputs if inputs is None else inputs, again)
        if self._aborted or self._closed or self.in_flight:
            self._usable()
        comm, seconds = self._comm() if futures.level() else self._comms[0], self._timeout(opts)
        asynchronous = getattr(opts, "asyncOp", True)
        self._posted += 1
        device = device_of(call.recv, call.send)
        try:
            if device is None and not asynchronous:
                comm.call(call, seconds)
                if finish is not None:
                    finish()
                return self._noted(Work(self, outputs))
            if device is None:
                request = comm.start(call, seconds)
            else:
                if call.op is OPS["AVG"]:
                    call, finish = call._replace(op=OPS["SUM"]), mean_of(call.recv, self._place[1], finish)
                start = partial(comm.start, call, seconds)
                return self._noted(self._in_stream(device, start, call[1:3], outputs, finish, asynchronous))
        except UCCHError as failure:
            raise torch_error(failure) from failure
        work = Work(self, outputs, (request,), finish, call)
        work.collective = True
        work.poll(_MOMENT)
        return self._noted(work)

    def _recorded(self, name: str, inputs: Any, start: Callable[[], Work]) -> Work:
        """Start a call within ranges of the active profiler."""
        self._batch.recorded = True
        try:
            return recorded(self, name, inputs, start)
        finally:
            self._batch.recorded = False

    def _noted(self, work: Work) -> Work:
        """A call that was made, also for whoever collects this thread's calls."""
        if self._batch.works is not None:
            self._batch.works.append(work)
        return work

    def _in_stream(
        self, device: Any, start: Any, memory: Sequence[Any], outputs: Sequence[Any], finish: Finish, asynchronous: bool
    ) -> Work:
        """Make a call a part of a stream's work."""
        self._known(device)
        side = self._sides.get(device) or self._sides.setdefault(device, Side(device, self._comms[0].streams))
        request, ready = side.run(start, (*memory, *outputs), finish, asynchronous=asynchronous)
        return Work(self, outputs, (request,), None if ready else finish, memory, ready=ready)

    def _known(self, device: Any) -> None:
        if device.type not in TORCH:
            raise ValueError(
                f"tensors on rank {self._place[0]} are on device {str(device)!r}; the backend ucch takes those of the "
                f"host, and of {' and '.join(map(repr, TORCH))}"
            )

    def _comm(self) -> GroupComm:
        """The communicator of the calling thread: calls that callbacks post have one of their own (:mod:`.futures`)."""
        at = futures.level()
        comm = self._comms.get(at)
        if comm is None:
            # Collective; every rank runs the same callbacks in the same order, and so comes here.
            comm = self._comms[at] = GroupComm(
                GroupCommunicator._adopt(self._comms[0].communicator.mpi.Dup()), self.check_aborted
            )
        return comm

    def _timeout(self, opts: Any) -> float:
        if opts is None:
            return self._seconds
        own: float = opts.timeout.total_seconds()
        return own if own > 0 else self._seconds

    # --- messages -----------------------------------------------------------------------------------------------------

    def post_message(
        self, tensor: Any, peer: int, tag: int, outgoing: bool, outputs: Sequence[Any], finish: Finish
    ) -> Work:
        """Start a send to, or a receive from, group rank ``peer`` (-1: any)."""
        if active._is_profiler_enabled and not self._batch.recorded:
            again = partial(self.post_message, tensor, peer, tag, outgoing, outputs, finish)
            return self._recorded(_MESSAGES[outgoing, peer < 0], outputs or tensor, again)
        self._usable()
        comm, memory, stream = self._comms[0], tensor, None
        if not tensor.is_cpu:
            self._known(tensor.device)
            refuse_capture(tensor.device)
            comm.check_message(outgoing, peer, tag)  # before it takes a buffer
            memory, finish, stream = self._buffered(tensor, outgoing, finish)
        buffered = memory is not tensor
        try:
            if outgoing:
                request = comm.send(memory, peer, tag, self._seconds, stream)
            else:
                request = comm.receive(memory, peer, tag, self._seconds, stream, taken=buffered)
        except UCCHError as failure:
            raise torch_error(failure) from failure
        if buffered:
            kind = Sent if outgoing else Received
            return self._noted(kind(self, outputs, (request,), finish, memory, None if outgoing else Source()))
        work = Work(self, outputs, (request,), finish, memory, None if outgoing else Source())
        if tensor.is_cpu:
            work.poll(_MOMENT)
        return self._noted(work)

    def _buffered(self, tensor: Any, outgoing: bool, finish: Finish) -> tuple[Any, Finish, int | None]:
        """Buffer of a message on device memory (:mod:`.p2p_buffers`), what is to be done after it, and the
        stream that it waits for."""
        device = tensor.device
        buffers = self._p2p_buffers.get(device) or self._p2p_buffers.setdefault(device, P2pBuffers(device))
        buffered = buffers.outgoing(tensor) if outgoing else buffers.incoming(tensor, finish)
        memory, finish = buffered or (tensor, finish)
        free = buffered and not outgoing  # in nobody's use: it may be written to from now on
        return memory, finish, None if free else stream_handle(current(device))

    # --- others -------------------------------------------------------------------------------------------------------

    def together(self, calls: Iterable[Work], form: str = "", inputs: Any = ()) -> Work:
        """One Work for several calls; a profiler that knows the name shows them as one."""
        if form and active._is_profiler_enabled and not self._batch.recorded:
            return self._recorded(form, inputs, partial(self.together, calls))
        works = list(calls)
        return works[0] if len(works) == 1 else Works(self, works)

    def done(self, outputs: Sequence[Any]) -> Work:
        """The Work of a call that has nothing to do."""
        return Work(self, outputs)

    def callbacks(self, at: int) -> InOrder:
        """Thread that runs the callbacks of a level; of a group that has ended, whoever attaches them."""
        with self._lock:
            found = self._callbacks.get(at)
            if found is None:
                found = self._callbacks[at] = InOrder(at, f"{self._name}-callbacks-{at}")
                if self._ended:
                    found.stop(0.0)
            return found

    def broke(self, error: Exception) -> None:
        """A call failed whose result is in use already: no more calls are made, and whoever waits is told."""
        self._unfit = self._unfit or error
        run = self._comms[0].run
        if not run.broken:
            run.abandon(str(error))

    def check_data(self) -> None:
        """Raise when a stream had to go on without the data of a message that it waited for: its time was over."""
        failures = lib.ucch_failures()
        if failures != self._failures:
            self._failures = failures
            for work in list(self.in_flight):
                work.is_over()
        if self._unfit is not None:
            raise dist.DistBackendError(
                f"process group {self._name!r} on rank {self.rank()}: data is missing for which a stream has waited, "
                f"and what was computed from it is wrong; make a new group: {self._unfit}"
            ) from self._unfit

    def check_aborted(self) -> None:
        """Raise when the group has been aborted."""
        if self._aborted:
            raise dist.DistBackendError(f"process group {self._name!r} was aborted: {self._aborted}")

    def _usable(self) -> None:
        self.check_aborted()
        if self._ended or (self._closed and not futures.level()):
            raise dist.DistBackendError(f"process group {self._name!r} has been destroyed")
        if self.streams_wait:
            self.check_data()
        # Calls that nobody waits for hold memory until somebody looks: at the oldest, and now and then at all.
        while (oldest := _first(self.in_flight)) is not None and oldest.is_over():
            pass
        if self._posted % _MANY == 0:
            for work in list(self.in_flight):
                work.is_over()


def _first(works: dict[Work, None]) -> Work | None:
    try:
        return next(iter(works), None)
    except RuntimeError:  # another thread collected one meanwhile
        return None
