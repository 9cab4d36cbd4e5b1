"""Streams for calls on tensors of a device: the call is queued in one, and the host does not wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ..calls.request import Request
from ..device import stream_handle
from ..machine.vendors import TORCH
from .layout import Finish


def module(device: Any) -> Any:
    """The module of a device's type: streams, events, which device and stream are current."""
    return getattr(torch, device.type)


@cache
def _raw_stream_of(kind: str) -> Any:
    """torch's function that returns the handle of the calling thread's stream on a device; None where it has none."""
    return getattr(torch._C, f"_{kind}_getCurrentRawStream", None)


def capture_query(device: Any) -> Callable[[], bool]:
    """A function that returns True if the calling thread's stream is being captured, as quickly as torch can."""
    short: Callable[[], bool] | None = getattr(torch._C, f"_{device.type}_isCurrentStreamCapturing", None)
    long: Callable[[], bool] = module(device).is_current_stream_capturing
    return long if short is None else short


def start_with(local_rank: int) -> None:
    """Let torch begin with the device of this rank where several are in sight; scripts may still choose another one."""
    for kind in TORCH:
        found: Any = getattr(torch, kind, None)
        if hasattr(found, "_lazy_call") and not found.is_initialized():
            found._lazy_call(partial(_choose, found, local_rank))


def _choose(found: Any, local_rank: int) -> None:
    count = found.device_count()
    if count > 1:
        found.set_device(local_rank % count)


def started() -> Iterator[tuple[str, Any]]:
    """The types of devices that this process uses already, and their modules."""
    for kind in TORCH:
        found = getattr(torch, kind, None)
        if found is not None and found.is_initialized():
            yield kind, found


def device_of(*memory: Any) -> Any:
    """The device of a call's tensors, None for the host; each is a tensor, a list that begins with one, or None."""
    for each in memory:
        tensor = each[0] if isinstance(each, list) else each
        if tensor is not None:
            return None if tensor.is_cpu else tensor.device
    return None


def tensors_in(memory: Sequence[Any]) -> Iterator[Any]:
    """The tensors among nested sequences that may also hold counts, and None."""
    for each in memory:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


#: torch's streams by device and handle: making one takes longer than launching a kernel.
_streams: dict[tuple[Any, int], Any] = {}


def current(device: Any) -> Any:
    """The calling thread's stream on a tensor's device."""
    tell = _raw_stream_of(device.type)
    if tell is None:
        return module(device).current_stream(device)
    key = device, int(tell(device.index))
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = module(device).current_stream(device)
    return found


def current_handle(device: Any) -> int:
    tell = _raw_stream_of(device.type)
    return stream_handle(module(device).current_stream(device)) if tell is None else int(tell(device.index))


def stream_query(device: Any) -> Callable[[], int]:
    """A function that returns the handle of the calling thread's stream on a device, as quickly as torch can."""
    tell = _raw_stream_of(device.type)
    return partial(current_handle, device) if tell is None else partial(tell, device.index)


def used_in_current(memory: Sequence[Any]) -> Ready | None:
    """Tell torch that the current stream uses a call's memory; when that is over, None for memory of the host."""
    stream = None
    for tensor in tensors_in(memory):
        if not tensor.is_cpu:
            stream = current(tensor.device)
            tensor.record_stream(stream)
    return None if stream is None else Ready(stream)


_idle: dict[Any, Any] = {}


def in_idle_stream(devices: Sequence[Any] | None) -> AbstractContextManager[Any]:
    """Make a stream with nothing in it current, for work that follows a call whose end the host has seen."""
    if not devices:
        return nullcontext()
    stream = _idle.get(devices[0])
    if stream is None:
        stream = _idle[devices[0]] = module(devices[0]).Stream(devices[0])
    return using_stream(devices[0], stream)


@contextmanager
def using_stream(device: Any, stream: Any) -> Iterator[None]:
    """Make a stream current in any thread.

    The current device of a new thread is the first one. When torch leaves a stream of another device it makes a context
    on the first one: half a gigabyte of that GPU for each rank of a host. So the device is chosen, too.
    """
    with module(device).device(device), module(device).stream(stream):
        yield


