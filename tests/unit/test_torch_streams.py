"""Calls on a device's tensors: what is asked of streams and in which order, when messages are copied, by notes."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'ucc-hetero[torch]'")
import torch
import torch.distributed as dist
from torch_notes import Cuda, Stream

from ucc_hetero.calls.request import Request
from ucc_hetero.errors import CollectiveError
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.torch import dispatch, p2p_buffers, streams
from ucc_hetero.torch import work as works
from ucc_hetero.torch.work import Received, Sent, Work


def finished() -> Request:
    """A request of a call that has ended."""
    message = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
    request = Request(lib.ucch_message_op(message), message, lambda state, status: None)
    request._done = True
    return request


@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "at once"])
def test_a_call_is_a_part_of_the_right_stream(cuda: Cuda, held: bool, asynchronous: bool) -> None:
    notes, where = cuda.notes, "side" if asynchronous else "main"

    def start(stream: int) -> Request:
        notes.append(f"start in {stream}")
        request = finished()
        request._done, request.in_stream = False, held
        return request

    def finish() -> None:
        notes.append(f"finish in {cuda.current.name}")

    side = streams.Side(torch.device("cuda", 0))
    handle = cuda.side.cuda_stream if asynchronous else cuda.main.cuda_stream
    _, ready = side.run(start, (None,), finish, asynchronous=asynchronous)
    before = ["side waits for an event of main"] if asynchronous else []
    after = [f"finish in {where}", *(["event in side"] if asynchronous else [])] if held else []
    assert notes == [*before, f"start in {handle}", *after]
    assert (ready is not None) == held and cuda.current is cuda.main
    if held:
        notes.clear()
        ready.order()  # the stream of whoever waits, and not the host
        assert notes == (["main waits for an event of side"] if asynchronous else [])
        notes.clear()
        with cuda.stream(Stream("other", notes)):
            ready.order()
        assert notes == ([] if asynchronous else ["event in main"]) + [f"other waits for an event of {where}"]


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


def test_calls_are_not_captured(cuda: Cuda) -> None:
    cuda.capturing = True
    with pytest.raises(dist.DistBackendError, match="captured"):
        streams.Side(torch.device("cuda", 0)).run(lambda stream: finished(), (), None, asynchronous=True)


class Group:
    """As much of a process group as a Work needs."""

    def __init__(self) -> None:
        self.in_flight: dict[Work, None] = {}
        self.aborted = ""
        self._name = "fake"
        self.streams_wait = False

    check_data, _failures, _unfit = dispatch.Dispatch.check_data, 0, None

    def rank(self) -> int:
        return 0

    def check_aborted(self) -> None:
        if self.aborted:
            raise dist.DistBackendError(self.aborted)

    def broke(self, error: Exception) -> None:
        self.broken = self._unfit = error


class Comm:
    """Notes the messages that are begun; none of them ends before its operation does."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes, self.error = notes, None

    def check_message(self, outgoing: bool, peer: int, tag: int) -> None:
        if peer > 1:
            raise ValueError(f"dest {peer}")

    def send(self, memory: Any, peer: int, tag: int, seconds: float, stream: int | None = None) -> Request:
        self.notes.append(("send", memory, stream))
        if self.error:
            raise self.error
        return finished()

    def receive(
        self, memory: Any, source: int, tag: int, seconds: float, stream: int | None = None, *, taken: bool = False
    ) -> Request:
        assert taken == (stream is None)
        self.notes.append(("receive", memory, stream))
        return finished()


class Remote(torch.Tensor):
    """Says that it is on a device."""

    is_cpu = False
    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        pass


class Sender(dispatch.Dispatch):
    """As much of a group as messages need; what has ended stays uncollected."""

    def _usable(self) -> None:
        pass

    def __init__(self) -> None:
        self._comms: Any = {0: Comm([])}
        self._p2p_buffers, self.in_flight, self._batch = {}, {}, dispatch._Batch()
        self._aborted, self._closed, self._ended, self._posted, self._seconds = "", False, False, 0, 1.0


