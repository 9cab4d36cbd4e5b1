"""allreduce between many or unlike islands: exchanges over the bridge that UCC's own collectives do not offer.

``direct`` weighs the owners of a rail by their links, ``doubling`` takes the fewest rounds, ``ring`` the most bandwidth
from links between neighbours only. In each of them replicas come out equal to the last bit: one owner reduces a share,
or both partners of a round compute the same sum of two operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ucc_hetero.algorithms.parts import (
    Dense,
    Owned,
    Segment,
    copy,
    message,
    native_allgather,
    native_reduce_scatter,
    only,
    region,
    segments,
    stages,
    without,
)
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm, cut_at
from ucc_hetero.collectives import Block, Call
from ucc_hetero.plan import Operand, Region, Step
from ucc_hetero.topology import Topology

__all__ = ["owner_shares"]

_RECV = Dense("recv")


def owner_shares(weights: Sequence[int]) -> list[Fraction]:
    """Which part of a rail's segment each owner should reduce, by the weights of their links.

    An owner of the share s sends, and receives, 1 + (m-2)s of the segment. All that have a share should be done at the
    same time T; links too slow for any get none: s = (T*w - 1) / (m-2) where positive, and the shares add up to 1.
    """
    m = len(weights)
    if m < 3 or len(set(weights)) == 1:
        return [Fraction(1, m)] * m
    fast = sorted(weights, reverse=True)
    for n in range(m, 0, -1):
        done = Fraction(m - 2 + n, sum(fast[:n]))
        if done * fast[n - 1] > 1:
            break
    return [max(Fraction(0), (done * w - 1) / (m - 2)) for w in weights]


def _cut(part: Segment, weights: Sequence[int]) -> list[Block]:
    """A segment divided among its owners."""
    ends, total = [0], Fraction(0)
    for share in owner_shares(weights):
        total += share
        ends.append(cut_at(part.count, total.numerator, total.denominator))
    return [Block(part.offset + a, b - a) for a, b in pairwise(ends)]


def _inside(topology: Topology, parts: Sequence[Segment]) -> tuple[list[Step], list[Step]]:
    """What comes before and after the exchange in the islands; one-rank islands start from a copy."""
    owned = Owned(parts)
    before, after = [], []
    for island in topology.islands:
        before += native_reduce_scatter(island, owned, _RECV)
        after += native_allgather(island, owned, _RECV)
        if island.size == 1:
            for block in owned.shares(island)[0]:
                before += copy(island.ranks[0], region("send", block), region("recv", block))
    return before, after


@algorithm("allreduce", "direct")
def direct(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, exchange over every rail straight between the owners, allgather in each island.

    Stages: m + 3 for m islands, of which two cross: every owner sends each other one its share, then its result to
    all. Shares follow the owners' links: a host with a slow link sends and receives the data once and reduces nothing,
    where equal shares would have it send 2(m-1)/m times.
    """
    parts = segments(topology, [piece.vector(call)])
    if not parts:
        return ()
    before, after = _inside(topology, parts)
    m = len(topology.islands)
    if m == 1:
        return stages(before, after)
    inward, outward = [], []
    combines: list[list[Step]] = [[] for _ in range(m - 1)]
    for part in parts:
        shares = _cut(part, [topology.weights[rank] if topology.weights else 1 for rank in part.owners])
        arrived: list[list[Region]] = []
        for i, rank in enumerate(part.owners):
            count = shares[i].count
            arrived.append([piece.tmp(rank, count if j != i else 0) for j in range(m)])
            others = [at for j, at in enumerate(arrived[i]) if j != i and count]
            for stage, at in zip(combines, others, strict=False):
                stage.append(Step("combine", (rank,), "local", (at,), (region("recv", shares[i]),)))
        src = [_skip("recv", shares, i) for i in range(m)]
        inward.append(Step("alltoall", part.owners, "bridge", tuple(src), tuple(map(tuple, arrived))))
        results: list[Operand] = [
            tuple(region("recv", share if j != i else Block(share.offset, 0)) for j in range(m))
            for i, share in enumerate(shares)
        ]
        outward.append(Step("alltoall", part.owners, "bridge", tuple(results), tuple(src)))
    return stages(before, inward, *combines, outward, after)


