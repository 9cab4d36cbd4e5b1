"""A job of a torch group on fake GPUs: collectives in any stream, blocking and asynchronous, new and repeated.

A call's input is computed in the current stream just before the call, its output is poisoned until then, and both are
overwritten after the wait: a stream that waits too little gives wrong numbers.
"""

import ctypes
import gc
import os
import random
import time
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch_device as gpu
from mpi4py import MPI

from ucc_hetero.native.libraries import load

load()
import torch  # noqa: E402  its libraries come after ours
from arrays import Graph  # noqa: E402

import ucc_hetero.torch  # noqa: E402, F401  registers the backend

dist = torch.distributed
dist.init_process_group("ucch")
R, N = dist.get_rank(), dist.get_world_size()
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
dice = random.Random(int(os.environ["DICE"]))  # the same on every rank
other = gpu.Stream()
total, most = N * (N - 1) / 2, N - 1


def memory(n):
    return gpu.empty(n), gpu.empty(N * n)


def as_one(tensor, async_op):
    """Sum the parts of a tensor in calls that torch coalesces."""
    with dist._coalescing_manager(async_ops=async_op, **dice.choice(({}, {"device": gpu.DEVICE}))) as manager:
        for part in torch.Tensor.tensor_split(tensor, 3):
            dist.all_reduce(part.as_subclass(gpu.Tensor))
    return manager.works[0] if async_op else None


def calls(n, small, large):
    """Name -> (the call, its inputs, its outputs, the expected numbers in each rank's part)."""
    turned = dice.choice((list, lambda each: [*each][::-1]))  # a list's tensors are adjacent in memory, or not

    def parts(tensor):
        return turned(tensor.split([n] * N))

    return {
        "sum": (lambda **how: dist.all_reduce(small, SUM, **how), small, small, lambda v: [N * v + total]),
        "mean": (lambda **how: dist.all_reduce(small, AVG, **how), small, small, lambda v: [v + total / N]),
        "max": (lambda **how: dist.all_reduce(large, MAX, **how), large, large, lambda v: [v + most]),
        "broadcast": (lambda **how: dist.broadcast(small, 1, **how), small, small, lambda v: [v + 1]),
        "reduce": (lambda **how: dist.reduce(small, 0, **how), small, small, lambda v: [] if R else [N * v + total]),
        "gather": (
            lambda **how: dist.all_gather_into_tensor(large, small, **how), small, large,
            lambda v: [v + r for r in range(N)],
        ),
        "scatter": (
            lambda **how: dist.reduce_scatter_tensor(small, large, **how), large, small, lambda v: [N * v + total],
        ),
        "exchange": (
            lambda **how: dist.all_to_all_single(large, copies[n], **how), copies[n], large,
            lambda v: [v + r for r in range(N)],
        ),
        "sums": (partial(as_one, small), small, small, lambda v: [N * v + total]),
        "gather lists": (
            lambda **how: dist.all_gather(parts(large), small, **how), small, large,
            lambda v: turned(v + r for r in range(N)),
        ),
        "scatter lists": (
            lambda **how: dist.reduce_scatter(small, parts(large), AVG, **how), large, small,
            lambda v: [v + total / N],
        ),
        "exchange lists": (
            lambda **how: dist.all_to_all(parts(large), parts(copies[n]), **how), copies[n], large,
            lambda v: turned(v + r for r in range(N)),
        ),
    }  # fmt: skip


sizes = (3, 5000, 70_000)
copies = {n: gpu.empty(N * n) for n in sizes}
known = {n: memory(n) for n in sizes}


def check(into, numbers, what):
    seen = into.seen()
    for part, number in zip(seen.chunk(max(1, len(numbers))), numbers, strict=False):
        assert torch.allclose(part, torch.tensor(number)), (R, what, part[:3], number)


