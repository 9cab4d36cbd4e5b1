"""barrier: no rank goes on before all have arrived."""

from __future__ import annotations

from ucc_hetero.algorithms.parts import stages
from ucc_hetero.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.collectives import Call
from ucc_hetero.plan import Step
from ucc_hetero.topology import Topology

__all__: list[str] = []


@algorithm("barrier", "tree")
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """A barrier in each island, one between the leaders, and one in each island again: 3 stages, no data."""
    if piece.index:
        return ()
    inside = [_barrier(island.ranks, "native") for island in topology.islands if island.size > 1]
    if topology.flat:
        return stages(inside)
    leaders = tuple(island.ranks[0] for island in topology.islands)
    return stages(inside, [_barrier(leaders, "bridge")], inside)


def _barrier(ranks: tuple[int, ...], link: str) -> Step:
    none = (None,) * len(ranks)
    return Step("barrier", ranks, link, none, none)
