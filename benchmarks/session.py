"""State shared by the timed loops: job, options, memory and peers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .memory import Memory
from .options import Options
from .stats import Floats, osu_percentile
from .table import Bench
from .world import Peer, World


@dataclass(slots=True)
class Session:
    """State of the timed loops."""

    bench: Bench
    options: Options
    world: World
    memory: Memory
    peers: dict[str, Peer]
    _plans: dict[str, str] = field(default_factory=dict)

    @property
    def peer(self) -> Peer:
        return self.peers[self.options.backend]

    def plan(self) -> str | None:
        """The plan of the calls since the last query, if the peer is ``ours``; else None."""
        summary = getattr(self.peer.comm, "plan_summary", None)
        if self.peer.name != "ours" or summary is None:
            return None
        known, self._plans = self._plans, dict(line.split(": ", 1) for line in summary().splitlines()[1:])
        self._plans.pop("rings", None)
        new = [plan for label, plan in self._plans.items() if label not in known]
        # Nothing new: this row's calls used the plan of the row before.
        return new[-1] if new else next(reversed(self._plans.values()), None)

    def percentiles(self, mine: Floats) -> tuple[float, ...]:
        """OSU's percentiles of the per-iteration means over ranks."""
        return self.percentiles_of(self.world.gather(mine).mean(axis=0)) if self.options.percentiles else ()

    def percentiles_of(self, values: Floats) -> tuple[float, ...]:
        """OSU's percentiles of values that every rank has."""
        return tuple(osu_percentile(values, p) for p in self.options.percentiles)
