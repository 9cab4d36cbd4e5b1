"""Runs the cases of a module: functions named ``case_…`` that take a communicator of all ranks."""

import importlib
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

from ucc_hetero import Communicator


def _add(a, b, datatype):
    np.frombuffer(b, np.float64)[:] += np.frombuffer(a, np.float64)


ADD = MPI.Op.Create(_add, commute=True)


def neighbours(comm):
    """The right one and the left one in the ring of all ranks."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def seen(memory):
    """The contents of an array that the test may read."""
    found = getattr(memory, "peek", memory)
    return found


@contextmanager
def raises(kind, *words):
    with pytest.raises(kind) as caught:
        yield
    assert all(word in str(caught.value) for word in words), (words, str(caught.value))


def run_module(module):
    """Run the cases of a module; each leaves no message behind. Rank 0 prints each that has passed."""
    comm = Communicator(MPI.COMM_WORLD)
    for name, case in vars(importlib.import_module(module)).items():
        if name.startswith("case_"):
            case(comm)
            comm.Barrier()
            assert not comm.Iprobe(), f"{name} left a message behind"
            comm.mpi.Barrier()
            if comm.rank == 0:
                print(name, flush=True)
    comm.Free()
