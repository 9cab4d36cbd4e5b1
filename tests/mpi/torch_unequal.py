"""Cases of test_torch_strategies.py: ranks of unequal speed, and replicas that drift apart."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch_cases import N, R
from torch_model import SHARE, batch, fresh, loss_of

from ucc_hetero.torch.balance import BalancedSampler, Share, profile, profile_layers, split_layers
from ucc_hetero.torch.replicas import DriftError, Replicas, checksum

#: The last rank takes three times as long for a sample.
SLOW = 3.0 if R == N - 1 else 1.0


class Clock:
    """Seconds that pass only when work is done: profiles of a busy machine would depend on its load."""

    now = 0.0

    def __call__(self):
        return self.now


def measured():
    """Return the shares from a profile of an artificially slow rank."""
    model, clock = fresh(), Clock()

    def step(n):
        x, y = batch(0)
        loss_of(model(x[:n]), y[:n]).backward()
        clock.now += 0.5 + SLOW * n

    return profile(step, (1, 2, 6), clock=clock).split(SHARE * N)


def case_balanced_sampler():
    """The global batches of an epoch are equal for any split."""
    share, length = measured(), 3 * SHARE * N + 1
    data = TensorDataset(torch.arange(length))
    equal = Share((SHARE,) * N, R)
    batches = {}
    for name, each in (("measured", share), ("equal", equal)):
        sampler = BalancedSampler(length, each, seed=5)
        sampler.set_epoch(2)
        mine = [rows.tolist() for (rows,) in DataLoader(data, batch_sampler=sampler)]
        assert len(mine) == len(sampler) == 3 and all(len(rows) == each.count for rows in mine)
        everyone = [None] * N
        dist.all_gather_object(everyone, mine)
        batches[name] = [[i for rows in everyone for i in rows[step]] for step in range(3)]
    assert batches["measured"] == batches["equal"]
    assert len({i for rows in batches["equal"] for i in rows}) == 3 * SHARE * N


def case_balanced_pipeline():
    model, clock = fresh(), Clock()

    def timed(block, rank=R):
        def run(x):
            clock.now += SLOW
            return block(x)

        return run

    seconds = profile_layers([timed(block) for block in model.blocks], batch(0)[0], clock=clock)
    assert [row[0] for row in seconds] == [1.0] * (N - 1) + [3.0]
    cuts = split_layers(seconds)
    assert cuts[-1][1] - cuts[-1][0] == 1 and cuts[-1][1] == 4 and (N > 2 or cuts == [(0, 3), (3, 4)])


def nudged(model):
    """Effect of another vendor's optimizer kernel: one parameter of the last rank is off by one bit."""
    if R == N - 1:
        with torch.no_grad():
            weight = next(model.parameters()).view(-1)
            weight[3] = math.nextafter(weight[3].item(), 10.0) + 1e-7


def case_drift_is_seen_and_undone():
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters())
    replicas = Replicas(model, optimizer, every=2, policy="broadcast")
    for step in range(4):
        x, y = batch(step)
        loss_of(model(x), y).backward()
        optimizer.step()
        if step == 1:
            nudged(model)
            nudged_state = next(iter(optimizer.state.values()))["exp_avg"]
            nudged_state.add_(1e-6 * (R == N - 1))
        found = replicas.step()
        assert (found is None) == (step % 2 == 0)
    assert [drift.step for drift in replicas.history] == [2, 4]
    apart, together = replicas.history
    assert not apart.equal and 0 < apart.distance < 1e-5 and len(set(apart.checksums)) == 2
    assert together.equal and together.distance == 0
    sums = [None] * N
    dist.all_gather_object(sums, checksum(state["exp_avg"] for state in optimizer.state.values()))
    assert len(set(sums)) == 1


def case_drift_of_numbers_without_dimensions_and_of_nan():
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.ones(()))
    model.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam(model.parameters())
    (model.scale * (1 + R)).backward()  # the ranks' means of the gradient differ
    optimizer.step()
    model.phase[1] = 4j * (R == N - 1)
    watch = Replicas(model, optimizer, every=1)
    assert watch.step().distance == pytest.approx(4, rel=1e-2)
    assert watch.step().equal
    moments = [None] * N
    dist.all_gather_object(moments, optimizer.state[model.scale]["exp_avg"].item())
    assert len(set(moments)) == 1
    with torch.no_grad():
        model.scale.fill_(math.nan if R == N - 1 else 1)
    assert math.isnan(watch.step().distance) and watch.step().equal


def case_drift_may_be_an_error():
    model = fresh()
    watch = Replicas(model, every=1, policy="raise")
    assert watch.step().equal
    nudged(model)
    with pytest.raises(DriftError, match="differ"):
        watch.step()
    told = Replicas(model, every=1, policy="report")
    told.step(), told.step()
    assert [drift.equal for drift in told.history] == [False, False]
