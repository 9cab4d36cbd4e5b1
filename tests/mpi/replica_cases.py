"""Replicas: after an allreduce all ranks hold the same bits, and the same call gives them again."""

import os
import zlib

import numpy as np
from mpi4py import MPI

from ucc_hetero import Communicator
from ucc_hetero.planner import algorithms

#: 8 B to 4 MiB of float32, and lengths that no number of ranks divides.
ELEMENTS = (2, 5, 17, 250, 1001, 4096, 16385, 65536, 300007, 1 << 20)


def spread(world: MPI.Intracomm, array: np.ndarray) -> int:
    """How many different results the ranks hold."""
    return len(set(world.allgather(zlib.crc32(array.tobytes()))))


def main(*sizes: int) -> None:
    """Allreduces of so many elements."""
    world = MPI.COMM_WORLD
    rng = np.random.default_rng([17, world.rank])
    bad = 0
    for name in algorithms.names("allreduce"):
        os.environ["UCCH_TUNE"] = f"allreduce:@{name}"
        with Communicator(world) as comm:
            for dtype in ("float32", "float64", "complex64", "float16"):
                for count in sizes or ELEMENTS:
                    mine = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
                    out, again = np.zeros_like(mine), np.zeros_like(mine)
                    comm.Allreduce(mine, out)
                    comm.Allreduce(mine, again)
                    here = mine.copy()
                    comm.Allreduce(MPI.IN_PLACE, here)
                    results = [spread(world, a) for a in (out, again, here)]
                    if max(results) > 1 or not world.allreduce(out.tobytes() == again.tobytes(), MPI.LAND):
                        bad += 1
                        if world.rank == 0:
                            print(f"{name} {dtype}[{count}]: {results} different results", flush=True)
    assert bad == 0
