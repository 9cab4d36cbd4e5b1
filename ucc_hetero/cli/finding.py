"""Findings of ``tune`` at one size, as a line of text, and as ranges of sizes at which something is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from ..planner.rules import best_of, spans


@dataclass(frozen=True, slots=True)
class Finding:
    """Seconds of each choice for one kind of call; ``default`` is what would have been chosen without a table.

    ``noise``: seconds in which the middle half of a choice's samples lie.
    """

    kind: Any
    nbytes: int
    default: Any
    seconds: Mapping[Any, float]
    noise: Mapping[Any, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: Any, nbytes: int, default: Any, samples: Mapping[Any, Sequence[float]]) -> Finding:
        """Make a finding of samples.

        Args:
            kind: what kind of call was measured.
            nbytes: its size.
            default: what would be chosen without a table; one of the choices.
            samples: seconds of each choice, one or more.

        Returns:
            The finding: medians, and how far samples of one choice lie apart.
        """
        noise = {}
        for choice, times in samples.items():
            low, _, high = quantiles(times, method="inclusive") if len(times) > 1 else (0.0, 0.0, 0.0)
            noise[choice] = high - low
        return cls(kind, nbytes, default, {choice: median(times) for choice, times in samples.items()}, noise)

    @property
    def best(self) -> Any:
        """The fastest of those that are faster than the default by more than the noise of both, or the default."""
        usual, noise = self.seconds[self.default], self.noise.get
        clear = {
            choice: seconds
            for choice, seconds in self.seconds.items()
            if choice == self.default or usual - seconds > noise(choice, 0.0) + noise(self.default, 0.0)
        }
        return best_of(clear, self.default)

    @property
    def doubtful(self) -> bool:
        """True if the default stays although something was faster: by no more than noise."""
        return bool(self.best == self.default != best_of(self.seconds, self.default))

    def line(self, name: str, choice: Callable[[Any], str]) -> str:
        """The best, and what the first choices took."""
        times = sorted(self.seconds.items(), key=lambda item: item[1])[:6]
        mark = "?" if self.doubtful else "=" if self.best == self.default else "!"
        parts = ", ".join(f"{choice(what)} {seconds * 1e6:.1f}" for what, seconds in times)
        return f"{name:<22}{self.nbytes:>12} {mark} {parts} us"


def improvements(found: Sequence[Finding]) -> Iterator[tuple[Any, Any, float, float]]:
    """(kind, best, from, up to bytes) of findings whose best is not their default, neighbours drawn together."""
    for kind in dict.fromkeys(one.kind for one in found):
        row = sorted((one for one in found if one.kind == kind), key=lambda one: one.nbytes)
        better = [None if one.best == one.default else one.best for one in row]
        yield from ((kind, *span) for span in spans([one.nbytes for one in row], better))
