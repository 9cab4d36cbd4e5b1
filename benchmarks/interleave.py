"""Rounds: all peers of a session take turns at one size, so that disturbances hit all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from .output import Row
from .session import Session
from .stats import Floats, ratio
from .world import Peer


class Series(Protocol):
    """Calls of one peer at one size, bound before the clock runs. All methods are collective."""

    #: Elements that validation has found wrong on this rank.
    wrong: int

    def run(self, iterations: int, warmup: int) -> Floats:
        """This rank's samples, one per iteration."""

    def row(self, samples: Floats) -> Row:
        """One line of the table from the samples of one round or of several."""

    def free(self) -> None:
        """Release the calls."""


Open = Callable[[Session, Peer, np.dtype[Any], int], Series]


def turns(count: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(round, series): each round begins with another series, so that none always runs in another one's wake."""
    return ((r, (r + k) % count) for r in range(rounds) for k in range(count))


def measure(session: Session, opened: Open, dtype: np.dtype[Any], size: int) -> Row:
    """Measure one line of a benchmark with all peers of the session, whose calls ``opened`` binds. Collective.

    Returns the first peer's line; its ratios say how many times faster that is than each of the others."""
    options, world, rates = session.options, session.world, session.bench.unit == "bandwidth"
    iterations, warmup = options.loops(session.bench, size)
    names = list(session.peers)
    series = [opened(session, peer, dtype, size) for peer in session.peers.values()]
    rounds = min(options.rounds, iterations) if len(series) > 1 else 1
    samples: list[list[Floats]] = [[] for _ in series]
    world.barrier()
    for r, k in turns(len(series), rounds):
        share = iterations // rounds + (r < iterations % rounds)
        samples[k].append(series[k].run(share, warmup if r == 0 else min(warmup, 1)))
    for each in series:
        each.free()
    ratios = {}
    if rounds > 1:
        ours, *others = [np.array([s.row(one).compared for one in x]) for s, x in zip(series, samples, strict=True)]
        for name, one, x, theirs in zip(names[1:], series[1:], samples[1:], others, strict=True):
            ratios[name] = one.row(np.concatenate(x)).compared, ratio(ours, theirs) if rates else ratio(theirs, ours)
    wrong = world.total(sum(each.wrong for each in series)) if options.validate else 0
    return replace(series[0].row(np.concatenate(samples[0])), wrong=wrong, ratios=ratios)
