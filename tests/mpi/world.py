"""What cases share: the ranks around this one, arrays, and the text of an error that must come."""

import os
import random
import time

import numpy as np

import ucc_hetero  # noqa: F401  before MPI, as users do

from mpi4py import MPI  # isort: skip

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RIGHT, LEFT = (RANK + 1) % SIZE, (RANK - 1) % SIZE
#: Draws the same on all ranks.
DICE = random.Random(os.environ["TESTS_DRAW"])


def arrays(n=1000):
    """Ones to send, and where to receive."""
    return np.ones(n), np.full(n, np.nan)


def meet():
    """Barrier that naps: in MPI's a rank would use a core until others reach a deadline."""
    there = WORLD.Ibarrier()
    while not there.Test():
        time.sleep(0.01)


def caught(kind, call, *words):
    """Return the text of the error that a call must raise, which has these words."""
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        print("caught", error, flush=True)
        return str(error)
    raise AssertionError(f"rank {RANK}: no {kind}")
