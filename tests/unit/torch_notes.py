"""Stand-in for ``torch.cuda`` where there is none: it notes what is asked of it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import torch

from ucc_hetero.calls.request import Request
from ucc_hetero.native.libraries import ffi, lib


class Stream:
    """Notes what is asked of it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.device = name, notes, torch.device("cuda", 0)
        self.done = threading.Event()

    @property
    def cuda_stream(self) -> int | None:
        return id(self)

    def wait_event(self, event: Any) -> None:
        self.notes.append(f"{self.name} waits for an event of {event.name}")

    def record_event(self) -> Stream:
        self.record(self)
        return self

    def record(self, stream: Stream) -> None:
        self.notes.append(f"event in {stream.name}")

    def query(self) -> bool:
        return self.done.is_set()

    synchronize = query


class Event:
    """An event that is recorded again and again."""

    name, passed = "", True

    def record(self, stream: Stream) -> None:
        self.name = stream.name

    def query(self) -> bool:
        return self.passed


class Cuda:
    """Stands for ``torch.cuda``; ``main`` is the current stream."""

    Event = Event

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.main = self.current = Stream("main", self.notes)
        self.capturing = False
        self.here = threading.local()

    def Stream(self, device: Any) -> Stream:
        self.side = Stream("side", self.notes)
        self.side.device = device
        return self.side

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def is_initialized(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def device(self, device: str) -> Any:
        before = getattr(self.here, "device", torch.device("cuda", 0))
        self.here.device = device
        yield
        self.here.device = before  # in name only, until something is done there

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        device, self.here.device = getattr(self.here, "device", torch.device("cuda", 0)), stream.device
        yield
        self.current, self.here.device = before, device
        if device != stream.device:
            self.notes.append(f"a context on {device}")


class Remote(torch.Tensor):
    """Says that it is on a device."""

    is_cpu = False
    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        pass


def finished() -> Request:
    """A request of a call that has ended."""
    message = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
    request = Request(lib.ucch_message_op(message), message, lambda state, status: None)
    request._done = True
    return request
