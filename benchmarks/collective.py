"""The timed loops of the collectives, blocking, persistent and non-blocking, by OSU's rule.

Only the call itself is inside the timed window; a barrier outside it keeps ranks together. A rank's latency is the
mean over iterations, a row is mean, least and most of these over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .cases import Buffers, Call, Case, Pool, bind, in_place_only, longest, roots
from .output import Row
from .session import Session
from .stats import Overlap, overlap, ratio
from .validate import Checker
from .world import Peer

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Bound:
    """One peer's calls of one size: one per root, each with the buffers and the checker that belong to it."""

    calls: list[Call]
    buffers: list[Buffers]
    warm: list[Call]
    checkers: list[Checker]


def _cases(session: Session, peer: Peer, dtype: np.dtype[Any], size: int) -> list[Case]:
    row, world, options = session.bench.collective, session.world, session.options
    assert row is not None
    in_place = options.in_place or in_place_only(peer, row)
    count = size // dtype.itemsize
    return [Case(row, world.rank, world.size, count, root, in_place) for root in roots(row, options.root, world.size)]


def _bind(session: Session, peer: Peer, dtype: np.dtype[Any], size: int) -> Bound:
    """Allocate and bind everything before the clock runs."""
    cases, family = _cases(session, peer, dtype, size), session.bench.family
    elements = max(longest(cases[0].row, cases[0].count, session.world.size), 1)

    def bound(pool: Pool) -> tuple[list[Buffers], list[Call]]:
        buffers = [pool.take(case) for case in cases]
        return buffers, [bind(peer, case, block, family) for case, block in zip(cases, buffers, strict=True)]

    buffers, calls = bound(Pool(session.memory, dtype, elements))
    if not session.options.validate or cases[0].row.kind == "barrier":
        return Bound(calls, buffers, [], [])
    _, warm = bound(Pool(session.memory, dtype, elements))
    return Bound(calls, buffers, warm, [Checker(case, dtype, log=session.log) for case in cases])


def _timed(
    session: Session, bound: Bound, iterations: int, warmup: int, once: Callable[[Callable[[], Any]], Any]
) -> tuple[list[Any], int]:
    """(what ``once`` returned in each iteration after the warm-up, wrong elements on this rank)."""
    barrier, checkers, n = session.world.barrier, bound.checkers, len(bound.calls)
    samples: list[Any] = []
    wrong = 0
    # OSU's barrier benchmark has no barrier of its own between the timed ones.
    apart = session.bench.sized or session.bench.family == "nonblocking"
    for i in range(warmup + iterations):
        k = i % n
        call = bound.calls[k].run
        if checkers:
            checkers[k].load(bound.buffers[k], i)
            for _ in range(session.options.validation_warmup):
                barrier()
                _finish(bound.warm[k].run())
            barrier()
        sample = once(call)
        if apart:
            barrier()
        if i >= warmup:
            samples.append(sample)
        if checkers:
            wrong += checkers[k].wrong(bound.buffers[k], i)
    return samples, wrong


def _finish(request: Any) -> None:
    """Wait for what a non-blocking call returned; blocking ones return nothing."""
    if hasattr(request, "Wait"):
        request.Wait()


