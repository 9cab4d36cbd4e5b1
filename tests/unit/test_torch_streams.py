"""Calls on device tensors: requests to streams and their order, and when messages are copied, recorded by fakes."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from processes import in_threads

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch

from ucc_hetero.torch import streams
from ucc_hetero.torch.experts import Experts

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """Fake of torch's stream, and of an event recorded in it; records the requests to it."""

    def __init__(self, name, notes, device=FIRST):
        self.name, self.notes, self.device, self.cuda_stream = name, notes, device, id(self)

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for an event of {event.name}")

    def record_event(self):
        self.notes.append(f"event in {self.name}")
        return self


class Cuda:
    """Fake of ``torch.cuda``, with streams besides ``main``."""

    Event = Mock

    def __init__(self):
        self.notes = []
        self.main = self.current = Stream("main", self.notes)
        self.here = threading.local()
        self.is_initialized = self.is_current_stream_capturing = lambda: False

    def Stream(self, device):
        return Stream("side", self.notes, device)

    def current_stream(self, device=None):
        return self.current

    @contextmanager
    def device(self, device):
        before, self.here.device = getattr(self.here, "device", FIRST), device
        yield
        self.here.device = before  # nominally, until work is given to it

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        with self.device(stream.device):
            yield
        self.current = before
        if getattr(self.here, "device", FIRST) != stream.device:
            self.notes.append(f"a context on {self.here.device}")


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    monkeypatch.setattr(streams.torch, "cuda", found)
    monkeypatch.setattr(streams, "module", lambda device: found)  # also for host tensors
    monkeypatch.setattr(streams, "_raw_stream_of", lambda kind: None)  # the real function asks torch for CUDA's driver
    monkeypatch.setattr(streams, "_idle", {})
    return found


def test_calls_that_order_themselves_take_streams_in_turn(cuda):
    """So no call waits for the end of the previous one."""
    side, taken = streams.SideStream(FIRST, 2), []
    for _ in range(4):
        request = SimpleNamespace(in_stream=True, finished=True)
        side.run(lambda stream: taken.append(stream) or [request], (), None, asynchronous=True)  # noqa: B023
    assert taken == taken[:2] * 2 and len({*taken, cuda.main.cuda_stream}) == 3


def test_threads_leave_nothing_on_the_first_device(cuda):
    """A stream on another rank's device would create a context there."""
    seen = []

    def work():
        for _ in range(2):
            with streams.in_idle_stream([SECOND]):
                seen.append((cuda.current.name, cuda.here.device))

    in_threads(work)
    assert seen == [("side", SECOND)] * 2 and cuda.current is cuda.main and not cuda.notes


def test_experts_work_beside_the_current_stream(cuda):
    notes = cuda.notes

    class Kept(torch.Tensor):
        """Pretends to be on a device."""

        is_cpu, device, name = False, FIRST, "result"

        def record_stream(self, stream):
            notes.append(f"{self.name} is kept for {stream.name}")

    given, made = torch.empty(1).as_subclass(Kept), torch.empty(1).as_subclass(Kept)
    given.name = "argument"
    experts = Experts.__new__(Experts)
    experts._sides = {}

    def run(**how):
        notes.clear()
        result, event = experts._run(lambda: notes.append(f"work in {cuda.current.name}") or (made,), [given], **how)
        assert result is made and cuda.current is cuda.main
        return event

    event = run(async_finish=True)
    beside = ["work in side", "event in side", "argument is kept for side", "result is kept for main"]
    assert notes == ["event in main", "side waits for an event of main", *beside]
    event.current_stream_wait()
    assert notes[-1] == "main waits for an event of side"
    run(async_finish=True, previous_event=event)
    assert notes == ["side waits for an event of side", *beside]
    run(previous_event=event).current_stream_wait()
    assert notes == ["main waits for an event of side", "work in main"]