class Ready:
    """The moment when the results of a call are there: when its stream has done what it has been given by now.

    ``marked``: record an event now. Without an event a wait is for all that the stream has by the time of the wait; a
    caller that waits at once, in the same stream, needs none. ``events``: a pool of events to be used again; None if
    the event is not that of the call alone. ``behind``: the stream that the call's stream has waited for.
    """

    _over = False
    _event: Any = None

    def __init__(
        self, stream: Any, *, marked: bool = True, events: deque[Any] | None = None, behind: Any = None
    ) -> None:
        self._stream, self._events, self._behind = stream, events, behind
        if marked:
            self.mark()

    def mark(self) -> None:
        try:
            event = self._events.pop() if self._events else None
        except IndexError:  # another thread has taken the last one
            event = None
        if event is None:
            self._event = self._stream.record_event()
        else:
            event.record(self._stream)
            self._event = event

    def order(self) -> bool:
        """Let the current stream wait, and not the host. True if it is the stream that the call is behind."""
        caller = current(self._stream.device)
        if not self._over and caller is not self._stream and caller != self._stream:
            event = self._event or self._stream.record_event()
            if not self._over:  # else the event, if there was one, is in use for something else
                caller.wait_event(event)
        return self._behind is not None and (caller is self._behind or caller == self._behind)

    def query(self) -> bool:
        return self._over or bool((self._event or self._stream).query())

    def over(self) -> None:
        """Give the event back, as the host has seen the call end. No driver is called: a stream may be captured."""
        if self._events is not None:
            event, self._event, self._over = self._event, None, True
            if event is not None:
                self._events.append(event)

    def publish(self, future: torch.futures.Future[Any], outputs: list[Any]) -> None:
        """Set a future's result now: a thread that takes it gets a stream that waits for the event."""
        with module(self._stream.device).stream(self._stream):
            future.set_result(outputs)


class EnteredStream(NamedTuple):
    """A stream for calls, its handle, and the caller's stream, for which it waits before them."""

    stream: Any
    handle: int
    behind: Any


def captures() -> bool:
    """True if the calling thread's current stream of any device is being captured in a graph."""
    return any(module.is_current_stream_capturing() for _, module in started())


class SideStream:
    """The stream of one group's asynchronous calls on one device, so that computing goes on beside them.

    A call that its caller would wait for at once goes into the caller's stream. ``many``: so many streams take calls in
    turn, where calls keep their order without one stream: one then sends while the one before still receives.
    """

    def __init__(self, device: Any, many: int = 1) -> None:
        self._device = device
        self._module = module(device)
        made = [self._module.Stream(device) for _ in range(many)]
        self._streams = deque((stream, stream_handle(stream)) for stream in made)
        self._posted, self._lock = self._module.Event(), threading.Lock()
        self._events: deque[Any] = deque()

    def enter(self) -> EnteredStream:
        """The stream for the next asynchronous call; it waits for what the caller's stream has been given so far."""
        caller = current(self._device)
        with self._lock:  # one event for all calls: a wait is for its latest record
            entered = self._streams[0]
            self._streams.rotate()
            self._posted.record(caller)
            entered[0].wait_event(self._posted)
        return EnteredStream(*entered, caller)

    def ready(self, entered: EnteredStream, *, marked: bool) -> Ready:
        """When a stream has done a call that needs nothing to be done after it."""
        return Ready(entered.stream, marked=marked, events=self._events, behind=entered.behind)

    def run(
        self,
        start: Callable[[int], Request],
        memory: Sequence[Any],
        finish: Finish,
        *,
        asynchronous: bool,
        joined: EnteredStream | None = None,
    ) -> tuple[Request, Ready | None]:
        """Make a call in a stream, and ``finish`` after it; ``joined`` is a stream that was entered before.

        ``memory`` is what both read and write. It stays allocated until the call has ended. None for when the results
        are there if the stream does not wait for the call: the host then has to, and finishes it.
        """
        if asynchronous:
            stream, handle, behind = joined or self.enter()
        else:
            stream = behind = current(self._device)
            handle = stream_handle(stream)
        request = start(handle)
        waits = request.in_stream or request.finished
        if waits and finish is not None:
            with self._module.stream(stream):
                finish()
            for tensor in tensors_in(memory) if asynchronous else ():
                if not tensor.is_cpu:  # used beyond the end of the call
                    tensor.record_stream(stream)
        events = self._events if finish is None else None
        marked = asynchronous and joined is None
        return request, Ready(stream, marked=marked, events=events, behind=behind) if waits else None


def mean_of(tensor: Any, size: int, finish: Finish) -> Finish:
    """Divide a sum by the number of ranks on the device (the engine would on the host), then ``finish``."""

    def divide() -> None:
        if tensor is not None and tensor.numel():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.detach().div_(size)
            else:
                tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))
        if finish is not None:
            finish()

    return divide