def _blocking(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def measure_latency(session: Session, dtype: np.dtype[Any], size: int) -> Row:
    """One row of a blocking or persistent benchmark; with ``--peer`` all peers in turn, round by round."""
    iterations, warmup = session.options.loops(session.bench, size)
    bounds = [_bind(session, peer, dtype, size) for peer in session.peers.values()]
    rounds = min(session.options.rounds, iterations) if len(bounds) > 1 else 1
    share = [iterations // rounds + (r < iterations % rounds) for r in range(rounds)]
    times: list[list[float]] = [[] for _ in bounds]
    by_round: list[list[float]] = [[] for _ in bounds]
    wrong = 0
    session.world.barrier()
    for r in range(rounds):
        # Another peer begins each round, so that none always runs in the other's wake.
        for k in ((r + j) % len(bounds) for j in range(len(bounds))):
            samples, bad = _timed(session, bounds[k], share[r], warmup if r == 0 else min(warmup, 1), _blocking)
            times[k] += samples
            by_round[k].append(sum(samples) / len(samples) * 1e6)
            wrong += bad
    for call in (call for bound in bounds for call in (*bound.calls, *bound.warm)):
        call.free()
    return _latency_row(session, size, times, by_round, wrong)


def _latency_row(session: Session, size: int, times: list[list[float]], by_round: list[list[float]], wrong: int) -> Row:
    options, world = session.options, session.world
    names = list(session.peers)
    mine = np.asarray(times[0]) * 1e6
    mean, least, most = world.spread(float(mine.mean()))
    ratios = {}
    if len(names) > 1:
        means = [world.gather(values).mean(axis=0) for values in by_round]
        for k, name in enumerate(names[1:], 1):
            if len(means[0]) > 1:
                ratios[name] = (float(np.mean(means[k])), ratio(means[k], means[0]))
    session.samples[size] = mine
    wrong = world.total(wrong) if options.validate else 0
    return Row(size, mean, least, most, mine.size, wrong, session.percentiles(mine), ratios=ratios)


# --- non-blocking: how much of the communication does computation hide? -----------------------------------------------

_DIMENSION = 25


class Compute:
    """Work for a given time: small matrix operations, as OSU's benchmarks do, in pieces of about a microsecond."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._a = rng.random(_DIMENSION)
        self._x = np.zeros(_DIMENSION)

    def spend(self, seconds: float) -> None:
        """Compute until that much time went into computing."""
        spent = 0.0
        while spent < seconds:
            start = perf_counter()
            np.multiply(self._a, self._a, out=self._x)
            spent += perf_counter() - start


def _overlapped(compute: Compute, seconds: float, tests: int) -> Callable[[Callable[[], Any]], Floats]:
    """One iteration: start, compute with calls of Test in between, wait."""

    def once(call: Callable[[], Any]) -> Floats:
        begin = perf_counter()
        request = call()
        started = perf_counter()
        tested = 0.0
        for _ in range(tests):
            compute.spend(seconds / tests)
            before = perf_counter()
            request.Test()
            tested += perf_counter() - before
        if not tests:
            compute.spend(seconds)
        computed = perf_counter()
        request.Wait()
        end = perf_counter()
        return np.array((end - begin, computed - started, started - begin, tested, end - computed))

    return once


def _pure(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call().Wait()
    return perf_counter() - start


def measure_overlap(session: Session, dtype: np.dtype[Any], size: int) -> Row:
    """One row of a non-blocking benchmark: first the communication alone, then with as much computation."""
    options, world = session.options, session.world
    iterations, warmup = options.loops(session.bench, size)
    bound = _bind(session, session.peer, dtype, size)
    world.barrier()
    alone, wrong = _timed(session, bound, iterations, warmup, _pure)
    pure = float(np.mean(alone))
    world.barrier()
    once = _overlapped(Compute(), pure, options.test_calls)
    samples, more_wrong = _timed(session, bound, iterations, warmup, once)
    times = np.asarray(samples)
    overall, computing, init, test, wait = world.gather(times.mean(axis=0)).mean(axis=0) * 1e6
    mean, least, most = world.spread(pure * 1e6)
    percent = overlap(overall, computing, test, mean)
    session.samples[size] = times[:, 0] * 1e6
    wrong = world.total(wrong + more_wrong) if options.validate else 0
    percentiles = session.percentiles(times[:, 0] * 1e6)
    hidden = Overlap(overall, computing - test, init, test, wait, mean, least, most, percent)
    return Row(size, float(overall), iterations=iterations, wrong=wrong, percentiles=percentiles, overlap=hidden)
