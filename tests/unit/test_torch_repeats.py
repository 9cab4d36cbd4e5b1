"""Calls on a device's tensors that were made before: which of them are left to streams, by notes."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
import torch
import torch.distributed as dist
from torch_notes import Cuda, Remote, finished

from ucc_hetero.calls.dispatch import Short
from ucc_hetero.calls.request import Request
from ucc_hetero.errors import CollectiveError
from ucc_hetero.torch import collectives, dispatch

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class Leaving:
    """A group's communicator, and the runner of it: notes what is started and what is left to streams."""

    streams = 1

    def __init__(self) -> None:
        self.run, self.known, self.started, self.left = self, {}, [], []
        self.fails: Exception | None = None

    def remember(self, key: Any, call: Any, *, mean: bool) -> None:
        self.known[key] = Short(key, None, mean)  # type: ignore[arg-type]

    def remake(self, short: Short, both: Any, seconds: float, stream: int | None, keep: Any) -> bool:
        if self.fails:
            raise self.fails
        self.left.append((short.kind, *both, stream))
        return True

    def relaunch(self, short: Short, both: Any, seconds: float, stream: int) -> Request | None:
        self.remake(short, both, seconds, stream, ())
        request = finished()
        request.in_stream = True
        return request

    def start(self, call: Any, seconds: float, stream: int | None = None) -> Request:
        self.started.append(call.name)
        request = finished()
        request.in_stream = True
        return request


class Caller(collectives.Collectives):
    """As much of a group as collectives on a device need."""

    def __init__(self, comm: Leaving) -> None:
        self._place, self._comms, self._sides, self._seconds = (1, 2), {0: comm}, {}, 9.0  # type: ignore[dict-item]
        self._aborted, self._closed, self._ended, self._posted, self._name = "", False, False, 0, "fake"
        self._batch, self.in_flight, self.left = dispatch._Batch(), {}, "left"  # type: ignore[assignment]


def test_calls_that_were_made_before_are_left_to_the_callers_stream(cuda: Cuda) -> None:
    """Those that are waited for at once and differ in addresses alone; all others are posted."""
    comm = Leaving()
    group, now = Caller(comm), SimpleNamespace(asyncOp=False, timeout=timedelta(seconds=-1), reduceOp=SUM, rootRank=0)

    def remote(n: int, dtype: torch.dtype = torch.float32) -> Any:
        return torch.ones(n, dtype=dtype).as_subclass(Remote)

    def made(call: Any, *tensors: Any, left: bool, opts: Any = now) -> None:
        before = len(comm.left), len(comm.started)
        work = call(*tensors, opts)
        assert (work == "left") == left, work
        assert (len(comm.left) - before[0], len(comm.started) - before[1]) == ((1, 0) if left else (0, 1))
        group.in_flight.clear()

    mean = SimpleNamespace(**{**vars(now), "reduceOp": AVG})
    for left in (False, True):
        made(group.allreduce, [remote(4)], left=left)
        made(group.allreduce, [remote(4)], left=left, opts=mean)
        made(group.broadcast, [remote(4)], left=left)
        made(group.all_gather_single, remote(8), remote(4), left=left)
        made(group.reduce_scatter_single, remote(4), remote(8), left=left)
    halved = remote(4)
    made(group.allreduce, [halved], left=True, opts=mean)
    assert halved.tolist() == [0.5] * 4
    into, outof = remote(8), remote(4)
    made(group.all_gather_single, into, outof, left=True)
    assert comm.left[-1][1:] == (outof.data_ptr(), into.data_ptr(), cuda.main.cuda_stream)
    made(group.all_gather_single, into, into[4:], left=False)  # its own place
    made(group.reduce_scatter_single, into[:4], into, left=False)  # the operand is copied
    made(group.allreduce, [remote(4, torch.float64)], left=False)
    made(group.allreduce, [remote(5)], left=False)
    made(group.allreduce, [remote(8)[::2]], left=False)
    with torch.profiler.profile():
        made(group.allreduce, [remote(4)], left=False)
    comm.fails = CollectiveError("rank 0 has died")
    with pytest.raises(dist.DistBackendError, match="rank 0 has died"):
        group.allreduce([remote(4)], now)
    group._aborted = "it had to"
    with pytest.raises(dist.DistBackendError, match="it had to"):
        group.allreduce([remote(4)], now)


def test_asynchronous_calls_that_were_made_before(cuda: Cuda) -> None:
    """They are launched beside the caller's stream; those of one Work enter a stream, and leave it, together."""
    comm = Leaving()
    group, later = Caller(comm), SimpleNamespace(asyncOp=True, timeout=timedelta(seconds=-1), reduceOp=SUM, rootRank=0)
    tensors = [torch.ones(n).as_subclass(Remote) for n in (4, 4, 5)]
    for tensor in tensors:
        group.allreduce([tensor], later).wait()
    cuda.notes.clear()
    work: Any = group.allreduce([tensors[0]], later)
    assert len(comm.started) == 2, "the second tensor is as the first"
    assert comm.left[-1][1:] == (0, tensors[0].data_ptr(), cuda.side.cuda_stream)
    assert cuda.notes == ["side waits for an event of main", "event in side"] and work in group.in_flight
    assert work.wait() and not group.in_flight and work.result()[0] is tensors[0]
    cuda.notes.clear()
    work = group.allreduce_coalesced(tensors, later)
    assert len(comm.left) == 5 and cuda.notes == ["side waits for an event of main", "event in side"]
    cuda.notes.clear()
    assert work.wait() and cuda.notes == ["main waits for an event of side"]
    group._batch.works = []
    work = group.allreduce_coalesced(tensors, later)
    assert len(comm.left) == 8 and group._batch.works == [work], "whoever collects calls has them as one"
    group._batch.works = None
    assert group.together([]).wait(), "of nothing"
    mean = SimpleNamespace(**{**vars(later), "reduceOp": AVG})
    before = len(comm.left)
    group.allreduce([tensors[0]], mean), group.allreduce([tensors[0]], mean)
    cuda.capturing = True
    group.allreduce([tensors[0]], later)
    assert len(comm.left) == before, "posted"
    cuda.capturing = False
    comm.fails = CollectiveError("rank 0 has died")
    with pytest.raises(dist.DistBackendError, match="rank 0 has died"):
        group.allreduce([tensors[0]], later)