def _skip(buffer: str, shares: Sequence[Block], own: int) -> Operand:
    """Everybody's share but one's own, which stays where it is."""
    return tuple(region(buffer, b if i != own else Block(b.offset, 0)) for i, b in enumerate(shares))


@algorithm("allreduce", "doubling")
def doubling(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, recursive doubling between the leaders, broadcast in each island.

    Stages: 2 + 2 log2(m) for m islands, two more rounds if m is no power of two. A leader sends the vector once a
    round: for short vectors and many islands.
    """
    at = piece.vector(call)
    if not at.count:
        return ()
    recv = region("recv", at)
    up: list[Step] = []
    down: list[Step] = []
    for island in topology.islands:
        n, ranks = island.size, island.ranks
        if n == 1:
            up += copy(ranks[0], region("send", at), recv)
            continue
        up.append(Step("reduce", ranks, "native", (region("send", at),) * n, only(0, n, recv), 0))
        down.append(Step("bcast", ranks, "native", only(0, n, recv), without(0, n, recv), 0))
    leaders = [island.ranks[0] for island in topology.islands]
    return stages(up, *_double(topology, leaders, recv, piece), down)


def _double(topology: Topology, leaders: Sequence[int], recv: Region, piece: Piece) -> list[list[Step]]:
    m = len(leaders)
    power = 1 << (m.bit_length() - 1)
    spare = [piece.tmp(rank, recv.count) for rank in leaders[:power]] if m > 1 else []

    def exchange(pairs: list[tuple[int, int]]) -> list[list[Step]]:
        """Each pair: the first sends to the second, which adds it."""
        sends = [s for a, b in pairs for s in message(topology, leaders[a], leaders[b], recv, spare[b])]
        adds = [Step("combine", (leaders[b],), "local", (spare[b],), (recv,)) for _, b in pairs]
        return [sends, adds]

    extra = range(power, m)
    out = exchange([(i, i - power) for i in extra])
    distance = 1
    while distance < power:
        out += exchange([(i, i ^ distance) for i in range(power)])
        distance *= 2
    out.append([s for i in extra for s in message(topology, leaders[i - power], leaders[i], recv, recv)])
    return out


@algorithm("allreduce", "ring")
def ring(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, a ring over every rail (reduce, then distribute), allgather in each island.

    Stages: 2 + 3(m-1) for m islands. Every owner sends 2(m-1)/m of its segment, to its neighbour only.
    """
    parts = segments(topology, [piece.vector(call)])
    if not parts:
        return ()
    before, after = _inside(topology, parts)
    m = len(topology.islands)
    rounds: list[list[Step]] = [[] for _ in range(3 * (m - 1))]
    for part in parts:
        cuts = [part.offset + cut_at(part.count, i, m) for i in range(m + 1)]
        shares = [region("recv", Block(a, b - a)) for a, b in pairwise(cuts)]
        spare = [piece.tmp(rank, max(share.count for share in shares)) for rank in part.owners if m > 1]
        for t in range(m - 1):
            for i, rank in enumerate(part.owners):
                j = (i + 1) % m
                share = shares[(i - t) % m]
                at = Region("tmp", spare[j].offset, share.count)
                rounds[2 * t] += message(topology, rank, part.owners[j], share, at)
                if share.count:
                    rounds[2 * t + 1].append(Step("combine", (part.owners[j],), "local", (at,), (share,)))
                done = shares[(i + 1 - t) % m]
                rounds[2 * (m - 1) + t] += message(topology, rank, part.owners[j], done, done)
    return stages(before, *rounds, after)
