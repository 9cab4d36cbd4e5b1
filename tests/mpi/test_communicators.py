"""Communicators under a real mpirun: parts and copies, identity, threads, and a thousand of them."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = Path(__file__).with_name("communicator_cases.py")

LAYOUTS = {
    "flat": (3, {}),
    "mixed": (4, {"UCCH_EMULATE": "nvidia:2,amd:2"}),
    "interleaved": (5, {"UCCH_EMULATE": "nvidia:1,amd:1,nvidia:1,amd:1,host:1"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_communicators(mpirun, layout: str) -> None:
    ranks, env = LAYOUTS[layout]
    job = mpirun(CASES, ranks, env={"UCCH_TIMEOUT": "200", **env}, timeout=150)
    assert job.stdout.count("all good") == ranks
    assert "WARN" not in job.stderr and "ERROR" not in job.stderr, job.output


@pytest.mark.parametrize("layout", ["flat", "mixed"])
def test_neighbourhoods(mpirun, layout: str) -> None:
    ranks, env = LAYOUTS[layout]
    job = mpirun(CASES.with_name("neighbour_cases.py"), ranks, env={"UCCH_TIMEOUT": "60", **env}, timeout=150)
    assert job.stdout.count("all good") == ranks
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
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))

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
(memory, files, shared), (memory_now, files_now, shared_now) = readings[len(readings) // 4], readings[-1]
print(f"MiB {memory:.0f} -> {memory_now:.0f}, files {files} -> {files_now}, pages {shared} -> {shared_now}", flush=True)
assert memory_now - memory < 10, readings
assert files_now - files < 5, readings
print("end", flush=True)
"""
    job = mpirun(script, 2, args=[str(count)], env={"UCCH_EMULATE": layout} if layout else {}, timeout=150)
    assert job.stdout.count("end") == 2
