"""scan and exscan: every rank gets the reduction over the ranks up to (or before) it, in the order of the ranks.

UCC has neither, so they are messages and local combinations, which keep the order and so serve any operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucc_hetero.algorithms.parts import copy, message, region, stages
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.collectives import Call
from ucc_hetero.plan import Region, Step
from ucc_hetero.topology import Topology

__all__: list[str] = []


def doubling(topology: Topology, ranks: Sequence[int], own: Sequence[Region], recv: Region, piece: Piece) -> Stages:
    """Inclusive scan over ``ranks`` of their ``own`` regions into ``recv``, by recursive doubling.

    In the round of distance d rank i sends what it has to i + d and puts what comes from i - d before its own. What
    arrives becomes the new partial result, so the operand of lower ranks is always the left one.
    """
    n = len(ranks)
    partial = list(own)
    needed = [0, 1, *(min(2, i.bit_length() - 1) for i in range(2, n))]
    spare = [[piece.tmp(rank, recv.count) for _ in range(needed[i])] for i, rank in enumerate(ranks)]
    out: list[list[Step]] = []
    distance, round_ = 1, 0
    while distance < n:
        sends: list[Step] = []
        combines: list[Step] = []
        arrived = list(partial)
        for i in range(distance, n):
            # The last one to arrive may land in recv itself, unless a combination is still to read ``send`` there.
            last = i < 2 * distance and round_ > 0
            arrived[i] = recv if last else spare[i][round_ % 2]
            sends += message(topology, ranks[i - distance], ranks[i], partial[i - distance], arrived[i])
            combines.append(Step("combine", (ranks[i],), "local", (partial[i],), (arrived[i],)))
        partial = arrived
        out += [sends, combines]
        distance, round_ = 2 * distance, round_ + 1
    out.append([s for rank, at in zip(ranks, partial, strict=True) if at != recv for s in copy(rank, at, recv)])
    return stages(*out)


@algorithm("scan", "flat")
def scan(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Recursive doubling over all ranks: 2 log2(P) + 1 stages, at most log2(P) vectors sent by each rank."""
    at = piece.vector(call)
    if not at.count:
        return ()
    return doubling(topology, range(call.ranks), [region("send", at)] * call.ranks, region("recv", at), piece)


@algorithm("exscan", "flat")
def exscan(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Every rank's vector moves to the next rank, then a scan without rank 0: one message more than scan."""
    at = piece.vector(call)
    if not at.count or call.ranks == 1:
        return ()
    ranks = range(1, call.ranks)
    # Not into recv: in place that is still to be sent.
    own = [piece.tmp(rank, at.count) for rank in ranks]
    shift = [
        s
        for rank, to in zip(ranks, own, strict=True)
        for s in message(topology, rank - 1, rank, region("send", at), to)
    ]
    return stages(shift) + doubling(topology, ranks, own, region("recv", at), piece)