def test_a_send_starts_when_its_stream_gets_there_and_a_receive_at_once(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_buffers, "_MOST", 100)
    monkeypatch.setattr(dispatch, "P2pBuffers", lambda device: p2p_buffers.P2pBuffers(torch.device("cuda", 0)))
    monkeypatch.setattr(dispatch, "current", lambda device: cuda.current)
    group = Sender()
    notes, tensor = group._comms[0].notes, torch.arange(10.0).as_subclass(Remote)
    sent = group.post_message(tensor, 1, 0, True, [], None)
    got = group.post_message(tensor, 1, 0, False, [tensor], None)
    full = group.post_message(tensor, 1, 0, True, [], None), group.post_message(tensor, 1, 0, False, [tensor], None)
    assert [(kind, stream) for kind, _, stream in notes] == [
        ("send", cuda.main.cuda_stream), ("receive", None), ("send", cuda.main.cuda_stream),
        ("receive", cuda.main.cuda_stream),
    ]  # fmt: skip
    own = [memory.data_ptr() == tensor.data_ptr() for _, memory, _ in notes]
    assert own == [False, False, True, True], "copies, until the buffers are full"
    assert isinstance(sent, Sent) and not any(isinstance(each, Sent) for each in (got, *full))
    with pytest.raises(ValueError, match="dest 2"):
        group.post_message(tensor, 2, 0, True, [], None)
    cuda.capturing = True
    with pytest.raises(dist.DistBackendError, match="captured"):
        group.post_message(tensor, 1, 0, True, [], None)


def test_what_is_sent_was_copied_and_nobody_waits_for_it() -> None:
    group: Any = Group()
    left: list[str] = []
    work = Sent(group, [], (finished(),), lambda: left.append("gone"), None)
    assert work in group.in_flight
    assert work.wait() and left == ["gone"] and not group.in_flight

    def fail() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        Sent(group, [], (finished(),), fail, None).wait()


class Native:
    """Stands for the native module: whether a message has come, and whether a stream may wait for one that has not."""

    come, early, looks = 0, False, 0

    def __init__(self) -> None:
        self.limits: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def ucch_op_deadline(self, op: Any, seconds: float) -> None:
        self.limits.append(seconds)

    def ucch_wait_matched(self, op: Any, seconds: float) -> int:
        self.looks += seconds >= 0
        if seconds >= 0:
            self.come = 1  # it comes while somebody waits
        return self.come


class Coming(Request):
    """A request whose message never ends by itself."""

    over = False

    def __init__(self) -> None:
        ended = finished()
        super().__init__(ended._op, ended, lambda state, status: None)

    def _arm(self) -> None:
        pass

    def Wait(self, status: Any = None) -> None:
        if self.over:
            raise CollectiveError("rank 0: the sender died")
        super().Wait(status)


