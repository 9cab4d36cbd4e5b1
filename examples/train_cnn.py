"""Train a small convolutional network on handwritten digits with PyTorch's DDP: the first five minutes.

    ucch-run -np 4 python examples/train_cnn.py
    UCCH_EMULATE=nvidia:2,amd:2 ucch-run -np 4 python examples/train_cnn.py --check

Except for the name of the backend this is a usual script for torchrun. The digits are scikit-learn's, which the
extra ``demo`` installs. --check also trains in a single process on the same batches and compares. The exit status is 0
only if all ranks end with the same weights and, with --check, the same loss.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ucc_hetero.torch  # noqa: F401  registers the backend


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def data(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Training images and labels, test images and labels: the same split on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    return tuple(t.to(device) for t in (images[:1440], labels[:1440], images[1440:], labels[1440:]))


def train(model: nn.Module, options: argparse.Namespace, device: torch.device, rank: int, size: int) -> list[float]:
    """Train; returns the mean loss of each epoch over this rank's share of the images."""
    images, labels, test_images, test_labels = data(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
    shuffle = torch.Generator().manual_seed(1)  # the same order on every rank
    losses = []
    for epoch in range(1, options.epochs + 1):
        start, total, steps = time.perf_counter(), 0.0, 0
        for batch in torch.randperm(len(images), generator=shuffle).split(options.batch):
            mine = batch.chunk(size)[rank].to(device)
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        losses.append(total / steps)
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        if rank == 0:
            took = (time.perf_counter() - start) * 1e3
            print(f"epoch {epoch:2d}  loss {losses[-1]:.4f}  test accuracy {accuracy:6.2%}  {took:6.0f} ms", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=96, help="images per step, over all ranks (default: 96)")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--check", action="store_true", help="also train in a single process and compare")
    options = parser.parse_args()

    dist.init_process_group("ucch")
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.batch % size:
        parser.error(f"--batch {options.batch} is not a multiple of the {size} ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    model = DistributedDataParallel(network().to(device))
    losses = torch.tensor(train(model, options, device, rank, size), device=device)
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    same = torch.tensor([torch.equal(weights, first)], dtype=torch.int32, device=device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    good = bool(same.item())
    if rank == 0:
        print(f"weights identical on all {size} ranks: {'yes' if good else 'NO'}")
        if options.check:
            print("alone:")
            alone = train(network().to(device), options, device, rank=0, size=1)
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses.tolist(), alone, strict=True))
            print(f"largest relative difference of the loss from a single process: {worst:.1e} (allowed: 1e-04)")
            good = good and worst < 1e-4
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
