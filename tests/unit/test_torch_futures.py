"""Futures of calls: what callbacks see, whichever thread publishes the result, and however late; how ranks start."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from processes import in_threads, python

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")

import torch
import torch.distributed as dist
from torch._jit_internal import _extract_tensors
from torch.distributed.rendezvous import _env_rendezvous_handler, _rendezvous_handlers

import _ucc_hetero_autoload
import ucc_hetero.torch as ut
from ucc_hetero.errors import CollectiveTimeout
from ucc_hetero.native.libraries import lib
from ucc_hetero.torch import futures, profiling, rendezvous, streams
from ucc_hetero.torch.dispatch import Dispatch
from ucc_hetero.torch.futures import CallbackThread, Future
from ucc_hetero.torch.work import Work


@pytest.fixture
def thread():
    """The thread in which callbacks run."""
    made = CallbackThread(1, "test")
    yield made
    made.stop(5)


@pytest.fixture
def future(thread):
    """Return a future whose result is 3."""
    made = Future(lambda _level: thread)
    made.set_result(3)
    return made


def test_failures_keep_their_type_on_devices(thread):
    """A future of devices looks for tensors in its result when it gets it; C++ fails if it does so later."""
    found = []

    class OnDevice(Future):
        def set_result(self, result):
            found.append(_extract_tensors(result))  # as C++ does if there are devices
            found.append(result)
            super().set_result(result)

    future = OnDevice(lambda _level: thread)
    future._devices = [object()]
    future.set_exception(KeyError("mine"))
    assert found[0] == []
    for call in (future.wait, lambda: _extract_tensors(found[1])):
        with pytest.raises(KeyError, match="mine"):
            call()


@pytest.mark.parametrize("error", [RuntimeError("lost"), None])
def test_callbacks_run_once_there_is_a_result(thread, error):
    """The call has ended, but the thread that publishes its result has not done so when the callback asks for it."""
    published, seen = threading.Event(), []
    work = SimpleNamespace(devices=None, error=error, future=None, wait=lambda: None)
    work.publish = lambda failure=None: published.set()  # as if the completing thread had been faster
    future = Future(lambda _level: thread, work)

    def look(each):
        try:
            seen.append(each.value())
        except RuntimeError as failure:
            seen.append(str(failure))

    out = future.then(look)
    assert published.wait(600)
    threading.Event().wait(0.05)  # a callback that does not wait has most likely run by now
    assert not seen
    future.set_result([1]) if error is None else future.set_exception(error)
    out.wait()
    assert seen == [[1] if error is None else "lost"]


def test_callbacks_of_a_stopped_thread_run_in_the_caller(thread, future):
    """A callback attached after the end of its group used to wait for ever."""
    thread.stop(5)
    out = future.then(lambda each: each.value() + 1)
    assert out.done() and out.value() == 4


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_what_a_callback_raises(thread, future, caplog, kind):
    """An exception ends neither the thread nor the wait, and is logged if no caller waits for it."""

    def fails(_each):
        raise kind("mine")

    with pytest.raises(RuntimeError if kind is SystemExit else kind, match=f"{kind.__name__}|mine"):
        future.then(fails).wait()
    future.add_done_callback(fails)
    assert future.then(lambda each: each.value()).wait() == 3, "those after it run"
    thread.stop(5)
    (record,) = caplog.records
    assert "fails" in record.message and "mine" in record.message and record.exc_info, record


class EndedRequest:
    """A request that has ended, but has not been completed by a thread."""

    finished = lasting = False

    def __init__(self):
        self._keep = message = lib.ucch_message_new()
        self._op = lib.ucch_message_op(message)

    def Wait(self, _status=None):
        self.finished = True
        return True

    def _arm(self):
        pass


class Group(Dispatch):
    """Stand-in for the group of a Work."""

    def __init__(self):
        run = SimpleNamespace(members=SimpleNamespace(channels=None))
        comm = SimpleNamespace(rank=0, size=1, _runner=run, _messages=None)
        self._open(comm, "test", None)


def fail():
    raise ValueError("no room")


def test_what_goes_wrong_after_a_call_is_raised_where_it_is_waited_for():
    """Whichever thread collects the call; the exception used to end the thread that completes futures."""
    group = Group()
    work = Work(group, [], [EndedRequest()], fail)
    future = work.get_future()
    good = Work(group, [], [EndedRequest()])
    assert good.get_future().wait() == []
    for each in (work, work, future):
        with pytest.raises(ValueError, match="no room"):
            each.wait()
    assert not group.in_flight
    futures.stop()


def test_the_completing_thread_outlives_a_result_that_cannot_be_handed_on():
    group = Group()
    bad = Work(group, [], [EndedRequest()])
    bad.listen = fail
    bad.is_over = fail
    good = Work(group, [], [EndedRequest()])
    with pytest.raises(ValueError, match="no room"):
        super(Future, bad.get_future()).wait()
    assert super(Future, good.get_future()).wait() == []
    futures.stop()


def test_calls_that_are_waited_for_together_are_those_of_the_thread():
    """Also ended calls: their errors used to be lost."""
    from ucc_hetero.torch.group import ProcessGroupUCCH

    group = Group()
    ProcessGroupUCCH._start_coalescing(group)
    bad = group._register(Work(group, [], [EndedRequest()], fail))
    assert bad.is_over()
    in_threads(lambda: group._register(Work(group, [])))
    good = group._register(Work(group, []))
    together = ProcessGroupUCCH._end_coalescing(group)
    assert together._parts == [bad, good]
    with pytest.raises(ValueError, match="no room"):
        together.wait()
    assert isinstance(together.exception(), ValueError)
    assert group._register(good) is good and group._batch.works is None


# --- how ranks start: with which device and backend, which all ranks must have chosen ---------------------------------


@pytest.mark.parametrize("count, local, chosen", [(4, 1, [1]), (2, 5, [1]), (1, 1, []), (0, 3, [])])
def test_torch_begins_with_the_device_of_the_rank(monkeypatch, count, local, chosen):
    """When CUDA is initialised, not before: until then a script may fork. A script that sets a device does so
    afterwards."""
    found = []
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    streams.start_with(local)
    assert not found
    for call, _ in torch.cuda._queued_calls:  # as torch does
        call()
    assert found == chosen
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    streams.start_with(local)
    assert found == chosen, "the script has chosen one already"


def test_ranks_that_chose_another_backend_are_named(monkeypatch):
    monkeypatch.setenv("UCCH_TORCH_REPLACE", "nccl")
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"ucch/chosen/{rank}", "y")
    with pytest.raises(CollectiveTimeout, match=r"rank 4: rank\(s\) \[9, 5\] did not come .* UCCH_TORCH_REPLACE=nccl"):
        rendezvous.await_all(store, 2, [7, 9, 4, 5], 0.01)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_group_does_not_have(rank):
    """It used to raise IndexError, and rank -1 waited for the last rank."""
    with pytest.raises(ValueError, match=f"rank {rank} of 2 rank.*WORLD_SIZE"):
        rendezvous.await_all(dist.HashStore(), rank, [0, 1], 0.01)


def test_a_group_of_another_size_is_made_where_one_was():
    """After all groups are destroyed torch numbers groups from 0 again, in the same store of torchrun."""
    store = dist.HashStore()
    for size in random.sample([2, 3, 4], 3):
        with ThreadPoolExecutor(size) as pool:
            said = [pool.submit(rendezvous.await_all, store, rank, list(range(size)), 60) for rank in range(size)]
        assert [each.exception() for each in said] == [None] * size


def test_a_rank_that_chose_another_backend_where_a_group_was():
    """It is found, also if ranks that waited in vain try again."""
    store = dist.HashStore()

    def come(ranks, seconds):
        with ThreadPoolExecutor(3) as pool:
            said = [pool.submit(rendezvous.await_all, store, rank, [0, 1, 2], seconds) for rank in ranks]
        return [str(each.exception()) for each in said]

    assert come([2, 0, 1], 60) == ["None"] * 3
    for _ in range(2):
        assert all("rank(s) [2] did not come" in text for text in come([0, 1], 0.05))
    assert come([0, 1, 2], 60) == ["None"] * 3


@pytest.mark.parametrize("installs", [(), (rendezvous.install,)])
def test_a_script_that_no_launcher_has_started_is_told_of_one(monkeypatch, installs):
    """Whether it imports ucc_hetero.torch or not; the hint is given once."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(_rendezvous_handlers, "env", _env_rendezvous_handler)
    for install in (_ucc_hetero_autoload.wrap_env, *installs):
        install()
    with pytest.raises(ValueError, match="RANK expected, but not set: start the script by `ucch-run -np N python") as e:
        next(dist.rendezvous("env://"))
    assert str(e.value).count("ucch-run") == 1


