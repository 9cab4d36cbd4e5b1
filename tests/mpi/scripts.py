"""Jobs whose ranks run a script, and their expected end."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: Start of scripts: a communicator of all ranks, arrays, and a check for errors; ``world`` is MPI's communicator.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import ucc_hetero as u
from mpi4py import MPI
world = MPI.COMM_WORLD
comm = u.Communicator(world)
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
x, y, one = np.ones(1000), np.empty(1000), np.zeros(4)

def caught(kind, call):
    "What the error of a call says."
    try:
        call()
    except kind as error:
        print("caught", error, flush=True)
        return str(error)
    raise SystemExit(f"rank {rank}: no {kind.__name__}")
"""

#: A job that waits for its calls' timeout is killed before that.
NEVER = {"UCCH_TIMEOUT": "1000"}


class Job(NamedTuple):
    """A script, or a function that makes one; its ranks, and their expected end."""

    script: str | Callable[[], str]
    ranks: int = 2
    #: Regular expression -> number of matches in standard output. None: any in all output; 0: none in all output.
    said: Mapping[str, int | None] = {}
    #: mpirun's exit status; None: any except 0.
    status: int | None = 0
    env: Mapping[str, str] = {"UCCH_TIMEOUT": "200"}
    head: str = HEAD
    more: Mapping[str, Any] = {}

    def run(self, start, **more):
        """Run it with ``mpirun``, or with ``crew``, whose ranks must succeed, and check its end."""
        script = self.script if isinstance(self.script, str) else self.script()
        done = start(self.head + script, self.ranks, env=self.env, **self.more, **more)
        assert (done.returncode == self.status) if self.status is not None else done.returncode, done.output
        for pattern, count in self.said.items():
            found = len(re.findall(pattern, done.stdout if count else done.output, re.M))
            assert found == count if count is not None else found, (pattern, found, done.output)
        return done
