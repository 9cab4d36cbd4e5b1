"""Cases of test_harness.py, most of which do not come to their ends."""

import threading

from mpi4py import MPI


def right():
    print("rank", MPI.COMM_WORLD.rank)


def raises():
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("no such luck")
    threading.Event().wait()  # MPI's Barrier would take a core


def stays():
    if MPI.COMM_WORLD.rank == 1:
        threading.Event().wait()
