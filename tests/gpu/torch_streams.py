"""Cases of test_torch_gpu.py: streams and memory of calls on CUDA tensors."""

import os

import pytest
import torch
import torch.distributed as dist
from torch_cases import N, R, same

ALL = N * (N - 1) // 2
#: True if the ranks are of one vendor, so that the host never waits for a stream.
ALONE = os.environ.get("CASES_ALONE") == "1"
LONG = 1 << 22


def later():
    """Keep the current stream busy: code that does not wait for it reads too early."""
    torch.cuda._sleep(200_000_000)


def contexts():
    """The devices on which this process has a context."""
    return [device for device in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(device)]


def case_threads_stay_on_their_device():
    """A context takes half a gigabyte of its device, and new threads start on device 0."""
    before = contexts()
    future = dist.all_reduce(torch.full((LONG,), float(R)), async_op=True).get_future()
    assert bool((future.then(lambda f: f.value()[0] + 1).wait() == ALL + 1).all())
    got = torch.empty(LONG)
    for work in [dist.isend(torch.full((LONG,), float(R)), (R + 1) % N), dist.irecv(got, (R - 1) % N)]:
        work.wait()
    assert bool((got == (R - 1) % N).all())
    assert contexts() == before


def case_asynchronous_calls_follow_the_stream():
    side = torch.cuda.Stream()
    for where in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(where):
            results = []
            later()
            for k in range(10):
                x = torch.full((LONG,), float(R + k))
                work = dist.all_reduce(x, async_op=True)
                torch.mm(torch.ones(512, 512), torch.ones(512, 512))
                work.wait()
                results.append(x * 2)
        where.synchronize()
        for k, got in enumerate(results):
            assert bool((got == 2.0 * (ALL + N * k)).all()), (k, got[:4])


def case_waited_for_in_another_stream():
    later()
    x = torch.full((LONG,), float(R))
    work = dist.all_reduce(x, async_op=True)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        work.wait()
        y = x + 1
    other.synchronize()
    assert bool((y == ALL + 1).all())
    future = dist.all_reduce(torch.full((LONG,), float(R)), async_op=True).get_future()
    assert bool((future.then(lambda f: f.value()[0] * 3).wait() == 3 * ALL).all())


def case_averages_and_gaps_in_memory():
    for _ in range(5):
        later()
        whole = torch.full((1000, 64), -1.0)
        whole[:, ::2] = float(R)
        dist.all_reduce(whole[:, ::2], op=dist.ReduceOp.AVG)
        mine = torch.full((N * 1000,), float(R), dtype=torch.bfloat16)
        part = torch.empty(1000, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, mine, op=dist.ReduceOp.AVG)
        sums = whole[:, ::2].sum(), whole[:, 1::2].sum(), part.float().sum()
        assert [s.item() for s in sums] == [32000 * ALL / N, -32000.0, 1000 * ALL / N]


def case_memory_may_be_dropped():
    """Tensors of calls that are never waited for may be dropped; memory that is reused is not written to."""
    for _ in range(20):
        later()
        for _ in range(3):
            dist.all_reduce(torch.full((LONG,), float(R)), async_op=True)
            dist.all_reduce(torch.full((LONG,), float(R))[::2], async_op=True)
        others = [torch.full((LONG,), -5.0) for _ in range(6)]
        dist.barrier()
        torch.cuda.synchronize()
        assert all(bool((each == -5.0).all()) for each in others)


def case_messages_follow_the_stream():
    right, left = (R + 1) % N, (R - 1) % N
    for size in (3, LONG):
        later()
        sent = [torch.full((size,), float(R * 10 + k)) for k in range(4)]
        got = [torch.empty(size) for _ in range(4)]
        works = [dist.isend(each, right) for each in sent] + [dist.irecv(each, left) for each in got]
        for work in works:
            work.wait()
        for k, each in enumerate(got):
            assert bool((each == left * 10 + k).all()), (size, k, each[:3])


def case_the_host_goes_on():
    if not ALONE:
        return
    x = torch.full((LONG,), float(R))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # seconds
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.all_reduce(x)
    assert not torch.cuda.current_stream().query() and not work.is_completed()
    torch.cuda.synchronize()
    assert work.is_completed()


def case_mistakes():
    if torch.cuda.device_count() > N:
        with pytest.raises(dist.DistBackendError, match="device"):
            dist.all_reduce(torch.ones(3, device=f"cuda:{N}"))


def case_a_graph_replays_a_call():
    x = torch.full((1000,), float(R))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    for turn in range(3):
        x.fill_(R + turn)
        graph.replay()
        same(x, torch.full((1000,), float(sum(r + turn for r in range(N)))))
        one = torch.full((5,), float(R * turn))
        dist.all_reduce(one)  # between the replays, not in the graph
        same(one, torch.full((5,), float(sum(r * turn for r in range(N)))))


def case_a_compiled_step_is_replayed():
    """torch.compile makes a graph of it, including the calls."""
    import torch.distributed._functional_collectives as fc
    from torch._dynamo.utils import counters

    def step(x, w):
        y = fc.all_reduce(x @ w, "sum", dist.group.WORLD)
        return torch.relu(fc.all_gather_tensor(y - R, 0, dist.group.WORLD)) + 1

    replays, replay = [], torch.cuda.CUDAGraph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))[1])
        compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        w = torch.eye(64)
        for turn in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(torch.full((64, 64), float(R + turn)), w)
            total = ALL + N * turn
            same(got, torch.cat([torch.full((64, 64), float(max(total - r, 0) + 1)) for r in range(N)]))
    assert replays and not counters["inductor"]["cudagraph_skips"], counters["inductor"]


def case_a_graph_replays_messages():
    right, left = (R + 1) % N, (R - 1) % N
    pairs = [(torch.full((n,), float(R)), torch.zeros(n)) for n in (1, 5000, 400_000, 3_000_000)]

    def exchange():
        ops = [dist.P2POp(dist.irecv, got, left) for _, got in pairs]
        ops += [dist.P2POp(dist.isend, sent, right) for sent, _ in pairs]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    total = torch.ones(3)
    exchange()
    dist.all_reduce(total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(total)  # in a one-vendor group it allocates what messages need
        exchange()
    for turn in range(4):
        for k, (sent, got) in enumerate(pairs):
            sent.fill_(R + 10 * turn + k)
            got.fill_(-1)
        graph.replay()
        for k, (_, got) in enumerate(pairs):
            same(got, torch.full_like(got, left + 10 * turn + k))
        exchange()  # between the replays, not in the graph