@pytest.fixture
def received(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> tuple[Native, Any, Received, list[str]]:
    native, group, notes = Native(), Group(), cuda.notes
    monkeypatch.setattr(works, "lib", native)
    monkeypatch.setattr(works, "current", lambda device: cuda.current)
    monkeypatch.setattr(works, "used_in_current", lambda memory: streams.Ready(cuda.current))
    monkeypatch.setattr(works, "beside", lambda devices: cuda.stream(Stream("beside", notes)))

    def take(request: Any, stream: int, *, early: bool = False) -> bool:
        may = bool(native.come) or (early and native.early)
        notes.extend([f"taken in {cuda.current.name}"] * may)
        return may

    monkeypatch.setattr(works.Messages, "take", staticmethod(take))
    request, target = Coming(), torch.zeros(3)
    work = Received(group, [target], (request,), lambda: notes.append(f"copied in {cuda.current.name}"), None)
    monkeypatch.setattr(work, "is_over", lambda: work._done)
    return native, request, work, notes


def test_a_stream_waits_for_a_message_that_has_come(received: Any) -> None:
    native, _, work, notes = received
    native.early = True
    work.advance()
    assert not notes, "it has not come, and nobody waits"
    native.come = 1
    assert work.wait() and work.wait()
    assert notes == ["taken in main", "copied in main", "event in main"] and not work._done


def test_an_abort_lets_streams_go_that_wait_for_messages(received: Any) -> None:
    native, _, work, _ = received
    native.early = True
    work.let_go()
    assert not native.limits, "no stream waits yet"
    assert work.wait()
    work.let_go()
    assert len(native.limits) == 1 and 0 < native.limits[0] < 1e-3


@pytest.mark.parametrize("early", [True, False])
def test_a_stream_waits_for_a_message_that_has_not_come(received: Any, early: bool) -> None:
    """Where that cannot be, the host waits until it has."""
    native, _, work, notes = received
    native.early = early
    assert work.wait()
    assert notes == ["taken in main", "copied in main", "event in main"] and not work._done
    assert native.looks == (0 if early else 1)


def test_whoever_looks_for_a_message_does_not_stop_its_own_stream(received: Any) -> None:
    native, _, work, notes = received
    native.come = 1
    work.is_completed()
    assert notes[:2] == ["taken in beside", "copied in beside"]
    notes.clear()
    assert work.wait() and notes == ["main waits for an event of beside"]


def test_what_goes_wrong_behind_a_message_is_raised_and_tried_again(received: Any) -> None:
    native, request, work, _ = received
    native.come, attempts = 1, []

    def finish() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("no room")

    work._finish = finish
    with pytest.raises(ValueError, match="no room"):
        work.wait()
    request._done = True
    assert work.wait() and len(attempts) == 2 and work._done


def test_a_message_that_fails_after_it_was_used_ends_the_group(received: Any) -> None:
    native, request, work, _ = received
    native.come = 1
    assert work.wait()
    request.over = True
    work._collect()
    assert isinstance(work._group.broken, dist.DistBackendError)
    with pytest.raises(dist.DistBackendError, match="the sender died"):
        work.wait()


def test_who_waits_for_anything_later_learns_that_a_stream_had_no_data(
    received: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let go: the host, which asks for something else, is told before it takes what was computed for good."""
    native, request, work, _ = received
    native.come = 1
    assert work.wait()
    other = Work(work._group, [torch.zeros(1)])
    assert other.wait(), "all is well so far"
    request.over = True
    monkeypatch.setattr(work, "is_over", work._collect)
    failed = lib.ucch_failures()
    monkeypatch.setattr(dispatch, "lib", SimpleNamespace(ucch_failures=lambda: failed + 1))
    for later in (other, Sent(work._group, [])):
        with pytest.raises(dist.DistBackendError, match="rank 0: data is missing .* the sender died"):
            later.wait()


def test_the_devices_that_are_none_of_ours(cuda: Cuda) -> None:
    assert streams.device_of(None, torch.ones(2)) is None
    assert streams.device_of([torch.ones(2, device="meta"), [1, 1]]).type == "meta"
    assert streams.used_in_current([torch.ones(2), [torch.ones(1), [3]], None]) is None and not cuda.notes


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


def test_messages_go_through_buffers_while_there_is_room(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_buffers, "_MOST", 100)
    buffers = p2p_buffers.P2pBuffers(torch.device("cuda", 0))
    tensor = torch.arange(10.0)
    copy, sent = buffers.outgoing(tensor)
    tensor.zero_()
    assert copy.tolist() == list(range(10)) and not cuda.notes
    target, rest = torch.zeros(10), []
    buffer, deliver = buffers.incoming(target, lambda: rest.append(1))
    assert not cuda.notes and buffer.data_ptr() != target.data_ptr()
    assert (
        buffers.outgoing(tensor) is None
        and buffers.incoming(target, None) is None
        and buffers.outgoing(tensor[:0]) is None
    )
    buffer.copy_(copy)
    with cuda.stream(Stream("other", cuda.notes)):
        deliver()
    assert cuda.notes == ["other waits for an event of main"]  # kernels before the receive may still read the target
    assert target.tolist() == list(range(10)) and rest == [1]
    sent()
    assert buffers.incoming(target, None) is not None and buffers.outgoing(tensor) is not None


def test_buffers_of_messages_are_used_again_once_they_are_empty(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_buffers, "_IDLE", 100)
    buffers, tensor = p2p_buffers.P2pBuffers(torch.device("cuda", 0)), torch.arange(10.0)
    first, deliver = buffers.incoming(tensor, None)
    deliver()
    assert cuda.notes == [], "it is delivered in the stream that it was asked for in"
    (kept,) = buffers._kept[tensor.dtype, tensor.shape]
    monkeypatch.setattr(kept.copied, "passed", False, raising=False)
    second, sent = buffers.outgoing(tensor)
    assert second.data_ptr() != first.data_ptr(), "its copy has not been made yet"
    sent()
    kept.copied.passed = True
    assert buffers.incoming(tensor, None)[0].data_ptr() == first.data_ptr()
    third, deliver = buffers.incoming(tensor, None)
    assert third.data_ptr() == second.data_ptr()
    # No more than so much is kept, of whatever kind, and nothing that is still to be copied from.
    for n in (1, 10, 20, 5, 1):
        _, sent = buffers.outgoing(torch.ones(n))
        sent()
    assert buffers._idle == 4 * sum(each.tensor.numel() for kept in buffers._kept.values() for each in kept) <= 100
    assert buffers._used == 2 * 40
