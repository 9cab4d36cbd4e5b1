"""Shared by the training jobs: a model, its data, and the results of a single process."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch_cases import DEVICE, N, R, close

STEPS, SHARE, WIDTH = 3, 4, 16  # the third step depends on the optimizer's state


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fresh():
    torch.manual_seed(0)
    return Model()


def batch(step):
    generator = torch.Generator("cpu").manual_seed(step)
    x = torch.randn(SHARE * N, WIDTH, generator=generator, device="cpu")
    y = torch.randint(0, 3, (SHARE * N,), generator=generator, device="cpu")
    return x.to(DEVICE), y.to(DEVICE)


def share(step, index=R, parts=N):
    x, y = batch(step)
    return x.chunk(parts)[index], y.chunk(parts)[index]


def sgd(parameters):
    # foreach, the default on GPUs, does not accept plain tensors and DTensors together.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


loss_of = nn.functional.cross_entropy


@functools.cache
def reference():
    model = fresh()
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses)


def train(model, optimizer, *, index=R, parts=N, tolerance=1e-5):
    """Train on this rank's share and compare the mean loss of all ranks with the reference at every step."""
    for step, want in enumerate(reference()):
        x, y = share(step, index, parts)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        close(mean.item(), want, tolerance, f"loss of step {step}")
