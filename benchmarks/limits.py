"""``--limit``: for each size of a benchmark the least time, or the most bandwidth, that the job's links allow.

The links are measured in the same run, with the messages of ours and of the MPI in use, whichever is faster. Only what
holds for every algorithm and every implementation counts, so the limit of small messages is one message's latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .links import BYTES, Traffic, bandwidth, latency, measure_links
from .peers import NotOffered, Peer, open_peer
from .roofline import least_seconds
from .session import Session

__all__ = ["Limit", "open_limit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """``of(size)``: µs or MB/s, as the benchmark's column; ``links``: what was measured, for result files."""

    of: Callable[[int], float]
    links: dict[str, Any]


def _carriers(session: Session) -> tuple[list[Peer], list[Peer]]:
    """(who is measured, those of them that were opened for it). MPI may not know what device memory is."""
    found = [peer for peer in session.peers.values() if peer.name in ("ours", "mpi4py")]
    opened = []
    wanted = ["ours"] + ["mpi4py"] * (session.memory.accelerator == "host")
    for name in wanted:
        if name not in session.peers:
            try:
                opened.append(open_peer(name, session.world))
            except NotOffered:
                continue
    if not (found or opened):
        raise NotOffered("option --limit: neither ours nor MPI's messages can carry this memory")
    return found + opened, opened


def _islands(peers: Sequence[Peer], session: Session) -> list[list[int]]:
    """The ranks of each island, as ours knows them; without ours the ranks of each node."""
    for peer in peers:
        if peer.name == "ours":
            return [list(island.ranks) for island in peer.comm.topology.islands]
    from mpi4py import MPI

    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(session.world.comm.allgather(MPI.Get_processor_name())):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def open_limit(session: Session) -> Limit:
    """Measure the links that the session's benchmark uses. Collective; raises NotOffered where nobody can."""
    peers, opened = _carriers(session)
    try:
        row = session.bench.collective
        return _messages(session, peers) if row is None else _collective(session, peers)
    finally:
        for peer in opened:
            peer.close()


def _collective(session: Session, peers: Sequence[Peer]) -> Limit:
    row = session.bench.collective
    assert row is not None
    islands = _islands(peers, session)
    links = measure_links(peers, session.world, session.memory, islands)
    kind, root = row.kind, session.options.root or 0

    def of(size: int) -> float:
        return least_seconds(kind, size, links, islands, root) * 1e6

    return Limit(of, links.data() | {"islands": islands})


def _traffic(session: Session) -> Traffic:
    """Who sends to whom at once."""
    pairs = session.options.pairs or session.world.size // 2
    forth = {rank: rank + pairs for rank in range(pairs)}
    both = session.bench.name == "osu_bibw"
    return forth | {b: a for a, b in forth.items()} if both else forth


def _messages(session: Session, peers: Sequence[Peer]) -> Limit:
    """Of benchmarks between pairs of ranks."""
    world, memory, traffic = session.world, session.memory, _traffic(session)
    rate = max(bandwidth(peer, world, memory, traffic, nbytes) for peer in peers for nbytes in BYTES)
    total = rate * len(traffic)
    if session.bench.unit == "bandwidth":
        return Limit(lambda size: total / 1e6, {"all senders MB/s": total / 1e6})
    first = next(iter(traffic.items()))
    start = min(latency(peer, world, memory, *first) for peer in peers)
    links = {"latency us": start * 1e6, "each sender MB/s": rate / 1e6}
    return Limit(lambda size: (start + size / rate) * 1e6, links)
