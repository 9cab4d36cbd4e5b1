"""Streams for calls on device tensors: a call is queued in a stream, and the host does not wait for it."""

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
    """torch's module for a device type (streams, events, current device and stream)."""
    return getattr(torch, device.type)


@cache
def _raw_stream_of(kind: str) -> Any:
    """torch's function that returns the raw handle of the current stream; None if this type has none."""
    return getattr(torch._C, f"_{kind}_getCurrentRawStream", None)


def capture_query(device: Any) -> Callable[[], bool]:
    """The fastest function that is True while the calling thread's stream is being captured."""
    short: Callable[[], bool] | None = getattr(torch._C, f"_{device.type}_isCurrentStreamCapturing", None)
    long: Callable[[], bool] = module(device).is_current_stream_capturing
    return long if short is None else short


def start_with(local_rank: int) -> None:
    """Make torch start with this rank's device if several are visible. Scripts may still choose another."""
    for kind in TORCH:
        found: Any = getattr(torch, kind, None)
        if hasattr(found, "_lazy_call") and not found.is_initialized():
            found._lazy_call(partial(_choose, found, local_rank))


def _choose(found: Any, local_rank: int) -> None:
    count = found.device_count()
    if count > 1:
        found.set_device(local_rank % count)


def started() -> Iterator[tuple[str, Any]]:
    """The device types that this process already uses, with their modules."""
    for kind in TORCH:
        found = getattr(torch, kind, None)
        if found is not None and found.is_initialized():
            yield kind, found


def device_of(*memory: Any) -> Any:
    """The device of a call's tensors; None for host memory. Each argument is a tensor, a list of tensors, or None."""
    for each in memory:
        tensor = each[0] if isinstance(each, list) else each
        if tensor is not None:
            return None if tensor.is_cpu else tensor.device
    return None


def tensors_in(memory: Sequence[Any]) -> list[Any]:
    """The tensors in nested sequences, which may also hold counts and None."""
    found, left = [], list(memory)
    for each in left:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            left += each
    return found


#: (device, handle) -> torch's stream object, as making one takes longer than a kernel launch.
_streams: dict[tuple[Any, int], Any] = {}


def current(device: Any) -> Any:
    """The calling thread's current stream on a tensor's device."""
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
    """The fastest function that returns the handle of the calling thread's current stream on a device."""
    tell = _raw_stream_of(device.type)
    return partial(current_handle, device) if tell is None else partial(tell, device.index)


def used_in_current(memory: Sequence[Any]) -> Ready | None:
    """Tell torch's allocator that the current stream uses this memory. Returns when that ends; None for host memory."""
    stream = None
    for tensor in tensors_in(memory):
        if not tensor.is_cpu:
            stream = current(tensor.device)
            tensor.record_stream(stream)
    return None if stream is None else Ready(stream)


_idle: dict[Any, Any] = {}


def in_idle_stream(devices: Sequence[Any] | None) -> AbstractContextManager[Any]:
    """Make an idle stream current, for work on the result of a call whose end the host has seen."""
    if not devices:
        return nullcontext()
    stream = _idle.get(devices[0])
    if stream is None:
        stream = _idle[devices[0]] = module(devices[0]).Stream(devices[0])
    return using_stream(devices[0], stream)


@contextmanager
def using_stream(device: Any, stream: Any) -> Iterator[None]:
    """Make a stream current in any thread.

    A new thread's current device is device 0. When torch leaves a stream of another device, it restores device 0 and so
    creates a context there, half a gigabyte for each rank. Therefore the stream's device is made current first.
    """
    with module(device).device(device), module(device).stream(stream):
        yield


