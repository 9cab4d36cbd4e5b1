"""Calls on a device's tensors: what is asked of streams and in which order, when messages are copied, by notes."""

import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch
from torch_notes import Cuda, Remote, Stream, finished

from ucc_hetero.calls.request import Request
from ucc_hetero.torch import streams
from ucc_hetero.torch.experts import Event, Experts


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
        def record_stream(self, stream: Any) -> None:
            notes.append(f"{names[id(self)]} is kept for {stream.name}")

    given, made = torch.empty(1).as_subclass(Kept), torch.empty(1).as_subclass(Kept)
    names = {id(given): "argument", id(made): "result"}
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
