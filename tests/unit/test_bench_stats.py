"""The arithmetic of measurements."""

import numpy as np
import pytest

from ucc_hetero.bench.stats import Interval, osu_percentile, ratio, sizes, verdict
from ucc_hetero.bench.stats import overlap as overlap_of


def test_sizes() -> None:
    assert list(sizes(1, 16, 1)) == [1, 2, 4, 8, 16]
    assert list(sizes(1, 16, 4)) == [4, 8, 16]
    assert list(sizes(3, 20, 1)) == [3, 6, 12]
    assert list(sizes(8, 4096, 4, 8)) == [8, 64, 512, 4096]
    assert list(sizes(0, 2, 1)) == [1, 2]


@pytest.mark.parametrize(("p", "expected"), [(50, 49), (90, 89), (99, 98), (100, 99), (1, 0)])
def test_percentiles_are_samples(p: int, expected: float) -> None:
    shuffled = np.random.default_rng(0).permutation(np.arange(100.0))
    assert osu_percentile(shuffled, p) == expected


@pytest.mark.parametrize(("overall", "compute", "test", "pure", "expected"), [
    (10.0, 10.0, 0.0, 10.0, 100.0),  # all of it hidden
    (20.0, 10.0, 0.0, 10.0, 0.0),  # none
    (15.0, 10.0, 0.0, 10.0, 50.0),
    (15.0, 12.0, 2.0, 10.0, 50.0),  # calls of Test are not computation
    (30.0, 10.0, 0.0, 10.0, 0.0),  # never negative
    (1.0, 1.0, 0.0, 0.0, 0.0),
])  # fmt: skip
def test_overlap(overall: float, compute: float, test: float, pure: float, expected: float) -> None:
    assert overlap_of(overall, compute, test, pure) == pytest.approx(expected)


def test_ratio_interval_holds_the_truth_and_excludes_others() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        common = rng.normal(0, 0.3, 30)  # what disturbs both at once
        got = ratio(13 + common + rng.normal(0, 0.2, 30), 10 + common + rng.normal(0, 0.2, 30), draws=400)
        inside += got.low <= 1.3 <= got.high
        assert not got.low <= 1.0 <= got.high
    assert inside >= 85


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0]), ([], [])])
def test_ratio_needs_pairs(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="equal length"):
        ratio(a, b)


@pytest.mark.parametrize(("interval", "says"), [
    (Interval(1.3, 1.2, 1.4), "faster"), (Interval(2.0, 1.1, 4.0), "faster"), (Interval(0.5, 0.4, 0.6), "slower"),
    (Interval(1.0, 0.99, 1.01), "same"), (Interval(1.05, 1.0, 1.1), "same"), (Interval(1.1, 0.6, 1.9), "too noisy"),
])  # fmt: skip
def test_verdict(interval: Interval, says: str) -> None:
    assert verdict(interval) == says
