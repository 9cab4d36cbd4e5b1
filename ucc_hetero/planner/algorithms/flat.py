"""``flat``: one collective step over all ranks, for every collective that UCC has.

The link is native when there is one island, else the bridge. Bytes and steps are those of the library's own algorithm,
which knows nothing of islands: with several, much of the data crosses the bridge more than once.
"""

from __future__ import annotations

from ucc_hetero.planner.algorithms import ranking
from ucc_hetero.planner.algorithms.builders import copy, each, region, stages
from ucc_hetero.planner.algorithms.registry import Case, Piece, Role, Stages, algorithm
from ucc_hetero.planner.collectives import ROWS, Block, Call, Shape
from ucc_hetero.planner.plan import KINDS, Blocks, Operand, Region, Step
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


def _side(shape: Shape, piece: Piece, buffer: str, forms: tuple[str, str]) -> tuple[Operand, ...]:
    """Every rank's ``send`` or ``recv`` in a step, by the forms that the root's and the others' have there."""
    call = shape.call
    shared: dict[str, Operand] = {"none": None}
    if shape.layout == "vector":
        shared["one"] = region(buffer, piece.vector(call))
    elif shape.layout == "equal":
        own = piece.cut(Block(0, call.counts[0]))
        shared["one"] = region(buffer, own)
        shared["each"] = Blocks(buffer, own.offset, own.count, call.counts[0], call.ranks)

    def operand(form: str, rank: int) -> Operand:
        if form == "one" and "one" not in shared:
            return region(buffer, piece.cut(Block(0, shape.own(rank).count)))
        if form not in shared:
            at = shape.send if buffer == "send" else shape.recv
            blocks = each(buffer, [piece.cut(at(rank, peer)) for peer in range(call.ranks)])
            if shape.layout == "matrix":
                return blocks
            shared[form] = blocks
        return shared[form]

    root = max(call.root, 0)
    out = [operand(forms[1], rank) for rank in range(call.ranks)]
    out[root] = operand(forms[0], root)
    return tuple(out)


def _carries(shape: Shape, piece: Piece) -> bool:
    """True if this fragment is needed.

    Uneven calls in one piece always are: a rank of a non-blocking one knows only its own counts, and must take part
    even when it has nothing. So is a barrier's.
    """
    if piece.total == 1 and shape.layout in ("ranks", "matrix"):
        return True
    counts = set(shape.call.counts)
    return any(piece.cut(Block(0, count)).count for count in counts) if counts else piece.index == 0


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
    shape, kind = Shape(call), ROWS[call.collective].step
    if not _carries(shape, piece):
        return ()
    forms = KINDS[kind]
    src, dst = _side(shape, piece, "send", forms.src), _side(shape, piece, "recv", forms.dst)
    return stages([Step(kind, tuple(range(call.ranks)), src, dst, call.root)])
