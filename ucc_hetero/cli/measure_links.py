"""Links of a job, measured by its own ranks: inside an island, between islands, of hosts, in memory.

The numbers are those of the cost model: seconds for a message and seconds for a byte of it, both ways at once.
"""

from __future__ import annotations

from math import inf
from time import perf_counter

import numpy as np

from ..api.comm import Communicator
from ..planner.cost import Links
from ..planner.topology import Link, Topology

#: Rounds of every measurement, of which the best counts, and messages in a round of short ones.
_ROUNDS, _SHORT = 5, 16
_LONG = 8 << 20


def measure_links(comm: Communicator) -> Links:
    """Costs of the links of a communicator; collective, equal on every rank. Host memory, whatever the vendors."""
    topology = comm.topology
    native = _pair(comm, _inside(topology))
    bridge = _pair(comm, _between(topology)) or native
    local = _memory(comm)
    hosts: tuple[Link, ...] = ()
    if not topology.one_host:
        speeds = dict(zip(topology.hosts, link_speeds(comm), strict=True))
        alpha = bridge.alpha if bridge else 0.0
        hosts = tuple(Link(alpha, 1e-6 / speeds[host]) for host in range(len(speeds)))
    return Links(native or local, bridge or local, local, hosts)


def _inside(topology: Topology) -> tuple[int, ...]:
    """Two ranks of one island."""
    return next((island.ranks[:2] for island in topology.islands if island.size > 1), ())


def _between(topology: Topology) -> tuple[int, ...]:
    """Two ranks of different islands, on different hosts if there are any."""
    first = topology.islands[0].ranks[0]
    others = [island.ranks[0] for island in topology.islands[1:]]
    far = [rank for rank in others if topology.hosts[rank] != topology.hosts[first]]
    return (first, (far or others)[0]) if others else ()


def _pair(comm: Communicator, ranks: tuple[int, ...]) -> Link | None:
    """The cost of messages between two ranks; None where there are no two."""
    if not ranks:
        return None
    peers = dict(zip(ranks, ranks[::-1], strict=True))
    short = _exchange(comm, peers, 8, _SHORT)
    return Link(short, max(_exchange(comm, peers, _LONG) - short, 1e-9) / _LONG)


def _exchange(comm: Communicator, peers: dict[int, int], nbytes: int, times: int = 1) -> float:
    """Seconds of one exchange of so many bytes each way between all ``peers`` at a time, the same on every rank."""
    mpi, best = comm.mpi, inf
    out, into = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    for _ in range(_ROUNDS):
        mpi.Barrier()
        start = perf_counter()
        for _ in range(times if comm.rank in peers else 0):
            request = comm.Irecv(into, source=peers[comm.rank])
            comm.Send(out, dest=peers[comm.rank])
            request.Wait()
        best = min(best, max(mpi.allgather((perf_counter() - start) / times)))
    return best


def _memory(comm: Communicator) -> Link:
    """The cost of adding up in one rank's memory while all ranks do."""
    mpi, best = comm.mpi, inf
    one, other = np.zeros(_LONG // 4, np.float32), np.ones(_LONG // 4, np.float32)
    for _ in range(_ROUNDS):
        mpi.Barrier()
        start = perf_counter()
        np.add(one, other, out=one)
        best = min(best, max(mpi.allgather(perf_counter() - start)))
    return Link(1e-6, best / _LONG)


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
    each = _LONG // pairs
    return max(1, round(each * pairs / _exchange(comm, peers, each) / 1e6))


def describe(links: Links) -> list[str]:
    """A line for each kind of link."""
    rows = [("inside an island", links.native), ("between islands", links.bridge), ("adding in memory", links.local)]
    rows += [(f"host {i}'s links", link) for i, link in enumerate(links.hosts)]
    return [f"{name}: {link.alpha * 1e6:.1f} us, {8e-9 / link.beta:.3g} Gbit/s" for name, link in rows]