def groups_that_threads_make_at_once():
    """A group is created while another thread, which creates one, checks which groups have ended."""
    store, looks, goes_on = dist.HashStore(), threading.Event(), threading.Event()

    def makes(name):
        return ut.process_group(dist.PrefixStore(name, store), 0, 1, timedelta(seconds=100))

    def looked_at(group):
        if threading.current_thread() is not threading.main_thread():
            looks.set()
            goes_on.wait()
        return usable(group)

    over, made = makes("over"), [makes("first")]
    over.shutdown()
    usable = ut.ProcessGroupUCCH.usable.fget
    ut.ProcessGroupUCCH.usable = property(looked_at)
    thread = threading.Thread(target=lambda: made.append(makes("second")))
    thread.start()
    looks.wait()
    made.append(makes("third"))
    goes_on.set()
    thread.join()
    assert {*map(id, ut.groups())} == {*map(id, made)} and len(made) == 3, (ut.groups(), made)


def test_groups_that_threads_make_at_once():
    """All groups are listed, and so ended at process exit."""
    python("test_torch_futures:groups_that_threads_make_at_once", timeout=100)


@pytest.mark.parametrize("comes", [False, True], ids=["late", "in time"])
def test_a_range_ends_before_its_profiler(monkeypatch, comes):
    """Or never: a profiler that has stopped has freed what the end of a range would write into."""
    late = []
    if not comes:
        never = SimpleNamespace(ended=lambda _seconds: False)
        monkeypatch.setattr(profiling, "ThreadedCall", lambda end: late.append(end) or never)
    with torch.autograd.profiler.profile() as profiler:
        span = profiling._Span("ucch:all_reduce", [torch.ones(1)])
        span.close()
    late and in_threads(*late)
    assert (span._end.done(), span in profiling._given_up) == (comes, not comes)
    assert not comes or [each.is_async for each in profiler.function_events if each.name == "ucch:all_reduce"] == [True]
