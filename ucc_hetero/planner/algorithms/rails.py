"""Exchanges over the rails between islands that UCC's collectives do not offer, for many or different islands.

``direct`` weighs the owners of a rail by their links, ``doubling`` takes the fewest rounds, ``ring`` gets the most
bandwidth from links between neighbours only. In each, results are equal to the last bit on all ranks: one owner reduces
a share, or both partners of a round compute the same sum of two operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, pairwise

from ..collectives import Block, Call
from ..plan import Region, Step
from ..topology import Group, Topology
from . import ranking
from .allreduce import over_rails
from .builders import LocalSteps, copy, message, only, region, stages, without
from .partition import Segment, cuts
from .registry import Case, Piece, Stages, algorithm, cut_at
from .tree import Hierarchy

#: Most islands between which ``direct`` exchanges.
MOST_DIRECT = 16
#: Size in bytes from which on leaders on two hosts exchange short vectors by messages of the engine: libucc 1.4 then
#: sends these in halves, one after the other. Measured on 2 x 2 ranks: 4 KiB in 33 instead of 42 us, but 2 KiB in 28
#: instead of 24. Between more hosts messages are better at every length: 8 B in 48 instead of 59 us on three, 105
#: instead of 128 on four.
DOUBLING_LIMIT = 4 << 10


def owner_shares(weights: Sequence[int | Fraction]) -> list[Fraction]:
    """The part of a rail's segment that each owner should reduce, by the weights of their links.

    An owner of share s sends, and receives, 1 + (m-2)s of the segment. All that have a share should finish at the same
    time T; links too slow for any get none: s = (T*w - 1) / (m-2) where positive, and the shares add up to 1.
    """
    m = len(weights)
    if m < 3 or len(set(weights)) == 1:
        return [Fraction(1, m)] * m
    fast = sorted(weights, reverse=True)
    for n in range(m, 0, -1):
        done = Fraction(m - 2 + n) / sum(fast[:n])
        if done * fast[n - 1] > 1:
            break
    return [max(Fraction(0), (done * w - 1) / (m - 2)) for w in weights]


def _cut(part: Segment, weights: Sequence[Fraction]) -> list[Block]:
    if len(set(weights)) == 1:
        return cuts(part, len(weights))
    ends, total = [0], Fraction(0)
    for share in owner_shares(weights):
        total += share
        ends.append(cut_at(part.count, total.numerator, total.denominator))
    return [Block(part.offset + a, b - a) for a, b in pairwise(ends)]


def _weights(hierarchy: Hierarchy, root: Group) -> dict[int, Fraction]:
    """Bandwidth of each rank's link per element that it owns: a rank in many rails has less for each."""
    owned = Counter[int]()
    for division in map(hierarchy.division, root.children):
        for (end, rank), start in zip(division, (0, *(end for end, _ in division)), strict=False):
            owned[rank] += end - start
    links = hierarchy.topology.weights
    return {rank: Fraction(links[rank], count) if links else Fraction(1) for rank, count in owned.items() if count}


def _in_recv(hierarchy: Hierarchy, root: Group) -> LocalSteps:
    """Copies for ranks that are groups by themselves, whose segments are in ``send``."""
    src, dst = (region(name, hierarchy.block) for name in ("send", "recv"))
    alone = [child.ranks[0] for child in root.children if child.size == 1 and hierarchy.piece.wants(child.ranks)]
    return LocalSteps(step for rank in alone for step in copy(rank, src, dst))


def _straight_is_best(case: Case) -> int:
    """Between two islands all data must be sent, whatever their links."""
    few = 2 < len(case.topology.islands) <= MOST_DIRECT
    return ranking.BETTER if few and ranking.is_long(case) and ranking.unequal_links(case.topology) else 0


