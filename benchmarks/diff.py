"""``python -m ucc_hetero.bench diff OLD NEW``: what became slower or faster between two result files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curves import Curve, Point, UnknownFile, read
from .options import BadUsage
from .stats import Interval


@dataclass(frozen=True, slots=True)
class Change:
    """One size of one curve in both files. ``cost`` is new / old time (or old / new bandwidth): above 1 is worse."""

    curve: Curve
    size: int
    old: float
    new: float
    cost: Interval
    verdict: str  # "worse", "better" or "same"


def _cost(old: Point, new: Point, inverted: bool) -> Interval:
    """The ratio, with a bootstrap interval where both files have the single rounds."""
    up, down = (old, new) if inverted else (new, old)
    value = up.value / down.value if down.value else float("inf")
    if len(up.rounds) < 2 or len(down.rounds) < 2:
        return Interval(value, value, value)
    rng = np.random.default_rng(1)

    def medians(point: Point) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        rounds = np.asarray(point.rounds)
        return np.asarray(np.median(rounds[rng.integers(0, rounds.size, (2000, rounds.size))], axis=1))

    low, high = np.percentile(medians(up) / medians(down), (2.5, 97.5))
    return Interval(value, float(low), float(high))


def compare(old: Sequence[Curve], new: Sequence[Curve], threshold: float) -> list[Change]:
    """Every size that both have. A change counts where the whole interval lies beyond ``1 ± threshold``."""
    known = {curve.key: {point.size: point for point in curve.points} for curve in old}
    changes = []
    for curve in new:
        before = known.get(curve.key, {})
        for point in curve.points:
            if point.size not in before:
                continue
            cost = _cost(before[point.size], point, curve.higher_is_better)
            verdict = "worse" if cost.low > 1 + threshold else "better" if cost.high < 1 / (1 + threshold) else "same"
            changes.append(Change(curve, point.size, before[point.size].value, point.value, cost, verdict))
    return changes


def table(changes: Sequence[Change], everything: bool) -> str:
    """The changes as text: only those that count, unless ``everything``."""
    lines = [f"{'# benchmark':<28}{'whose':<16}{'size':>12}{'old':>14}{'new':>14} {'unit':<5}{'new cost':>20}"]
    for change in changes:
        if everything or change.verdict != "same":
            curve = change.curve
            lines.append(
                f"{curve.benchmark:<28}{curve.label:<16}{change.size:>12}{change.old:>14.2f}{change.new:>14.2f} "
                f"{curve.unit:<5}{change.cost!s:>20}  {change.verdict}"
            )
    counts = {word: sum(change.verdict == word for change in changes) for word in ("worse", "better", "same")}
    lines.append(f"# {counts['worse']} worse, {counts['better']} better, {counts['same']} the same")
    return "\n".join(lines) + "\n"


def run(words: Sequence[str], command: list[str]) -> int:
    """Print the changes; the status is 1 if anything became worse."""
    parser = argparse.ArgumentParser(prog="python -m ucc_hetero.bench diff", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--threshold", type=float, default=0.1, help="smallest change that counts, as a share (0.1)")
    parser.add_argument("--all", action="store_true", help="also print what stayed the same")
    arguments = parser.parse_args(list(words))
    if arguments.threshold < 0:
        raise BadUsage(f"diff: --threshold {arguments.threshold}: a share of 0 or more is needed")
    try:
        changes = compare(read(arguments.old), read(arguments.new), arguments.threshold)
    except UnknownFile as why:
        raise BadUsage(f"diff: {why}") from None
    if not changes:
        raise BadUsage(f"diff: {arguments.old} and {arguments.new} have no benchmark, series, dtype and size in common")
    print(table(changes, arguments.all), end="")
    return int(any(change.verdict == "worse" for change in changes))
