"""Communicators, neighbourhoods and requests under a real mpirun, and hundreds of communicators."""

import pytest

MIXED, IN_TURN = "nvidia:2,amd:2", "nvidia:1,amd:1,nvidia:1,amd:1,host:1"


@pytest.mark.parametrize("what, ranks, vendors", [
    *(("communicator", 3, ""), ("communicator", 4, MIXED), ("communicator", 5, IN_TURN)),
    *(("neighbour", 3, ""), ("neighbour", 4, MIXED)),
    *(("request", 2, ""), ("request", 4, "nvidia:1,amd:2,host:1")),
])  # fmt: skip
def test_cases(mpirun, what: str, ranks: int, vendors: str) -> None:
    env = {"UCCH_TIMEOUT": "1000", "UCCH_EMULATE": vendors}  # what waits for that is killed before
    job = mpirun(f"tests/mpi/{what}_cases.py", ranks, env=env, timeout=150)
    assert job.said("all good") == ranks
    assert "WARN" not in job.stderr and "ERROR" not in job.stderr, job.output


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "count"), [("", 500), ("nvidia:1,amd:1", 200)], ids=["flat", "mixed"])
def test_many_are_created_and_freed(mpirun, layout: str, count: int) -> None:
    """Neither memory nor file descriptors grow; a number of them live at the same time."""
    script = """
import os, sys
import numpy as np
import ucc_hetero as u
from mpi4py import MPI

def used():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd"))

comm = u.Communicator(MPI.COMM_WORLD)
count = int(sys.argv[1])
alive, readings = [], []
for number in range(count):
    made = comm.Dup() if number % 2 else comm.Split(0, -comm.rank)
    alive.append(made)
    if number % 10 == 0:
        made.Allreduce(np.ones(1000), total := np.zeros(1000))
        assert (total == comm.size).all()
        made.Sendrecv(np.ones(1), 1 - made.rank, 1, np.zeros(1), 1 - made.rank, 1)
    if len(alive) == 20:
        for each in alive[::-1] if number % 3 else alive:
            each.Free()
        alive.clear()
        readings.append(used())
# The first rounds fill caches.
(memory, files), (memory_now, files_now) = readings[len(readings) // 4], readings[-1]
print(f"MiB {memory:.0f} -> {memory_now:.0f}, files {files} -> {files_now}", flush=True)
assert memory_now - memory < 10, readings
assert files_now - files < 5, readings
print("end", flush=True)
"""
    job = mpirun(script, 2, args=[str(count)], env={"UCCH_EMULATE": layout}, timeout=150)
    assert job.said("end") == 2
