"""``python -m ucc_hetero tune``: measures algorithms on a job's own ranks, and writes the fastest for later jobs.

It measures the algorithms of collectives, and the speed of each host's links. An algorithm that is clearly faster than
the default becomes a rule (UCCH_TUNE_FILE).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np

from ..api.comm import Communicator, runner_of
from ..device import Vector
from ..planner.collectives import ROWS, elements, recv_length, send_length
from ..planner.rules import Measured, Rule, save_table
from ..planner.select import Choice, Tuning, candidates, choose, example_call
from ..planner.topology import Topology, link_weights
from .plan import short_name

#: A candidate must take less than this share of the default's time; less gain counts as noise.
_GAIN = 0.95


@dataclass(frozen=True, slots=True)
class Finding:
    """Seconds of each choice for a collective. ``noise``: width of the middle half of its samples."""

    collective: str
    nbytes: int
    default: Choice
    seconds: Mapping[Choice, float]
    noise: Mapping[Choice, float] = field(default_factory=dict)

    @classmethod
    def of(cls, collective: str, nbytes: int, default: Choice, samples: Mapping[Choice, Sequence[float]]) -> Finding:
        """Summarise the samples of each choice, in seconds: medians, and their spread."""
        noise = {}
        for choice, times in samples.items():
            low, _, high = quantiles(times, method="inclusive") if len(times) > 1 else (0.0, 0.0, 0.0)
            noise[choice] = high - low
        return cls(collective, nbytes, default, {choice: median(times) for choice, times in samples.items()}, noise)

    @property
    def best(self) -> Choice:
        """The fastest choice that beats the default by more than both choices' noise; otherwise the default."""
        usual, noise = self.seconds[self.default], self.noise.get
        clear = {
            choice: seconds
            for choice, seconds in self.seconds.items()
            if choice == self.default or usual - seconds > noise(choice, 0.0) + noise(self.default, 0.0)
        }
        return self._fastest(clear)

    def _fastest(self, seconds: Mapping[Choice, float]) -> Choice:
        """The fastest of these choices; the default if none is clearly faster."""
        fastest = min(seconds, key=seconds.__getitem__)
        return fastest if seconds[fastest] < _GAIN * seconds[self.default] else self.default

    @property
    def doubtful(self) -> bool:
        """True if a choice was faster than the default, but by no more than the noise."""
        return self.best == self.default != self._fastest(self.seconds)

    def line(self) -> str:
        """A line with the best choice, and the times of the first few."""
        times = sorted(self.seconds.items(), key=lambda item: item[1])[:6]
        mark = "?" if self.doubtful else "=" if self.best == self.default else "!"
        parts = ", ".join(f"{short_name(what)} {seconds * 1e6:.1f}" for what, seconds in times)
        return f"{self.collective:<22}{self.nbytes:>12} {mark} {parts} us"


def rules_of(found: Sequence[Finding]) -> tuple[Rule, ...]:
    """Rules for ranges of sizes. A range ends at the geometric mean of two sizes with different best choices.

    No rules are made where the default was best, so that improvements of later versions apply, and none from twice the
    longest size on.
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


#: Collectives whose counts follow from a size.
MEASURABLE = tuple(name for name, row in ROWS.items() if row.layout in ("none", "vector", "equal"))
#: Candidates that are this much slower than the best in the first round are dropped.
_HOPELESS = 1.5
#: Samples of a choice, seconds per sample, and maximum calls per sample.
_ROUNDS, _SECONDS, _MOST = 5, 1e-3, 4096
#: Attempts to find the number of calls for a sample of that length.
_TRIES = 4
#: Bytes per message when links are measured.
_LONG = 8 << 20


class Trial:
    """A call that all ranks repeat and time. All methods are collective."""

    def __init__(self, comm: Communicator, call: Callable[[], None]) -> None:
        self.mpi: Any = comm.mpi
        self.call = call
        #: Calls in a sample; set by ``warm``.
        self.calls = 1

    def warm(self) -> None:
        """Do what only first calls need, and choose the number of calls in a sample."""
        self.call()
        self.calls = 1
        for _ in range(_TRIES):
            took = self.sample()
            before, self.calls = self.calls, int(min(max(_SECONDS / max(took, 1e-9), 1), _MOST))
            if self.calls <= 2 * before:  # a single call after a barrier takes longer than the average
                break

    def sample(self) -> float:
        """Seconds of one call on the slowest rank; equal on every rank."""
        self.mpi.Barrier()
        start = perf_counter()
        for _ in range(self.calls):
            self.call()
        return float(max(self.mpi.allgather((perf_counter() - start) / self.calls)))


class _Example:
    """``nbytes`` of float32 for a collective, on the rank's device if it has one."""

    def __init__(self, comm: Communicator, collective: str, nbytes: int) -> None:
        if collective not in MEASURABLE:
            raise ValueError(f"{collective} cannot be run by its size alone; these can: {', '.join(MEASURABLE)}")
        self.comm, self.collective = comm, collective
        call = example_call(comm.topology, collective, nbytes // 4)
        self.root = root = call.root
        send, recv = (f(call, comm.rank) for f in (send_length, recv_length))
        one = collective == "bcast"  # send and receive buffer are one
        self._vectors = [
            Vector(np.ones(n, np.float32), runner_of(comm).members.runtime) for n in (send, one * send or recv)
        ]
        self._send: Any = self._vectors[0].buffer
        self._recv: Any = self._vectors[1].buffer
        if collective in ("barrier", "bcast") or (collective == "scatter" and comm.rank != root):
            self._send = None
        if collective == "barrier" or (root >= 0 and comm.rank != root and collective not in ("bcast", "scatter")):
            self._recv = None

    def call(self) -> None:
        runner_of(self.comm).blocking(self.collective, self._send, self._recv, None, self.root)

    def close(self) -> None:
        for vector in self._vectors:
            vector.close()


def sampled(comm: Communicator, collective: str, nbytes: int, wanted: Choice | None, samples: int) -> list[float]:
    """Times of a collective with its default choice, or with ``wanted``, in seconds; equal on every rank."""
    if wanted:
        runner_of(comm).retune(_forced(wanted, collective))
    example = _Example(comm, collective, nbytes)
    trial = Trial(comm, example.call)
    trial.warm()
    took = [trial.sample() for _ in range(samples)]
    example.close()
    return took


def _forced(choice: Choice, collective: str) -> Tuning:
    """A tuning that forces ``choice`` for a collective."""
    return Tuning((Rule(collective, 0, inf, choice.algorithm, choice.fragments),))


def measure_collectives(
    comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], tell: Callable[[str], None]
) -> list[Finding]:
    """Measure every candidate of every collective and size; ``tell`` is given a line about each size."""
    before, found = runner_of(comm).members.tuning, []
    bare = replace(before, user=(), measured=())
    try:
        for collective in collectives:
            for nbytes in sizes if collective != "barrier" else [0]:
                found.append(measure(comm, collective, nbytes, bare))
                tell(found[-1].line())
    finally:
        runner_of(comm).retune(before)
    return found


