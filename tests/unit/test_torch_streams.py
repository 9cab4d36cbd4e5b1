"""Calls on a device's tensors: what is asked of streams and in which order, when messages are copied, by notes."""

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch
import torch.distributed as dist
from torch_notes import Cuda, Remote, Stream, finished

from ucc_hetero.calls.message import Letter
from ucc_hetero.calls.request import Request
from ucc_hetero.calls.stream_launch import Captured
from ucc_hetero.errors import CollectiveError
from ucc_hetero.native.libraries import lib
from ucc_hetero.torch import dispatch, fabric, p2p_buffers, streams
from ucc_hetero.torch import work as works
from ucc_hetero.torch.experts import Event, Experts
from ucc_hetero.torch.work import InLane, Received, Sent, Work

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


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
        self.notes, self.error, self.repeats = notes, None, True
        #: Whether streams of both ranks hand each other messages.
        self.lanes = False

    def by_lane(self, peer: int) -> bool:
        return self.lanes

    def check_lane(self, tensor: Any, peer: int, tag: int, outgoing: bool) -> None:
        self.notes.append(("look", peer))

    def hand(self, tensor: Any, peer: int, tag: int, seconds: float, stream: int, *, outgoing: bool) -> Letter:
        self.notes.append(("send" if outgoing else "receive", tensor.data_ptr(), stream))
        if self.error:
            raise self.error
        return Letter(0, tensor.data_ptr(), tensor.nbytes, peer, tag, stream, tensor)

    def check_message(self, outgoing: bool, peer: int, tag: int) -> None:
        if peer > 1:
            raise ValueError(f"dest {peer}")

    def send(
        self, memory: Any, peer: int, tag: int, seconds: float, stream: int | None = None, *, lasting: bool = False
    ) -> Request:
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

    def again(self, request: Any, seconds: float, stream: int | None) -> Request | None:
        self.notes.append(("again", request, stream))
        if self.error:
            raise self.error
        return finished() if self.repeats else None


class Sender(dispatch.Dispatch):
    """As much of a group as messages need; what has ended stays uncollected."""

    def _usable(self) -> None:
        pass

    def __init__(self) -> None:
        self._comms: Any = {0: Comm([])}
        self._p2p_buffers, self.in_flight, self._batch = {}, {}, dispatch._Batch()
        self._aborted, self._closed, self._ended, self._posted, self._seconds = "", False, False, 0, 1.0
        self._lane_peers, self._lane_device = set(), None


def test_a_send_starts_when_its_stream_gets_there_and_a_receive_at_once(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_buffers, "_MOST", 100)
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
    group._place = 0, 2
    with pytest.raises(ValueError, match="device 'meta'"):
        group.post_message(torch.ones(3, device="meta"), 1, 0, True, [], None)
    cuda.capturing = True
    with pytest.raises(dist.DistBackendError, match="captured"):
        group.post_message(tensor, 1, 0, True, [], None)


def test_messages_by_lanes_start_in_the_current_stream_without_a_copy(cuda: Cuda) -> None:
    group = Sender()
    comm: Any = group._comms[0]
    comm.lanes, tensor = True, torch.arange(10.0).as_subclass(Remote)

    def again(peer: int = 1, tag: Any = 0, memory: Any = tensor) -> Any:
        return group.message_again(memory, peer, tag, True)

    assert again() is None, "it has to be looked at first"
    with cuda.stream(other := Stream("other", cuda.notes)):
        works = [group.post_message(tensor, 1, 0, outgoing, [], None) for outgoing in (True, False)]
        works += [group.message_again(tensor, 1, 0, outgoing) for outgoing in (True, False)]
    assert all(isinstance(work, InLane) and work.source_rank() == 1 for work in works)
    assert [each for each in comm.notes if each[0] != "look"] == 2 * [
        ("send", tensor.data_ptr(), other.cuda_stream), ("receive", tensor.data_ptr(), other.cuda_stream)
    ]  # fmt: skip
    assert len(comm.notes) == 6
    others: list[dict[str, Any]] = [
        {"peer": 0}, {"tag": -1}, {"tag": 1 << 40}, {"tag": 1.0}, {"memory": tensor[::2]}, {"memory": tensor[:0]},
        {"memory": torch.ones(3)}, {"memory": torch.ones(3, device="meta")},
    ]  # fmt: skip
    assert not [how for how in others if again(**how) is not None], "these have to be looked at"
    cuda.capturing = True
    assert again() is None
    cuda.capturing = False
    comm.error = CollectiveError("rank 1 has died")
    for post in (again, lambda: group.post_message(tensor, 1, 0, True, [], None)):
        with pytest.raises(dist.DistBackendError, match="rank 1 has died"):
            post()


