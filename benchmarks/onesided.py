"""The timed loops of one-sided communication, by OSU's rule: the whole loop is timed, not each put.

``ours`` puts to a region of the other rank's and gets from it, ``mpi4py`` through an MPI window, which accumulates,
fetches and compares, too.
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
from .option_table import Options
from .options import BadUsage
from .output import Row
from .session import Session
from .world import NotOffered, Peer

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Window:
    """An MPI window of ``size`` bytes on both ranks and what is needed to reach the other one's memory."""

    win: Any
    local: Any
    result: Any
    compare: Any
    partner: int
    group: Any
    base: int
    #: Waits for the other rank, which may be needed to carry transfers out.
    meet: Callable[[], None]

    def transfer(self, what: str, start: int, size: int) -> None:
        """A put or get of bytes, their sum with those there, or an operation on one number there, as OSU has them."""
        mine, there = self.local[start : start + size], (self.base + start, size)
        if what in ("put", "get", "acc"):
            getattr(self.win, {"acc": "Accumulate"}.get(what, what.capitalize()))(mine, self.partner, there)
        elif what == "get_acc":
            self.win.Get_accumulate(mine, self.result[start : start + size], self.partner, there)
        else:
            one, found = self.local[:8].view(np.int64), self.result[:8].view(np.int64)
            if what == "fop":
                self.win.Fetch_and_op(one, found, self.partner, self.base)
            else:
                self.win.Compare_and_swap(one, self.compare, found, self.partner, self.base)


@dataclass(slots=True)
class Regions:
    """The other rank's region, and one of as many bytes of this rank's to copy from and to."""

    peer: Any
    there: Any
    local: Any
    meet: Callable[[], None]
    under_way: list[Any]

    def transfer(self, what: str, start: int, size: int) -> None:
        call = self.peer.put if what == "put" else self.peer.get
        self.under_way.append(call(self.local, self.there, start, start, size))

    def flush(self) -> None:
        """Wait until all transfers are done on the other side."""
        for request in self.under_way:
            request.Wait()
        self.under_way.clear()


def check(bench: str, peer: Peer, options: Options) -> None:
    """Raise NotOffered for peers without one-sided communication, BadUsage for what only MPI windows have."""
    if peer.name not in ("ours", "mpi4py"):
        raise NotOffered(f"{bench}: peer {peer.name!r} has no one-sided communication; ours and mpi4py have")
    if peer.name == "ours" and WHAT[bench] not in ("put", "get"):
        raise NotOffered(f"{bench}: regions are put to and got from alone; use --backend mpi4py")
    if peer.name == "ours" and options.sync not in _PASSIVE:
        raise BadUsage(
            f"option -s {options.sync}: regions have no epochs in which both ranks take part; "
            "use -s flush or --backend mpi4py"
        )


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


def _mpi_window(session: Session, comm: Any, nbytes: int, stack: ExitStack) -> Window:
    from mpi4py import MPI

    kind = session.options.win
    base = 0
    if kind == "allocate":
        win = MPI.Win.Allocate(nbytes, 1, MPI.INFO_NULL, comm)
        stack.callback(win.Free)
    else:
        memory = session.memory.block(np.dtype(np.uint8), nbytes).head(nbytes).array
        if kind == "create":
            win = MPI.Win.Create(memory, 1, MPI.INFO_NULL, comm)
            stack.callback(win.Free)
        else:
            win = MPI.Win.Create_dynamic(MPI.INFO_NULL, comm)
            stack.callback(win.Free)
            win.Attach(memory)
            stack.callback(win.Detach, memory)
            base = comm.allgather(MPI.Get_address(memory))[1 - comm.rank]
    partner = 1 - comm.rank
    world = comm.Get_group()
    group = world.Incl([partner])
    world.Free()
    stack.callback(group.Free)
    local, result = (session.memory.block(np.dtype(np.uint8), nbytes).head(nbytes).array for _ in range(2))
    compare = np.zeros(1, np.int64)
    return Window(win, local, result, compare, partner, group, base, session.world.barrier)


#: Synchronization in which the other rank takes no part: what comes before and after the transfers.
_PASSIVE: dict[str, tuple[Callable[[Any, int], None] | None, Callable[[Any, int], None]]] = {
    "lock": (lambda win, rank: win.Lock(rank, _shared()), lambda win, rank: win.Unlock(rank)),
    "lock_all": (lambda win, rank: win.Lock_all(), lambda win, rank: win.Unlock_all()),
    "flush": (None, lambda win, rank: win.Flush(rank)),
    "flush_local": (None, lambda win, rank: win.Flush_local(rank)),
}


