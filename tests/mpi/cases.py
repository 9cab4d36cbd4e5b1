"""Runs the cases of a file under mpirun: functions named ``case_…`` that take a communicator of all ranks."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from mpi4py import MPI

from ucc_hetero import Communicator


def run(names: Mapping[str, Callable[[Communicator], Any] | Any]) -> None:
    """Run the cases among ``names`` that the command line asks for, or all; rank 0 prints each when it has passed."""
    comm = Communicator(MPI.COMM_WORLD)
    wanted = sys.argv[1:]
    for name, case in list(names.items()):
        if name.startswith("case_") and (not wanted or name in wanted):
            case(comm)
            comm.Barrier()
            assert not comm.Iprobe(), f"{name} left a message behind"
            comm.mpi.Barrier()
            if comm.rank == 0:
                print(name, flush=True)
    comm.Free()
    print("all good", flush=True)
