"""The timed loops of one-sided communication, by OSU's rule: the whole loop is timed, not each put.

``ours`` puts to a region of the other rank's and gets from it, ``mpi4py`` through an MPI window that is locked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import Memory
from .output import Row
from .session import Session
from .world import Peer

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Window:
    """An MPI window of both ranks, and memory of this one to put from and to get to."""

    win: Any
    local: Any
    partner: int
    #: Waits for the other rank, which may be needed to carry transfers out.
    meet: Callable[[], None]

    def transfer(self, what: str, start: int, size: int) -> None:
        """Put or get bytes."""
        call = self.win.Put if what == "put" else self.win.Get
        call(self.local[start : start + size], self.partner, (start, size))

    def flush(self) -> None:
        """Wait until all transfers are done on the other side."""
        self.win.Flush(self.partner)


@dataclass(slots=True)
class Regions:
    """The other rank's region, and one of as many bytes of this rank's to copy from and to."""

    peer: Any
    there: Any
    local: Any
    meet: Callable[[], None]
    under_way: list[Any]

    def transfer(self, what: str, start: int, size: int) -> None:
        """Put or get bytes."""
        call = self.peer.put if what == "put" else self.peer.get
        self.under_way.append(call(self.local, self.there, start, start, size))

    def flush(self) -> None:
        """Wait until all transfers are done on the other side."""
        for request in self.under_way:
            request.Wait()
        self.under_way.clear()


@contextmanager
def regions(comm: Any, memory: Memory, nbytes: int) -> Iterator[Regions]:
    """Regions of both ranks of an MPI communicator, opened by the other one."""
    from ucc_hetero import rma

    with ExitStack() as stack:
        worker = stack.enter_context(rma.Worker())
        blocks = [memory.block(np.dtype(np.uint8), nbytes) for _ in range(2)]
        home, local = (worker.register(block.whole) for block in blocks)
        peer = rma.connect_all(worker, comm)[1 - comm.rank]
        there = peer.open(comm.allgather(home.descriptor)[1 - comm.rank])

        def meet() -> None:
            done = comm.Ibarrier()
            while not done.Test():
                os.sched_yield()  # to the thread that makes progress

        stack.callback(meet)
        yield Regions(peer, there, local, meet, [])


@contextmanager
def window(session: Session, comm: Any, nbytes: int) -> Iterator[Window]:
    """An MPI window of both ranks, locked on the other one."""
    from mpi4py import MPI

    win, partner = MPI.Win.Allocate(nbytes, 1, MPI.INFO_NULL, comm), 1 - comm.rank
    local = session.memory.block(np.dtype(np.uint8), nbytes).array
    win.Lock(partner, MPI.LOCK_SHARED)
    yield Window(win, local, partner, session.world.barrier)
    win.Unlock(partner)
    win.Free()


class Transfers:
    """One peer's transfers of one size: an iteration is one of them, or a window of them in bandwidth tests."""

    def __init__(self, session: Session, peer: Peer, dtype: np.dtype[Any], size: int) -> None:
        self.session, self.size, self.wrong = session, size, 0
        self.messages = session.options.window if session.bench.unit == "bandwidth" else 1
        self.what = session.bench.name.split("_")[1]
        #: True if both ranks transfer at once; otherwise the second one only provides memory.
        self.both = session.bench.name.endswith("_bibw")
        self.stack = ExitStack()
        nbytes = max(size * self.messages, 1)
        opened: Any = (
            regions(session.world.comm, session.memory, nbytes)
            if peer.name == "ours"
            else window(session, peer.comm, nbytes)
        )
        self.memory: Window | Regions = self.stack.enter_context(opened)

    def _once(self) -> None:
        """One iteration of rank 0, or of both."""
        for j in range(self.messages):
            self.memory.transfer(self.what, j * self.size, self.size)
        self.memory.flush()

    def run(self, iterations: int, warmup: int) -> Floats:
        """Seconds of each iteration, without a gap between them; none on a rank that takes no part."""
        self.memory.meet()
        stamps = []
        if self.both or self.session.world.rank == 0:
            for _ in range(warmup):
                self._once()
            stamps.append(perf_counter())
            for _ in range(iterations):
                self._once()
                stamps.append(perf_counter())
        self.memory.meet()
        return np.diff(stamps)

    def row(self, samples: Floats) -> Row:
        """The mean time in µs, or MB/s; of both directions together where both ranks transfer."""
        session = self.session
        total = session.world.comm.allgather(float(samples.sum()))
        times = session.world.comm.bcast(samples)
        seconds = max(total) if self.both else total[0]
        if session.bench.unit == "bandwidth":
            megabytes = self.size / 1e6 * self.messages * (2 if self.both else 1)
            value, values = megabytes * times.size / seconds, megabytes / times
        else:
            value, values = seconds * 1e6 / times.size, times * 1e6
        return Row(self.size, float(value), iterations=times.size, percentiles=session.percentiles_of(values))

    def free(self) -> None:
        """Free the window, or deregister the memory."""
        self.stack.close()
