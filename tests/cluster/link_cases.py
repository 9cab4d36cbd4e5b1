"""Cases of jobs on two hosts whose ranks, or links, fail."""

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ucc_hetero import CollectiveError, Communicator, rma
from ucc_hetero.bootstrap.teams import Teams


class Waits:
    """What ranks of a job wait in, with how many elements, by host memory."""

    def __init__(self, comm, n, folder, beside):
        self.comm, self.n, self.folder, self.beside, self.at = comm, n, folder, beside, []

    def right(self):
        x, y = np.full(self.n, self.comm.rank + 1.0), np.full(self.n, -1.0)
        self.comm.Allreduce(x, y)
        assert (y == self.comm.size * (self.comm.size + 1) // 2).all()

    def send(self):
        x = np.full(self.n, self.comm.rank + 1.0)
        if self.comm.rank < 2:
            (self.comm.Recv if self.comm.rank else self.comm.Send)(x, 1 - self.comm.rank)
            assert (x == 1).all()

    def any(self):
        x = np.full(self.n, self.comm.rank + 1.0)
        self.comm.Recv(x, MPI.ANY_SOURCE) if self.comm.rank else self.comm.Send(x, 1)
        assert (x == 1).all()

    def of_any(self):
        """Of ranks of whom one is behind the cut, and sends, and one is beside this rank and does not."""
        if self.comm.rank == 0:
            self.comm.Recv(np.ones(self.n), MPI.ANY_SOURCE)
        elif self.comm.rank == 2:
            self.comm.Send(np.ones(self.n), 0)
        raise CollectiveError("nothing to wait for")

    def probe(self):
        if self.comm.rank:
            self.comm.Probe(MPI.ANY_SOURCE)
        self.send()

    def once(self):
        """The first rank of a transfer that goes one way sees that the other one does not acknowledge it, and tells it;
        also if it has sent and waits for nothing."""
        (self.comm.Recv if self.comm.rank else self.comm.Send)(np.ones(3), 1 - self.comm.rank)
        if self.comm.rank == 0 and (self.folder / "cut").exists():
            wait(self.folder / f"down{self.beside}")
            raise CollectiveError("it has not waited")

    def put(self):
        if not self.at:
            worker = rma.Worker()
            mine, other = worker.register(np.ones(self.n)), 1 - self.comm.rank
            peer, theirs = rma.connect_all(worker, self.comm)[other], self.comm.allgather(mine.descriptor)[other]
            self.at.extend((peer, mine, peer.open(theirs)))
        self.at[0].put(*self.at[1:]).Wait()


def wait(file):
    while not file.exists():
        time.sleep(0.01)


def one_link(folder, names, jobs):
    """Jobs of two or three ranks within one: ``names`` has what they wait in when the link of their data is cut, with
    how many elements, the seconds of a heartbeat, those of a deadline, and FIRST if it is their first call; ``jobs``
    has the job of every rank."""
    everyone, folder = MPI.COMM_WORLD, Path(folder)
    name = names[jobs[everyone.rank]]
    call, n, os.environ["UCCH_HEARTBEAT"], os.environ["UCCH_TIMEOUT"], *first = name.split()
    mpi = everyone.Split(jobs[everyone.rank])
    comm, ranks = Communicator(mpi), mpi.allgather(everyone.rank)
    waits = Waits(comm, int(n), folder, ranks[1])
    if not first:
        getattr(waits, "right" if call == "of_any" else call)()
    (folder / f"up{everyone.rank}").touch()
    wait(folder / "cut")
    try:
        while True:
            getattr(waits, call)()
    except CollectiveError as error:
        print(f"{name}: rank {comm.rank}:", error, flush=True)
    (folder / f"down{everyone.rank}").touch()
    wait(folder / "back")
    other = None
    while other is None:
        with suppress(CollectiveError):  # the kernel may refuse to connect: the other host was unreachable just now
            other = Communicator(mpi)
    with other:
        again = Waits(other, int(n), folder, ranks[1])
        again.right()
        again.send()
        assert other._runner.members.job is not comm._runner.members.job, "its connections may have been given up"
    print(f"{name}: right", flush=True)


def fails(*_):
    raise CollectiveError("mine alone")


def no_team_on_one_rank():
    if MPI.COMM_WORLD.rank == 1:
        Teams._canary = fails
    try:
        Communicator()
    except CollectiveError as error:
        print(f"rank {MPI.COMM_WORLD.rank}:", error, flush=True)
