"""Measures, for ``tune``, which way messages between devices are faster: direct, or by way of the host.

Ranks are alike whose devices are of one vendor; a pair of each two kinds is measured on one host and on two, wherever
its messages can go either way. The other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ..api.comm import Communicator
from ..device import Vector
from ..planner.rules import PairRule, best_of, spans
from ..transport.detours import Detours
from ..types import Transport

__all__ = ["PairFinding", "describe_pair", "described", "improvements", "measure_pairs", "pair_rules", "pairs_of"]

_ROUNDS = 7
#: Length of one sample at least, in seconds, and the most messages in it.
_SAMPLE, _MOST = 5e-4, 64


@dataclass(frozen=True, slots=True)
class PairFinding:
    """Seconds of a message of one size by each path, between two kinds of ranks; ``default`` goes without a table."""

    vendors: tuple[str, str]
    near: bool
    nbytes: int
    default: Transport
    seconds: dict[Transport, float]

    @property
    def best(self) -> Transport:
        """The faster path, or the default where none is clearly faster."""
        return best_of(self.seconds, self.default)


def measure_pairs(comm: Communicator, sizes: Sequence[int], tell: Callable[[PairFinding], None]) -> list[PairFinding]:
    """Measure a pair of every two kinds at every size; collective, and the same on every rank."""
    found = []
    for one, other in pairs_of(comm._messages.detours, comm.topology.hosts):
        for nbytes in sizes:
            found.append(_measure(comm, one, other, nbytes))
            tell(found[-1])
    return found


def pairs_of(detours: Detours, hosts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A pair of ranks for every two kinds that can reach each other either way, on one host and on two."""
    by_host: dict[int, dict[str, list[int]]] = {}  # host -> vendor -> its first two ranks there
    firsts: dict[str, list[int]] = {}  # vendor -> its first ranks on two hosts
    for rank, host in enumerate(hosts):
        (vendor, _), _ = detours.kind(rank, rank)
        alike = by_host.setdefault(host, {}).setdefault(vendor, [])
        if not alike and len(firsts.setdefault(vendor, [])) < 2:
            firsts[vendor].append(rank)
        alike += [rank][: 2 - len(alike)]
    near = (pair for there in by_host.values() for pair in combinations(sorted(chain(*there.values())), 2))
    far = combinations(sorted(chain(*firsts.values())), 2)
    seen = set()
    for one, other in chain(near, far):
        kind = detours.kind(one, other)
        if kind not in seen and detours.either(one, other):
            seen.add(kind)
            yield one, other


def _measure(comm: Communicator, one: int, other: int, nbytes: int) -> PairFinding:
    detours = comm._messages.detours
    vendors, near = detours.kind(one, other)
    vector = Vector(np.zeros(max(nbytes, 1), np.uint8), comm._run.members.runtime)
    times: dict[Transport, list[float]] = {Transport.DIRECT: [], Transport.STAGED: []}
    calls = dict.fromkeys(times, 1)
    try:
        for k in range(_ROUNDS + 2):
            for path in times:
                detours.forced = path
                took = _there_and_back(comm, one, other, vector, calls[path])
                if k > 1:
                    times[path].append(took)
                elif k == 1:  # the first one made what messages need
                    calls[path] = int(min(max(_SAMPLE / max(took, 1e-9), 1), _MOST))
    finally:
        detours.forced = None
        vector.close()
    return PairFinding(vendors, near, nbytes, detours.usual, {path: median(t) for path, t in times.items()})


def _there_and_back(comm: Communicator, one: int, other: int, vector: Vector, calls: int) -> float:
    """Seconds of one message, the same on every rank."""
    mpi = comm.mpi
    mpi.Barrier()
    start = perf_counter()
    if comm.rank in (one, other):
        peer = other if comm.rank == one else one
        for _ in range(calls):
            for sends in (comm.rank == one, comm.rank == other):
                if sends:
                    comm.Send(vector.buffer, dest=peer)
                else:
                    comm.Recv(vector.buffer, source=peer)
    return float(max(mpi.allgather((perf_counter() - start) / (2 * calls))))


def pair_rules(found: Sequence[PairFinding]) -> tuple[PairRule, ...]:
    """Rules for ranges of sizes that end halfway (geometrically) between sizes with different bests.

    There are none where the default was best, and none from twice the longest size on.
    """
    better = improvements(found, lambda one: (one.vendors, one.near))
    return tuple(PairRule(vendors, near, low, high, path) for (vendors, near), path, low, high in better)


def improvements(found: Sequence[Any], kind: Callable[[Any], Hashable]) -> Iterator[tuple[Any, Any, float, float]]:
    """(kind, best, from, up to bytes) of findings whose best is not their default, neighbours drawn together."""
    for each in dict.fromkeys(map(kind, found)):
        row = sorted((one for one in found if kind(one) == each), key=lambda one: one.nbytes)
        better = [None if one.best == one.default else one.best for one in row]
        yield from ((each, *span) for span in spans([one.nbytes for one in row], better))


def describe_pair(one: PairFinding) -> str:
    """One line: the best, and what each path took."""
    where = "one host" if one.near else "two hosts"
    return described(f"{one.vendors[0]}-{one.vendors[1]}, {where}", one, str)


def described(name: str, one: Any, choice: Callable[[Any], str]) -> str:
    """One line of a finding: the best, and what the first choices took."""
    times = sorted(one.seconds.items(), key=lambda item: item[1])[:6]
    mark = "=" if one.best == one.default else "!"
    parts = ", ".join(f"{choice(what)} {seconds * 1e6:.1f}" for what, seconds in times)
    return f"{name:<22}{one.nbytes:>12} {mark} {parts} us"
