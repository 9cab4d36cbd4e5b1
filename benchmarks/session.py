"""What the timed loops share: the job, the options, the memory, the peers, and where rows go."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np
import numpy.typing as npt

from .files import Results
from .memory import Memory
from .options import Options
from .peers import Peer, World
from .stats import osu_percentile
from .table import Bench
from .validate import Log

__all__ = ["Progress", "Session"]


class Progress:
    """One line on stderr of rank 0 if that is a terminal; otherwise nothing."""

    def __init__(self, wanted: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on = wanted and self._stream.isatty()

    def show(self, text: str) -> None:
        if self._on:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def clear(self) -> None:
        self.show("")


@dataclass(slots=True)
class Session:
    """What the timed loops need: who measures what, with which options, in which memory."""

    bench: Bench
    options: Options
    world: World
    memory: Memory
    peers: dict[str, Peer]
    progress: Progress
    results: Results
    log: Log | None = None
    samples: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)

    @property
    def peer(self) -> Peer:
        """The one that the stock columns describe."""
        return self.peers[self.options.backend]

    def print(self, text: str) -> None:
        """Write to the table: rank 0's stdout."""
        if self.world.rank == 0:
            self.progress.clear()
            sys.stdout.write(text)
            sys.stdout.flush()

    def percentiles(self, mine: npt.NDArray[np.float64], ranks: int | None = None) -> tuple[float, ...]:
        """OSU's percentiles of the per-iteration means over ranks (``ranks``: only the first so many)."""
        if not self.options.percentiles:
            return ()
        means = self.world.gather(mine)[:ranks].mean(axis=0)
        return tuple(osu_percentile(means, p) for p in self.options.percentiles)
