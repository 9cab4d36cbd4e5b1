"""Runs the cases of a module: functions named ``case_…`` that take a communicator of all ranks."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mpi4py import MPI

from ucc_hetero import Communicator


def run_module(module: str) -> None:
    """Run the cases of a module on a crew."""
    _run_all(vars(importlib.import_module(module)))


def run(names: Mapping[str, Callable[[Communicator], Any] | Any]) -> None:
    """Run the cases among ``names`` that the command line asks for, or all, in a job of their own."""
    wanted = sys.argv[1:]
    _run_all({name: case for name, case in names.items() if not wanted or name in wanted})
    print("right", flush=True)


def _run_all(names: Mapping[str, Any]) -> None:
    """Run cases; each leaves no message behind. Rank 0 prints each that has passed."""
    comm = Communicator(MPI.COMM_WORLD)
    for name, case in list(names.items()):
        if name.startswith("case_"):
            case(comm)
            comm.Barrier()
            assert not comm.Iprobe(), f"{name} left a message behind"
            comm.mpi.Barrier()
            if comm.rank == 0:
                print(name, flush=True)
    comm.Free()
