"""Timed loops of collectives (blocking, persistent, non-blocking), with OSU's rules.

Only the call itself is timed; a barrier before it keeps the ranks together. A rank's latency is the mean over
iterations; a row has the mean, minimum and maximum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from .cases import Buffers, Call, Case, Pool, bind, in_place_only, longest, roots
from .output import Row
from .session import Session
from .stats import Floats, Overlap, overlap
from .validate import Checker
from .world import Peer


class Latency:
    """A peer's blocking or persistent calls of one size: one per root, each with its own buffers and checker."""

    def __init__(self, session: Session, peer: Peer, dtype: np.dtype[Any], size: int) -> None:
        row, world, options = session.bench.collective, session.world, session.options
        assert row is not None
        self.session, self.size, self.wrong = session, size, 0
        in_place, count = options.in_place or in_place_only(peer, row), size // dtype.itemsize
        cases = [Case(row, world.rank, world.size, count, r, in_place) for r in roots(row, options.root, world.size)]
        elements = max(longest(row, count, world.size), 1)

        def bound() -> tuple[list[Buffers], list[Call]]:
            pool = Pool(session.memory, dtype, elements)
            buffers = [pool.take(case) for case in cases]
            calls = [bind(peer, case, each, session.bench.family) for case, each in zip(cases, buffers, strict=True)]
            return buffers, calls

        self.buffers, self.calls = bound()
        self.warm: list[Call] = []
        self.checkers: list[Checker] = []
        if options.validate and row.kind != "barrier":
            _, self.warm = bound()
            self.checkers = [Checker(case, dtype) for case in cases]

    def run(self, iterations: int, warmup: int) -> Floats:
        """Seconds of each iteration on this rank."""
        return np.asarray(self.timed(iterations, warmup, _blocking))

    def timed(self, iterations: int, warmup: int, once: Callable[[Callable[[], Any]], Any]) -> list[Any]:
        """The results of ``once`` in each iteration after the warm-up."""
        session, checkers = self.session, self.checkers
        barrier, samples = session.world.barrier, []
        # OSU's barrier benchmark has no extra barrier between iterations.
        apart = session.bench.sized or session.bench.family == "nonblocking"
        for i in range(warmup + iterations):
            k = i % len(self.calls)
            call = self.calls[k].run
            if checkers:
                checkers[k].load(self.buffers[k], i)
                for _ in range(session.options.validation_warmup):
                    barrier()
                    _finish(self.warm[k].run())
                barrier()
            sample = once(call)
            if apart:
                barrier()
            if i >= warmup:
                samples.append(sample)
            if checkers:
                self.wrong += checkers[k].wrong(self.buffers[k], i)
        return samples

    def row(self, samples: Floats) -> Row:
        """Mean, minimum and maximum of the ranks' means, in µs."""
        session, mine = self.session, samples * 1e6
        mean, least, most = session.world.spread(float(mine.mean()))
        return Row(self.size, mean, least, most, mine.size, percentiles=session.percentiles(mine))

    def free(self) -> None:
        """Release the requests of persistent calls."""
        for call in (*self.calls, *self.warm):
            call.free()


def _finish(request: Any) -> None:
    """Wait for the request of a non-blocking call; blocking calls return none."""
    if hasattr(request, "Wait"):
        request.Wait()


def _blocking(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


# --- non-blocking: how much of the communication does computation hide? -----------------------------------------------

#: Elements of a computation of about a microsecond, as in OSU's benchmarks.
_DIMENSION = 25


def _overlapped(seconds: float, tests: int) -> Callable[[Callable[[], Any]], Floats]:
    """An iteration: start, compute for some seconds with calls of Test in between, wait."""
    numbers, squares = np.random.default_rng(1).random(_DIMENSION), np.zeros(_DIMENSION)

    def compute(seconds: float) -> None:
        spent = 0.0
        while spent < seconds:
            start = perf_counter()
            np.multiply(numbers, numbers, out=squares)
            spent += perf_counter() - start

    def once(call: Callable[[], Any]) -> Floats:
        begin = perf_counter()
        request = call()
        started = perf_counter()
        tested = 0.0
        for _ in range(tests):
            compute(seconds / tests)
            before = perf_counter()
            request.Test()
            tested += perf_counter() - before
        if not tests:
            compute(seconds)
        computed = perf_counter()
        request.Wait()
        end = perf_counter()
        return np.array((end - begin, computed - started, started - begin, tested, end - computed))

    return once


def _pure(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call().Wait()
    return perf_counter() - start


class Overlapped(Latency):
    """Non-blocking calls: first the communication alone, then with as much computation as that takes."""

    def run(self, iterations: int, warmup: int) -> Floats:
        """Seconds of each iteration: alone; then overall, computing, starting, testing and waiting."""
        alone = self.timed(iterations, warmup, _pure)
        self.session.world.barrier()
        once = _overlapped(float(np.mean(alone)), self.session.options.test_calls)
        return np.column_stack((alone, self.timed(iterations, warmup, once)))

    def row(self, samples: Floats) -> Row:
        """Means over the ranks in µs, and the share of the communication that computation hid."""
        session, world = self.session, self.session.world
        mine = samples * 1e6
        _, overall, computing, init, test, wait = world.gather(mine.mean(axis=0)).mean(axis=0)
        pure, least, most = world.spread(float(mine[:, 0].mean()))
        hidden = overlap(overall, computing, test, pure)
        times = Overlap(overall, computing - test, init, test, wait, pure, least, most, hidden)
        percentiles = session.percentiles(mine[:, 1])
        return Row(self.size, float(overall), iterations=len(mine), percentiles=percentiles, overlap=times)
