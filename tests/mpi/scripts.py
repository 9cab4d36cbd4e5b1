"""Jobs whose ranks run a text, and how they have to end."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: A communicator of all ranks, arrays, and what has to fail; ``world`` has MPI's own.
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

#: A job that waits for its calls' deadline is killed before that.
NEVER = {"UCCH_TIMEOUT": "1000"}


class Job(NamedTuple):
    """A script, or what draws one; its ranks, and how they end."""

    script: str | Callable[[], str]
    ranks: int = 2
    #: Regular expressions -> how often standard output has them; None, 0: if anything written has them, or must not.
    said: Mapping[str, int | None] = {}
    #: mpirun's exit status; None: any but 0.
    status: int | None = 0
    env: Mapping[str, str] = {"UCCH_TIMEOUT": "200"}
    head: str = HEAD
    more: Mapping[str, Any] = {}

    def run(self, start, **more):
        """Run it by ``mpirun`` or ``crew``, whose ranks end well, and see how it ends."""
        script = self.script if isinstance(self.script, str) else self.script()
        done = start(self.head + script, self.ranks, env=self.env, **self.more, **more)
        assert (done.returncode == self.status) if self.status is not None else done.returncode, done.output
        for pattern, count in self.said.items():
            found = len(re.findall(pattern, done.stdout if count else done.output, re.M))
            assert found == count if count is not None else found, (pattern, found, done.output)
        return done
