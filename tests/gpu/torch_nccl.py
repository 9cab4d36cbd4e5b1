"""A job of two ranks of one vendor: their groups are torch's own, with features that scripts use with NCCL.

The argument ``bound`` binds a device to the default group, ``nccl`` names NCCL as its backend.
"""

import os
import sys

import torch
import torch.distributed as dist

import ucc_hetero.torch  # noqa: F401

REPLAYS = 100


def expect(what, found, want):
    assert found.tolist() == want, (what, dist.get_rank(), found.tolist(), want)


def calls(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    total, spread = size * (size + 1) / 2, [1.0 + r for r in range(size) for _ in range(2)]
    whole, x, other = (torch.full((n,), -1.0, device="cuda") for n in (2 * size, 2, 2))
    dist.all_reduce(x.fill_(rank + 1.0), group=group)
    expect("all_reduce", x, [total] * 2)
    dist.all_gather_into_tensor(whole, x.fill_(rank + 1.0), group=group)
    expect("all_gather", whole, spread)
    dist.reduce_scatter_tensor(x, whole.fill_(rank + 1.0), group=group)
    expect("reduce_scatter", x, [total] * 2)
    dist.broadcast(x.fill_(rank + 1.0), 0, group=group)
    expect("broadcast", x, [1.0] * 2)
    x.fill_(rank + 1.0)
    pair = (dist.isend, x, (rank + 1) % size), (dist.irecv, other, (rank - 1) % size)
    for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in pair]):
        work.wait()
    expect("isend and irecv", other, [(rank - 1) % size + 1.0] * 2)


def features():
    world, size = dist.group.WORLD, dist.get_world_size()
    print("group", type(world._get_backend(torch.device("cuda"))).__name__, flush=True)
    fast = dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))
    calls(fast)
    made = getattr(fast._get_backend(torch.device("cuda")), "options", None)  # ours and wrapped ones: none
    assert getattr(made, "is_high_priority_stream", True)
    calls(dist.init_device_mesh("cuda", (size,)).get_group())
    found = [None] * size
    dist.all_gather_object(found, dist.get_rank())
    assert found == list(range(size))
    if world.bound_device_id is not None:
        calls(dist.split_group(split_ranks=[list(range(size))]))


def capture():
    """A captured all_reduce, replayed with new data, and with a call outside of the graph between replays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    dist.all_reduce(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
        dist.all_reduce(y)
    for turn in range(REPLAYS):
        x.fill_(rank + turn), y.fill_(-7)
        graph.replay()
        want = float(sum(r + turn for r in range(size)))
        assert bool((y == want).all()), (turn, rank, y[:4].tolist(), want)
        between = torch.full((3,), float(turn), device="cuda")
        dist.all_reduce(between)
        expect(f"the call after replay {turn}", between, [float(turn * size)] * 3)


torch.cuda.set_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
bound = {"device_id": torch.device("cuda", torch.cuda.current_device())} if "bound" in sys.argv else {}
dist.init_process_group("nccl" if "nccl" in sys.argv else "ucch", **bound)
calls(dist.group.WORLD)
features()
if "capture" in sys.argv:
    capture()
dist.destroy_process_group()
