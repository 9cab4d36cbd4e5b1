"""``python -m ucc_hetero tune``: a job's own ranks measure what runs fastest, and rank 0 writes it for later jobs.

Measured are the islands of a vendor's ranks on several hosts, the algorithms of collectives, and what each host's links
carry. What is clearly faster than the usual
choice becomes a rule (UCCH_TUNE_FILE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import numpy as np

from .. import env
from ..api.comm import Communicator, runner_of
from ..bootstrap.fabrics import layout_of
from ..device import Vector
from ..planner.collectives import ROWS, elements, recv_length, send_length
from ..planner.rules import Layout, Measured, Rule, save_fabric, save_table
from ..planner.select import Choice, Tuning, candidates, choose, example_call
from ..planner.topology import Topology, link_weights
from .finding import Finding, improvements
from .plan import short_name

#: Collectives with counts that a size alone gives.
MEASURABLE = tuple(name for name, row in ROWS.items() if row.layout in ("none", "vector", "equal"))
#: Candidates slower than the best by this factor after the first round are measured no further.
_HOPELESS = 1.5
#: Samples of a choice, seconds that one should take, and the most calls in it.
_ROUNDS, _SECONDS, _MOST = 5, 1e-3, 4096
#: Samples, each as long as the one before asks for, until they are as long as they should be.
_TRIES = 4
#: Seconds of a sample between hosts: short ones are as long as what carries them lasts.
_WIRES_SECONDS = 2e-3
#: Bytes by which links are measured.
_LONG = 8 << 20


class Trial:
    """A call that all ranks make again and again, timed. Collective to use.

    Args:
        comm: the communicator.
        call: one call.
        seconds: what a sample should take; as links can carry more than their rate for a moment (buckets, buffers), it
            must be longer.
    """

    def __init__(self, comm: Communicator, call: Callable[[], None], seconds: float = _SECONDS) -> None:
        self.mpi: Any = comm.mpi
        self.call, self.seconds = call, seconds
        #: Calls in a sample, which ``warm`` chooses.
        self.calls = 1

    def warm(self) -> None:
        """Make what the first calls make, and choose how many calls are a sample."""
        self.call()
        self.calls = 1
        for _ in range(_TRIES):
            took = self.sample()
            before, self.calls = self.calls, int(min(max(self.seconds / max(took, 1e-9), 1), _MOST))
            if self.calls <= 2 * before:  # a single call after a barrier looks longer than it is
                break

    def sample(self) -> float:
        """Seconds of one call, on the slowest rank, the same on every rank."""
        self.mpi.Barrier()
        start = perf_counter()
        for _ in range(self.calls):
            self.call()
        return float(max(self.mpi.allgather((perf_counter() - start) / self.calls)))


class _Example:
    """``nbytes`` of float32 for a collective, in the memory of the rank's device where it has one.

    ``ValueError`` for a collective with counts per rank.
    """

    def __init__(self, comm: Communicator, collective: str, nbytes: int) -> None:
        if collective not in MEASURABLE:
            raise ValueError(f"{collective} cannot be run by its size alone; these can: {', '.join(MEASURABLE)}")
        self.comm, self.collective = comm, collective
        call = example_call(comm.topology, collective, nbytes // 4)
        self.root = root = call.root
        send, recv = (f(call, comm.rank) for f in (send_length, recv_length))
        one = collective == "bcast"  # in one buffer
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
        """One call."""
        runner_of(self.comm).blocking(self.collective, self._send, self._recv, None, self.root)

    def close(self) -> None:
        """Give the memory back."""
        for vector in self._vectors:
            vector.close()


def sampled(comm: Communicator, collective: str, nbytes: int, wanted: Choice | None, samples: int) -> list[float]:
    """Seconds of a collective by its usual choice, or the ``wanted`` one; the same on every rank."""
    if wanted:
        runner_of(comm).retune(_forced(wanted, collective))
    example = _Example(comm, collective, nbytes)
    trial = Trial(comm, example.call)
    trial.warm()
    took = [trial.sample() for _ in range(samples)]
    example.close()
    return took


# --- islands by fabric ------------------------------------------------------------------------------------------------


def measure_fabric(
    comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], tell: Callable[[str], None]
) -> Finding | None:
    """Measure which islands of a vendor's ranks are faster, each host or all hosts; the same on every rank.

    Each kind has a communicator of its own (UCCH_FABRIC), which take turns at every call. A sample of the whole is the
    geometric mean of a round's calls, so that long ones do not outweigh short ones.

    Returns:
        Seconds of ``host`` and ``all``, and of ``auto`` where that is neither. None where the user has decided, no
        vendor has devices on several hosts, or streams cannot do calls between hosts.
    """
    facts = runner_of(comm).members.facts
    if not layout_of(facts).rdma or not all(each.device_memory for each in facts):
        return None
    if any(each.fabric.wanted != "auto" for each in facts):
        tell("# fabric: not measured, as UCCH_FABRIC decides")
        return None
    with _with_fabric(comm, "host") as apart, _with_fabric(comm, "all") as joined:
        if runner_of(apart).members.channels is None:
            tell(f"# fabric: not measured, as streams cannot do calls between hosts ({runner_of(apart).members.lacks})")
            return None
        sides = {"host": apart, "all": joined}
        if comm.topology.islands not in (apart.topology.islands, joined.topology.islands):
            sides["auto"] = comm  # some hosts have RDMA, others not
        found = []
        for name in collectives:
            for nbytes in sizes if name != "barrier" else [0]:
                found.append(_measure_sides(sides, name, nbytes))
                tell(without_default(found[-1], nbytes).line(f"fabric, {name}", str))
    rounds = {side: [geometric_mean(call[side][turn] for call in found) for turn in range(_ROUNDS)] for side in sides}
    whole = without_default(rounds, 0)
    tell(whole.line("fabric", str))
    return whole


def without_default(samples: Mapping[str, Sequence[float]], nbytes: int) -> Finding:
    """Finding whose default is the runner-up: its best is another one if that is clearly faster than all others."""
    return Finding.of("fabric", nbytes, sorted(samples, key=lambda side: median(samples[side]))[1], samples)


def clearly(fabric: Finding | None) -> str:
    """Value of UCCH_FABRIC for a table; empty where none is clearly faster, or what ``auto`` does by itself."""
    return "" if fabric is None or fabric.best in (fabric.default, "auto") else str(fabric.best)


@contextmanager
def _with_fabric(comm: Communicator, word: str) -> Iterator[Communicator]:
    """Communicator of the same ranks with other islands; so are those that are made meanwhile."""
    with env.meanwhile({"UCCH_FABRIC": word}), Communicator(comm.mpi) as one:
        yield one


def _measure_sides(sides: Mapping[str, Communicator], collective: str, nbytes: int) -> dict[str, list[float]]:
    """Samples of one call in each communicator, in turns."""
    examples = {side: _Example(one, collective, nbytes) for side, one in sides.items()}
    trials = {side: Trial(sides[side], example.call, _WIRES_SECONDS) for side, example in examples.items()}
    for trial in trials.values():
        trial.warm()
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(_ROUNDS):
        for side in sorted(sides, reverse=bool(turn % 2)):
            samples[side].append(trials[side].sample())
    for example in examples.values():
        example.close()
    return samples


# --- collectives ------------------------------------------------------------------------------------------------------


def _forced(choice: Choice, collective: str) -> Tuning:
    """A tuning that makes a collective run as ``choice`` says."""
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
                tell(found[-1].line(collective, short_name))
    finally:
        runner_of(comm).retune(before)
    return found


def measure(comm: Communicator, collective: str, nbytes: int, tuning: Tuning) -> Finding:
    """Seconds of every candidate at one size; the default is what ``tuning`` chooses. Leaves another tuning behind."""
    topology, run = comm.topology, runner_of(comm)
    total = elements(example_call(topology, collective, nbytes // 4)) * 4
    default = choose(topology, collective, total, tuning)
    example = _Example(comm, collective, nbytes)
    times: dict[Choice, list[float]] = {default: []}
    times |= {choice._replace(queued=default.queued): [] for choice in candidates(topology, collective, total)}
    trials = {choice: Trial(comm, example.call) for choice in times}
    for choice in times:
        run.retune(_forced(choice, collective))
        trials[choice].warm()
        times[choice].append(trials[choice].sample())
    # All ranks know the same times, so all measure the same candidates on.
    best = min(min(t) for t in times.values())
    hopeful = [c for c, t in times.items() if c == default or t[0] < _HOPELESS * best]
    for turn in range(1, _ROUNDS):
        # Each in another place of a round: what comes before it is not always the same.
        for choice in hopeful[turn % len(hopeful) :] + hopeful[: turn % len(hopeful)]:
            run.retune(_forced(choice, collective))
            example.call()
            times[choice].append(trials[choice].sample())
    example.close()
    return Finding.of(collective, total, default, times)


def rules_of(found: Sequence[Finding]) -> tuple[Rule, ...]:
    """Rules for ranges of sizes, which end halfway (geometrically) between sizes with different bests.

    There are none for sizes where the default was best, so that they follow what later versions know better, and none
    from twice the longest size on.
    """
    return tuple(Rule(name, low, high, best.algorithm, best.fragments) for name, best, low, high in improvements(found))


# --- links of hosts ---------------------------------------------------------------------------------------------------


def link_speeds(comm: Communicator) -> list[int]:
    """MB/s of the links of each rank's host, measured between neighbouring hosts; collective, equal on every rank.

    All ranks of a host send at once, so that several ports count together. A pair of hosts shows its slower one, so a
    host's own speed is the better of its two pairs.
    """
    hosts = max(comm.topology.hosts) + 1
    if hosts == 1:
        return [0] * comm.size
    pairs = [_pair_speed(comm, host, (host + 1) % hosts) for host in range(hosts)]
    own = [max(pairs[host], pairs[host - 1]) for host in range(hosts)]
    return [own[host] for host in comm.topology.hosts]


def _pair_speed(comm: Communicator, one: int, other: int) -> int:
    """MB/s between two hosts, both ways at once, over as many pairs of ranks as there are; equal on every rank."""
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


# --- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tuned:
    """Everything that was measured on a communicator."""

    #: Ranks of the job, and the islands with which all but ``fabric`` was measured.
    layout: Layout
    bare: Topology
    #: Which islands are faster; None: not measured.
    fabric: Finding | None
    speeds: list[int]
    collectives: list[Finding]

    @property
    def doubtful(self) -> int:
        """Sizes that have no rule although something was faster: by no more than noise."""
        return sum(one.doubtful for one in (self.fabric, *self.collectives) if one)

    def save(self, path: str | Path, rank: int) -> int:
        """Write the table on rank 0; returns the number of rules."""
        rules, word = rules_of(self.collectives), clearly(self.fabric)
        if rank == 0:
            weights = link_weights(self.bare.hosts, self.speeds)
            # Measuring them makes some difference of its own.
            clear = weights if weights and max(weights) > 1.25 * min(weights) else ()
            save_table(path, self.bare, Measured(rules, clear))
            if self.fabric:
                save_fabric(path, self.layout, word)
        return len(rules) + bool(word)


def tune(comm: Communicator, collectives: Sequence[str], sizes: Sequence[int], tell: Callable[[str], None]) -> Tuned:
    """Measure everything; collective, and the same on every rank. ``tell`` is given a line about each finding.

    Rules go by islands, so the faster islands are found first, and the rest is measured with these.
    """
    fabric = measure_fabric(comm, collectives, sizes, tell)
    word = clearly(fabric)
    with _with_fabric(comm, word) if word else nullcontext(comm) as one:
        speeds = link_speeds(one)
        for host in range(max(one.topology.hosts) + 1) if any(speeds) else ():
            tell(f"# host {host}'s links: {speeds[one.topology.hosts.index(host)] * 8e-3:.3g} Gbit/s")
        return Tuned(
            layout_of(runner_of(comm).members.facts),
            runner_of(one).members.bare,
            fabric,
            speeds,
            measure_collectives(one, collectives, sizes, tell),
        )
