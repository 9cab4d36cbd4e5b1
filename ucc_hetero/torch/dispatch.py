"""From a call of torch's to a started call: on which communicator, in which stream, and which Work waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ..api.comm import Communicator, adopted, messages_of, runner_of
from ..calls.arguments import CallSpec, Completion
from ..calls.request import Captured, Request, run_poll_hooks, wait_op
from ..calls.runner import RepeatableCall, Runner
from ..errors import UCCHError
from ..machine.vendors import TORCH
from ..native.libraries import lib
from ..p2p.captured import CapturedMessage
from ..p2p.transfer import TAG_MASK, LaneMessage
from ..types import OPS
from . import futures
from .fabric_messages import FabricMessages
from .futures import CallbackThread
from .layout import Finish, is_plain
from .not_compiled import not_compiled
from .profiling import profiled
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
    """One communicator with the locks that order what is posted on it; ``check_aborted`` raises on an abort."""

    def __init__(self, comm: Communicator, check_aborted: Callable[[], None]) -> None:
        self.communicator, self.runner = comm, runner_of(comm)
        self.messages = messages_of(comm)
        #: Streams that asynchronous calls on a device go into in turn: those queued whole keep their order themselves.
        self.streams = 1 if self.runner.members.channels is None else 2
        self._check_aborted = check_aborted
        self._lock = threading.RLock()
        #: The time limit that the runner has: -1 before the first call.
        self._seconds = -1.0
        #: Messages have one of their own: a peer may come to a collective only after a message of ours.
        self._message_lock = threading.RLock()
        self.runner.wait = partial(wait_op, look=self._look)
        self.runner.exchanges = False

    def _look(self) -> None:
        self._check_aborted()
        run_poll_hooks()

    def call(self, call: CallSpec, seconds: float) -> None:
        """Run a collective on host memory to its end in this thread."""
        with self._lock:
            self._limited(seconds).blocking(*call)

    def start(self, call: CallSpec, seconds: float, stream: int | None = None) -> Request:
        """Start a collective, with ``stream`` when that gets there.

        Where the stream cannot wait for its end the host has to, and can do so later. None is held for it: torch
        allocates whenever it likes. The progress thread is to be woken if a call without a stream does not end at once.
        Where devices of several vendors need all counts of an ``alltoallv``, these are exchanged first; streams do the
        rest.
        """
        with self._lock:
            agrees = stream is not None and call.name == "alltoallv" and not self.runner.members.topology.flat
            return self._limited(seconds).begin(call, stream, Completion.HOST if agrees else Completion.ON_WAIT)

    def repeat(
        self, repeatable: RepeatableCall, both: tuple[int, int], seconds: float, stream: int | None, keep: Any
    ) -> bool:
        with self._lock:
            if seconds != self._seconds:
                self._limited(seconds)
            return self.runner.repeat(repeatable, *both, stream, keep)

    def repeat_in_stream(
        self, repeatable: RepeatableCall, both: tuple[int, int], seconds: float, stream: int
    ) -> Request | None:
        with self._lock:
            if seconds != self._seconds:
                self._limited(seconds)
            return self.runner.repeat_in_stream(repeatable, *both, stream)

    def refuse(self, mistake: Exception) -> None:
        with self._lock:
            self.runner.refuse(mistake)

    def _limited(self, seconds: float) -> Runner:
        """The runner, with the time limit of the call to come; making teams for it is limited likewise."""
        runner = self.runner
        if self._seconds != seconds:
            self._seconds = runner.timeout = seconds
            runner.members.teams.timeout = seconds or NO_LIMIT
        return runner

    def send(self, tensor: Any, dest: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        """Start a send; of what is there when ``stream`` gets there."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            return messages.start(messages.outgoing(tensor, dest, tag, stream=stream))

    def goes_by_lane(self, peer: int) -> bool:
        """As :meth:`.Messages.goes_by_lane`; ``peer`` -1 is any."""
        return self.messages.goes_by_lane(self.messages.any_source if peer < 0 else peer)

    def check_lane(self, tensor: Any, peer: int, tag: int, outgoing: bool) -> None:
        """Refuse a peer, a tag or memory that cannot be, of a message that :meth:`goes_by_lane` is true for."""
        messages, arrays = self.messages, self.messages.arrays
        any_source = not outgoing and peer < 0
        messages.check("dest" if outgoing else "source", messages.any_source if any_source else peer, tag)
        arrays.on_device(arrays.bind(tensor, peer, writable=not outgoing))
        messages.captured.load()

    def receive(self, tensor: Any, source: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        """Start a receive, which may write once ``stream`` gets there; ``source`` -1 is any."""
        with self._message_lock:
            messages = self.messages
            messages.timeout = seconds
            origin = messages.any_source if source < 0 else source
            return messages.start(messages.incoming(tensor, origin, tag, stream=stream))


#: Seconds that an asynchronous call is polled before it returns.
_MOMENT = 20e-6
#: Every so many calls, all calls under way are polled; otherwise the oldest.
_MANY = 64


#: Number of the communicator for collectives on tensors of the host; callbacks' are numbered from 1.
_HOSTS = -1

#: (outgoing, from any source) -> the dispatcher's name of a message.
_MESSAGES = {(True, False): "send", (True, True): "send", (False, False): "recv_", (False, True): "recv_any_source_"}


class _Batch(threading.local):
    #: Works of the calls since coalescing began; None outside of it.
    works: list[Work] | None = None
    #: The streams of the calls that one Work is made of, each entered once; None outside of such a Work.
    joined: dict[SideStream, EnteredStream] | None = None
    #: True within a call that a profiler records: the calls that it is made of are not recorded.
    profiled = False


@not_compiled
class Dispatch:
    """Base of a process group: starts a collective or a message, in program order, and returns its Work."""

    #: Works (and `WaitedWork`) whose end the host has not seen, in order; keeps their tensors alive.
    in_flight: dict[Any, None]
    #: True once a stream waits for a message by itself, without the host.
    streams_wait = False
    #: Failed operations of this process at the last check.
    _failures = 0
    #: Why a stream had to go on without the data of a message.
    _unfit: Exception | None = None
    #: True once messages were captured in graphs: each later call checks that all of them were waited for.
    _in_graphs = False
    #: Messages by the vendor's library; None where no other rank of the group shares this rank's fabric.
    _fabric: FabricMessages | None = None

    def _open(
        self, comm: Communicator, name: str, timeout: timedelta | None, hosts: Communicator | None = None
    ) -> None:
        """Initialize; not a constructor, as torch's base class needs that for itself."""
        self._place = comm.rank, comm.size
        #: By level of callbacks; and that of collectives on the host's tensors, where these have one of their own.
        self._comms = {0: GroupComm(comm, self.check_aborted)}
        if hosts is not None:
            self._comms[_HOSTS] = GroupComm(hosts, self.check_aborted)
            self._comms[0].runner.beside.append(self._comms[_HOSTS].runner.used)
        self._hosts = self._comms[0] if hosts is None else self._comms[_HOSTS]
        self._sides: dict[Any, SideStream] = {}
        self._callbacks: dict[int, CallbackThread] = {}
        #: Ranks with which messages have gone by lanes; the device of their tensors, and functions that return its
        #: current stream, and True if that is being captured.
        self._lane_peers: set[int] = set()
        self._lane_device: Any = None
        self._lane_stream: Callable[[], int] = _no_device
        self._lane_captured: Callable[[], bool] = _no_device
        self._lock = threading.Lock()
        self._name, self._desc = name, ""
        #: Time limit of a call; 0: none.
        self.seconds = limit_of(timeout)
        self._aborted = ""
        #: True once only callbacks may make calls; and once no call may be made.
        self._closed = self._ended = False
        self._posted = 0
        self._batch = _Batch()
        self.in_flight = {}
        #: Work of calls that have ended when they return, or run in their caller's stream.
        self.done_work = Work(self, [])

    def rank(self) -> int:
        return self._place[0]

    @property
    def group_name(self) -> str:
        return self._name

    def size(self) -> int:
        return self._place[1]

    # --- collectives --------------------------------------------------------------------------------------------------

    def _post(
        self,
        call: CallSpec,
        opts: Any,
        outputs: Sequence[Any],
        finish: Finish = None,
        form: str = "",
        inputs: Any = None,
        key: Hashable = None,
    ) -> Work:
        """Start a collective; one that its caller would only wait for runs to its end here.

        With a ``key`` such calls can be repeated (:meth:`_repeat`). A profiler names the call by ``form``, the
        dispatcher's name, or else by the call's own, and shows the shapes of ``inputs``, or else of ``outputs``.
        """
        if profiler._is_profiler_enabled and not self._batch.profiled:
            again = partial(self._post, call, opts, outputs, finish)  # with a profiler no call is made in the short way
            return self._profiled(form or call.name, outputs if inputs is None else inputs, again)
        if self._aborted or self._closed or self.in_flight:
            self._check_usable()
        seconds = self._timeout(opts)
        try:
            work = self._start(seconds, call, outputs, finish, getattr(opts, "asyncOp", True), key)
        except UCCHError as failure:
            raise torch_error(failure) from failure
        return self._register(work)

    def _start(
        self,
        seconds: float,
        call: CallSpec,
        outputs: Sequence[Any],
        finish: Finish,
        asynchronous: bool,
        key: Hashable,
    ) -> Work:
        """Make a collective a part of a stream's work, begin it, or run it to its end."""
        device = device_of(call.recv, call.send)
        if device is not None:
            self._known(device)
        has_memory = call.send is not None or call.recv is not None
        comm = self._comm(on_host=has_memory and device is None)
        self._posted += 1  # from here on the communicator tells the others of mistakes
        mean = device is not None and call.op is OPS["AVG"]
        if device is not None:
            if mean:
                call, finish = call._replace(op=OPS["SUM"]), mean_of(call.recv, self._place[1], finish)
            start = partial(comm.start, call, seconds)
            work = self._in_stream(device, start, call[1:3], outputs, finish, asynchronous)
        elif asynchronous:
            work = Work(self, outputs, (comm.start(call, seconds),), finish, call)
            work.collective = True
            work.poll(_MOMENT)
            return work
        else:
            comm.call(call, seconds)
            if finish is not None:
                finish()
            work = Work(self, outputs)
        if key is not None and not futures.level():
            comm.runner.make_repeatable(key, call, mean=mean)
        return work

    def _repeat(self, key: Hashable, send: Any, recv: Any, opts: Any) -> Work | None:
        """Make a call that differs from an earlier one in its addresses alone; None if it has to be posted.

        ``key`` is all of the call but its addresses. A call on a device is launched into a stream: the caller's own, if
        that would wait at once. torch keeps memory that its streams work on. Few functions are called here: each takes
        a hundredth of the time of a short call.
        """
        comm = self._hosts if recv.is_cpu else self._comms[0]
        repeatable = comm.runner.repeatable.get(key)
        if repeatable is None or not _plain_at(send, recv):
            return None
        if profiler._is_profiler_enabled or self._batch.works is not None or futures.this_thread.level:
            return None
        device = None if recv.is_cpu else recv.device
        own = 0.0 if opts is None else opts.timeout.total_seconds()
        seconds = own if own > 0 else self.seconds
        both = 0 if send is None else send.data_ptr(), recv.data_ptr()
        try:
            if getattr(opts, "asyncOp", True):
                return (
                    None
                    if repeatable.mean or device is None
                    else self._repeat_async(comm, repeatable, both, seconds, (send, recv))
                )
            if self._aborted or self._closed or self.in_flight:
                self._check_usable()
            stream = None if device is None else current_handle(device)
            made = comm.repeat(repeatable, both, seconds, stream, (send, recv))
        except UCCHError as failure:
            raise torch_error(failure) from failure
        self._posted += made
        if made and repeatable.mean and (divide := mean_of(recv, self._place[1], None)) is not None:
            divide()
        return self.done_work if made else None

    def _repeat_async(
        self,
        comm: GroupComm,
        repeatable: RepeatableCall,
        both: tuple[int, int],
        seconds: float,
        memory: tuple[Any, Any],
    ) -> Work | None:
        """As :meth:`_repeat`, of an asynchronous call on a device."""
        if self._aborted or self._closed or self.in_flight:
            self._check_usable()
        device, joined = memory[1].device, self._batch.joined
        if module(device).is_current_stream_capturing():
            return None  # a stream that is entered and gets no call would not join the capture again
        side = self._sides.get(device) or self._side(device)
        if joined is None:
            entered = side.enter()
        else:
            entered = joined.get(side) or joined.setdefault(side, side.enter())
        request = comm.repeat_in_stream(repeatable, both, seconds, entered.handle)
        if request is None:
            return None
        self._posted += 1
        return Work(self, memory[1:], (request,), None, memory, ready=side.ready(entered, marked=joined is None))

    def _side(self, device: Any) -> SideStream:
        return self._sides.get(device) or self._sides.setdefault(device, SideStream(device, self._comms[0].streams))

    def _profiled(self, name: str, inputs: Any, start: Callable[[], Work]) -> Work:
        self._batch.profiled = True
        try:
            return profiled(self, name, inputs, start)
        finally:
            self._batch.profiled = False

    def _register(self, work: Work) -> Work:
        """Add a Work to the thread's batch, if calls are coalesced."""
        if self._batch.works is not None:
            self._batch.works.append(work)
        return work

    def _in_stream(
        self, device: Any, start: Any, memory: Sequence[Any], outputs: Sequence[Any], finish: Finish, asynchronous: bool
    ) -> Work:
        side = self._side(device)
        shared, joined = self._batch.joined, None
        if asynchronous and shared is not None:
            joined = shared.get(side) or shared.setdefault(side, side.enter())
        memory = *memory, *outputs
        request, ready = side.run(start, memory, finish, asynchronous=asynchronous, joined=joined)
        if type(request) is Captured:  # no host ever hears of its end
            return Work(self, outputs, ready=ready)
        return Work(self, outputs, (request,), None if ready else finish, memory, ready=ready)

    def _known(self, device: Any) -> None:
        if device.type not in TORCH:
            raise ValueError(
                f"tensors on rank {self._place[0]} are on device {str(device)!r}; the backend ucch takes those of the "
                f"host, and of {' and '.join(map(repr, TORCH))}"
            )

    def _comm(self, *, on_host: bool) -> GroupComm:
        """The communicator of a collective; calls that callbacks post have one of their own (:mod:`.futures`)."""
        at = futures.level()
        if not at:
            return self._hosts if on_host else self._comms[0]
        comm = self._comms.get(at)
        if comm is None:
            # Collective; every rank runs the same callbacks in the same order, and so comes here.
            comm = self._comms[at] = GroupComm(adopted(self._comms[0].communicator.mpi.Dup()), self.check_aborted)
        return comm

    def _timeout(self, opts: Any) -> float:
        if opts is None:
            return self.seconds
        own: float = opts.timeout.total_seconds()
        return own if own > 0 else self.seconds

    def refuse(self, mistake: Exception, memory: Sequence[Any] | None = None) -> None:
        """Tell the other ranks that this one cannot make its next collective, whose tensors are in ``memory``, if that
        is known."""
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
        if profiler._is_profiler_enabled and not self._batch.profiled:
            again = partial(self._post_message, tensor, peer, tag, outgoing=outgoing, outputs=outputs, finish=finish)
            return self._profiled(_MESSAGES[outgoing, peer < 0], outputs or tensor, again)
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
                if comm.goes_by_lane(peer):
                    comm.check_lane(tensor, peer, tag, outgoing)
                    self._lane_of(device)
                    if fabric is None or not fabric.reaches(peer):  # else it depends on the tag
                        self._lane_peers.add(peer)
                    return self._in_lane(tensor, peer, tag, outgoing, outputs, finish)
            if outgoing:
                request = comm.send(tensor, peer, tag, self.seconds, stream)
            else:
                request = comm.receive(tensor, peer, tag, self.seconds, stream)
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
        messages = self._comms[0].messages
        messages.timeout = self.seconds
        if outgoing:
            message = messages.outgoing(tensor, peer, tag, stream=stream)
        else:
            message = messages.incoming(tensor, messages.any_source if peer < 0 else peer, tag, stream=stream)
        assert isinstance(message, CapturedMessage), "the stream is being captured"
        return GraphWork(self, outputs, message, finish, stream_query(tensor.device))

    def _repeat_message(self, tensor: Any, peer: int, tag: int, *, outgoing: bool) -> Work | None:
        """Start a message by a lane, if one with this rank has gone by it; None if it has to be posted."""
        if peer not in self._lane_peers or tensor.is_cpu or tensor.device != self._lane_device:
            return None
        if type(tag) is not int or not 0 <= tag <= TAG_MASK or not (is_plain(tensor) and tensor.nbytes):
            return None
        if profiler._is_profiler_enabled or self._lane_captured():
            return None
        if self._aborted or self._closed or self.in_flight or self.streams_wait:
            self._check_usable()
        self._posted += 1
        try:
            return self._in_lane(tensor, peer, tag, outgoing, () if outgoing else (tensor,), None)
        except UCCHError as failure:
            raise torch_error(failure) from failure

    def _lane_of(self, device: Any) -> None:
        """Note which device has the tensors of messages by lanes."""
        if device != self._lane_device:
            self._lane_stream, self._lane_captured = stream_query(device), capture_query(device)
            self._lane_device = device

    def _in_lane(
        self, tensor: Any, peer: int, tag: int, outgoing: bool, outputs: Sequence[Any], finish: Finish
    ) -> Work:
        """Start a message by a lane, behind what the current stream has to do."""
        messages, seconds, stream = self._comms[0].messages, self.seconds, self._lane_stream
        messages.timeout = seconds
        message = messages.start_in_lane(
            tensor.data_ptr(), tensor.nbytes, peer, tag, stream(), tensor, comes=not outgoing
        )
        work = LaneWork(self, outputs, message, finish, stream, seconds)
        return work if self._batch.works is None else self._register(work)

    def failure_of(self, message: LaneMessage) -> UCCHError:
        return self._comms[0].messages.failure(message)

    # --- others -------------------------------------------------------------------------------------------------------

    def _combined(self, calls: Iterable[Work], form: str = "", inputs: Any = ()) -> Work:
        """One Work for several calls; a profiler that knows the name shows them as one."""
        if form and profiler._is_profiler_enabled and not self._batch.profiled:
            return self._profiled(form, inputs, partial(self._combined, calls))
        batch = self._batch
        joined, batch.joined, collected, batch.works = batch.joined, {}, batch.works, None
        try:
            works = list(calls)
            ready = [Ready(each.stream, behind=each.behind) for each in batch.joined.values()]
        finally:
            batch.joined, batch.works = joined, collected
        return self._register(works[0] if len(works) == 1 and not ready else CombinedWork(self, works, ready))

    def callbacks(self, at: int) -> CallbackThread:
        """The thread that runs the callbacks of a level; once the group has ended, they run where they are attached."""
        with self._lock:
            found = self._callbacks.get(at)
            if found is None:
                found = self._callbacks[at] = CallbackThread(at, f"{self._name}-callbacks-{at}")
                if self._ended:
                    found.stop(0.0)
            return found

    def broke(self, error: Exception) -> None:
        """End the group, as a call has failed whose result is in use already; waits raise from now on."""
        self._unfit = self._unfit or error
        runner = self._comms[0].runner
        if not runner.broken:
            runner.abandon(str(error))

    def check_data(self) -> None:
        """Raise if a stream that waited for a message had to go on without its data, as its time was over."""
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
        if self._aborted:
            raise dist.DistBackendError(f"process group {self._name!r} was aborted: {self._aborted}")

    def _check_usable(self) -> None:
        if self._aborted:
            self.check_aborted()
        if self._ended or (self._closed and not futures.level()):
            raise dist.DistBackendError(f"process group {self._name!r} has been destroyed")
        if self.streams_wait and (lib.ucch_failures() != self._failures or self._unfit is not None):
            self.check_data()
        if self._in_graphs:
            try:
                self._comms[0].messages.captured.check()  # raises where captured messages were not waited for
            except UCCHError as failure:
                raise torch_error(failure) from failure
        # Calls that are not waited for hold memory until they are polled: the oldest each time, all of them now and
        # then. What is left to do after them must not become part of a graph that is being captured.
        for oldest in _oldest(self.in_flight):
            if (oldest.leaves_work and captures()) or not oldest.is_over():
                break
        if self._posted % _MANY == 0 and not (self.in_flight and captures()):
            for work in list(self.in_flight):
                work.is_over()


def _plain_at(tensor: Any, beside: Any) -> bool:
    """True if the engine can take the memory of two tensors of a known type on one device; the first may be None."""
    if tensor is not None:
        if tensor.get_device() != beside.get_device() or tensor.layout is not torch.strided:
            return False
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return False
    return beside.layout is torch.strided and beside.is_contiguous() and not (beside.is_neg() or beside.is_conj())


def _oldest(works: dict[Any, None]) -> tuple[Any, ...]:
    """The two oldest calls: one more than each call adds, so that none stays for long."""
    try:
        return tuple(islice(works, 2))
    except RuntimeError:  # another thread collected one meanwhile
        return ()


def _no_device() -> Any:
    """Stands for the queries of a device until there is one."""
    raise AssertionError("no message has gone by a lane")
