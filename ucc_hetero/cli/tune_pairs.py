"""Measures, for ``tune``, which way messages between devices are faster: direct, or by way of the host.

Ranks are alike whose devices are of one vendor; a pair of each two kinds is measured on one host and on two, wherever
its messages can go either way. The other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from time import perf_counter

import numpy as np

from ..api.comm import Communicator
from ..device import Vector
from ..planner.rules import PairRule
from ..transport.paths import MessagePaths
from ..types import Transport
from .finding import Finding, improvements

_ROUNDS = 7
#: Length of one sample at least, in seconds, and the most messages in it.
_SAMPLE, _MOST = 5e-4, 64


def measure_pairs(comm: Communicator, sizes: Sequence[int], tell: Callable[[Finding], None]) -> list[Finding]:
    """Measure a pair of every two kinds at every size; collective, and the same on every rank."""
    found = []
    for one, other in pairs_of(comm._messages.paths, comm.topology.hosts):
        for nbytes in sizes:
            found.append(_measure(comm, one, other, nbytes))
            tell(found[-1])
    return found


def pairs_of(paths: MessagePaths, hosts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """A pair of ranks for every two kinds that can reach each other either way, on one host and on two."""
    by_host: dict[int, dict[str, list[int]]] = {}  # host -> vendor -> its first two ranks there
    firsts: dict[str, list[int]] = {}  # vendor -> its first ranks on two hosts
    for rank, host in enumerate(hosts):
        (vendor, _), _ = paths.kind(rank, rank)
        alike = by_host.setdefault(host, {}).setdefault(vendor, [])
        if not alike and len(firsts.setdefault(vendor, [])) < 2:
            firsts[vendor].append(rank)
        alike += [rank][: 2 - len(alike)]
    near = (pair for there in by_host.values() for pair in combinations(sorted(chain(*there.values())), 2))
    far = combinations(sorted(chain(*firsts.values())), 2)
    seen = set()
    for one, other in chain(near, far):
        kind = paths.kind(one, other)
        if kind not in seen and paths.either(one, other):
            seen.add(kind)
            yield one, other


def _measure(comm: Communicator, one: int, other: int, nbytes: int) -> Finding:
    paths = comm._messages.paths
    vendors, near = paths.kind(one, other)
    vector = Vector(np.zeros(max(nbytes, 1), np.uint8), comm._run.members.runtime)
    times: dict[Transport, list[float]] = {Transport.DIRECT: [], Transport.STAGED: []}
    calls = dict.fromkeys(times, 1)
    try:
        for k in range(_ROUNDS + 2):
            for path in times:
                paths.forced = path
                took = _there_and_back(comm, one, other, vector, calls[path])
                if k > 1:
                    times[path].append(took)
                elif k == 1:  # the first one made what messages need
                    calls[path] = int(min(max(_SAMPLE / max(took, 1e-9), 1), _MOST))
    finally:
        paths.forced = None
        vector.close()
    return Finding.of((vendors, near), nbytes, paths.usual, times)


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


def pair_rules(found: Sequence[Finding]) -> tuple[PairRule, ...]:
    """Rules for ranges of sizes that end halfway (geometrically) between sizes with different bests.

    There are none where the default was best, and none from twice the longest size on.
    """
    better = improvements(found)
    return tuple(PairRule(vendors, near, low, high, path) for (vendors, near), path, low, high in better)


def describe_pair(one: Finding) -> str:
    """One line: the best, and what each path took."""
    (one_vendor, other), near = one.kind
    return one.line(f"{one_vendor}-{other}, {'one host' if near else 'two hosts'}", str)