@algorithm("allreduce", "direct", suits=_straight_is_best, most=ranking.overlapped)
def direct(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, exchange over every rail directly between the owners, allgather in each island.

    Stages: m + 3 for m islands, of which two cross: every owner sends each other one its share, then its result to all.
    Shares follow the owners' links: a host with a slow link sends and receives the data once and reduces nothing, where
    equal shares would make it send 2(m-1)/m times.
    """

    def across(hierarchy: Hierarchy, root: Group) -> list[list[Step]]:
        m = len(root.children)
        out: list[list[Step]] = [_in_recv(hierarchy, root), [], *(LocalSteps() for _ in range(m - 1)), []]
        weights = _weights(hierarchy, root)
        for part in hierarchy.segments(root):
            shares = _cut(part, [weights[rank] for rank in part.owners])
            for stage, steps in zip(out[1:], _straight(part, shares, piece), strict=True):
                stage += steps
        return out

    return over_rails(topology, call, piece, across)


def _straight(part: Segment, shares: list[Block], piece: Piece) -> list[list[Step]]:
    """One rail of ``direct``: shares arrive, one is added m - 1 times, results are sent."""
    m, owners = len(shares), part.owners

    def arrived(i: int) -> tuple[Region, ...]:
        if i not in held:
            held[i] = tuple([piece.tmp(owners[i], shares[i].count if j != i else 0) for j in range(m)])
        return held[i]

    def others(i: int) -> tuple[Region, ...]:
        """All members' shares except member ``i``'s own, which is not moved."""
        return tuple([Region("recv", b.offset, b.count if j != i else 0) for j, b in enumerate(shares)])

    def results(i: int) -> tuple[Region, ...]:
        nothing, own = Region("recv", shares[i].offset, 0), region("recv", shares[i])
        return (own,) * i + (nothing,) + (own,) * (m - i - 1)

    held: dict[int, tuple[Region, ...]] = {}
    theirs = piece.members(owners, others)
    out = [[Step("alltoall", owners, theirs, piece.members(owners, arrived))]]
    out += [[] for _ in range(m - 1)]
    for i, rank in enumerate(owners):
        if shares[i].count and piece.wants((rank,)):
            into = (region("recv", shares[i]),)
            for stage, place in zip(out[1:], (p for j, p in enumerate(arrived(i)) if j != i), strict=True):
                stage.append(Step("combine", (rank,), (place,), into))
    return [*out, [Step("alltoall", owners, piece.members(owners, results), theirs)]]


def _doubling_is_best(case: Case) -> int:
    many = len(case.topology.islands) > 2
    best = ranking.between_hosts(case) and not ranking.is_long(case) and (many or case.nbytes >= DOUBLING_LIMIT)
    return ranking.BEST if best else 0


@algorithm("allreduce", "doubling", suits=_doubling_is_best)
def doubling(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce to a leader in each island, recursive doubling between the leaders, broadcast in each island.

    Stages: 2 + 2 log2(m) for m islands, two more rounds if m is not a power of two. A leader sends the vector once a
    round: for short vectors and many islands.
    """
    at = piece.vector(call)
    recv = region("recv", at)
    up: list[Step] = []
    down: list[Step] = []
    for island in topology.islands:
        n, ranks = island.size, island.ranks
        if not piece.wants(ranks):
            continue
        if n == 1:
            up += copy(ranks[0], region("send", at), recv)
            continue
        up.append(Step("reduce", ranks, (region("send", at),) * n, only(0, n, recv), 0))
        down.append(Step("bcast", ranks, only(0, n, recv), without(0, n, recv), 0))
    leaders = [island.ranks[0] for island in topology.islands]
    return stages(up, *_double(leaders, recv, piece), down)


def _double(leaders: Sequence[int], recv: Region, piece: Piece) -> list[list[Step]]:
    m = len(leaders)
    power = 1 << (m.bit_length() - 1)
    spare = [piece.tmp(rank, recv.count) for rank in leaders[:power]] if m > 1 else []

    def near(a: int, b: int) -> bool:
        return piece.wants((leaders[a], leaders[b]))

    def exchange(pairs: list[tuple[int, int]]) -> list[list[Step]]:
        """For each pair the first sends to the second, which adds it."""
        sends = [s for a, b in pairs if near(a, b) for s in message(leaders[a], leaders[b], recv, spare[b])]
        mine = [b for _, b in pairs if near(b, b)]
        return [sends, LocalSteps(Step("combine", (leaders[b],), (spare[b],), (recv,)) for b in mine)]

    extra = range(power, m)
    out = exchange([(i, i - power) for i in extra])
    distance = 1
    while distance < power:
        out += exchange([(i, i ^ distance) for i in range(power)])
        distance *= 2
    back = [i for i in extra if near(i - power, i)]
    out.append([s for i in back for s in message(leaders[i - power], leaders[i], recv, recv)])
    return out


def _places(owners: Sequence[int], piece: Piece) -> Iterator[tuple[int, int]]:
    """(position on a ring, rank there), for this plan's rank and the one before it."""
    m = len(owners)
    for i, rank in enumerate(owners):
        if piece.wants((rank, owners[(i + 1) % m])):
            yield i, rank


def _ring_is_best(case: Case) -> int:
    """Messages of the engine are faster if there is one fragment only.

    Measured on 2 + 2 + 1 ranks: 64 KiB in 220 instead of 285 us, 512 KiB on 4 x 2 in 1.75 instead of 2.1 ms; with 32
    fragments the library is faster by 2 to 15 %.
    """
    one = case.nbytes < 2 * ranking.LEAST_FRAGMENT and not ranking.unequal_links(case.topology)
    return ranking.passed_along(case, one and ranking.between_hosts(case))


@algorithm("allreduce", "ring", suits=_ring_is_best, most=ranking.hops)
def ring(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Reduce-scatter in each island, a ring over every rail (reduce, then distribute), allgather in each island.

    Stages: 2 + 3(m-1) for m islands. Every owner sends 2(m-1)/m of its segment, to its neighbour only.
    """

    def across(hierarchy: Hierarchy, root: Group) -> list[list[Step]]:
        m = len(root.children)
        inward = [(list[Step](), LocalSteps()) for _ in range(m - 1)]
        outward: list[list[Step]] = [[] for _ in range(m - 1)]
        for part in hierarchy.segments(root):
            shares = [region("recv", share) for share in cuts(part, m)]
            most = max(share.count for share in shares)
            spare = {rank: piece.tmp(rank, most) for rank in part.owners}
            for i, rank in _places(part.owners, piece):
                after = part.owners[(i + 1) % m]
                for t in range(m - 1):
                    share = shares[(i - t) % m]
                    to = Region("tmp", spare[after].offset, share.count)
                    inward[t][0].extend(message(rank, after, share, to))
                    if share.count and piece.wants((after,)):
                        inward[t][1].append(Step("combine", (after,), (to,), (share,)))
                    done = shares[(i + 1 - t) % m]
                    outward[t] += message(rank, after, done, done)
        return [_in_recv(hierarchy, root), *chain.from_iterable(inward), *outward]

    return over_rails(topology, call, piece, across)
