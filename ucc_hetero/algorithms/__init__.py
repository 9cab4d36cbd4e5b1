"""The algorithms: one module per collective, functions (topology, call, piece) -> stages, registered by decorator."""

from ucc_hetero.algorithms import (
    allgather,
    allreduce,
    allreduce_many,
    alltoall,
    barrier,
    bcast,
    flat,
    gather,
    ordered,
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
    "allreduce_many",
    "alltoall",
    "barrier",
    "bcast",
    "find",
    "flat",
    "gather",
    "names",
    "ordered",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "straight",
]
