"""What the scripts of ranks that tests here hold as text have in common."""

#: A communicator of all ranks, arrays, and what has to fail; ``world`` has MPI's own.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import ucc_hetero as u
from mpi4py import MPI
world = MPI.COMM_WORLD
comm = u.Communicator(world)
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
x, y, one = np.ones(1000), np.empty(1000), np.zeros(4)

def caught(kind, call):
    "What the error of a call says."
    try:
        call()
    except kind as error:
        print("caught", error, flush=True)
        return str(error)
    raise SystemExit(f"rank {rank}: no {kind.__name__}")
"""

#: A job that waits for its calls' deadline is killed before that.
NEVER = {"UCCH_TIMEOUT": "1000"}