def _shared() -> Any:
    from mpi4py import MPI

    return MPI.LOCK_SHARED


def _active(session: Session, window: Window, work: Callable[[], None]) -> Callable[[], None]:
    """One iteration with both ranks taking part, and back again in OSU's latency tests."""
    win, group, first = window.win, window.group, session.world.rank == 0

    def fence(mine: bool, theirs: bool) -> None:
        win.Fence()
        if mine:
            work()
        win.Fence()

    def post(mine: bool, theirs: bool) -> None:
        if theirs:
            win.Post(group)
        if mine:
            win.Start(group)
            work()
            win.Complete()
        if theirs:
            win.Wait()

    turn = fence if session.options.sync == "fence" else post
    if _both(session):
        return lambda: turn(True, True)

    def once() -> None:
        turn(first, not first)
        if session.bench.unit == "time":
            turn(not first, first)

    return once


def _both(session: Session) -> bool:
    """True if both ranks transfer at once."""
    return session.bench.name.endswith("_bibw")


def _passive(session: Session, window: Any, work: Callable[[], None]) -> Callable[[], None] | None:
    """One iteration of rank 0, or of both; else the other rank only provides memory."""
    if session.world.rank != 0 and not _both(session):
        return None
    if isinstance(window, Regions):
        flush = window.flush

        def put_and_flush() -> None:
            work()
            flush()

        return put_and_flush
    (before, after), win, partner = _PASSIVE[session.options.sync], window.win, window.partner

    def once() -> None:
        if before is not None:
            before(win, partner)
        work()
        after(win, partner)

    return once


class Transfers:
    """One peer's transfers of one size: an iteration is one of them, or a window of them in bandwidth tests."""

    def __init__(self, session: Session, peer: Peer, dtype: np.dtype[Any], size: int) -> None:
        self.session, self.size, self.wrong = session, size, 0
        self.messages = session.options.window if session.bench.unit == "bandwidth" else 1
        self.stack = ExitStack()
        nbytes, sync = max(size * self.messages, 1), session.options.sync
        window: Any
        if peer.name == "ours":
            window = self.stack.enter_context(regions(session.world.comm, session.memory, nbytes))
        else:
            window = _mpi_window(session, peer.comm, nbytes, self.stack)
        what, self.meet = WHAT[session.bench.name], window.meet

        def work() -> None:
            for j in range(self.messages):
                window.transfer(what, j * size, size)

        self.once = (_passive if sync in _PASSIVE else _active)(session, window, work)
        if isinstance(window, Window) and sync.startswith("flush") and self.once is not None:
            window.win.Lock(window.partner, _shared())
            self.stack.callback(window.win.Unlock, window.partner)

    def run(self, iterations: int, warmup: int) -> Floats:
        """Seconds of each iteration, without a gap between them; none on a rank that takes no part."""
        self.meet()
        stamps = []
        if self.once is not None:
            for _ in range(warmup):
                self.once()
            stamps.append(perf_counter())
            for _ in range(iterations):
                self.once()
                stamps.append(perf_counter())
        self.meet()
        return np.diff(stamps)

    def row(self, samples: Floats) -> Row:
        """The mean time in µs, or MB/s; of both directions together where both ranks transfer."""
        session, both = self.session, _both(self.session)
        total = session.world.comm.allgather(float(samples.sum()))
        times = session.world.comm.bcast(samples)
        seconds = max(total) if both else total[0]
        if session.bench.unit == "bandwidth":
            megabytes = self.size / 1e6 * self.messages * (2 if both else 1)
            value, values, shown = megabytes * times.size / seconds, megabytes / times, times * 1e6
        else:  # with both ranks taking part, an iteration goes there and back
            ways = 1 if session.options.sync in _PASSIVE else 2
            value, shown = seconds * 1e6 / times.size / ways, times * 1e6 / ways
            values = shown
        session.samples[self.size] = shown
        return Row(self.size, float(value), iterations=times.size, percentiles=session.percentiles_of(values))

    def free(self) -> None:
        """Free the window, or deregister the memory."""
        self.stack.close()


#: Benchmark -> what it does.
WHAT = {f"osu_{what}_latency": what for what in ("put", "get", "acc", "get_acc", "fop", "cas")}
WHAT |= {"osu_put_bw": "put", "osu_get_bw": "get", "osu_put_bibw": "put"}
