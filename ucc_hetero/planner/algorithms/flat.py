"""``flat``: one collective step over all ranks, for every collective of UCC.

The link is native if there is one island, else the bridge. Bytes and steps are those of the library's own algorithm,
which does not know islands: with several, much of the data crosses the bridge more than once.
"""

from __future__ import annotations

from ..collectives import ROWS, Block, Call, Shape
from ..plan import KINDS, EqualRegions, Operand, Region, Step
from ..topology import Topology
from . import ranking
from .builders import copy, each, message, region, stages
from .registry import Case, Piece, Role, Stage, Stages, algorithm


def _in_one_step(case: Case) -> int:
    """Rank of ``flat``: best for calls that gain nothing from islands, and the last resort for others."""
    topology, row, size = case.topology, ROWS[case.collective], case.topology.size
    best = size == 1 or (topology.flat and not topology.deep)
    if case.plain and topology.one_host:  # all ranks share one memory: every additional copy costs the same
        short = case.nbytes <= ranking.PARCEL_LIMIT and size <= ranking.MOST_WITH_PARCELS
        best = best or short or not row.reduces or case.nbytes >= ranking.SHARED_LIMIT
    # One kernel does a short queued call best, directly from every rank to every other.
    best = best or (case.queued and size <= ranking.MOST_IN_KERNEL and case.nbytes <= ranking.KERNEL_LIMIT)
    # Long blocks of an alltoall cross once in any case, and bundling would add a copy on each side.
    long = case.plain and row.step == "alltoall" and case.nbytes >= ranking.BUNDLED_LIMIT * size
    scattered = case.collective == "reduce" and ranking.scattered(case)
    return ranking.ALONE if (best or long) and not scattered else ranking.LAST


def _alike(call: Call, buffer: str, part: Block, forms: tuple[str, str]) -> tuple[Operand, ...]:
    """Every rank's ``send`` or ``recv`` operand, in the root's form and the others', if each uses this part of each
    block."""

    def operand(form: str) -> Operand:
        if form == "each":
            return EqualRegions(buffer, part.offset, part.count, call.counts[0], call.ranks)
        return Region(buffer, part.offset, part.count) if form == "one" else None

    root, others = max(call.root, 0), operand(forms[1])
    first = others if forms[0] == forms[1] else operand(forms[0])
    return (others,) * root + (first,) + (others,) * (call.ranks - root - 1)


def _unlike(shape: Shape, piece: Piece, buffer: str, forms: tuple[str, str]) -> tuple[Operand, ...]:
    ranks, at = range(shape.call.ranks), shape.send if buffer == "send" else shape.recv
    whole: list[Operand] = []

    def operand(form: str, rank: int) -> Operand:
        if form != "each":
            return region(buffer, piece.cut(Block(0, shape.own(rank).count))) if form == "one" else None
        if shape.layout == "matrix" or not whole:
            whole[:] = [each(buffer, [piece.cut(at(rank, peer)) for peer in ranks])]
        return whole[0]

    root = max(shape.call.root, 0)
    return tuple([operand(forms[rank != root], rank) for rank in ranks])


def _alone(call: Call, piece: Piece) -> Stages:
    """One rank: any collective is a copy of its own data, if it has two buffers."""
    row = ROWS[call.collective]
    shape = Shape(call)
    count = min(row.send(shape, 0), row.recv(shape, 0))
    if not row.post(shape, 0):
        return ()
    at = piece.cut(Block(0, count))
    return stages(copy(0, Region("send", at.offset, at.count), Region("recv", at.offset, at.count)))


def _pieces(case: Case) -> int:
    cut = case.nbytes >= ranking.CACHED_LIMIT and (ROWS[case.collective].reduces or case.collective == "bcast")
    return ranking.cached(case) if cut else 1


@algorithm(
    tuple(name for name, row in ROWS.items() if row.step),
    "flat", suits=_in_one_step, most=_pieces, role=Role.ONE_STEP,
)  # fmt: skip
def flat(topology: Topology, call: Call, piece: Piece) -> Stages:
    """One step over all ranks; the library chooses the algorithm."""
    if call.ranks == 1:
        return _alone(call, piece)
    row, everybody = ROWS[call.collective], tuple(range(call.ranks))
    src, dst = KINDS[row.step].src, KINDS[row.step].dst
    if row.layout in ("ranks", "matrix"):
        # Always one fragment: in a non-blocking call a rank knows only its own counts, and must take part even if they
        # are 0.
        if piece.total > 1 and not any(piece.cut(Block(0, count)).count for count in set(call.counts)):
            return ()
        shape = Shape(call)
        sides = _unlike(shape, piece, "send", src), _unlike(shape, piece, "recv", dst)
    else:
        part = piece.vector(call) if call.counts else Block(0, piece.index == 0)
        if not part.count:
            return ()
        sides = _alike(call, "send", part, src), _alike(call, "recv", part, dst)
    return (Stage((Step(row.step, everybody, *sides, call.root),)),)


def _pairs(call: Call) -> list[tuple[int, int]]:
    """(sender, receiver) of every block that is not known to be empty."""
    n = call.ranks
    if call.collective == "alltoallv":
        found = [divmod(i, n) for i, count in enumerate(call.counts) if count]
        # Each rank begins with its next neighbour, so that not all send to the same rank first.
        return sorted(found, key=lambda pair: (pair[1] - pair[0]) % n)
    others = [rank for rank, count in enumerate(call.counts) if count]
    return [(rank, call.root) if call.collective == "gatherv" else (call.root, rank) for rank in others]


@algorithm(("gatherv", "scatterv", "alltoallv"), "pairwise", role=Role.UNCOUNTED, candidate=False)
def pairwise(topology: Topology, call: Call, piece: Piece) -> Stages:
    """Every block goes directly from its sender to its receiver.

    Stages: 1. Every byte crosses the bridge once, by its own rank's link. Both ends of a message know its length
    without other ranks' counts, so it serves non-blocking calls, which cannot exchange counts first. P - 1 messages at
    the root, up to P - 1 in each direction at every rank of an alltoallv.
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
