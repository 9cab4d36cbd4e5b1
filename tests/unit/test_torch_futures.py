"""Futures of calls: what callbacks see, whoever publishes the result, and however late."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'ucc-hetero[torch]'")

from ucc_hetero.torch.futures import Future, InOrder


class SlowWork:
    """A call that has ended, whose result another thread is about to publish."""

    devices = None

    def __init__(self, error: Exception | None) -> None:
        self.error, self.future, self.published = error, None, threading.Event()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def publish(self, failure: Exception | None = None) -> None:
        self.published.set()  # as if the completing thread had been first


@pytest.mark.parametrize("error", [RuntimeError("lost"), None])
def test_callbacks_run_once_there_is_a_result(error: Exception | None) -> None:
    """The call had ended, the thread that publishes its result had not yet done so, and the callback asked for it."""
    work, thread = SlowWork(error), InOrder(1, "test")
    future = Future(lambda _level: thread, work)  # type: ignore[arg-type]
    seen: list[Any] = []

    def look(each: Future) -> None:
        try:
            seen.append(each.value())
        except RuntimeError as failure:
            seen.append(str(failure))

    out = future.then(look)
    assert work.published.wait(10)
    threading.Event().wait(0.05)  # a callback that does not wait for the result has run by now
    assert not seen
    if error is None:
        future.set_result([1])
    else:
        future.set_exception(error)
    out.wait()
    assert seen == [[1] if error is None else "lost"]
    thread.stop(5)
