"""From a call of torch's API to a started call: its communicator, its stream, and the Work that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ..api.comm import Communicator, adopted, messages_of, runner_of
from ..calls.arguments import CallSpec, Completion
from ..calls.request import Captured, Request, run_poll_hooks, wait_op
from ..calls.runner import RepeatableCall, Repetition, Runner
from ..errors import UCCHError
from ..machine.vendors import TORCH
from ..native.libraries import lib
from ..p2p.captured import CapturedMessage
from ..p2p.transfer import TAG_MASK, LaneMessage
from ..types import OPS
from .fabric_messages import FabricMessages
from .futures import CallbackThread, this_thread
from .layout import NUMPY_TYPES, Finish, is_plain
from .not_compiled import not_compiled
from .operators import PLAIN, modes, seen
from .streams import (
    EnteredStream,
    Ready,
    SideStream,
    capture_query,
    captures,
    current_handle,
    device_of,
    mean_of,
    module,
    stream_query,
    tensors_in,
)
from .work import NO_LIMIT, CombinedWork, GraphWork, LaneWork, ReceiveStatus, Work, limit_of, torch_error


class GroupComm:
    """A communicator with the locks that order its calls. ``check_aborted`` raises once the group was aborted."""

    def __init__(self, comm: Communicator, check_aborted: Callable[[], None]) -> None:
        self.communicator, self.runner = comm, runner_of(comm)
        self.messages = messages_of(comm)
        #: Number of side streams for asynchronous calls. Queued calls keep their order themselves, and so can use two.
        self.streams = 1 if self.runner.members.channels is None else 2
        self._check_aborted = check_aborted
        self.lock = threading.RLock()
        #: The runner's time limit; -1 before the first call.
        self.seconds = -1.0
        #: Messages have a lock of their own: a peer may need a message of ours before it makes the collective.
        self.message_lock = threading.RLock()
        self.runner.wait = partial(wait_op, poll_hook=self._poll)
        self.runner.exchanges = False

    def _poll(self) -> None:
        self._check_aborted()
        run_poll_hooks()

    def call(self, call: CallSpec, seconds: float) -> None:
        """Run a collective on host memory to its end in this thread."""
        with self.lock:
            self.within(seconds).blocking(*call)

    def start(self, call: CallSpec, seconds: float, stream: int | None = None) -> list[Request]:
        """Start a collective; with ``stream``, when the stream gets there. Returns its one request.

        If the stream cannot wait for the end of the call, the host waits in ``wait()``; the stream is not held for it,
        as torch may allocate memory at any time, which waits for streams. If a call without a stream does not end at
        once, the caller wakes the progress thread. Among devices of several vendors an ``alltoallv`` exchanges its
        counts first, and the host waits for these.
        """
        with self.lock:
            agrees = stream is not None and call.name == "alltoallv" and not self.runner.members.topology.flat
            return [self.within(seconds).begin(call, stream, Completion.HOST if agrees else Completion.ON_WAIT)]

    def repeat_in_stream(self, calls: list[Repetition], seconds: float, stream: int) -> list[Request]:
        """As :meth:`start` in a stream, for calls that were made before. Only calls that were made stay in the list."""
        with self.lock:
            requests = self.within(seconds).repeat_in_stream(calls, stream)
        if len(requests) < len(calls):
            del calls[len(requests) :]
        return requests

    def refuse(self, mistake: Exception) -> None:
        with self.lock:
            self.runner.refuse(mistake)

    def within(self, seconds: float) -> Runner:
        """The runner, with the time limit of the next call. The limit also holds for teams that the call creates."""
        runner = self.runner
        if self.seconds != seconds:
            self.seconds = runner.timeout = seconds
            runner.members.teams.timeout = seconds or NO_LIMIT
        return runner

    def begin(self, tensor: Any, peer: int, tag: int, outgoing: bool, seconds: float, stream: int | None) -> Request:
        """Start a message. With ``stream`` it sends the data that is there, or may write to the tensor, when the stream
        gets to it. ``peer`` -1 is any rank."""
        comm, messages = self.communicator, self.messages
        if stream is None and tensor.dtype in NUMPY_TYPES:
            tensor = tensor.detach().numpy()  # messages of numpy's arrays begin and end in C
        with self.message_lock:
            messages.timeout = seconds
            if outgoing:
                return comm.Isend(tensor, peer, tag, stream=stream)
            return comm.Irecv(tensor, messages.any_source if peer < 0 else peer, tag, stream=stream)

    def goes_by_lane(self, tensor: Any, peer: int, tag: int, outgoing: bool) -> bool:
        """As :meth:`.Messages.goes_by_lane`; raises if peer, tag or memory are not valid for a message by a lane."""
        messages, arrays = self.messages, self.messages.arrays
        if not messages.goes_by_lane(messages.any_source if peer < 0 else peer):
            return False
        any_source = not outgoing and peer < 0
        messages.check("dest" if outgoing else "source", messages.any_source if any_source else peer, tag)
        arrays.on_device(arrays.bind(tensor, peer, writable=not outgoing))
        messages.captured.load()
        return True


#: Seconds that an asynchronous call is polled before it returns.
_MOMENT = 20e-6
#: After each this many calls all calls under way are polled; after the others only the oldest.
_MANY = 64


#: Key of the communicator for collectives on host tensors; those for callbacks have keys from 1.
_HOSTS = -1

#: A call that may repeat an earlier one: all of it but addresses (:func:`_key_of`), the tensor to send, and the one to
#: receive into, or None.
KeyedCall: TypeAlias = tuple[Hashable, Any, Any]


class _Batch(threading.local):
    #: Works of the calls since coalescing began; None outside of it.
    works: list[Work] | None = None
    #: Side streams that the calls of one combined Work share: each is entered once. None otherwise.
    joined: dict[SideStream, EnteredStream] | None = None


@not_compiled
class Dispatch:
    """Base of a process group: starts a collective or a message, in program order, and returns its Work."""

    #: Works (and `WaitedWork`) whose end the host has not seen, in order of posting; keeps their tensors alive.
    in_flight: dict[Any, None]
    #: True once a stream waits for a message without the host.
    streams_wait = False
    #: The process's count of failed operations at the last check.
    _failures = 0
    #: Why a stream went on without the data of a message; None if none did.
    _unfit: Exception | None = None
    #: True once messages were captured in graphs: later calls check that all of those were waited for.
    _in_graphs = False
    #: Messages by NCCL or RCCL; None if no other rank of the group shares this rank's fabric.
    _fabric: FabricMessages | None = None

    def _open(
        self, comm: Communicator, name: str, timeout: timedelta | None, hosts: Communicator | None = None
    ) -> None:
        """Initialize the group. Not ``__init__``: torch's base class has its own."""
        #: Rank and size of the group.
        self.place = comm.rank, comm.size
        #: Communicators by level of callbacks (0: none), and the one for host tensors if they have one of their own.
        self._comms = {0: GroupComm(comm, self.check_aborted)}
        if hosts is not None:
            self._comms[_HOSTS] = GroupComm(hosts, self.check_aborted)
            self._comms[0].runner.beside.append(self._comms[_HOSTS].runner.used)
        self._hosts = self._comms[0] if hosts is None else self._comms[_HOSTS]
        self._sides: dict[Any, SideStream] = {}
        self._callbacks: dict[int, CallbackThread] = {}
        #: Ranks with which messages have gone by lanes; the device of their tensors, and functions that return its
        #: current stream, and whether that is being captured.
        self._lane_peers: set[int] = set()
        self._lane: tuple[Any, Callable[[], int], Callable[[], bool]] | None = None
        self._lock = threading.Lock()
        self._name, self._desc = name, ""
        #: Time limit of a call in seconds; 0: none.
        self.seconds = limit_of(timeout)
        self._aborted = ""
        #: `_closed`: only callbacks may still make calls. `_ended`: no call may be made.
        self._closed = self._ended = False
        self._posted = 0
        self._batch = _Batch()
        self.in_flight = {}
        #: The Work of calls that have ended when they return, or that run in their caller's stream.
        self.done_work = Work(self, [])

    def rank(self) -> int:
        return self.place[0]

    @property
    def group_name(self) -> str:
        return self._name

    def size(self) -> int:
        return self.place[1]

    # --- collectives --------------------------------------------------------------------------------------------------

    def _post(self, call: CallSpec, opts: Any, outputs: Sequence[Any], finish: Finish = None) -> Work:
        """Start a collective. A call with ``async_op=False`` on host memory runs to its end here."""
        key = _key_of(call)
        if key is not None:
            send, recv = call.send, call.recv[0] if type(call.recv) is list else call.recv
            if not ((send is not None and send.numel()) or (recv is not None and recv.numel())):
                return Work(self, outputs)  # on all ranks
            repeated = self._repeat([(key, send, recv)], opts, outputs, finish)
            if repeated is not None:
                return repeated
        if self._aborted or self._closed or self.in_flight:
            self._check_usable()
        device, asynchronous = device_of(call.recv, call.send), getattr(opts, "asyncOp", True)
        mean = device is not None and call.op is OPS["AVG"]
        if device is not None:
            self._known(device)
        try:
            comm = self._comm(on_host=device is None and not (call.send is None and call.recv is None))
            self._posted += 1  # from here on the communicator itself reports wrong arguments to the other ranks
            if device is not None:
                if mean:
                    call, finish = call._replace(op=OPS["SUM"]), mean_of(call.recv, self.place[1], finish)
                start = partial(comm.start, call, self._timeout(opts))
                work = self._in_stream(self._side(device), start, call[1:3], outputs, finish, asynchronous)
                assert work is not None, "an error is raised where a call cannot be started"
            elif asynchronous:
                work = Work(self, outputs, comm.start(call, self._timeout(opts)), finish, call)
                work.collective = True
                work.poll(_MOMENT)
            else:
                comm.call(call, self._timeout(opts))
                if finish is not None:
                    finish()
                work = Work(self, outputs)
        except UCCHError as failure:
            raise torch_error(failure) from failure
        if key is not None and not this_thread.level:
            comm.runner.make_repeatable(key, call, on_host=device is None, mean=mean)
        return self._register(work)

    def _repeat(
        self, calls: list[KeyedCall], opts: Any, outputs: Sequence[Any] | None = None, finish: Finish = None
    ) -> Work | None:
        """Make calls again that differ from earlier ones only in their addresses. Returns one Work for them, or None if
        the first one has to be posted in full; those that are left to be posted stay in the list.

        Calls on a device are queued in a stream: the caller's own if the caller would wait for them at once. torch
        itself keeps memory that its streams use. ``outputs`` and ``finish`` are those of a single call, as in
        :meth:`_post`. Few Python functions are called here, as each costs a hundredth of a short call's time.
        """
        if profiler._is_profiler_enabled or this_thread.level or not calls or modes():
            return None
        where: Any = calls[0][1] if calls[0][2] is None else calls[0][2]
        comm, device = (self._hosts, None) if where.is_cpu else (self._comms[0], where.device)
        again = _repetitions(comm.runner.repeatable, calls, where.get_device())
        if not again:
            return None
        own = 0.0 if opts is None else opts.timeout.total_seconds()
        seconds = own if own > 0 else self.seconds
        try:
            if self._aborted or self._closed or self.in_flight:
                self._check_usable()
            self._posted += 1  # first: no later error is a refusal
            if getattr(opts, "asyncOp", True):
                results = [where] if outputs is None else [*outputs]
                if len(calls) > 1:
                    results = _results(calls)
                if device is None:
                    work, made = self._repeat_for_a_moment(comm, again, seconds, calls, results, finish)
                else:
                    side = self._sides.get(device) or self._side(device)
                    work, made = self._repeat_beside(comm, again, seconds, calls, results, finish, side)
            else:
                stream = None if device is None else current_handle(device)
                with comm.lock:
                    runner = comm.runner if comm.seconds == seconds else comm.within(seconds)
                    work, made = self.done_work, runner.repeat(again, stream, (calls,))
                if finish is not None or again[0][0].mean:
                    self._complete(again[:made], calls, finish)
        except UCCHError as failure:
            raise torch_error(failure) from failure
        if not made:
            self._posted -= 1
            return None
        del calls[:made]
        if self._batch.works is not None:
            self._batch.works.append(work)
        return work

    def _complete(self, made: Sequence[Repetition], calls: Sequence[KeyedCall], finish: Finish) -> None:
        """Do what is left of calls whose data is there, or is there once the current stream gets to this point."""
        for (repeatable, _, _), (_, _, recv) in zip(made, calls, strict=False):
            if repeatable.mean and (divide := mean_of(recv, self.place[1], None)) is not None:
                divide()
        if made and finish is not None:
            finish()

    def _repeat_for_a_moment(
        self, comm: GroupComm, again: list[Repetition], seconds: float, calls: list[KeyedCall], results: list[Any],
        finish: Finish,
    ) -> tuple[Work, int]:  # fmt: skip
        """As :meth:`_repeat`, for asynchronous calls on host memory; returns also the number of calls made."""
        with comm.lock:
            made, requests = comm.within(seconds).repeat_for(_MOMENT, again, tuple(calls))
        if made < len(calls):
            del results[made:]
        work = Work(self, results, requests, finish if made else None)
        if requests:
            work.collective = True
            lib.ucch_progress_thread(1)
        return work, made

    def _repeat_beside(
        self, comm: GroupComm, again: list[Repetition], seconds: float, calls: list[KeyedCall], results: list[Any],
        finish: Finish, side: SideStream,
    ) -> tuple[Work, int]:  # fmt: skip
        """As :meth:`_repeat`, for asynchronous calls in a side stream; returns also the number of calls made."""
        first = again[0][0]
        if first.program is None or side.captured():
            return self.done_work, 0  # a side stream that was entered but gets no call would never rejoin the capture
        if first.mean:
            finish = partial(self._complete, again, tuple(calls), finish)
        work = self._in_stream(side, partial(comm.repeat_in_stream, again, seconds), tuple(calls), results, finish)
        if len(again) < len(calls):
            del results[len(again) :]
        return work or self.done_work, len(again)

    def _side(self, device: Any) -> SideStream:
        return self._sides.get(device) or self._sides.setdefault(device, SideStream(device, self._comms[0].streams))

    def _register(self, work: Work) -> Work:
        """Add a Work to this thread's batch, if calls are being coalesced."""
        if self._batch.works is not None:
            self._batch.works.append(work)
        return work

    def _in_stream(
        self,
        side: SideStream,
        start: Callable[[int], list[Request]],
        memory: Sequence[Any],
        outputs: Sequence[Any],
        finish: Finish,
        asynchronous: bool = True,
    ) -> Work | None:
        """Make calls in a stream, and queue ``finish`` behind them; None if ``start`` has made none."""
        shared, joined = self._batch.joined, None
        if asynchronous and shared is not None:
            joined = shared.get(side) or shared.setdefault(side, side.enter())
        memory = memory, outputs
        requests, ready = side.run(start, memory, finish, asynchronous=asynchronous, joined=joined)
        if not requests:
            return None
        if type(requests[0]) is Captured:  # a captured call never ends for the host
            return Work(self, outputs, ready=ready)
        return Work(self, outputs, requests, None if ready else finish, memory, ready=ready)

    def _known(self, device: Any) -> None:
        if device.type not in TORCH:
            raise ValueError(
                f"tensors on rank {self.place[0]} are on device {str(device)!r}; the backend ucch takes those of the "
                f"host, and of {' and '.join(map(repr, TORCH))}"
            )

    def _comm(self, *, on_host: bool) -> GroupComm:
        """The communicator of a collective. Calls from callbacks have their own (:mod:`.futures`)."""
        at = this_thread.level
        if not at:
            return self._hosts if on_host else self._comms[0]
        comm = self._comms.get(at)
        if comm is None:
            # Dup is collective: every rank runs the same callbacks in the same order, and so makes it at the same
            # point.
            comm = self._comms[at] = GroupComm(adopted(self._comms[0].communicator.mpi.Dup()), self.check_aborted)
        return comm

    def _timeout(self, opts: Any) -> float:
        if opts is None:
            return self.seconds
        own: float = opts.timeout.total_seconds()
        return own if own > 0 else self.seconds

    def refuse(self, mistake: Exception, memory: Sequence[Any] | None = None) -> None:
        """Tell the other ranks that this one cannot make its next collective. ``memory``: the call's tensors, if
        known."""
        self._check_usable()
        self._posted += 1
        kinds = (True, False) if memory is None else (any(each.is_cpu for each in tensors_in(memory)),)
        for comm in {self._comm(on_host=kind) for kind in kinds}:
            comm.refuse(mistake)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _post_message(
        self, tensor: Any, peer: int, tag: int, *, outgoing: bool, outputs: Sequence[Any], finish: Finish = None
    ) -> Work:
        """Start a send to, or a receive from, group rank ``peer`` (-1: any)."""
        if self._aborted or self._closed or self.in_flight or self.streams_wait:
            self._check_usable()
        self._posted += 1
        comm, stream = self._comms[0], None
        try:
            if not tensor.is_cpu:
                device = tensor.device
                self._known(device)
                stream = current_handle(device)
                if module(device).is_current_stream_capturing():
                    return self._register(self._captured(tensor, peer, tag, outgoing, outputs, finish, stream))
                fabric = self._fabric
                if fabric is not None and fabric.carries(peer, tag):
                    return self._register(fabric.post(self, tensor, peer, outgoing, outputs, finish))
                if comm.goes_by_lane(tensor, peer, tag, outgoing):
                    if self._lane is None or device != self._lane[0]:
                        self._lane = device, stream_query(device), capture_query(device)
                    if fabric is None or not fabric.reaches(peer):  # else it depends on the tag
                        self._lane_peers.add(peer)
                    return self._in_lane(tensor, peer, tag, outgoing, outputs, finish)
            request = comm.begin(tensor, peer, tag, outgoing, self.seconds, stream)
        except UCCHError as failure:
            raise torch_error(failure) from failure
        work = Work(self, outputs, (request,), finish, tensor, None if outgoing else ReceiveStatus())
        if tensor.is_cpu:
            work.poll(_MOMENT)
        return self._register(work)

    def _captured(
        self, tensor: Any, peer: int, tag: int, outgoing: bool, outputs: Sequence[Any], finish: Finish, stream: int
    ) -> Work:
        self.streams_wait = self._in_graphs = True
        message = self._comms[0].begin(tensor, peer, tag, outgoing, self.seconds, stream)
        assert isinstance(message, CapturedMessage), "the stream is being captured"
        return GraphWork(self, outputs, message, finish, stream_query(tensor.device))

    def _repeat_message(self, tensor: Any, peer: int, tag: int, *, outgoing: bool) -> Work | None:
        """Start a message by a lane if one with this peer was sent that way before. None if it has to be posted in
        full."""
        lane = self._lane
        if lane is None or peer not in self._lane_peers or tensor.is_cpu or tensor.device != lane[0]:
            return None
        if type(tag) is not int or not 0 <= tag <= TAG_MASK or not (is_plain(tensor) and tensor.data_ptr()):
            return None
        if profiler._is_profiler_enabled or lane[2]():
            return None
        if modes() or (type(tensor) not in PLAIN and seen(tensor)):
            return None
        if self._aborted or self._closed or self.in_flight or self.streams_wait:
            self._check_usable()
        self._posted += 1
        try:
            return self._in_lane(tensor, peer, tag, outgoing, () if outgoing else (tensor,), None)
        except UCCHError as failure:
            raise torch_error(failure) from failure

    def _in_lane(
        self, tensor: Any, peer: int, tag: int, outgoing: bool, outputs: Sequence[Any], finish: Finish
    ) -> Work:
        """Start a message by a lane, after what is queued in the current stream."""
        assert self._lane is not None
        messages, seconds, stream = self._comms[0].messages, self.seconds, self._lane[1]
        messages.timeout = seconds
        message = messages.start_in_lane(
            tensor.data_ptr(), tensor.nbytes, peer, tag, stream(), tensor, incoming=not outgoing
        )
        work = LaneWork(self, outputs, message, finish, stream, seconds)
        return work if self._batch.works is None else self._register(work)

    def failure_of(self, message: LaneMessage) -> UCCHError:
        return self._comms[0].messages.failure(message)

    # --- others -------------------------------------------------------------------------------------------------------

    def _combined(self, calls: Iterable[Work]) -> Work:
        """Return one Work for several calls."""
        batch = self._batch
        joined, batch.joined, collected, batch.works = batch.joined, {}, batch.works, None
        try:
            works = list(calls)
            ready = [Ready(each.stream, behind=each.behind) for each in batch.joined.values()]
        finally:
            batch.joined, batch.works = joined, collected
        return self._register(works[0] if len(works) == 1 and not ready else CombinedWork(self, works, ready))

    def callbacks(self, at: int) -> CallbackThread:
        """The thread that runs the callbacks of a level. After the group's end callbacks run where they are
        attached."""
        with self._lock:
            found = self._callbacks.get(at)
            if found is None:
                found = self._callbacks[at] = CallbackThread(at, f"{self._name}-callbacks-{at}")
                if self._ended:
                    found.stop(0.0)
            return found

    def broke(self, error: Exception) -> None:
        """End the group because a call failed after its result was used; all waits raise from now on."""
        self._unfit = self._unfit or error
        runner = self._comms[0].runner
        if not runner.broken:
            runner.abandon(str(error))

    def check_data(self) -> None:
        """Raise if a stream had to go on without a message's data, because the message timed out."""
        failures = lib.ucch_failures()
        if failures != self._failures:
            self._failures = failures
            for work in list(self.in_flight):
                work.is_over()
        if self._unfit is not None:
            raise dist.DistBackendError(
                f"process group {self._name!r} on rank {self.rank()}: a stream went on without a message's data, and "
                f"results computed from it are wrong; make a new group: {self._unfit}"
            ) from self._unfit

    def check_aborted(self) -> None:
        if self._aborted:
            raise dist.DistBackendError(f"process group {self._name!r} was aborted: {self._aborted}")

    def _check_usable(self) -> None:
        if self._aborted:
            self.check_aborted()
        if self._ended or (self._closed and not this_thread.level):
            raise dist.DistBackendError(f"process group {self._name!r} has been destroyed")
        if self.streams_wait and (lib.ucch_failures() != self._failures or self._unfit is not None):
            self.check_data()
        if self._in_graphs:
            try:
                self._comms[0].messages.captured.check()  # raises where captured messages were not waited for
            except UCCHError as failure:
                raise torch_error(failure) from failure
        # Calls that are never waited for hold memory until they are polled: poll the oldest in each call, and all now
        # and then. Not during a capture: the rest of their work must not become part of the graph.
        try:
            first = (*islice(self.in_flight, 2),)  # two, as each call adds one
        except RuntimeError:  # another thread removed one at the same time
            first = ()
        for oldest in first:
            if (oldest.leaves_work and captures()) or not oldest.is_over():
                break
        if self._posted % _MANY == 0 and not (self.in_flight and captures()):
            for work in list(self.in_flight):
                work.is_over()


