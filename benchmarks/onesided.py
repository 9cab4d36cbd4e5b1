"""Timed loops of one-sided communication, with OSU's rules: the whole loop is timed, not each put.

``ours`` puts to and gets from a region of the other rank, ``mpi4py`` uses a locked MPI window.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from .memory import Memory
from .output import Row
from .session import Session
from .stats import Floats
from .world import Peer


@dataclass(slots=True)
class Window:
    """An MPI window over both ranks, and local memory to put from and get to."""

    win: Any
    local: Any
    partner: int
    #: Barrier with the other rank, which may have to make progress for the transfers.
    meet: Callable[[], None]

    def transfer(self, what: str, start: int, size: int) -> None:
        """Put or get bytes."""
        call = self.win.Put if what == "put" else self.win.Get
        call(self.local[start : start + size], self.partner, (start, size))

    def flush(self) -> None:
        """Wait until all transfers are complete on the other side."""
        self.win.Flush(self.partner)


@dataclass(slots=True)
class Regions:
    """The other rank's region, and a local region of the same size."""

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
        """Wait until all transfers are complete on the other side."""
        for request in self.under_way:
            request.Wait()
        self.under_way.clear()


@contextmanager
def regions(comm: Any, memory: Memory, nbytes: int) -> Iterator[Regions]:
    """Context with regions of both ranks, opened by the other rank."""
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
    """Context with an MPI window over both ranks, locked on the other rank."""
    from mpi4py import MPI

    win, partner = MPI.Win.Allocate(nbytes, 1, MPI.INFO_NULL, comm), 1 - comm.rank
    local = session.memory.block(np.dtype(np.uint8), nbytes).array
    win.Lock(partner, MPI.LOCK_SHARED)
    yield Window(win, local, partner, session.world.barrier)
    win.Unlock(partner)
    win.Free()


class Transfers:
    """A peer's transfers of one size. An iteration is one transfer, or in bandwidth tests a window of them."""

    def __init__(self, session: Session, peer: Peer, dtype: np.dtype[Any], size: int) -> None:
        self.session, self.size, self.wrong = session, size, 0
        self.messages = session.options.window if session.bench.unit == "bandwidth" else 1
        self.what = session.bench.name.split("_")[1]
        #: True if both ranks transfer at once; otherwise rank 1 only provides memory.
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
        """An iteration of rank 0, or of both ranks."""
        for j in range(self.messages):
            self.memory.transfer(self.what, j * self.size, self.size)
        self.memory.flush()

    def run(self, iterations: int, warmup: int) -> Floats:
        """Seconds of each iteration, without gaps between them; empty on a rank that does not take part."""
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
        """The mean time in µs, or MB/s; of both directions together if both ranks transfer."""
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