class Ready:
    """The point in a stream at which the results of a call are there.

    ``marked``: record an event now. Without an event a wait is for all that is in the stream at the time of the wait;
    that suffices for a caller that waits at once in the same stream. ``events``: pool to which the event returns; None
    if the event has other users. ``behind``: the stream for which the call's stream has waited.
    """

    _over = False
    _event: Any = None

    def __init__(
        self, stream: Any, *, marked: bool = True, events: deque[Any] | None = None, behind: Any = None
    ) -> None:
        self._stream, self._events, self._behind = stream, events, behind
        if marked:
            try:
                event = events.pop() if events else None
            except IndexError:  # another thread took the last one
                event = None
            if event is None:
                event = stream.record_event()
            else:
                event.record(stream)
            self._event = event

    def order(self) -> bool:
        """Make the current stream wait, not the host. True if it is the stream that the call came behind."""
        caller = current(self._stream.device)
        if not self._over and caller is not self._stream and caller != self._stream:
            event = self._event or self._stream.record_event()
            if not self._over:  # after that the event may be in use again
                caller.wait_event(event)
        return self._behind is not None and (caller is self._behind or caller == self._behind)

    def query(self) -> bool:
        return self._over or bool((self._event or self._stream).query())

    def over(self) -> None:
        """Return the event to its pool: the host has seen the call end. Calls no driver, as a stream may be
        captured."""
        if self._events is not None:
            event, self._event, self._over = self._event, None, True
            if event is not None:
                self._events.append(event)

    def publish(self, future: torch.futures.Future[Any], outputs: list[Any]) -> None:
        """Complete a future now: a thread that takes the result gets a stream that waits for the event."""
        with module(self._stream.device).stream(self._stream):
            future.set_result(outputs)


class EnteredStream(NamedTuple):
    """A side stream, its handle, and the caller's stream, for which it waits first."""

    stream: Any
    handle: int
    behind: Any


def captures() -> bool:
    """True if the calling thread's current stream of any device type is being captured in a graph."""
    return any(module.is_current_stream_capturing() for _, module in started())


class SideStream:
    """The side streams of a group's asynchronous calls on one device, beside which the caller's stream computes.

    A call that its caller waits for at once goes into the caller's stream instead. ``many``: number of streams that
    take calls in turn, if calls keep their order without sharing a stream: one call can then send while the last
    receives.
    """

    def __init__(self, device: Any, many: int = 1) -> None:
        self._device = device
        self._module = module(device)
        made = [self._module.Stream(device) for _ in range(many)]
        self._streams = deque((stream, stream_handle(stream)) for stream in made)
        self._posted, self._lock = self._module.Event(), threading.Lock()
        self._events: deque[Any] = deque()
        #: True while the calling thread's stream is being captured.
        self.captured = capture_query(device)

    def enter(self) -> EnteredStream:
        """The stream for the next asynchronous call. It waits for what is queued in the caller's stream."""
        caller = current(self._device)
        with self._lock:  # one event serves all calls: a wait is for its latest record
            entered = self._streams[0]
            self._streams.rotate()
            self._posted.record(caller)
            entered[0].wait_event(self._posted)
        return EnteredStream(*entered, caller)

    def run(
        self,
        start: Callable[[int], Sequence[Request]],
        memory: Sequence[Any],
        finish: Finish,
        *,
        asynchronous: bool,
        joined: EnteredStream | None = None,
    ) -> tuple[Sequence[Request], Ready | None]:
        """Make calls in a stream, and queue ``finish`` behind them. ``joined``: a side stream that was entered before.

        ``memory`` is what the calls and ``finish`` read and write; it stays allocated until they end. The second value
        is None if the stream does not wait for the calls: then the host has to wait and to run ``finish``.
        """
        if asynchronous:
            stream, handle, behind = joined or self.enter()
        else:
            stream = behind = current(self._device)
            handle = stream_handle(stream)
        requests = start(handle)
        waits = bool(requests)
        for request in requests:
            waits = waits and (request.in_stream or request.finished)
        if waits and finish is not None:
            with self._module.stream(stream):
                finish()
            for tensor in tensors_in(memory) if asynchronous else ():
                if not tensor.is_cpu:  # still used after the call has ended
                    tensor.record_stream(stream)
        events = self._events if finish is None else None
        marked = asynchronous and joined is None
        return requests, Ready(stream, marked=marked, events=events, behind=behind) if waits else None


def mean_of(tensor: Any, size: int, finish: Finish) -> Finish:
    """Divide a sum by the number of ranks on the device (else the host would do it), then run ``finish``."""

    is_sum = tensor is not None and bool(tensor.numel())

    def divide() -> None:
        nonlocal is_sum
        if is_sum:
            whole = tensor.detach()
            if tensor.is_floating_point() or tensor.is_complex():
                change, by = whole.div_, size
            else:
                change, by = whole.copy_, torch.div(whole, size, rounding_mode="trunc")
            is_sum = False  # first: if a signal's handler raises, which it does after the next line, this runs again
            change(by)
        if finish is not None:
            finish()

    return divide