def test_messages_inside_a_fabric_depend_on_the_tag(cuda: Cuda) -> None:
    group, tensor, made = Sender(), torch.arange(10.0).as_subclass(Remote), []

    class Backend:
        def send(self, *how: Any) -> Any:
            return made.append(("send", cuda.current.name, *how[1:])) or SimpleNamespace(wait=bool)

    def make(store: Any, rank: int, places: Any, seconds: float) -> Backend:
        made.append(("make", rank, places))
        return Backend()

    comm: Any = group._comms[0]
    comm.lanes, store = True, SimpleNamespace(clone=dist.HashStore)
    group._fabric = fabric.Fabric(make, 0, frozenset({1, 2}), store, 1.0)
    group._posted, group._unfit = 0, None
    for _ in range(2):
        assert group.post_message(tensor, 2, 0, True, [], None).wait()
        for thread in threading.enumerate():
            if thread.name == "ucch-fabric":
                thread.join()
    assert made == [("make", 0, (0, 2)), ("send", "side", 1, 0), ("send", "main", 1, 0)]
    assert not comm.notes
    assert isinstance(group.post_message(tensor, 2, 5, True, [], None), InLane)
    assert group.message_again(tensor, 2, 0, True) is None, "it could go either way"
    assert isinstance(group.post_message(tensor, 3, 0, True, [], None), InLane)
    assert len(made) == 3


def test_messages_that_look_the_same_begin_as_those_before(cuda: Cuda) -> None:
    group = Sender()
    comm: Any = group._comms[0]

    def made(*how: Any, n: int = 10, dtype: torch.dtype = torch.float32, fails: bool = False) -> list[Any]:
        tensor = torch.ones(n, dtype=dtype).as_subclass(Remote)
        comm.notes.clear()
        try:
            work = group.post_message(tensor, *how, [] if how[2] else [tensor], None)
        except dist.DistBackendError:
            assert fails
        else:
            work._collect()
        return [kind for kind, *_ in comm.notes]

    send, receive = (1, 0, True), (1, 0, False)
    assert (made(*send), made(*receive), made(*send), made(*receive)) == (["send"], ["receive"], ["again"], ["again"])
    assert comm.notes[0][2] is None, "what is received may come at once"
    for other in ((1, 3, True), (0, 0, True), (-1, 0, False)):
        assert made(*other) == ["send" if other[2] else "receive"], "another tag, another peer, or anyone"
    assert made(*send, n=11) == made(*send, dtype=torch.float64) == ["send"]
    assert made(*send) == ["again"] and comm.notes[0][2] == cuda.main.cuda_stream
    with cuda.stream(other := Stream("other", cuda.notes)):
        assert made(*send) == ["again"] and comm.notes[0][2] == other.cuda_stream
    comm.repeats = False
    assert made(*send) == ["again", "send"], "it goes another way now"
    comm.error, used = CollectiveError("rank 1 has died"), group._p2p_buffers[torch.device("cuda", 0)]._used
    assert made(*send, fails=True) == ["again"] and made(*send, fails=True) == ["send"], "what failed is not kept"
    comm.error, comm.repeats = None, True
    assert (made(*send), made(*send)) == (["send"], ["again"])
    assert group._p2p_buffers[torch.device("cuda", 0)]._used == used == 0
    long = {"n": (1 << 18) + 1}
    assert made(*send, **long) == made(*send, **long) == ["send"], "of a long one only the buffer is used again"


def test_a_captured_call_is_left_to_its_stream(cuda: Cuda) -> None:
    """Nobody collects it, and whoever waits for it joins its stream to the capture."""
    group, device = Sender(), torch.device("cuda", 0)
    group._place, group._sides, group._comms[0].streams = (0, 2), {device: streams.Side(device)}, 1
    work = group._in_stream(device, lambda stream: Captured(), (), [], None, True)
    assert not group.in_flight and work.is_success() is False  # the stream has not got there
    cuda.notes.clear()
    assert work.wait() and cuda.notes == ["main waits for an event of side"]


def buffer_of(left: list[str] | None) -> Any:
    """Stands for a message's buffer, and notes how that has ended."""
    return SimpleNamespace(
        tensor=None, over=lambda *, again: ([] if left is None else left).append("gone" if again else "lost")
    )


def test_what_is_sent_was_copied_and_nobody_waits_for_it() -> None:
    group: Any = Group()
    left: list[str] = []
    buffer = buffer_of(left)
    work = Sent(group, [], finished(), buffer)
    assert work in group.in_flight
    assert work.wait() and left == ["gone"] and not group.in_flight
    work._collect()
    assert left == ["gone"], "once"
    failing = Coming()
    failing.over = True
    work = Sent(group, [], failing, buffer)
    work._collect()
    assert left == ["gone", "lost"]
    with pytest.raises(dist.DistBackendError, match="the sender died"):
        work.wait()


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
    monkeypatch.setattr(works, "current_handle", lambda device: cuda.current.cuda_stream)
    monkeypatch.setattr(works, "beside", lambda devices: cuda.stream(Stream("beside", notes)))

    def take(request: Any, stream: int) -> bool:
        may = bool(native.come) or native.early
        notes.extend([f"taken in {cuda.current.name}"] * may)
        return may

    monkeypatch.setattr(works.Messages, "take", staticmethod(take))
    request, target = Coming(), torch.zeros(3)

    def deliver() -> streams.Ready:
        notes.append(f"copied in {cuda.current.name}")
        return streams.Ready(cuda.current)

    work = Received(group, [target], request, buffer_of(None), deliver)
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

    def finish() -> streams.Ready:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("no room")
        return streams.Ready(Stream("main", []))

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
    for later in (other, Sent(work._group, [], finished(), buffer_of(None))):
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


