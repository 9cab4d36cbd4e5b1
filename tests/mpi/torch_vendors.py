"""Cases of test_torch_vendors.py: four ranks of two vendors, whose pairs use torch's own groups."""

import os

import torch
import torch.distributed as dist
from torch_cases import N, R, data, same
from torch_catalogue import every_call
from torch_model import fresh, sgd, train

import ucc_hetero.torch

assert N == 4
#: Ranks whose groups are torch's own; other groups are ucch's.
OWN = os.environ["OWN"]


def owned(ranks):
    return OWN == "all" or (OWN == "pairs" and len({rank // 2 for rank in ranks}) == 1)


def check(group, ranks):
    ours = isinstance(group, ucc_hetero.torch.ProcessGroupUCCH)
    assert ours != owned(ranks) and (ours or type(group) is dist.ProcessGroup), (ranks, type(group))
    # What Gloo has, too; of messages only batches move there.
    every_call(group, ["allreduce_", "broadcast_", "_allgather_base_", "allgather_", "gather_", "scatter_"])
    objects = [None] * len(ranks)
    dist.all_gather_object(objects, ("from", R), group=group)
    assert objects == [("from", rank) for rank in ranks]
    at = ranks.index(R)
    if len(ranks) > 1:
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
        got = torch.full((5,), -1.0)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, data(R, (5,)), after, group), dist.P2POp(dist.irecv, got, before, group)]
        ):
            work.wait()
        same(got, data(before, (5,)), f"batch_isend_irecv over {ranks}")
    dist.barrier(group=group)


def case_world():
    check(dist.group.WORLD, [0, 1, 2, 3])
    assert dist.get_backend() == "ucch"


def case_groups():
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0], [3], [1, 2, 3]):
        group = dist.new_group(ranks)
        if R in ranks:
            check(group, ranks)
            assert dist.get_backend(group) == "ucch"
            dist.destroy_process_group(group)


def case_backends_per_device():
    pair = [0, 1] if R < 2 else [2, 3]
    for name in ("cpu:ucch,cuda:ucch", "cpu:ucch"):
        for ranks in ([0, 1], [2, 3], [0, 1, 2, 3]):
            group = dist.new_group(ranks, backend=name)
            if ranks in (pair, [0, 1, 2, 3]):
                check(group, ranks)
                assert dist.get_backend(group) == name
    gloo = dist.new_group([0, 1, 2, 3], backend="gloo")  # the requested backend
    assert type(gloo) is dist.ProcessGroup and dist.get_backend(gloo) == "gloo"


def case_hybrid_sharding():
    """Sharded inside a vendor, replicated across: a mesh's groups are of both kinds."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    check(mesh.get_group("shards"), [R // 2 * 2, R // 2 * 2 + 1])
    check(mesh.get_group("replicas"), [R % 2, R % 2 + 2])
    model = fresh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, sgd(model.parameters()))


def case_helpers():
    from ucc_hetero.torch.experts import Experts
    from ucc_hetero.torch.replicas import Replicas

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[R // 2]
    group.monitored_barrier()
    model = fresh()
    with torch.no_grad():
        next(model.parameters()).add_(R % 2)  # drift
    replicas = Replicas(model, every=1, policy="broadcast", group=group)
    replicas.step()
    assert len(replicas.history) == 1
    same(next(model.parameters()).detach(), next(fresh().parameters()).detach(), "first replica's parameters")

    experts = Experts(group)
    idx = torch.tensor([[0], [1], [1]])
    x = data(R, (3, 8))
    _, _, per_expert, inside, _ = experts.get_dispatch_layout(idx, num_experts=2)
    rows, _, _, counts, handle, _ = experts.dispatch(
        x, is_token_in_rank=inside, num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=torch.ones(3, 1)
    )
    assert counts == [2 if R % 2 == 0 else 4] and len(rows) == counts[0]
    back, _, _ = experts.combine(rows, handle)
    same(back, x, "tokens that have come back")
