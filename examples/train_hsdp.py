"""Train on a mixed cluster: parameters sharded inside each vendor, replicated across vendors.

    ucch-run -c cluster.yaml python examples/train_hsdp.py
    UCCH_EMULATE=nvidia:2,amd:2 mpirun -np 4 python examples/train_hsdp.py --check

Hybrid sharding (HSDP) gathers parameters and reduces gradients inside groups of one vendor, with the vendor's own
library, and sums only each rank's shard of the gradients across vendors. --check also trains in a single process on the
same batches and compares, and verifies that the replicas of all shards are equal. The exit status is 0 only if
everything agrees.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ucc_hetero.torch

#: Allowed relative difference from the losses of a single process, which adds gradients in another order.
TOLERANCE = 1e-4


def model_of(width: int, depth: int) -> nn.Sequential:
    """A network with the same weights on all ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(*blocks)


def batch_of(step: int, samples: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, made on the host, because the devices' generators differ between vendors."""
    draw = torch.Generator().manual_seed(1 + step)
    x = torch.randn(samples, width, generator=draw)
    return x, torch.sin(3 * x)


def train(model: nn.Module, options: argparse.Namespace, rank: int, size: int, device: torch.device) -> list[float]:
    """Train; return the losses of all steps, each the mean over the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        x, y = (part.chunk(size)[rank].to(device) for part in batch_of(step, options.batch, options.width))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
    return losses


def replicas_agree(model: nn.Module, mesh: Any) -> bool:
    """Compare each shard with its replicas on other vendors."""
    group = mesh.get_group("replicate")
    worst = 0.0
    for parameter in model.parameters():
        mine: Any = parameter.to_local().detach()  # type: ignore[attr-defined]
        first = mine.clone()
        dist.broadcast(first, group=group, group_src=0)
        worst = max(worst, float((mine - first).abs().max()) if mine.numel() else 0.0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, worst)
    return max(found) < TOLERANCE  # each vendor runs its own optimizer kernel


def main() -> int:
    """Train; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="(default: 64)")
    parser.add_argument("--depth", type=int, default=4, help="(default: 4)")
    parser.add_argument("--batch", type=int, default=64, help="samples a step, over all ranks (default: 64)")
    parser.add_argument("--steps", type=int, default=20, help="(default: 20)")
    parser.add_argument("--check", action="store_true", help="compare with training alone")
    options = parser.parse_args()

    dist.init_process_group("ucch")
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.batch % size:
        parser.error(f"--batch {options.batch} is not a multiple of the {size} ranks")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    mesh = ucc_hetero.torch.hybrid_mesh(device.type)
    if rank == 0:
        print(f"{mesh.size(0)} replicas of {mesh.size(1)} shards: {mesh.mesh.tolist()}")

    model = model_of(options.width, options.depth).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, options, rank, size, device)
    fine = replicas_agree(model, mesh)
    if options.check:
        alone = train(model_of(options.width, options.depth).to(device), options, 0, 1, device)
        apart = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        fine = fine and apart < TOLERANCE
        if rank == 0:
            print(f"losses differ from a single process's by at most {apart:.1e}")
    if rank == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; replicas agree: {'yes' if fine else 'no'}")
    dist.destroy_process_group()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
