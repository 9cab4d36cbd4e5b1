"""Benchmarks on the ranks of a crew; each argument is one command line."""

from dataclasses import replace

import numpy as np
from mpi4py import MPI

from ucc_hetero.bench import peers
from ucc_hetero.bench.__main__ import main
from ucc_hetero.bench.onesided import Window


def status(words):
    return int(MPI.COMM_WORLD.allreduce(main(words.split())))


def right(*commands):
    for words in commands:
        assert status(words) == 0, words


def wrong(*commands):
    for words in commands:
        assert status(words) == 1, words


class Broken:
    def __init__(self, comm, how):
        self.comm, self.how = comm, how

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Allreduce(self, send, recv, op):
        self.comm.Allreduce(send, recv, op)
        if self.how == "wrong" and recv.size >= 4 and self.comm.rank == 1:
            recv[2] += 1
        if self.how == "raise" and self.comm.rank == 1:
            raise OSError("this rank fails")


def broken(how, words):
    opened = peers._OPEN["mpi4py"]

    def breaks(world):
        peer = opened(world)
        return replace(peer, comm=Broken(peer.comm, how))

    peers._OPEN["mpi4py"] = breaks
    try:
        assert status(words) == 1
    finally:
        peers._OPEN["mpi4py"] = opened


def once(what):
    """One transfer of a one-sided benchmark through an MPI window, and what it leaves there."""
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
