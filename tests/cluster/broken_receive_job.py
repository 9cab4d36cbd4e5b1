"""A rank of a job whose calls go on after a connection of rank 1 has broken in the middle: LIBRARY SEED."""

import ctypes
import sys

import numpy as np
from mpi4py import MPI

import ucc_hetero as u

ROUNDS, COUNT = 3, 200_000

broken = ctypes.CDLL(sys.argv[1]).broken_receive
world, draw = MPI.COMM_WORLD, np.random.default_rng(int(sys.argv[2]))
comm, failed = u.Communicator(world), 0
rank, size = comm.rank, comm.size
for _ in range(ROUNDS):
    data, nth = draw.random((size, COUNT)), int(draw.integers(1, 5))
    for _ in range(2):
        comm.Allgather(data[rank], np.empty(size * COUNT))  # connections stand from here on
    got = np.full((size, COUNT), np.nan)
    world.Barrier()
    comm._runner.timeout, usual = 0.5, comm._runner.timeout  # libucp may have dropped the connection in silence
    broken(nth if rank == 1 else 0)
    try:
        comm.Allgather(data[rank], got)
    except u.CollectiveError as error:
        failed += 1
        print(f"rank {rank}: {str(error)[:150]}", flush=True)
    else:
        assert np.array_equal(got, data), f"wrong data on rank {rank}, read {nth} of rank 1 failed"
    broken(0)
    comm._runner.timeout = usual
    old, comm = comm, comm.Shrink()
    old.Free()
print(f"right: rank {rank}, {failed} failed", flush=True)
