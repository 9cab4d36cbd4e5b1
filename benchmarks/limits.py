"""``--limit``: for each size the minimum time, or maximum bandwidth, that the job's links allow.

The links are measured in the same job, with this package's messages and the MPI's; the faster counts. Only bounds that
hold for every algorithm and implementation are used, so the limit of small messages is one message's latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..planner.topology import ranks_by
from .links import Links, Traffic, best_bandwidth, latency, measure_links
from .onesided import regions
from .peers import open_peer
from .roofline import least_seconds
from .session import Session
from .world import NotOffered, Peer

#: Number of puts, of which the fastest counts.
_PUTS = 200


@dataclass(frozen=True, slots=True)
class Limit:
    """``of(size)``: µs or MB/s, as the benchmark's column; ``links``: what was measured, for result files."""

    of: Callable[[int], float]
    links: dict[str, Any]


def _message_peers(session: Session) -> tuple[list[Peer], list[Peer]]:
    """(peers to measure, those of them that were opened for it). MPI may not support device memory."""
    found = [peer for peer in session.peers.values() if peer.name in ("ours", "mpi4py", "nccl")]
    opened = []
    wanted = ["ours"] + ["mpi4py"] * (session.memory.accelerator == "host")
    for name in wanted:
        if name not in session.peers:
            try:
                opened.append(open_peer(name, session.world))
            except NotOffered:
                continue
    if not (found or opened):
        raise NotOffered("option --limit: neither this package's nor MPI's messages can carry this memory")
    return found + opened, opened


def _islands(peers: Sequence[Peer], session: Session) -> list[list[int]]:
    """The ranks of each island, from this package's topology; without it, the ranks of each node."""
    for peer in peers:
        if peer.name == "ours":
            return [list(island.ranks) for island in peer.comm.topology.islands]
    from mpi4py import MPI

    return list(ranks_by(session.world.comm.allgather(MPI.Get_processor_name())).values())


def open_limit(session: Session) -> Limit:
    """Measure the links that the benchmark uses. Collective. ``NotOffered`` if no peer can."""
    peers, opened = _message_peers(session)
    try:
        row = session.bench.collective
        return _messages(session, peers) if row is None else _collective(session, peers)
    finally:
        for peer in opened:
            peer.close()


def _put_seconds(session: Session, a: int, b: int) -> float:
    """Seconds until rank a knows that its one-byte put is in rank b's memory; equal on every rank."""
    from mpi4py import MPI

    world, best = session.world, float("inf")
    pair = world.comm.Split(0 if world.rank in (a, b) else MPI.UNDEFINED, world.rank)
    if pair != MPI.COMM_NULL:
        with regions(pair, session.memory, 1) as memory:
            for _ in range(_PUTS if world.rank == a else 0):
                start = perf_counter()
                memory.transfer("put", 0, 1)
                memory.flush()
                best = min(best, perf_counter() - start)
        pair.Free()
    return float(world.comm.bcast(best, a))


def _on_devices(session: Session) -> bool:
    return "host" not in session.world.comm.allgather(session.memory.accelerator)


def _quickest(session: Session, links: Links, islands: Sequence[Sequence[int]]) -> Links:
    """Use the latency of puts if all memory is on devices, where messages cost far more than the links do."""
    if not _on_devices(session):
        return links
    inside = next(((island[0], island[1]) for island in islands if len(island) > 1), None)
    if inside is not None:
        links = replace(links, latency=min(links.latency, _put_seconds(session, *inside)))
    if links.bridge_latency is not None:
        put = _put_seconds(session, islands[0][0], islands[1][0])
        links = replace(links, latency=min(links.latency, put), bridge_latency=min(links.bridge_latency, put))
    return links


def _collective(session: Session, peers: Sequence[Peer]) -> Limit:
    row = session.bench.collective
    assert row is not None
    islands = _islands(peers, session)
    links = _quickest(session, measure_links(peers, session.world, session.memory, islands), islands)
    kind, root = row.kind, session.options.root or 0

    def of(size: int) -> float:
        return least_seconds(kind, size, links, islands, root) * 1e6

    return Limit(of, links.data() | {"islands": islands})


def _traffic(session: Session) -> Traffic:
    """Messages that are under way at once."""
    pairs = session.options.pairs or session.world.size // 2
    forth = {rank: rank + pairs for rank in range(pairs)}
    both = session.bench.name.endswith("_bibw")
    return forth | {b: a for a, b in forth.items()} if both else forth


def _messages(session: Session, peers: Sequence[Peer]) -> Limit:
    """The limit for benchmarks between pairs of ranks."""
    world, memory, traffic = session.world, session.memory, _traffic(session)
    rate = best_bandwidth(peers, world, memory, traffic)
    total = rate * len(traffic)
    if session.bench.unit == "bandwidth":
        return Limit(lambda size: total / 1e6, {"all senders MB/s": total / 1e6})
    first = next(iter(traffic.items()))
    start = min(latency(peer, world, memory, *first) for peer in peers)
    if _on_devices(session):
        start = min(start, _put_seconds(session, *first))
    links = {"latency us": start * 1e6, "each sender MB/s": rate / 1e6}
    return Limit(lambda size: (start + size / rate) * 1e6, links)
