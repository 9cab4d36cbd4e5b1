"""``flat``: one collective step over all ranks, for every collective that UCC has.

The link is native when there is one island, else the bridge. Bytes and steps are those of the library's own algorithm,
which knows nothing of islands: with several, much of the data crosses the bridge more than once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucc_hetero.planner.algorithms import ranking
from ucc_hetero.planner.algorithms.builders import copy, each, stages
from ucc_hetero.planner.algorithms.registry import Case, Piece, Role, Stage, Stages, algorithm
from ucc_hetero.planner.collectives import ROWS, Block, Call, Shape
from ucc_hetero.planner.plan import Blocks, Operand, Region, Step
from ucc_hetero.planner.topology import Topology


def _in_one_step(case: Case) -> int:
    """Calls that gain nothing from islands, and what nothing else is fit for."""
    topology = case.topology
    one_island = topology.size == 1 or (topology.flat and not topology.deep)
    return ranking.ALONE if one_island or _shared(case) or _one_kernel(case) else ranking.LAST


def _shared(case: Case) -> bool:
    """True if all ranks share one memory: every additional copy costs the same."""
    if not (case.plain and case.topology.one_host):
        return False
    short = case.nbytes <= ranking.PARCEL_LIMIT and case.topology.size <= ranking.MOST_WITH_PARCELS
    return short or not ROWS[case.collective].reduces or case.nbytes >= ranking.SHARED_LIMIT


def _one_kernel(case: Case) -> bool:
    """True if a call is queued, and so short that one kernel does it best, from every rank straight to every other."""
    return case.queued and case.topology.size <= ranking.MOST_IN_KERNEL and case.nbytes <= ranking.KERNEL_LIMIT


def _step(topology: Topology, kind: str, src: Sequence[Operand], dst: Sequence[Operand], root: int = -1) -> Stages:
    """One collective step over all ranks."""
    link = "native" if topology.flat else "bridge"
    return (Stage((Step(kind, tuple(range(topology.size)), link, tuple(src), tuple(dst), root),)),)


def _vector(topology: Topology, call: Call, piece: Piece, kind: str) -> Stages:
    n, at = call.ranks, piece.vector(call)
    if not at.count:
        return ()
    send, recv = Region("send", at.offset, at.count), Region("recv", at.offset, at.count)
    src: list[Operand] = [send] * n
    dst: list[Operand] = [recv] * n
    if kind == "bcast":
        src = [None] * n
        src[call.root], dst[call.root] = send, None
    elif kind == "reduce":
        dst = [None] * n
        dst[call.root] = recv
    return _step(topology, kind, src, dst, call.root)


def blocks(shape: Shape, piece: Piece, buffer: str, rank: int = 0) -> Operand:
    """This fragment's slice of every block of ``rank``'s ``send`` or ``recv`` buffer, one per peer."""
    call = shape.call
    if shape.layout == "equal":
        own = piece.cut(Block(0, call.counts[0]))
        return Blocks(buffer, own.offset, own.count, call.counts[0], call.ranks)
    at = shape.send if buffer == "send" else shape.recv
    return each(buffer, [piece.cut(at(rank, peer)) for peer in range(call.ranks)])


def _one_block(shape: Shape, piece: Piece, kind: str) -> tuple[list[Operand], list[Operand]]:
    """Operands of the kinds where a rank has all blocks on one side and its own on the other."""
    call, spread = shape.call, kind in ("scatter", "reduce_scatter")
    whole = blocks(shape, piece, "send" if spread else "recv")
    own: list[Operand] = []
    for rank in range(call.ranks):
        mine = piece.cut(Block(0, shape.own(rank).count))
        own.append(Region("recv" if spread else "send", mine.offset, mine.count))
    every: list[Operand] = [whole] * call.ranks
    if ROWS[call.collective].rooted:
        every = [None] * call.ranks
        every[call.root] = whole
    return (every, own) if spread else (own, every)


def _carries(shape: Shape, piece: Piece) -> bool:
    """True if this fragment is needed.

    Uneven calls in one piece always are: a rank of a non-blocking one knows only its own counts, and must take part
    even when it has nothing.
    """
    if piece.total == 1 and shape.layout != "equal":
        return True
    return any(piece.cut(Block(0, count)).count for count in set(shape.call.counts))


def _blocked(topology: Topology, call: Call, piece: Piece, kind: str) -> Stages:
    shape = Shape(call)
    if not _carries(shape, piece):
        return ()
    n = call.ranks
    if kind != "alltoall":
        src, dst = _one_block(shape, piece, kind)
    elif shape.layout == "equal":
        src, dst = [blocks(shape, piece, "send")] * n, [blocks(shape, piece, "recv")] * n
    else:
        src = [blocks(shape, piece, "send", rank) for rank in range(n)]
        dst = [blocks(shape, piece, "recv", rank) for rank in range(n)]
    return _step(topology, kind, src, dst, call.root)


def _alone(call: Call, piece: Piece) -> Stages:
    """One rank: what any collective comes to is a copy of its own data, if it has two buffers."""
    row = ROWS[call.collective]
    shape = Shape(call)
    count = min(row.send(shape, 0), row.recv(shape, 0))
    if not row.post(shape, 0):
        return ()
    at = piece.cut(Block(0, count))
    return stages(copy(0, Region("send", at.offset, at.count), Region("recv", at.offset, at.count)))


@algorithm(tuple(name for name, row in ROWS.items() if row.step), "flat", suits=_in_one_step, role=Role.ONE_STEP)
def flat(topology: Topology, call: Call, piece: Piece) -> Stages:
    """One step over all ranks; the library decides how."""
    if call.ranks == 1:
        return _alone(call, piece)
    kind = ROWS[call.collective].step
    if kind == "barrier":
        none = (None,) * call.ranks
        return _step(topology, kind, none, none) if piece.index == 0 else ()
    if ROWS[call.collective].layout == "vector":
        return _vector(topology, call, piece, kind)
    return _blocked(topology, call, piece, kind)
