"""The part of ``python tools/bench_cluster.py`` that runs on the ranks: every peer in turn, call by call.

Reads a list of tests as JSON, writes one of results. A sample is the slowest rank's time, after a barrier, of one long
call or the mean of back-to-back short ones, which follow as many untimed ones: what the peer before has left to do, in
threads and buffers, is not this one's. For the same reason every round has an order of its own. Results are checked
against numpy before anything is timed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ucc_hetero.bench.cases import Case, Pool, in_place_only, longest
from ucc_hetero.bench.memory import open_memory
from ucc_hetero.bench.peers import open_peer
from ucc_hetero.bench.table import COLLECTIVES
from ucc_hetero.bench.validate import proven_call
from ucc_hetero.bench.world import NotOffered, Peer, World, open_world, prepare
from ucc_hetero.cli.tune import measure

#: Length of one sample, in seconds, and the most calls in it; of calls below the limit, in seconds, at least a few: one
#: that follows a barrier also waits for the rank that leaves the barrier last.
_SAMPLE_SECONDS, _MOST_CALLS = 5e-3, 200
_SHORT_CALL, _FEW_CALLS = 10e-3, 8
#: Untimed samples before the first one, at least and at most, each as long as the one before asks for: connections are
#: made, pages touched, TCP's windows opened.
_WARM, _WARMEST = 2, 5
#: Samples that every peer gets, however slow, and the most that are taken.
_LEAST, _MOST = 2, 40
#: Rounds in which every algorithm has its turn where choices are judged, and what a sample takes there: many times what
#: an emulated link's bucket holds, which lets half a megabyte pass at the speed of memory.
_SELECTION_ROUNDS, _SELECTION_SECONDS = 7, 20e-3


class _Runner:
    """One peer's call of one test."""

    def __init__(self, peer: Peer, call: Callable[[], Any]) -> None:
        self.peer, self.call = peer, call
        self.calls, self.spent = 1, 0.0
        self.samples: list[float] = []

    def sample(self, world: World) -> float:
        """Seconds per call of the slowest rank."""
        for _ in range(self.calls if self.calls > 1 else 0):
            self.call()
        world.barrier()
        start = perf_counter()
        for _ in range(self.calls):
            self.call()
        mine = (perf_counter() - start) / self.calls
        slowest = world.spread(mine)[2]
        self.spent += slowest * self.calls
        return slowest


def _ready(peer: Peer, case: Case, pool: Pool, world: World) -> _Runner:
    """Bind a call, prove once that it gives the right answer, warm up and choose how many calls make a sample."""
    runner = _Runner(peer, proven_call(peer, case, np.dtype(np.float32), pool, world).run)
    for turn in range(_WARMEST):
        before, runner.calls = runner.calls, calls_of(runner.sample(world))
        if turn >= _WARM - 1 and runner.calls <= 2 * before:
            break
    return runner


def calls_of(took: float) -> int:
    """How many calls of so many seconds make a sample."""
    return int(min(max(_SAMPLE_SECONDS / max(took, 1e-9), _FEW_CALLS if took < _SHORT_CALL else 1), _MOST_CALLS))


def _measure(test: dict[str, Any], peers: Sequence[Peer], world: World) -> dict[str, Any]:
    """Samples of every peer, in turn, until each has had its share of the test's seconds."""
    row = COLLECTIVES[test["collective"]]
    count = int(test["count"])
    # torch.distributed reduces in place only: then all do, where it takes part.
    in_place = any(in_place_only(peer, row) for peer in peers)
    case = Case(row, world.rank, world.size, count, 0, in_place)
    pool = Pool(open_memory("host", "numpy", 0), np.dtype(np.float32), longest(row, count, world.size))
    runners, missing = [], {}
    for peer in peers:
        try:
            runners.append(_ready(peer, case, pool, world))
        except NotOffered as why:
            missing[peer.name] = str(why)
    share = float(test["seconds"]) / max(len(runners), 1)
    order = random.Random(0)  # the same on every rank
    while True:
        # All ranks know the same times, so all leave the loop together.
        due = [r for r in runners if len(r.samples) < _LEAST or (r.spent < share and len(r.samples) < _MOST)]
        if not due:
            break
        order.shuffle(due)
        for runner in due:
            runner.samples.append(runner.sample(world))
    return {
        **test,
        "missing": missing,
        "series": {r.peer.name: {"calls": r.calls, "seconds": r.samples} for r in runners},
    }


def _selected(test: dict[str, Any], ours: Peer) -> dict[str, Any]:
    """The choice against everything that could be chosen: the limit is the fastest candidate's median."""
    run = ours.comm._run
    before = run.members.tuning
    found = measure(
        ours.comm, test["collective"], test["nbytes"], before, _SELECTION_ROUNDS, seconds=_SELECTION_SECONDS
    )
    run.retune(before)
    return {
        **test,
        "missing": {},
        "chosen": list(found.default),
        "limit": min(found.seconds.values()),
        "candidates": [[*choice, seconds] for choice, seconds in found.seconds.items()],
        "series": {ours.name: {"calls": 1, "seconds": [found.seconds[found.default]]}},
    }


def main(words: Sequence[str]) -> int:
    """``SPEC RESULT``: run the tests of one file, write the other from rank 0."""
    spec = json.loads(Path(words[0]).read_text())
    prepare(spec["peers"])
    world = open_world()
    peers = [open_peer(name, world) for name in spec["peers"]]
    rows = [_selected(t, peers[0]) if "selection" in t else _measure(t, peers, world) for t in spec["tests"]]
    plans = getattr(peers[0].comm, "plan_summary", lambda: "")()
    if world.rank == 0:
        Path(words[1]).write_text(json.dumps({"rows": rows, "plans": plans}))
    for peer in reversed(peers):
        peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
