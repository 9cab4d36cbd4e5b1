"""Findings of ``tune`` at one size, as a line of text, and the rules that follow from many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from ..planner.rules import Rule
from ..planner.select import Choice
from .plan import short_name

#: A candidate must beat the choice that would be made anyway by this much, or it is noise.
_GAIN = 0.95


@dataclass(frozen=True, slots=True)
class Finding:
    """Seconds of each choice for a collective; ``default`` is what would have been chosen without a table.

    ``noise``: seconds in which the middle half of a choice's samples lie.
    """

    collective: str
    nbytes: int
    default: Choice
    seconds: Mapping[Choice, float]
    noise: Mapping[Choice, float] = field(default_factory=dict)

    @classmethod
    def of(cls, collective: str, nbytes: int, default: Choice, samples: Mapping[Choice, Sequence[float]]) -> Finding:
        """The finding of one or more ``samples`` of each choice, in seconds: medians, and how far they lie apart."""
        noise = {}
        for choice, times in samples.items():
            low, _, high = quantiles(times, method="inclusive") if len(times) > 1 else (0.0, 0.0, 0.0)
            noise[choice] = high - low
        return cls(collective, nbytes, default, {choice: median(times) for choice, times in samples.items()}, noise)

    @property
    def best(self) -> Choice:
        """The fastest of those that are faster than the default by more than the noise of both, or the default."""
        usual, noise = self.seconds[self.default], self.noise.get
        clear = {
            choice: seconds
            for choice, seconds in self.seconds.items()
            if choice == self.default or usual - seconds > noise(choice, 0.0) + noise(self.default, 0.0)
        }
        return self._fastest(clear)

    def _fastest(self, seconds: Mapping[Choice, float]) -> Choice:
        """The fastest of these, or the default where nothing is clearly faster."""
        fastest = min(seconds, key=seconds.__getitem__)
        return fastest if seconds[fastest] < _GAIN * seconds[self.default] else self.default

    @property
    def doubtful(self) -> bool:
        """True if the default stays although something was faster: by no more than noise."""
        return self.best == self.default != self._fastest(self.seconds)

    def line(self) -> str:
        """The best, and what the first choices took."""
        times = sorted(self.seconds.items(), key=lambda item: item[1])[:6]
        mark = "?" if self.doubtful else "=" if self.best == self.default else "!"
        parts = ", ".join(f"{short_name(what)} {seconds * 1e6:.1f}" for what, seconds in times)
        return f"{self.collective:<22}{self.nbytes:>12} {mark} {parts} us"


def rules_of(found: Sequence[Finding]) -> tuple[Rule, ...]:
    """Rules for ranges of sizes, which end halfway (geometrically) between sizes with different bests.

    There are none for sizes where the default was best, so that they follow what later versions know better, and none
    from twice the longest size on.
    """
    names = dict.fromkeys(one.collective for one in found)
    return tuple(rule for name in names for rule in _rules(name, [one for one in found if one.collective == name]))


def _rules(collective: str, found: Sequence[Finding]) -> Iterator[Rule]:
    row = sorted(found, key=lambda one: one.nbytes)
    better = [None if one.best == one.default else one.best for one in row]
    low = 0.0
    for i, (one, best) in enumerate(zip(row, better, strict=True)):
        last = i + 1 == len(row)
        if last or better[i + 1] != best:
            high = float(2 * one.nbytes if last else round(math.sqrt(max(one.nbytes, 1) * row[i + 1].nbytes)))
            if best is not None:
                yield Rule(collective, low, high, best.algorithm, best.fragments)
            low = high
