"""A rank of a job without MPI that grows, loses a rank, shrinks and grows back: FOLDER STORE RANK (or `later`)."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from ucc_hetero import Communicator, Store
from ucc_hetero.bootstrap import exit as at_exit
from ucc_hetero.bootstrap.storecomm import StoreComm
from ucc_hetero.errors import CollectiveError
from ucc_hetero.native.libraries import load


def call(comm):
    """Sums of few and of many elements, a value of each rank, and objects, from all hosts."""
    every = np.arange(comm.size) + 1
    for n in (3, 1 << 18):
        x, y = np.random.default_rng(comm.rank).integers(-9, 9, n), np.full(n, -1)
        comm.Allreduce(x, y)
        assert (y == sum(np.random.default_rng(rank).integers(-9, 9, n) for rank in range(comm.size))).all(), "wrong"
    told = np.zeros(comm.size, np.int64)
    comm.Allgather(np.array([comm.rank + 1]), told)
    assert (told == every).all(), told
    for length in (1, 70_000):
        assert comm.allgather("x" * length * comm.rank) == ["x" * length * rank for rank in range(comm.size)]


def grown(comm, store, size):
    while (new := comm.Grow(store, size - comm.size)) is None:
        call(comm)
    comm.Free()
    assert new.size == size, new.size
    call(new)
    return new


def main():
    folder, store, rank = (
        Path(sys.argv[1]), Store(sys.argv[2], (Path(sys.argv[1]) / "secret").read_bytes()), sys.argv[3],
    )  # fmt: skip
    if rank == "later":
        comm = Communicator.Enter(store)
        call(comm)
    else:
        load()
        at_exit.register()
        comm = grown(Communicator._adopt(StoreComm.first(store, int(rank), range(2), 2, 200.0)), store, 4)
    if not (folder / "shrunk").exists():
        print(f"{comm.rank} of {comm.size}, with topology {comm.topology.describe()}", flush=True)
        (folder / f"called{comm.rank}").touch()
        if comm.rank == 3:
            while not all((folder / f"called{rank}").exists() for rank in range(4)):  # otherwise their calls fail
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                call(comm)
        except CollectiveError as error:
            print(f"lost: {error}", flush=True)
        small = comm.Shrink()
        comm.Free()
        assert small.size == 3, small.size
        call(small)
        if small.rank == 0:
            (folder / "shrunk").touch()
        comm = grown(small, store, 4)
    call(comm)
    comm.Free()
    print(f"right, rank {comm.rank}", flush=True)


if __name__ == "__main__":
    main()
