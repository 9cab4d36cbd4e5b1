"""Work shares for unequal devices, so that all ranks finish a step at the same time.

Data parallel: :func:`profile` times a step on every rank, :meth:`Profile.split` divides a global batch, and
:class:`BalancedSampler` selects each rank's samples. Gradients stay exact: every rank scales its mean loss by
:attr:`Share.weight`, so that the average over ranks is the average over all samples.

Pipelines: :func:`profile_layers` times every layer on every rank and :func:`split_layers` cuts the stages.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import log
from .streams import started

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of every global batch; made by :meth:`Profile.split`.

    Args:
        counts: Samples of all ranks, in rank order.
        rank: This rank.
    """

    counts: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """Samples of this rank."""
        return self.counts[self.rank]

    @property
    def total(self) -> int:
        """Samples of the global batch."""
        return sum(self.counts)

    @property
    def first(self) -> int:
        """Index of this rank's first sample in the global batch."""
        return sum(self.counts[: self.rank])

    @property
    def weight(self) -> float:
        """Factor of this rank's mean loss. With it the gradients' average over ranks is that over all samples."""
        return self.count * len(self.counts) / self.total

    def take(self, batch: Any) -> Any:
        """Take this rank's samples of a global batch.

        Args:
            batch: Tensor or sequence; the first dimension counts samples.

        Returns:
            A part of it.

        Raises:
            ValueError: The batch does not have :attr:`total` samples.
        """
        if len(batch) != self.total:
            raise ValueError(f"batch on rank {self.rank} has {len(batch)} samples; the shares add up to {self.total}")
        return batch[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class Profile:
    """Cost of a step on each rank: ``fixed[r] + each[r] * samples`` seconds on rank r; measured by :func:`profile`.

    Args:
        rank: This rank.
        fixed: Seconds of a step without samples, of each rank.
        each: Seconds of a sample, of each rank.
    """

    rank: int
    fixed: tuple[float, ...]
    each: tuple[float, ...]

    def seconds(self, counts: Sequence[int]) -> float:
        """Tell how long a step takes.

        Args:
            counts: Samples of each rank.

        Returns:
            Seconds of the slowest rank.
        """
        return max(f + e * n for f, e, n in zip(self.fixed, self.each, counts, strict=True))

    def split(self, total: int, *, most: Sequence[int] | None = None) -> Share:
        """Divide a batch so that the slowest rank finishes as early as possible. Each rank gets one sample or more.

        Args:
            total: Samples of the global batch.
            most: Largest number of samples of each rank, by its memory. No limit if None.

        Returns:
            This rank's share, equal counts on all ranks.

        Raises:
            ValueError: ``total`` is below the number of ranks, or above the sum of ``most``.
        """
        size = len(self.each)
        limits = list(most) if most is not None else [total] * size
        if len(limits) != size or total < size or sum(limits) < total or min(limits) < 1:
            raise ValueError(f"{total} samples cannot be divided among {size} ranks that take 1 to {limits}")
        counts = [1] * size
        # Give each sample to the rank that would finish with it first: optimal, as costs only grow with the samples.
        heap = [(self.fixed[r] + 2 * self.each[r], r) for r in range(size) if limits[r] > 1]
        heapq.heapify(heap)
        for _ in range(total - size):
            done, r = heapq.heappop(heap)
            counts[r] += 1
            if counts[r] < limits[r]:
                heapq.heappush(heap, (done + self.each[r], r))
        return Share(tuple(counts), self.rank)


def _settled() -> None:
    """Wait until this rank's device has finished what was queued."""
    for _, module in started():
        module.synchronize()


def _timed(call: Callable[[], object], repeat: int, clock: Clock) -> list[float]:
    """Time a call ``repeat`` times, in seconds, after one call to warm up."""
    call()
    seconds = []
    for _ in range(repeat):
        _settled()
        start = clock()
        call()
        _settled()
        seconds.append(clock() - start)
    return seconds


def _unlike(rank: int, samples: Sequence[Sequence[float]]) -> bool:
    """True if the ranks' times of the same work differ by clearly more than one rank's own; else rank 0 warns."""
    medians = [statistics.median(row) for row in samples]
    difference, noise = max(medians) - min(medians), statistics.median(max(row) - min(row) for row in samples)
    # The medians of many equal ranks spread as far as the samples of one rank.
    if len(samples) < 2 or difference > 2 * noise:
        return True
    if rank == 0:
        log.log("torch").warning(
            "the ranks took %.3g to %.3g s for the same work, but one rank's own times by %.3g s: all get equal "
            "shares; profile again on idle hosts, or with a larger repeat",
            min(medians), max(medians), noise,
        )  # fmt: skip
    return False


def fitted(rank: int, counts: Sequence[int], samples: Sequence[Sequence[Sequence[float]]]) -> Profile:
    """Fit each rank's cost of a step to its times. All ranks count as equal if their differences are within the noise.

    Args:
        rank: this rank.
        counts: numbers of samples for which a step was timed, ascending.
        samples: ``samples[r][i]`` are the repeated times of rank r in seconds, with ``counts[i]`` samples.

    Returns:
        Costs per step and per sample of every rank.
    """
    rows: list[tuple[float, ...]] = []
    for times in samples:
        seconds = [statistics.median(each) for each in times]
        slope, offset = statistics.linear_regression(counts, seconds)
        if min(times[-1]) <= max(times[0]):  # noise exceeds the cost of samples: no line can be fitted
            slope, offset = seconds[-1] / counts[-1], 0.0
        # The cost of a sample stays above 0 on every rank: a rank with cost 0 would get all samples.
        rows.append((max(offset, 0.0), max(slope, seconds[-1] / counts[-1] * 1e-3, 1e-12)))
    if not _unlike(rank, [times[-1] for times in samples]):
        rows = [tuple(map(statistics.fmean, zip(*rows, strict=True)))] * len(rows)
    return Profile(rank, tuple(f for f, _ in rows), tuple(e for _, e in rows))


def _everyone(mine: Any, group: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, mine, group=group)
    return out


def profile(
    step: Callable[[int], object],
    samples: Sequence[int] = (1, 4),
    *,
    repeat: int = 5,
    group: Any = None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Time a step, forward and backward, on every rank at the same time. Collective.

    If ranks differ by less than the noise of the measurements, all count as equal, and rank 0 warns.

    Args:
        step: Called with a number of samples. It must not communicate (use ``with model.no_sync()``, or the plain
            module): in a collective every rank would wait for the slowest one.
        samples: Two or more different numbers of samples; a line is fitted to their times.
        repeat: Measurements of each.
        group: Process group; torch's default group if None.
        clock: Returns seconds.

    Returns:
        Costs of all ranks, the same on each.

    Raises:
        ValueError: ``samples`` are not two or more different numbers from 1 on.
    """
    counts = sorted(set(samples))
    if len(counts) < 2 or counts[0] < 1:
        raise ValueError(f"samples {list(samples)} must be two or more different numbers from 1 on")
    dist.barrier(group=group)  # so that ranks which share a machine slow each other down as they will in training
    seconds = [_timed(partial(step, n), repeat, clock) for n in counts]
    return fitted(dist.get_rank(group), counts, _everyone(seconds, group))


def profile_layers(
    layers: Iterable[Callable[[Any], Any]],
    example: Any,
    *,
    repeat: int = 5,
    group: Any = None,
    clock: Clock = time.perf_counter,
) -> list[list[float]]:
    """Time the layers of a pipeline, forward and backward, on each rank. Collective.

    If ranks differ by less than the noise of the measurements, all rows are their mean, and rank 0 warns.

    Args:
        layers: The layers, in order; each gets what the one before it returned.
        example: One microbatch, as the first layer takes it.
        repeat: Measurements of each layer.
        group: Process group; torch's default group if None.
        clock: Returns seconds.

    Returns:
        A row of seconds per layer for each rank, the same on all ranks.
    """
    dist.barrier(group=group)
    mine, inputs = [], example
    for layer in layers:
        outputs: Any = None

        def both(layer: Callable[[Any], Any] = layer, inputs: Any = inputs) -> None:
            nonlocal outputs
            outputs = layer(inputs)
            if outputs.requires_grad:
                torch.autograd.backward(outputs, torch.ones_like(outputs))

        mine.append(_timed(both, repeat, clock))
        inputs = outputs.detach()
        inputs.requires_grad_(inputs.is_floating_point())
    return layer_seconds(dist.get_rank(group), _everyone(mine, group))


def layer_seconds(rank: int, samples: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Reduce times to one row per rank. All ranks count as equal if their differences are within the noise.

    Args:
        rank: this rank.
        samples: ``samples[r][i]`` are the repeated times of layer i on rank r, in seconds.

    Returns:
        A row of seconds for each rank.
    """
    rows = [[statistics.median(times) for times in layers] for layers in samples]
    if not _unlike(rank, [[sum(times) for times in zip(*layers, strict=True)] for layers in samples]):
        rows = [list(map(statistics.fmean, zip(*rows, strict=True)))] * len(rows)
    return rows


def split_layers(seconds: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Cut layers into one stage for each rank, so that the slowest stage is as quick as possible.

    Exact: dynamic programming over (ranks, layers).

    Args:
        seconds: ``seconds[r][i]`` is the time of layer i on rank r (:func:`profile_layers`); ranks are in the order of
            the pipeline.

    Returns:
        (first layer, one past the last) of each rank. Every rank gets at least one layer.

    Raises:
        ValueError: There are fewer layers than ranks, or rows differ in length.
    """
    ranks, layers = len(seconds), len(seconds[0]) if seconds else 0
    if layers < ranks or any(len(row) != layers for row in seconds):
        raise ValueError(
            f"{[len(row) for row in seconds]} layers on {ranks} ranks: each needs one, and all rows one length"
        )
    sums = [[0.0] * (layers + 1) for _ in seconds]
    for row, total in zip(seconds, sums, strict=True):
        for i, value in enumerate(row):
            total[i + 1] = total[i] + value
    # best[i]: (time of the slowest stage, cuts) for the ranks so far and the first i layers; None if impossible.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, (0,))] + [None] * layers
    for rank, total in enumerate(sums):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (layers + 1)
        for end in range(rank + 1, layers - (ranks - rank - 1) + 1):
            following[end] = min(
                (max(found[0], total[end] - total[start]), (*found[1], end))
                for start in range(end)
                if (found := best[start]) is not None
            )
        best = following
    last = best[layers]
    assert last is not None
    return list(zip(last[1], last[1][1:], strict=False))


class BalancedSampler(torch.utils.data.Sampler[list[int]]):
    """Selects this rank's samples of a data set by its :class:`Share`: a ``batch_sampler`` for torch's ``DataLoader``.

    The global batches are those of a run of any other split with the same ``seed``, in the same order; samples that do
    not fill the last one are left out. Call :meth:`set_epoch` before each epoch, as with ``DistributedSampler``.

    Args:
        length: Samples of the data set.
        share: This rank's part of a global batch.
        shuffle: True for another order in each epoch.
        seed: Of the order, equal on all ranks.

    Raises:
        ValueError: The data set is shorter than one global batch.
    """

    def __init__(self, length: int, share: Share, *, shuffle: bool = True, seed: int = 0) -> None:
        if length < share.total:
            raise ValueError(f"a data set of {length} samples is shorter than one global batch of {share.total}")
        self._length, self._share, self._shuffle, self._seed, self._epoch = length, share, shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the samples.

        Args:
            epoch: Number of the epoch, equal on all ranks.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length // self._share.total

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._length))
        if self._shuffle:
            random.Random(f"{self._seed} {self._epoch}").shuffle(order)  # the same on every rank
        for step in range(len(self)):
            yield self._share.take(order[step * self._share.total : (step + 1) * self._share.total])
