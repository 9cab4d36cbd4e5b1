"""The algorithms: one module per collective, functions (topology, call, piece) -> stages, registered by decorator."""

from ucc_hetero.algorithms import allreduce, flat, scan
from ucc_hetero.algorithms.registry import Algorithm, Piece, Scratch, Stages, algorithm, find, names

__all__ = ["Algorithm", "Piece", "Scratch", "Stages", "algorithm", "allreduce", "find", "flat", "names", "scan"]
