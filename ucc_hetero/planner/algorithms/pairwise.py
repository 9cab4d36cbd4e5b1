"""Uneven blocks as one message each: what a rank can plan that knows only its own counts."""

from __future__ import annotations

from ..collectives import Block, Call, Shape
from ..plan import Region, Step
from ..topology import Topology
from .builders import copy, message, region, stages
from .registry import Piece, Role, Stages, algorithm


def _pairs(call: Call) -> list[tuple[int, int]]:
    """(sender, receiver) of every block that is not empty, as far as is known."""
    n = call.ranks
    if call.collective == "alltoallv":
        found = [divmod(i, n) for i, count in enumerate(call.counts) if count]
        # Each rank begins with its next neighbour, so that not all send to the same one at first.
        return sorted(found, key=lambda pair: (pair[1] - pair[0]) % n)
    others = [rank for rank, count in enumerate(call.counts) if count]
    return [(rank, call.root) if call.collective == "gatherv" else (call.root, rank) for rank in others]


@algorithm(("gatherv", "scatterv", "alltoallv"), "pairwise", role=Role.UNCOUNTED, candidate=False)
def pairwise(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Every block goes straight from the rank that has it to the rank that wants it.

    Stages: 1. Every byte crosses the bridge once, by its own rank's link, and both ends of a message know its length
    without the other ranks' counts: so it serves non-blocking calls, which cannot ask for them. P - 1 messages at the
    root, up to P - 1 each way at every rank of an alltoallv.
    """
    shape = Shape(call)
    out: list[Step] = []
    for sender, receiver in _pairs(call):
        if not piece.wants((sender, receiver)):
            continue
        src, dst = _ends(shape, piece, sender, receiver)
        out += copy(sender, src, dst) if sender == receiver else message(sender, receiver, src, dst)
    return stages(out)


def _ends(shape: Shape, piece: Piece, sender: int, receiver: int) -> tuple[Region, Region]:
    if shape.layout == "matrix":
        src, dst = piece.cut(shape.send(sender, receiver)), piece.cut(shape.recv(receiver, sender))
        return region("send", src), region("recv", dst)
    gathers = shape.call.collective == "gatherv"
    block = shape.own(sender if gathers else receiver)
    whole = piece.cut(block)
    own = Block(whole.offset - block.offset, whole.count)
    return (region("send", own), region("recv", whole)) if gathers else (region("send", whole), region("recv", own))
