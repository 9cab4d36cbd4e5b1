"""A job of two ranks: one operation of a one-sided benchmark through an MPI window, and what it leaves there."""

import sys

import numpy as np

from ucc_hetero.bench.onesided import Window

from mpi4py import MPI  # isort: skip

comm, what = MPI.COMM_WORLD, sys.argv[1]
rng = np.random.default_rng(comm.rank)
room, local, result = rng.integers(0, 256, 64, np.uint8), rng.integers(0, 256, 64, np.uint8), np.zeros(64, np.uint8)
before, mine = comm.allgather((room.copy(), local.copy()))[1 - comm.rank][0], local.copy()
number = before[:8].view(np.int64)
compare = number + (comm.rank == 1)  # rank 1's does not fit
win = MPI.Win.Create(room, 1, MPI.INFO_NULL, comm)
win.Fence()
Window(win, local, result, compare, 1 - comm.rank, None, 0, comm.Barrier).transfer(what, 0 if len(what) == 3 else 8, 8)
win.Fence()
after = comm.allgather(room.copy())[1 - comm.rank]
wanted, got, at = before.copy(), np.zeros(64, np.uint8), slice(0, 8) if len(what) == 3 else slice(8, 16)
if what == "put":
    wanted[at] = mine[at]
elif what in ("acc", "get_acc"):
    wanted[at] += mine[at]
elif what == "fop":
    wanted[:8].view(np.int64)[:] += mine[:8].view(np.int64)
elif what == "cas" and comm.rank == 0:
    wanted[:8] = mine[:8]
if what in ("get_acc", "fop", "cas"):
    got[at] = before[at]
elif what == "get":
    mine[at] = before[at]
if not ((after == wanted).all() and (result == got).all() and (local == mine).all()):
    print(after, wanted, result, got, local, mine, sep="\n", flush=True)
    comm.Abort(1)
win.Free()
print("right", flush=True)
