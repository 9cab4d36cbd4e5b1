"""Findings of ``tune`` at one size, as a line of text, and as ranges of sizes at which something is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..planner.rules import best_of, spans


@dataclass(frozen=True, slots=True)
class Finding:
    """Seconds of each choice for one kind of call; ``default`` is what would have been chosen without a table."""

    kind: Any
    nbytes: int
    default: Any
    seconds: dict[Any, float]

    @property
    def best(self) -> Any:
        """The fastest, or the default where nothing is clearly faster."""
        return best_of(self.seconds, self.default)

    def line(self, name: str, choice: Callable[[Any], str]) -> str:
        """The best, and what the first choices took."""
        times = sorted(self.seconds.items(), key=lambda item: item[1])[:6]
        mark = "=" if self.best == self.default else "!"
        parts = ", ".join(f"{choice(what)} {seconds * 1e6:.1f}" for what, seconds in times)
        return f"{name:<22}{self.nbytes:>12} {mark} {parts} us"


def improvements(found: Sequence[Finding]) -> Iterator[tuple[Any, Any, float, float]]:
    """(kind, best, from, up to bytes) of findings whose best is not their default, neighbours drawn together."""
    for kind in dict.fromkeys(one.kind for one in found):
        row = sorted((one for one in found if one.kind == kind), key=lambda one: one.nbytes)
        better = [None if one.best == one.default else one.best for one in row]
        yield from ((kind, *span) for span in spans([one.nbytes for one in row], better))