def made(buffers: Any, key: Any, tensor: Any) -> Any:
    """A new buffer, whose memory notes the streams that it is kept for."""
    buffer = buffers.make(key, tensor)
    buffer.tensor = buffer.tensor.as_subclass(Keeping)
    buffer.tensor.kept_for = []
    return buffer


class Keeping(Remote):
    """Notes the streams that it is kept for."""

    kept_for: Any

    def record_stream(self, stream: Any) -> None:
        self.kept_for.append(stream)


def test_messages_go_through_buffers_while_there_is_room(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_buffers, "_MOST", 100)
    buffers = p2p_buffers.P2pBuffers(torch.device("cuda", 0))
    tensor = torch.arange(10.0)
    outgoing = made(buffers, "to", tensor)
    outgoing.fill(tensor.requires_grad_())
    assert not outgoing.tensor.requires_grad
    tensor = tensor.detach().zero_()
    assert outgoing.tensor.tolist() == list(range(10)) and not cuda.notes
    target, rest = torch.zeros(10).as_subclass(Remote), []
    incoming = made(buffers, "from", target)
    deliver = incoming.incoming(target, lambda: rest.append(1))
    assert not cuda.notes and incoming.tensor.data_ptr() != target.data_ptr()
    assert all(buffers.make("from", each) is None for each in (target, tensor[:0]))
    incoming.tensor.copy_(outgoing.tensor)
    with cuda.stream(other := Stream("other", cuda.notes)):
        ready = deliver()
        ready.order()
    assert cuda.notes == ["other waits for an event of main"]  # kernels before the receive may still read the target
    assert target.tolist() == list(range(10)) and rest == [1] and incoming.tensor.kept_for == [other]
    outgoing.over(again=False)
    made(buffers, "from", target), made(buffers, "to", tensor)
    assert buffers.again("to") is None and buffers.make("to", tensor) is None, "full"


def test_buffers_of_messages_are_used_again_once_they_are_empty(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_buffers, "_IDLE", 100)
    monkeypatch.setattr(p2p_buffers, "_LEAST", 8)
    buffers, tensor = p2p_buffers.P2pBuffers(torch.device("cuda", 0)), torch.arange(10.0).as_subclass(Remote)
    first = made(buffers, "from", tensor)
    ready = first.incoming(tensor, None)()
    assert cuda.notes == [], "it is delivered in the stream that it was asked for in"
    assert buffers._used == 0 and buffers.again("from") is None, "its message goes on"
    first._copied.passed = False
    first.over(again=True)
    assert buffers.again("from") is None, "its copy has not been made yet"
    second = made(buffers, "from", tensor)
    second.over(again=True)
    first._copied.passed = True
    with cuda.stream(other := Stream("other", cuda.notes)):
        ready.order()
        assert cuda.notes == ["other waits for an event of main"]
        cuda.notes.clear()
        assert buffers.again("from") is first and buffers.again("from") is second
        ready.order()
    assert cuda.notes == [] and ready.query(), "who waited for the first message waits for no other"
    first.incoming(tensor, None)()
    assert first.tensor.kept_for == [cuda.main], "it is known to be used there"
    with cuda.stream(other):
        first.incoming(tensor, None)()
    assert first.tensor.kept_for == [cuda.main, other]
    # No more than so much is kept, of whatever kind, and nothing that is still to be copied from.
    for n in (1, 10, 20, 5, 1):
        made(buffers, n, torch.ones(n)).over(again=True)
    assert {n: len(kept) for n, kept in buffers._kept.items()} == {5: 1, 1: 1}
    for tag in range(100):  # a short one counts for more than its bytes
        made(buffers, ("tag", tag), torch.ones(1)).over(again=True)
    assert [*buffers._kept] == [("tag", tag) for tag in range(88, 100)] and buffers._idle == 96
    assert buffers._used == second.nbytes
    with torch.inference_mode():
        third = made(buffers, "to", tensor)
    third.fill(tensor)  # outside of it


def test_events_are_recorded_again(cuda: Cuda) -> None:
    """Once the host has seen the end of their call, for which nobody waits any more then."""
    free: Any = deque()
    first = streams.Ready(cuda.main, events=free)
    assert not free and not first.query()
    first.over()
    assert len(free) == 1 and first.query()
    cuda.notes.clear()
    with cuda.stream(Stream("other", cuda.notes)):
        first.order()
    assert not cuda.notes
    event = free[0] = SimpleNamespace(recorded=[], query=lambda: False)
    event.record = event.recorded.append
    again = streams.Ready(cuda.main, events=free)
    assert event.recorded == [cuda.main] and not free and not again.query()
    more = streams.Ready(cuda.main)  # what comes after a call may not have ended with it
    more.over()
    assert not free and not more._over


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