def measure(comm: Communicator, collective: str, nbytes: int, tuning: Tuning) -> Finding:
    """Measure every candidate at one size. The default is what ``tuning`` chooses. Changes the communicator's
    tuning."""
    topology, runner = comm.topology, runner_of(comm)
    total = elements(example_call(topology, collective, nbytes // 4)) * 4
    default = choose(topology, collective, total, tuning)
    example = _Example(comm, collective, nbytes)
    times: dict[Choice, list[float]] = {default: []}
    times |= {choice._replace(queued=default.queued): [] for choice in candidates(topology, collective, total)}
    trials = {choice: Trial(comm, example.call) for choice in times}
    for choice in times:
        runner.retune(_forced(choice, collective))
        trials[choice].warm()
        times[choice].append(trials[choice].sample())
    # Times are equal on all ranks, so all go on with the same candidates.
    best = min(min(t) for t in times.values())
    hopeful = [c for c, t in times.items() if c == default or t[0] < _HOPELESS * best]
    for turn in range(1, _ROUNDS):
        # Rotate the order: what runs before a candidate should not always be the same.
        for choice in hopeful[turn % len(hopeful) :] + hopeful[: turn % len(hopeful)]:
            runner.retune(_forced(choice, collective))
            example.call()
            times[choice].append(trials[choice].sample())
    example.close()
    return Finding.of(collective, total, default, times)


def link_speeds(comm: Communicator) -> list[int]:
    """MB/s of each rank's host links, measured between neighbouring hosts. Collective; equal on every rank.

    All ranks of a host send at once, so that several ports count together. A pair of hosts shows the slower one's
    speed, so a host's own is the maximum of its two pairs.
    """
    hosts = max(comm.topology.hosts) + 1
    if hosts == 1:
        return [0] * comm.size
    pairs = [_pair_speed(comm, host, (host + 1) % hosts) for host in range(hosts)]
    own = [max(pairs[host], pairs[host - 1]) for host in range(hosts)]
    return [own[host] for host in comm.topology.hosts]


def _pair_speed(comm: Communicator, one: int, other: int) -> int:
    """MB/s between two hosts, both ways at once, over as many pairs of ranks as possible; equal on every rank."""
    sides = [[rank for rank, host in enumerate(comm.topology.hosts) if host == side] for side in (one, other)]
    peers = {a: b for pair in zip(*sides, strict=False) for a, b in (pair, pair[::-1])}
    pairs = len(peers) // 2
    out, into = np.zeros(_LONG // pairs, np.uint8), np.zeros(_LONG // pairs, np.uint8)

    def exchange() -> None:
        if comm.rank in peers:
            request = comm.Irecv(into, source=peers[comm.rank])
            comm.Send(out, dest=peers[comm.rank])
            request.Wait()

    trial = Trial(comm, exchange)
    return max(1, round(out.size * pairs / min(trial.sample() for _ in range(_ROUNDS)) / 1e6))


@dataclass(frozen=True, slots=True)
class Tuned:
    """All measurements on a communicator."""

    #: The topology at the time of the measurement.
    bare: Topology
    speeds: list[int]
    collectives: list[Finding]

    @property
    def doubtful(self) -> int:
        """Number of sizes without a rule although a choice was faster, by no more than noise."""
        return sum(one.doubtful for one in self.collectives)

    def save(self, path: str | Path, rank: int) -> int:
        """Write the table on rank 0. Returns the number of rules."""
        rules = rules_of(self.collectives)
        if rank == 0:
            weights = link_weights(self.bare.hosts, self.speeds)
            # Differences below this are measurement errors.
            clear = weights if weights and max(weights) > 1.25 * min(weights) else ()
            save_table(path, self.bare, Measured(rules, clear))
        return len(rules)


def tune(comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], tell: Callable[[str], None]) -> Tuned:
    """Measure everything; collective, and the same on every rank. ``tell`` is given a line about each finding."""
    speeds = link_speeds(comm)
    for host in range(max(comm.topology.hosts) + 1) if any(speeds) else ():
        tell(f"# host {host}'s links: {speeds[comm.topology.hosts.index(host)] * 8e-3:.3g} Gbit/s")
    return Tuned(runner_of(comm).members.bare, speeds, measure_collectives(comm, collectives, sizes, tell))
