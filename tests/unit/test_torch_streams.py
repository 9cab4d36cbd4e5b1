"""Calls on a device's tensors: what is asked of streams and in which order, when messages are copied, by notes."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch

from ucc_hetero.calls.request import Request
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.torch import streams
from ucc_hetero.torch.experts import Event, Experts

FIRST = torch.device("cuda", 0)


class Stream:
    """Stands for one of torch's, and for an event that was recorded in it; notes what is asked of it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.device, self.cuda_stream = name, notes, FIRST, id(self)

    def wait_event(self, event: Any) -> None:
        self.notes.append(f"{self.name} waits for an event of {event.name}")

    def record_event(self) -> Stream:
        self.record(self)
        return self

    def record(self, stream: Stream) -> None:
        self.notes.append(f"event in {stream.name}")


class Again:
    """An event that is recorded again and again."""

    name, passed = "", True

    def record(self, stream: Stream) -> None:
        self.name = stream.name

    def query(self) -> bool:
        return self.passed


class Cuda:
    """Stands for ``torch.cuda``, with one stream beside ``main``."""

    Event = Again
    capturing = False

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.main = self.current = Stream("main", self.notes)
        self.here = threading.local()

    def Stream(self, device: Any) -> Stream:
        side = Stream("side", self.notes)
        side.device = device
        return side

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def is_initialized(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def device(self, device: Any) -> Any:
        before, self.here.device = getattr(self.here, "device", FIRST), device
        yield
        self.here.device = before  # in name only, until something is done there

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        with self.device(stream.device):
            yield
        self.current = before
        if getattr(self.here, "device", FIRST) != stream.device:
            self.notes.append(f"a context on {self.here.device}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(streams.torch, "cuda", found)
    monkeypatch.setattr(streams, "module", lambda device: found)  # also of tensors that are the host's
    monkeypatch.setattr(streams, "raw_stream", lambda device: None)  # a torch for CUDA asks the driver
    return found


class Remote(torch.Tensor):
    """Says that it is on a device."""

    is_cpu, device = False, FIRST  # type: ignore[assignment]


def finished() -> Request:
    """A request of a call that has ended."""
    message = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
    request = Request(lib.ucch_message_op(message), message, lambda state, status: None)
    request._done = True
    return request


def test_calls_that_order_themselves_take_streams_in_turn(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call then waits for the end of the one before."""
    many = [Stream(name, cuda.notes) for name in ("one", "two")]
    left = iter(many)
    monkeypatch.setattr(cuda, "Stream", lambda device: next(left))
    side, taken = streams.Side(torch.device("cuda", 0), 2), []

    def start(stream: int) -> Request:
        taken.append(stream)
        return finished()

    for _ in range(4):
        side.run(start, (), None, asynchronous=True)
    assert taken == [each.cuda_stream for each in many] * 2 and len({*taken}) == 2


def test_threads_leave_nothing_on_the_first_device(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream on a device of another rank would make a context there."""
    monkeypatch.setattr(streams, "_idle", {})
    seen: list[Any] = []

    def work() -> None:
        for _ in range(2):
            with streams.beside([torch.device("cuda", 1)]):
                seen.append((cuda.current.name, cuda.here.device))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("side", torch.device("cuda", 1))] * 2 and cuda.current is cuda.main
    assert not cuda.notes


def test_experts_work_beside_the_current_stream(cuda: Cuda) -> None:
    notes = cuda.notes

    class Kept(Remote):
        name = "result"

        def record_stream(self, stream: Any) -> None:
            notes.append(f"{self.name} is kept for {stream.name}")

    given, made = torch.empty(1).as_subclass(Kept), torch.empty(1).as_subclass(Kept)
    given.name = "argument"
    experts = Experts.__new__(Experts)
    experts._sides = {}

    def run(**how: Any) -> Event:
        notes.clear()
        result, event = experts._run(lambda: notes.append(f"work in {cuda.current.name}") or (made,), [given], **how)
        assert result is made and cuda.current is cuda.main
        return event

    event = run(async_finish=True)
    kept = ["argument is kept for side", "result is kept for main"]
    ordered = ["event in main", "side waits for an event of main"]
    assert notes == [*ordered, "work in side", "event in side", *kept]
    event.current_stream_wait()
    assert notes[-1] == "main waits for an event of side"
    run(async_finish=True, previous_event=event)
    assert notes == ["side waits for an event of side", "work in side", "event in side", *kept]
    run(previous_event=event).current_stream_wait()
    assert notes == ["main waits for an event of side", "work in main"]