def _results(calls: Sequence[KeyedCall]) -> list[Any]:
    """The tensors that hold the results of calls; of one without a result on this rank, what it sends."""
    found = []
    for _, send, recv in calls:  # a comprehension is a function call up to Python 3.11
        found.append(send if recv is None else recv)
    return found


def _key_of(call: CallSpec) -> Hashable:
    """All of a call but addresses; None if its counts may differ on other ranks, or it has no tensors."""
    name, send, recv, op, root, counts = call
    if counts is not None or name == "alltoallv" or send is recv:
        return None
    sent = None if send is None else (send.dtype, send.numel(), send.device)
    if type(recv) is list:
        received: Any = recv[0].dtype, tuple(recv[1]), recv[0].device
    else:
        received = None if recv is None else (recv.dtype, recv.numel(), recv.device)
    return name, sent, received, op, root


def _repetitions(known: Mapping[Hashable, RepeatableCall], calls: Sequence[KeyedCall], device: int) -> list[Repetition]:
    """What the runner repeats, with addresses; empty unless all calls are known, with memory on ``device`` that the
    engine can use."""
    found: list[Repetition] = []  # list[Repetition]() would take half a microsecond
    for key, send, recv in calls:
        repeatable = known.get(key)
        if repeatable is None:
            return []
        for tensor in (send, recv):
            if tensor is not None and (
                tensor.get_device() != device
                or tensor.layout is not torch.strided
                or not tensor.is_contiguous()
                or tensor.is_neg()
                or tensor.is_conj()
                or (type(tensor) not in PLAIN and seen(tensor))
            ):
                return []
        send_at, recv_at = 0 if send is None else send.data_ptr(), 0 if recv is None else recv.data_ptr()
        if (send_at or send is None) and (recv_at or recv is None):
            found.append((repeatable, send_at, recv_at))
    return found if len(found) == len(calls) else []
