"""barrier: no rank goes on before all have arrived."""

from __future__ import annotations

from ..collectives import Call
from ..plan import Step
from ..topology import Topology
from . import ranking
from .builders import stages
from .registry import Piece, Stages, algorithm
from .tree import teams


@algorithm("barrier", "tree", suits=ranking.tree)
def tree(topology: Topology, call: Call, piece: Piece) -> Stages:
    """A barrier in each island, one between the leaders, and one in each island again: 3 stages, no data.

    Two more for each further level.
    """
    if piece.index:
        return ()
    rounds = []
    for of in teams(topology, piece):
        rounds.append([Step("barrier", t.ranks, (None,) * len(t), (None,) * len(t)) for t in of])
    return stages(*rounds, *reversed(rounds[:-1]))
