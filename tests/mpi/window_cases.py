"""Two ranks: one operation of a one-sided benchmark through an MPI window, and what it leaves there."""

import numpy as np
from mpi4py import MPI

from ucc_hetero.bench.onesided import Window


def once(what: str) -> None:
    comm, rng = MPI.COMM_WORLD, np.random.default_rng()
    room, local, result = rng.integers(0, 256, 64, np.uint8), rng.integers(0, 256, 64, np.uint8), np.zeros(64, np.uint8)
    before, mine = comm.allgather((room.copy(), local.copy()))[1 - comm.rank][0], local.copy()
    number = before[:8].view(np.int64)
    compare = number + (comm.rank == 1)  # rank 1's does not fit
    at = slice(0, 8) if len(what) == 3 else slice(8, 16)
    win = MPI.Win.Create(room, 1, MPI.INFO_NULL, comm)
    win.Fence()
    Window(win, local, result, compare, 1 - comm.rank, None, 0, comm.Barrier).transfer(what, at.start, 8)
    win.Fence()
    after = comm.allgather(room.copy())[1 - comm.rank]
    wanted, got = before.copy(), np.zeros(64, np.uint8)
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
    assert (after == wanted).all(), (after, wanted)
    assert (result == got).all() and (local == mine).all(), (result, got, local, mine)
    win.Free()
