"""``--peer`` for benchmarks whose loops measure one library: the loop runs for each of them in turn, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from .output import Row
from .session import Session
from .stats import Overlap, ratio

Measure = Callable[[Session, np.dtype[Any], int], Row]


def together(rows: Sequence[Row], *, rates: bool) -> Row:
    """One row from those of all rounds, which had about equally many iterations. ``rates``: values are per time."""

    def mean(values: Sequence[float]) -> float:
        if rates:  # what was moved in all rounds over the time of all rounds
            return len(values) / sum(1 / value for value in values) if all(values) else 0.0
        return float(np.mean(values))

    overlap = None
    if rows[0].overlap is not None:
        times = [row.overlap for row in rows if row.overlap is not None]
        overlap = Overlap(*(float(np.mean([getattr(t, field.name) for t in times])) for field in fields(Overlap)))
    return replace(
        rows[0],
        value=mean([row.value for row in rows]),
        least=min(row.least for row in rows),
        most=max(row.most for row in rows),
        iterations=sum(row.iterations for row in rows),
        wrong=sum(row.wrong for row in rows),
        rate=mean([row.rate for row in rows]),
        overlap=overlap,
    )


def interleaved(measure: Measure) -> Measure:
    """``measure`` for all peers of the session. The ratios say how many times faster the first one is."""

    def measure_all(session: Session, dtype: np.dtype[Any], size: int) -> Row:
        options, names = session.options, list(session.peers)
        iterations, warmup = options.loops(session.bench, size)
        rounds = min(options.rounds, iterations)
        rows: dict[str, list[Row]] = {name: [] for name in names}
        for r in range(rounds):
            share = iterations // rounds + (r < iterations % rounds)
            for k in range(len(names)):
                name = names[(r + k) % len(names)]
                session.options = replace(
                    options, backend=name, iterations=share, warmup=warmup if r == 0 else min(warmup, 1)
                )
                rows[name].append(measure(session, dtype, size))
        session.options = options
        rates = session.bench.unit == "bandwidth"
        ratios = {}
        ours = np.array([row.compared for row in rows[names[0]]])
        for name in names[1:]:
            theirs = np.array([row.compared for row in rows[name]])
            value = together(rows[name], rates=rates)
            if rounds > 1:
                ratios[name] = value.compared, ratio(ours, theirs) if rates else ratio(theirs, ours)
        wrong = sum(row.wrong for name in names[1:] for row in rows[name])
        first = together(rows[names[0]], rates=rates)
        return replace(first, ratios=ratios, wrong=first.wrong + wrong)

    return measure_all
