"""Cases of test_torch_strategies.py, which also compares ways by tools/torch_parity.py: ways to train in parallel,
compared with one process that has all the data."""

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_cases import DEVICE, N, R
from torch_model import fresh, loss_of, sgd, share, train


def case_ddp_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    for hook, tolerance in ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 1e-2)):
        model = DDP(fresh(), bucket_cap_mb=0.001)
        model.register_comm_hook(None, hook)
        train(model, sgd(model.parameters()), tolerance=tolerance)
    # Its callbacks communicate; rank 16 of a 16-wide model is almost no compression.
    model = DDP(fresh(), bucket_cap_mb=0.001)
    state = power.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, power.powerSGD_hook)
    train(model, sgd(model.parameters()), tolerance=1e-2)


def case_ddp_join():
    from torch.distributed.algorithms.join import Join

    model = DDP(fresh())
    with model.join(divide_by_initial_world_size=False):  # the mean is over the ranks that still have inputs
        for step in range(1 + R % 2):
            x, y = share(step)
            loss_of(model(x), y).backward()
            alone, ranks = fresh(), range(step, N, 1 + step)
            for rank in ranks:
                x, y = share(step, rank)
                (loss_of(alone(x), y) / len(ranks)).backward()
            for found, want in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found.grad, want.grad)
            model.zero_grad()

    model = DDP(fresh())
    optimizer = sgd(model.parameters())
    with Join([model]):
        for step in range(1 + R % 2):
            x, y = share(step)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


def case_checkpoint_meanwhile():
    """A thread writes a checkpoint during training; on a device in the group that the training uses."""
    import torch.distributed.checkpoint as dcp

    kinds = "ucch" if DEVICE == "cpu" else f"cpu:ucch,{DEVICE}:ucch"
    group = dist.new_group(backend=kinds)
    weights = {f"{k}": torch.full((1000,), float(k), device=DEVICE) for k in range(5)}
    folder = [tempfile.mkdtemp() if R == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    writing = dcp.async_save(weights, checkpoint_id=folder[0], process_group=group)
    beside = dist.group.WORLD if DEVICE == "cpu" else group
    for step in range(200):
        total = torch.full((5000,), float(step + R), device=DEVICE)
        dist.all_reduce(total, group=beside)
        assert (total == N * step + N * (N - 1) / 2).all(), step
    writing.result()
    read = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    dcp.load(read, checkpoint_id=folder[0], process_group=group)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def case_groups_choose_for_themselves():
    """A group of one vendor's ranks uses only that vendor's library, a mixed group islands and bridge."""
    mesh = dist.init_device_mesh(DEVICE, (2, N // 2), mesh_dim_names=("across", "inside"))
    islands = [tuple(island.ranks) for island in dist.group.WORLD.communicator.topology.islands]
    if islands != [(0, 1), (2, 3)]:
        return  # requires that the first half of the ranks is of one vendor, and the second of another
    for name, want in (("inside", 1), ("across", 2)):
        group = mesh[name].get_group()
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=group)
        assert len(group.communicator.topology.islands) == want and tensor.max() == 2
    assert "allreduce" in mesh["inside"].get_group().communicator.plan_summary()
    assert mesh["inside"].get_group().communicator.plan_summary().count("flat") == 1
