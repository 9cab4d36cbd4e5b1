"""Cases of test_torch_api.py: the ranges of calls in the traces of torch's profilers."""

import random

import pytest
import torch
import torch.distributed as dist
from torch_cases import N, R
from torch_catalogue import NAMES, Made, drawn_blocks, made

HOST = torch.device("cpu")


def filled(*shape):
    """Return a host tensor, whatever the default device is."""
    return torch.full(shape, float(R), device=HOST)


#: Ranges of calls; the rest are named as their operators.
TITLES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast", "reduce_": "reduce",
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "gather_": "gather", "scatter_": "scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "send": "send",
    "recv_": "recv", "recv_any_source_": "recvAnySource", "barrier": "barrier",
}  # fmt: skip


def calls():
    """Operator, and a call that runs it; its tensors are on the host, whatever the default device is."""
    blocks = drawn_blocks(1, (3, 2), device=HOST)
    for name in (*NAMES, "send recv_any_source_"):
        for operator in name.split():
            if operator in TITLES:
                yield operator, made(name, blocks)
    yield "barrier", Made(dist.barrier, [], [], [])


PROFILERS = [
    lambda: torch.autograd.profiler.profile(record_shapes=True),
    lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True),
]


def events(profiler, name):
    every = profiler.events() if isinstance(profiler, torch.profiler.profile) else profiler.function_events
    return [event for event in every if event.name == name]


def case_every_call_has_its_ranges():
    for operation, one in calls():
        with random.choice(PROFILERS)() as active:
            work = one.call(**random.choice(({}, {"async_op": True})))
            if work is not None:
                work.wait()
        one.check(operation)
        what, shapes = f"{operation} of {type(active)}", [list(each.shape) for each in one.inputs]
        (host,), (complete,) = events(active, f"c10d::{operation}"), events(active, f"ucch:{TITLES[operation]}")
        assert not host.is_async and complete.is_async, what
        assert host.input_shapes == complete.input_shapes == shapes, (what, complete.input_shapes, shapes)


def case_a_call_outlasts_its_profiler():
    """The range ends with the start of the call: an end after the profiler's would write into freed memory. Scatter has
    no input on most ranks, so its range cannot follow the kind of its tensors."""
    for profiler in PROFILERS:
        t, source = filled(4), [filled(4) for _ in range(N)] if R == 0 else None
        if R % 2:
            dist.scatter(filled(4), source, 0)
            dist.barrier()
            dist.send(t, R - 1)
            continue
        with profiler() as active:
            works = [dist.irecv(t, R + 1), dist.scatter(filled(4), source, 0, async_op=True)]
            with torch.profiler.record_function("meanwhile"):
                filled(1)  # the peer has not sent yet
        (meanwhile,) = events(active, "meanwhile")
        for name in ("ucch:recv", "ucch:scatter"):
            (event,) = events(active, name)
            assert event.is_async and event.time_range.end <= meanwhile.time_range.start, name
        dist.barrier()
        for work in works:
            work.wait()
        assert t.tolist() == [R + 1.0] * 4


def case_calls_of_a_call_have_no_ranges():
    """Several tensors in one call have one range each; a failed call ends its own range."""
    outs = [filled(2) for _ in range(3)]
    with PROFILERS[1]() as active:
        dist.all_reduce_coalesced(outs)
        with pytest.raises(ValueError, match="meta"):
            dist.all_reduce(torch.empty(2, device="meta"))
    assert [each.input_shapes for each in events(active, "ucch:all_reduce")] == [[[2]] * 3, [[2]]]


def case_futures_under_a_profiler():
    with PROFILERS[1]() as active:
        work = dist.all_reduce(filled(5), async_op=True)
        doubled = work.get_future().then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [float(N * (N - 1))] * 5
        assert work.is_completed() and work.is_success() and work.exception() is None
    assert len(events(active, "ucch:all_reduce")) == 1
