"""The algorithms: one module per collective, functions (topology, call, piece) -> stages, registered by decorator."""

from ucc_hetero.planner.algorithms import (
    allgather,
    allreduce,
    alltoall,
    alltoall_tree,
    barrier,
    bcast,
    flat,
    gather,
    ordered,
    rails,
    reduce,
    reduce_scatter,
    ring,
    scan,
    scatter,
    straight,
)
from ucc_hetero.planner.algorithms.expand import spell
from ucc_hetero.planner.algorithms.registry import Algorithm, Piece, Scratch, Stages, algorithm, find, names

__all__ = [
    "Algorithm",
    "Piece",
    "Scratch",
    "Stages",
    "algorithm",
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_tree",
    "barrier",
    "bcast",
    "find",
    "flat",
    "gather",
    "names",
    "ordered",
    "rails",
    "reduce",
    "reduce_scatter",
    "ring",
    "scan",
    "scatter",
    "spell",
    "straight",
]
