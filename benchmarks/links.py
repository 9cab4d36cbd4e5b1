"""Links between ranks: latency and bandwidth of pairs, one at a time and all at once.

Every peer that can send messages is measured, and the best result counts: the figures are limits for benchmarks, so
they are the fastest that was seen, not the typical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter
from typing import Any

import numpy as np

from .memory import Block, Memory
from .world import Peer, World

#: Message sizes, of which the fastest counts: host caches make short messages faster than long ones, while devices need
#: long ones to reach their rate.
_BYTES, _DEVICE_BYTES = (1 << 16, 1 << 19, 1 << 22), (1 << 22, 1 << 25, 1 << 28)
#: Minimum bytes per sample, maximum messages per sample, samples, and ping-pongs.
_SAMPLE, _MOST, _SAMPLES, _PINGS = 4 << 20, 32, 4, 200
#: Number of pairs inside and between islands that are measured.
_PAIRS = 4
_TAG = 77

#: Simultaneous messages: sender -> receiver.
Traffic = dict[int, int]


@dataclass(frozen=True, slots=True)
class Links:
    """Measured links: seconds and bytes per second, one way, equal on every rank.

    ``port``: maximum rate of a rank that sends and receives. ``cuts``: for each island the rate at which all its ranks
    together send to other islands while they receive as much; empty if there is one island, and then ``bridge_latency``
    is None.
    """

    latency: float
    bridge_latency: float | None
    port: float
    cuts: tuple[float, ...]

    def data(self) -> dict[str, Any]:
        """For result files: microseconds, and megabytes (10⁶) per second."""
        bridge = None if self.bridge_latency is None else self.bridge_latency * 1e6
        return {
            "latency us": self.latency * 1e6, "bridge latency us": bridge,
            "port MB/s": self.port / 1e6, "cuts MB/s": [cut / 1e6 for cut in self.cuts],
        }  # fmt: skip


def lengths(world: World, memory: Memory) -> tuple[int, ...]:
    """Message lengths in bytes for bandwidth. Collective: only long ones if all memory is on devices."""
    return _BYTES if "host" in world.comm.allgather(memory.accelerator) else _DEVICE_BYTES


def _blocks(memory: Memory, nbytes: int) -> tuple[Block, Block]:
    one, two = (memory.block(np.dtype(np.uint8), nbytes).head(nbytes) for _ in range(2))
    return one, two


def latency(peer: Peer, world: World, memory: Memory, a: int, b: int) -> float:
    """Seconds of one byte from rank a to rank b: half of the fastest round trip. Equal on every rank."""
    send, recv = _blocks(memory, 1)
    best = float("inf")
    if world.rank in (a, b):
        comm, other = peer.comm, a + b - world.rank
        for _ in range(_PINGS):
            start = perf_counter()
            if world.rank == a:
                comm.Send(send.array, other, _TAG)
                comm.Recv(recv.array, other, _TAG)
            else:
                comm.Recv(recv.array, other, _TAG)
                comm.Send(send.array, other, _TAG)
            best = min(best, perf_counter() - start)
    world.idle_barrier()
    return float(world.comm.bcast(best / 2, a))


def bandwidth(peer: Peer, world: World, memory: Memory, traffic: Traffic, nbytes: int) -> float:
    """Bytes per second of each sender of ``traffic`` when all send at once; the best sample."""
    to = traffic.get(world.rank)
    sources = [a for a, b in traffic.items() if b == world.rank]
    count = max(1, min(_MOST, _SAMPLE // nbytes))
    send, recv = _blocks(memory, nbytes)
    best = float("inf")
    for sample in range(_SAMPLES + 1):
        world.barrier()
        start = perf_counter()
        if to is not None or sources:
            requests = [peer.comm.Irecv(recv.array, a, _TAG) for a in sources for _ in range(count)]
            requests += [peer.comm.Isend(send.array, to, _TAG) for _ in range(count) if to is not None]
            peer.waitall(requests)
            spent = perf_counter() - start
        else:
            spent = 0.0
        world.idle_barrier()
        slowest = world.spread(spent)[2]
        if sample:  # the first sample makes connections
            best = min(best, slowest)
    return nbytes * count / best


def best_bandwidth(peers: Sequence[Peer], world: World, memory: Memory, traffic: Traffic) -> float:
    """Bytes per second of each sender, by the fastest peer at its fastest size; 0 without senders."""
    if not traffic:
        return 0.0
    sizes = lengths(world, memory)
    return max(bandwidth(peer, world, memory, traffic, nbytes) for peer in peers for nbytes in sizes)


def _some(pairs: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """A few of many pairs, evenly spread."""
    everything = list(pairs)
    step = max(1, len(everything) // _PAIRS)
    return everything[::step][:_PAIRS]


def _inside(islands: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return _some(pair for island in islands for pair in combinations(island, 2))


def _between(islands: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return _some((a, b) for one, two in combinations(islands, 2) for a, b in zip(one, two, strict=False))


def _cut(island: Sequence[int], ranks: int) -> Traffic:
    """Pair each rank of an island with one outside, both ways, until there are none left outside."""
    outside = [rank for rank in range(ranks) if rank not in set(island)]
    pairs = list(zip(island, outside, strict=False))
    return dict(pairs) | {b: a for a, b in pairs}


def _rings(islands: Sequence[Sequence[int]]) -> Traffic:
    """Each rank of every island sends to the next one in it."""
    return {
        a: b for island in islands if len(island) > 1 for a, b in zip(island, [*island[1:], island[0]], strict=True)
    }


def measure_links(peers: Sequence[Peer], world: World, memory: Memory, islands: Sequence[Sequence[int]]) -> Links:
    """Measure a job's links. Collective; takes some hundred milliseconds or more. ``islands``: ranks of each."""
    inside, between = _inside(islands), _between(islands)
    alone = [best_bandwidth(peers, world, memory, {a: b}) for a, b in inside + between]
    duplex = [best_bandwidth(peers, world, memory, {a: b, b: a}) for a, b in (inside + between)[:1]]
    rings = best_bandwidth(peers, world, memory, _rings(islands))
    latencies = {pair: min(latency(peer, world, memory, *pair) for peer in peers) for pair in inside + between}
    cuts = []
    if len(islands) > 1:
        crossing = max(alone[len(inside) :])
        for island in islands:
            traffic = _cut(island, world.size)
            cuts.append(max(crossing, best_bandwidth(peers, world, memory, traffic) * len(traffic) / 2))
    return Links(
        latency=min(latencies.values()),
        bridge_latency=min(latencies[pair] for pair in between) if between else None,
        port=max(*alone, *duplex, rings),
        cuts=tuple(cuts),
    )
