"""Two ranks: one transfer of a one-sided benchmark through an MPI window, and what it leaves there."""

import numpy as np
from mpi4py import MPI

from ucc_hetero.bench.onesided import Window


def once(what: str) -> None:
    comm, rng = MPI.COMM_WORLD, np.random.default_rng()
    room, local = (rng.integers(0, 256, 64, np.uint8) for _ in range(2))
    before, mine, at = comm.allgather(room.copy())[1 - comm.rank], local.copy(), slice(8, 16)
    win = MPI.Win.Create(room, 1, MPI.INFO_NULL, comm)
    win.Fence()
    Window(win, local, 1 - comm.rank, comm.Barrier).transfer(what, at.start, 8)
    win.Fence()
    after, wanted = comm.allgather(room.copy())[1 - comm.rank], before.copy()
    if what == "put":
        wanted[at] = mine[at]
    else:
        mine[at] = before[at]
    assert (after == wanted).all(), (after, wanted)
    assert (local == mine).all(), (local, mine)
    win.Free()
