"""Statistics of measurements. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: A ratio whose confidence interval is wider than this share of it is too noisy.
NOISY = 0.25
#: Smaller differences count as equal.
SAME = 0.02

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (f"{v:.2f}" if v < 100 else f"{v:.0f}" for v in (self.value, self.low, self.high))
        return f"{value} [{low},{high}]"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Times of a non-blocking call in µs, as means over ranks; ``percent``: share that computation hid."""

    overall: float
    compute: float
    init: float
    test: float
    wait: float
    pure: float
    least: float
    most: float
    percent: float


def sizes(least: int, most: int, itemsize: int, factor: int = 2) -> Iterator[int]:
    """OSU's message sizes: doubled from ``least`` to ``most`` bytes, without those below one element."""
    size = max(least, 1)
    while size <= most:
        if size >= itemsize:
            yield size
        size *= factor


def osu_percentile(samples: Floats, percentile: int) -> float:
    """OSU's percentile: without interpolation, and at least the smallest sample."""
    ordered = np.sort(samples)
    return float(ordered[max(len(ordered) * percentile // 100 - 1, 0)])


def overlap(overall: float, compute: float, test: float, pure: float) -> float:
    """Percent of the communication that computation hid. ``compute`` includes the calls of Test."""
    return max(0.0, 100.0 - (overall - (compute - test)) / pure * 100.0) if pure > 0 else 0.0


def relative_spread(samples: Sequence[float] | Floats) -> float:
    """Interquartile distance as a share of the median: the noise of repeated measurements."""
    low, middle, high = np.percentile(np.asarray(samples, dtype=np.float64), (25, 50, 75))
    return float((high - low) / middle) if middle > 0 else 0.0


def ratio(theirs: Sequence[float] | Floats, ours: Sequence[float] | Floats, draws: int = 2000) -> Interval:
    """median(theirs) / median(ours) of paired rounds, with a bootstrap interval. Above 1 if ours is faster.

    Round i of both ran next to each other, so rounds are resampled in pairs: common disturbances cancel out.
    ``ValueError`` unless both have the same number of rounds, at least two.
    """
    a, b = np.asarray(theirs, dtype=np.float64), np.asarray(ours, dtype=np.float64)
    if a.shape != b.shape or a.size < 2:
        raise ValueError(f"two series of equal length, at least 2, are needed; got {a.size} and {b.size}")
    picks = np.random.default_rng(1).integers(0, a.size, (draws, a.size))
    drawn = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high))


def verdict(interval: Interval) -> str:
    """``faster``, ``slower``, ``same`` or ``too noisy`` for a ratio theirs / ours."""
    # An interval on one side of 1 decides, even if it is wide.
    if interval.low > 1 + SAME:
        return "faster"
    if interval.high < 1 - SAME:
        return "slower"
    if interval.high - interval.low > NOISY * interval.value:
        return "too noisy"
    return "same"
