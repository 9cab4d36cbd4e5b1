"""``ordered``: reductions out of messages and local combinations, operands in the order of the ranks.

For operations that UCC has not (the user's own, MAXLOC, MINLOC) or that do not commute, and for datatypes that it
reduces wrongly. One binomial tree to rank 0, whose result then goes where the collective wants it: log2(P) vectors
deep, so it is for correctness first.
"""

from __future__ import annotations

from ucc_hetero.planner.algorithms.bcast import fan_out
from ucc_hetero.planner.algorithms.builders import Aside, copy, message, only, region, shifted, stages, step
from ucc_hetero.planner.algorithms.registry import Piece, Role, Stages, algorithm
from ucc_hetero.planner.collectives import Block, Call, Shape
from ucc_hetero.planner.plan import Region, Step
from ucc_hetero.planner.topology import Topology


def _to_first(topology: Topology, at: Block, held: dict[int, Region], piece: Piece) -> Stages:
    """Reduce everybody's ``send`` into rank 0's ``held``; even ranks use theirs on the way.

    In the round of distance d every 2d-th rank gets the partial result of the rank d above it: the higher operand.
    """
    n = topology.size
    own = [rank for rank in range(0, n, 2) if piece.wants((rank,))]
    out: list[list[Step]] = [Aside(s for rank in own for s in copy(rank, region("send", at), held[rank]))]
    spare = {rank: piece.tmp(rank, at.count) for rank in range(0, n, 2)}
    distance = 1
    while distance < n:
        sends: list[Step] = []
        combines = Aside()
        for low in range(0, n - distance, 2 * distance):
            high = low + distance
            if not piece.wants((low, high)):
                continue
            src = region("send", at) if distance == 1 else held[high]
            sends += message(topology, high, low, src, spare[low])
            if piece.wants((low,)):
                combines.append(Step("combine", (low,), "local", (spare[low],), (held[low],)))
        out += [sends, combines]
        distance *= 2
    return stages(*out)


@algorithm("reduce", "ordered", role=Role.ORDERED, candidate=False)
def reduce(topology: Topology, call: Call, piece: Piece) -> Stages:
    """To rank 0 in the order of the ranks, then one message to the root."""
    at = piece.vector(call)
    if not at.count:
        return ()
    recv = region("recv", at)
    held = {rank: recv if rank == call.root else piece.tmp(rank, at.count) for rank in range(0, call.ranks, 2)}
    last = message(topology, 0, call.root, held[0], recv) if call.root and piece.wants((0, call.root)) else []
    return _to_first(topology, at, held, piece) + stages(last)


@algorithm("allreduce", "ordered", role=Role.ORDERED, candidate=False)
def allreduce(topology: Topology, call: Call, piece: Piece) -> Stages:
    """To rank 0 in the order of the ranks, then to everybody, crossing to each island once."""
    at = piece.vector(call)
    if not at.count:
        return ()
    recv = region("recv", at)
    held = dict.fromkeys(range(0, call.ranks, 2), recv)
    return _to_first(topology, at, held, piece) + fan_out(topology, 0, recv, recv, piece)


@algorithm(("reduce_scatter_block", "reduce_scatter"), "ordered", role=Role.ORDERED, candidate=False)
def reduce_scatter(topology: Topology, call: Call, piece: Piece) -> Stages:
    """The whole vector to rank 0 in the order of the ranks, then scattered; done in the first fragment."""
    shape = Shape(call)
    whole = Block(0, shape.total)
    if piece.index or not whole.count:
        return ()
    held = {rank: piece.tmp(rank, whole.count) for rank in range(0, call.ranks, 2)}
    own = shifted("recv", lambda rank: shape.own(rank).offset)
    blocks = [shape.own(rank) for rank in range(call.ranks)]
    src = tuple(Region("tmp", held[0].offset + block.offset, block.count) for block in blocks)
    dst = [own(rank, block) for rank, block in enumerate(blocks)]
    scatter = step(topology, "scatter", range(call.ranks), only(0, call.ranks, src), dst, 0)
    return _to_first(topology, whole, held, piece) + stages([scatter])
