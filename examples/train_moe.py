"""Train a mixture of experts whose experts are distributed over ranks of any vendors.

    UCCH_EMULATE=nvidia:2,amd:2 mpirun -np 4 python examples/train_moe.py --check

Each rank has a part of the experts and of each batch, and all ranks have the router, which chooses experts for each
token. The model learns to imitate another mixture. --fixed uses calls of fixed size, in which the host does not learn
how many tokens go where. --check also trains in a single process, with all experts and whole batches, and compares; the
exit status is 0 if the losses agree.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ucc_hetero.torch  # noqa: F401  registers the backend
from ucc_hetero.torch.experts import Experts


class Mixture(nn.Module):
    """``top_k`` of ``experts`` for each token, weighted by a router; this process has the experts in ``own``."""

    def __init__(self, options: argparse.Namespace, spread: Experts | None, seed: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        size, rank = (spread.size, spread.rank) if spread else (1, 0)
        width, count = options.width, options.experts // size
        own = slice(rank * count, (rank + 1) * count)
        self.options, self.spread = options, spread
        self.router = nn.Parameter(torch.randn(width, options.experts, generator=make) / width**0.5)
        self.up = nn.Parameter((torch.randn(options.experts, width, 2 * width, generator=make) / width**0.5)[own])
        self.down = nn.Parameter((torch.randn(options.experts, 2 * width, width, generator=make) / width**0.5)[own])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = (x @ self.router).softmax(1).topk(self.options.top_k)
        if self.spread is None:
            return self.apply_experts(x, chosen, weights)
        if self.options.fixed:
            return self.at_fixed_size(x, chosen, weights)
        per_rank, _, per_expert, inside, _ = self.spread.get_dispatch_layout(chosen, self.options.experts)
        rows, index, factors, _, handle, _ = self.spread.dispatch(
            x, topk_idx=chosen, topk_weights=weights,
            num_tokens_per_rank=per_rank, is_token_in_rank=inside, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        return self.spread.combine(self.apply_experts(rows, index, factors), handle)[0]

    def apply_experts(self, rows: torch.Tensor, index: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return for each row the weighted sum of the outputs of this process's experts."""
        out = torch.zeros_like(rows)
        for e in range(len(self.up)):
            at, k = (index == e).nonzero(as_tuple=True)
            made = torch.relu(rows[at] @ self.up[e]) @ self.down[e]
            out = out.index_add(0, at, made * factors[at, k].unsqueeze(1))
        return out

    def at_fixed_size(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all experts by one batched matrix product."""
        assert self.spread is not None
        most = -(-self.options.batch // self.spread.size)
        rows, _, handle, _, _ = self.spread.low_latency_dispatch(x, chosen, most, self.options.experts)
        made = torch.bmm(torch.relu(torch.bmm(rows, self.up)), self.down)
        return self.spread.low_latency_combine(made, chosen, weights, handle)[0]


def train(model: Mixture, options: argparse.Namespace, device: Any, rank: int, size: int) -> list[float]:
    """Train on this rank's part of each batch; return this part's share of each step's loss."""
    teacher = Mixture(options, None, seed=1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
    draw, losses = torch.Generator().manual_seed(2), []
    for _ in range(options.steps):
        x = torch.randn(options.batch, options.width, generator=draw).tensor_split(size)[rank].to(device)
        with torch.no_grad():
            wanted = teacher(x)
        # Sums over tokens, so that an expert's gradients cover the whole batch, whichever ranks the tokens come from.
        loss = (model(x) - wanted).square().sum() / (options.batch * options.width)
        optimizer.zero_grad()
        loss.backward()
        if model.spread is not None:  # experts have no replicas: only the router's gradient is summed
            dist.all_reduce(model.router.grad, group=model.spread.group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--experts", type=int, default=8, help="experts of all ranks (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, help="experts for each token (default: 2)")
    parser.add_argument("--width", type=int, default=32, help="elements of a token (default: 32)")
    parser.add_argument("--batch", type=int, default=256, help="tokens per step, over all ranks (default: 256)")
    parser.add_argument("--rate", type=float, default=1.0, help="learning rate (default: 1)")
    parser.add_argument("--fixed", action="store_true", help="calls of fixed size, without counts on the host")
    parser.add_argument("--check", action="store_true", help="also train in a single process and compare")
    options = parser.parse_args()

    dist.init_process_group("ucch")
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.experts % size:
        parser.error(f"--experts {options.experts} is not a multiple of the {size} ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    losses = torch.tensor(train(Mixture(options, Experts(), seed=0).to(device), options, device, rank, size))
    dist.all_reduce(losses)
    good = True
    if rank == 0:
        for step in range(0, options.steps, max(1, options.steps // 6)):
            print(f"step {step + 1:3d}  loss {losses[step]:.4f}", flush=True)
        if options.check:
            alone = train(Mixture(options, None, seed=0).to(device), options, device, rank=0, size=1)
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses.tolist(), alone, strict=True))
            print(f"largest relative difference of the loss from a single process: {worst:.1e} (allowed: 1e-04)")
            good = worst < 1e-4 and losses[-1].item() < losses[0].item()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
