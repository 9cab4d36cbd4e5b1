"""barrier: no rank goes on before all have arrived."""

from __future__ import annotations

from ucc_hetero.planner.algorithms import ranking
from ucc_hetero.planner.algorithms.builders import stages
from ucc_hetero.planner.algorithms.registry import Piece, Stages, algorithm
from ucc_hetero.planner.algorithms.tree import teams
from ucc_hetero.planner.collectives import Call
from ucc_hetero.planner.plan import Step
from ucc_hetero.planner.topology import Topology


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
