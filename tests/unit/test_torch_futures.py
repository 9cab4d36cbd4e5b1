"""Futures of calls: what callbacks see, whoever publishes the result, and however late."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")

from torch._jit_internal import _extract_tensors

from ucc_hetero.native.libraries import lib
from ucc_hetero.torch import futures
from ucc_hetero.torch.dispatch import Dispatch
from ucc_hetero.torch.futures import Future, InOrder
from ucc_hetero.torch.work import Work


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


def test_failures_keep_their_type_on_devices() -> None:
    """A future of devices looks for tensors in its result as it gets it; C++ that does so later fails."""
    found = []

    class OnDevice(Future):
        def set_result(self, result: Any) -> None:
            found.append(_extract_tensors(result))  # as C++ does where there are devices
            found.append(result)
            super().set_result(result)

    future = OnDevice(lambda _level: InOrder(1, "test"))
    future._devices = [object()]
    future.set_exception(KeyError("mine"))
    assert found[0] == []
    with pytest.raises(KeyError, match="mine"):
        future.wait()
    with pytest.raises(KeyError, match="mine"):
        _extract_tensors(found[1])


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
    assert work.published.wait(600)
    threading.Event().wait(0.05)  # a callback that does not wait for the result has most likely run by now
    assert not seen
    if error is None:
        future.set_result([1])
    else:
        future.set_exception(error)
    out.wait()
    assert seen == [[1] if error is None else "lost"]
    thread.stop(5)


def test_callbacks_of_a_stopped_thread_run_in_the_caller() -> None:
    """One that was attached after its group had ended used to wait for ever."""
    thread = InOrder(1, "test")
    thread.stop(5)
    future = Future(lambda _level: thread)
    future.set_result(3)
    out = future.then(lambda each: each.value() + 1)
    assert out.done() and out.value() == 4


def test_a_callback_that_exits_ends_neither_the_thread_nor_the_wait() -> None:
    thread = InOrder(1, "test")
    future = Future(lambda _level: thread)
    future.set_result(3)

    def leave(_each: Any) -> None:
        raise SystemExit(2)

    with pytest.raises(RuntimeError, match="SystemExit"):
        future.then(leave).wait()
    assert future.then(lambda each: each.value()).wait() == 3
    thread.stop(5)


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_what_a_callback_raises_that_nobody_waits_for_is_logged(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    thread = InOrder(1, "test")
    future = Future(lambda _level: thread)
    future.set_result(3)

    def fails(_each: Any) -> None:
        raise kind("mine")

    future.add_done_callback(fails)
    assert future.then(lambda each: each.value()).wait() == 3, "those after it run"
    thread.stop(5)
    (record,) = caplog.records
    assert "fails" in record.message and "mine" in record.message and record.exc_info, record


class EndedRequest:
    """A request that has ended, and that nobody has completed."""

    finished = lasting = False

    def __init__(self) -> None:
        self._keep = message = lib.ucch_message_new()
        self._op = lib.ucch_message_op(message)

    def Wait(self, _status: Any = None) -> bool:
        self.finished = True
        return True

    def _arm(self) -> None:
        pass


class Group(Dispatch):
    """Stand-in for the group of a Work."""

    def __init__(self) -> None:
        run = SimpleNamespace(members=SimpleNamespace(channels=None))
        comm: Any = SimpleNamespace(rank=0, size=1, _run=run, _messages=None)
        self._open(comm, "test", None)


def fail() -> None:
    raise ValueError("no room")


def test_what_goes_wrong_after_a_call_is_raised_where_it_is_waited_for() -> None:
    """Whichever thread collects the call; it used to end the one that completes futures."""
    group = Group()
    work = Work(group, [], [EndedRequest()], fail)  # type: ignore[list-item]
    future = work.get_future()
    good = Work(group, [], [EndedRequest()])  # type: ignore[list-item]
    assert good.get_future().wait() == []
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            work.wait()
    with pytest.raises(ValueError, match="no room"):
        future.wait()
    assert not group.in_flight
    futures.stop()


def test_the_completing_thread_outlives_a_result_that_cannot_be_handed_on() -> None:
    group = Group()
    bad = Work(group, [], [EndedRequest()])  # type: ignore[list-item]
    bad.listen = fail  # type: ignore[method-assign]
    bad.is_over = fail  # type: ignore[assignment, method-assign]
    good = Work(group, [], [EndedRequest()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no room"):
        super(Future, bad.get_future()).wait()
    assert super(Future, good.get_future()).wait() == []
    futures.stop()


def test_calls_that_are_waited_for_together_are_those_of_the_thread() -> None:
    """Also those that have ended: their errors used to be lost."""
    from ucc_hetero.torch.group import ProcessGroupUCCH

    group = Group()
    ProcessGroupUCCH._start_coalescing(group)  # type: ignore[arg-type]
    bad = group._noted(Work(group, [], [EndedRequest()], fail))  # type: ignore[list-item]
    assert bad.is_over()
    other = threading.Thread(target=lambda: group._noted(Work(group, [])))
    other.start()
    other.join()
    good = group._noted(Work(group, []))
    together = ProcessGroupUCCH._end_coalescing(group)  # type: ignore[arg-type]
    assert together._parts == [bad, good]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no room"):
        together.wait()
    assert isinstance(together.exception(), ValueError)
    assert group._noted(good) is good and group._batch.works is None