def one(step):
    """Make a call, and the kernels before and after it."""
    n, value, asynchronous = dice.choice(sizes), float(step), dice.random() < 0.6
    stream, waits = (dice.choice((gpu.state.current, other)) for _ in range(2))
    small, large = known[n] if dice.random() < 0.8 else memory(n)
    name, (call, outof, into, numbers) = dice.choice(list(calls(n, small, large).items()))
    with torch.cuda.stream(stream):
        into.fill(-7.0)
        outof.fill(value + R)
        work = call(async_op=asynchronous)
        while asynchronous and step % 2 and not work.is_completed():  # here the host sees its end first
            time.sleep(1e-5)
    with torch.cuda.stream(waits if asynchronous else stream):
        if asynchronous:
            work.wait()
        check(into, numbers(value), (step, name, n, asynchronous))
        outof.fill(-5.0)
        gpu.state.current.synchronize()
    stream.synchronize()


for step in range(120):
    one(step)

# Many calls in progress, of which only the last is waited for; several calls that are one Work.
small = [gpu.empty(1000) for _ in range(30)]
for k, tensor in enumerate(small):
    tensor.fill(k + R)
works = [dist.all_reduce(tensor, async_op=True) for tensor in small]
[work.wait() for work in works]
for k, tensor in enumerate(small):
    check(tensor, [N * k + total], "many")
for turn in range(3):
    for k, tensor in enumerate(small):
        tensor.fill(k + turn + R)
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in small:
            dist.all_reduce(tensor)
    manager.wait()
    for k, tensor in enumerate(small):
        check(tensor, [N * (k + turn) + total], "coalesced")


def captured(stream, n):
    """Capture calls in a graph, which have been made before and are made again between its replays."""
    made = calls(n, *memory(n))
    for name in ("max", "gather lists", "scatter lists", "exchange lists"):
        del made[name]  # the fakes' compilers have no kernel for a maximum, and memory is allocated for lists
    for name, (call, outof, into, numbers) in made.items():
        [call(async_op=False) for _ in range(2)]
        stream.synchronize()
        with Graph(stream._native) as graph:
            call(async_op=True).wait() if dice.random() < 0.5 else call(async_op=False)
        for turn in range(3):
            into.fill(-7.0)
            outof.fill(turn + R)
            call(async_op=False) if turn % 2 else graph.replay(stream._native)
            check(into, numbers(float(turn)), (name, "graph", turn))
        graph.close()


if "UCCH_CHANNELS" not in os.environ:  # streams do all of it
    with torch.cuda.stream(other):
        captured(other, 5000)


def released(*, together):
    """The group no longer refers to tensors of a call that was waited for, although the call has not ended."""
    word = ctypes.c_uint32.from_address(gpu.RUNTIME.flag())
    word.value = 0
    gpu.RUNTIME.wait_value(gpu.state.current.cuda_stream, ctypes.addressof(word), 1)
    tensor = gpu.empty(9)
    gone = weakref.ref(tensor)
    if together:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(tensor)
        manager.wait()
        manager.works.clear()
    else:
        dist.all_reduce(tensor, async_op=True).wait()
    block = tensor.block
    del tensor
    assert gone() is None, gc.get_referrers(gone())
    word.value = 1
    gpu.state.current.synchronize()
    block.close()


if "QUEUED" in os.environ:  # elsewhere hosts wait for messages, and no stream continues without their data
    for turn in range(4):
        released(together=turn % 2 == 1)
    brief = dist.new_group(timeout=timedelta(seconds=2))
    earlier = dist.all_reduce(small[0], group=brief, async_op=True)
    if R == 0:  # it is never sent: the next wait raises
        into = gpu.empty(100)
        dist.irecv(into, 1, group=brief).wait()
        gpu.state.current.synchronize()
        with pytest.raises(dist.DistBackendError, match="from rank 1"):  # garbage is not accepted as data
            earlier.wait()
    MPI.COMM_WORLD.Barrier()

    if R == 0:  # an abort releases a stream that waits for a message that is never sent
        dist.irecv(gpu.empty(100), 1).wait()
        dist.group.WORLD.abort()
        gpu.state.current.synchronize()
MPI.COMM_WORLD.Barrier()
print("right", flush=True)
os._exit(0)
