"""State that the timed loops share: the job, the options, the memory, the peers, and where rows go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TextIO

import numpy as np
import numpy.typing as npt

from .memory import Memory
from .option_table import Options
from .result_file import Results
from .stats import osu_percentile
from .table import Bench
from .validate import Log
from .world import Peer, World

#: Characters of a full bar.
_BAR = 24


class Progress:
    """A bar on stderr of rank 0 if that is a terminal; otherwise nothing."""

    def __init__(self, wanted: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on = wanted and self._stream.isatty()
        self._start = monotonic()

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        """``done`` of ``total`` steps are behind us and ``text`` is going on."""
        if self._on:
            minutes, seconds = divmod(int(monotonic() - self._start), 60)
            filled = _BAR * done // total if total else 0
            bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{total} " if total else ""
            self._write(f"{bar}{minutes}:{seconds:02} {text}")

    def clear(self) -> None:
        """Make room for a line of the table."""
        if self._on:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


@dataclass(slots=True)
class Session:
    """State of the timed loops: who measures what, with which options, in which memory."""

    bench: Bench
    options: Options
    world: World
    memory: Memory
    peers: dict[str, Peer]
    progress: Progress
    results: Results
    log: Log | None = None
    samples: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    #: Size -> limit set by the links, in the unit of the benchmark; None without --limit.
    limit: Callable[[int], float] | None = None
    _plans: dict[str, str] = field(default_factory=dict)

    @property
    def peer(self) -> Peer:
        """The one that the stock columns describe."""
        return self.peers[self.options.backend]

    def plan(self) -> str | None:
        """The plan of the calls that were made since the last question, as ours describes it; None of other peers."""
        summary = getattr(self.peer.comm, "plan_summary", None)
        if self.peer.name != "ours" or summary is None:
            return None
        known, self._plans = self._plans, dict(line.split(": ", 1) for line in summary().splitlines()[1:])
        self._plans.pop("rings", None)
        new = [plan for label, plan in self._plans.items() if label not in known]
        # None new: the calls of this row were made before, in the row before it.
        return new[-1] if new else next(reversed(self._plans.values()), None)

    def print(self, text: str) -> None:
        """Write to the table: rank 0's stdout."""
        if self.world.rank == 0:
            self.progress.clear()
            sys.stdout.write(text)
            sys.stdout.flush()

    def percentiles(self, mine: npt.NDArray[np.float64]) -> tuple[float, ...]:
        """OSU's percentiles of the per-iteration means over ranks."""
        return self.percentiles_of(self.world.gather(mine).mean(axis=0)) if self.options.percentiles else ()

    def percentiles_of(self, values: npt.NDArray[np.float64]) -> tuple[float, ...]:
        """OSU's percentiles of values that every rank has."""
        return tuple(osu_percentile(values, p) for p in self.options.percentiles)
