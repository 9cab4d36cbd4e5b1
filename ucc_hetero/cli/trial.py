"""One collective on example data, timed on the ranks of a communicator: what ``plan --run`` and ``tune`` measure."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from ..api.comm import Communicator
from ..device import Vector
from ..planner.collectives import ROWS, recv_length, send_length
from ..planner.rules import Rule
from ..planner.select import Choice, Tuning, example_call

#: Collectives with counts that a size alone gives.
MEASURABLE = tuple(name for name, row in ROWS.items() if row.layout in ("none", "vector", "equal"))
#: Length of one sample at least, in seconds, and the most calls in it.
_SAMPLE, _MOST = 1e-3, 4096
#: Samples, each as long as the one before asks for, until they are as long as they should be.
_TRIES = 4


def forced(choice: Choice, collective: str) -> Tuning:
    """A tuning that makes a collective run as ``choice`` says."""
    return Tuning((Rule(collective, 0, float("inf"), choice.algorithm, choice.fragments),))


class Trial:
    """``nbytes`` of float32 through one collective of a communicator, again and again. Collective to use.

    The data is in the memory of the rank's device, where it has one. ``close`` gives it back. ``seconds``: what a
    sample should take; as long as links can carry more than their rate (buckets, buffers), it must be longer.

    ``ValueError`` for a collective with counts per rank.
    """

    def __init__(self, comm: Communicator, collective: str, nbytes: int, seconds: float = _SAMPLE) -> None:
        if collective not in MEASURABLE:
            raise ValueError(f"{collective} cannot be run by its size alone; these can: {', '.join(MEASURABLE)}")
        self.comm, self.collective, self.seconds = comm, collective, seconds
        call = example_call(comm.topology, collective, nbytes // 4)
        self.root = root = call.root
        at_root = root < 0 or comm.rank == root
        send, recv = (f(call, comm.rank) for f in (send_length, recv_length))
        self._vectors: list[Vector] = []
        self._send: Any = self._vector(np.ones(send, np.float32))
        self._recv: Any = self._vector(np.zeros(recv, np.float32))
        if collective == "barrier":
            self._send = self._recv = None
        elif collective == "bcast":  # one buffer
            self._send, self._recv = None, self._vector(np.ones(send or recv, np.float32))
        elif not at_root and collective == "scatter":
            self._send = None
        elif not at_root:
            self._recv = None
        #: Calls in a sample, which ``warm`` chooses.
        self.calls = 1

    def _vector(self, values: np.ndarray[Any, Any]) -> Any:
        self._vectors.append(Vector(values, self.comm._run.members.runtime))
        return self._vectors[-1].buffer

    def close(self) -> None:
        """Give the memory back."""
        for vector in self._vectors:
            vector.close()

    def run(self) -> None:
        """One call."""
        self.comm._run.blocking(self.collective, self._send, self._recv, None, self.root)

    def warm(self) -> float:
        """Make what the first calls make, choose how many calls are a sample; returns seconds of one call."""
        self.run()
        self.calls = 1
        for _ in range(_TRIES):
            took = self.sample()
            before, self.calls = self.calls, int(min(max(self.seconds / max(took, 1e-9), 1), _MOST))
            if self.calls <= 2 * before:  # a single call after a barrier looks longer than it is
                break
        return took

    def sample(self) -> float:
        """Seconds of one call, on the slowest rank, the same on every rank."""
        mpi: Any = self.comm.mpi
        call: Callable[[], None] = self.run
        mpi.Barrier()
        start = perf_counter()
        for _ in range(self.calls):
            call()
        took = (perf_counter() - start) / self.calls
        return float(max(mpi.allgather(took)))
