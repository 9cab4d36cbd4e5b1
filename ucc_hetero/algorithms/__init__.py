"""The algorithms: one module per collective, functions (topology, call, piece) -> stages, registered by decorator."""

from ucc_hetero.algorithms import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    bcast,
    flat,
    gather,
    ordered,
    rails,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    straight,
)
from ucc_hetero.algorithms.registry import Algorithm, Piece, Scratch, Stages, algorithm, find, names

__all__ = [
    "Algorithm",
    "Piece",
    "Scratch",
    "Stages",
    "algorithm",
    "allgather",
    "allreduce",
    "alltoall",
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
    "scan",
    "scatter",
    "straight",
]
