"""A rank of a job that continues after a read of one rank failed in the middle: LIBRARY SEED COUNT ROUNDS SECONDS.

SECONDS is the timeout of the failing call.
"""

import ctypes
import sys

import numpy as np

import ucc_hetero as u  # before MPI, whose libucp would end the process

from mpi4py import MPI  # isort: skip

broken = ctypes.CDLL(sys.argv[1]).broken_read
seed, count, rounds = map(int, sys.argv[2:5])
world, draw = MPI.COMM_WORLD, np.random.default_rng(seed)
comm, failed = u.Communicator(world), 0
rank, size, far = comm.rank, comm.size, len({*comm.topology.hosts}) > 1
#: The rank whose read fails, and the rank above it.
reader, most = (1, 5) if far else (2, size)
for _ in range(rounds):
    data, nth = draw.random((size, count)), int(draw.integers(1, most))
    for _ in range(2):
        comm.Allgather(data[rank], np.empty(size * count))  # makes connections and registers peers' memory
    got = np.full((size, count), np.nan)
    world.Barrier()
    comm._runner.timeout, usual = float(sys.argv[5]), comm._runner.timeout
    broken(nth if rank == reader else 0, far)
    try:
        comm.Allgather(data[rank], got)
    except u.CollectiveError as error:
        failed += 1
        print(f"rank {rank}: {str(error)[:150]}", flush=True)
    else:
        assert np.array_equal(got, data), f"wrong data on rank {rank}, read {nth} of rank {reader} failed"
    broken(0, far)
    comm._runner.timeout = usual
    old, comm = comm, comm.Shrink()
    old.Free()
print(f"right: rank {rank}, {failed} failed", flush=True)
