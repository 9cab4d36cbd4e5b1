"""Benchmarks on the ranks of a crew; each argument is one command line."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mpi4py import MPI

from ucc_hetero.bench import peers, world
from ucc_hetero.bench.__main__ import main
from ucc_hetero.bench.limits import _put_seconds
from ucc_hetero.bench.memory import open_memory


def status(words: str) -> int:
    """The status of a job; rank 0 alone reports a failure."""
    return int(MPI.COMM_WORLD.allreduce(main(words.split())))


def right(*commands: str) -> None:
    for words in commands:
        assert status(words) == 0, words


def wrong(*commands: str) -> None:
    for words in commands:
        assert status(words) == 1, words


class Broken:
    """A communicator whose Allreduce goes wrong on rank 1: by its result, or by an exception."""

    def __init__(self, comm: Any, how: str) -> None:
        self.comm, self.how = comm, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def Allreduce(self, send: Any, recv: Any, op: Any) -> None:
        self.comm.Allreduce(send, recv, op)
        if self.how == "wrong" and recv.size >= 4 and self.comm.rank == 1:
            recv[2] += 1
        if self.how == "raise" and self.comm.rank == 1:
            raise OSError("this rank fails")


def broken(how: str, words: str) -> None:
    """A job of wrong results."""
    opened = peers._OPEN["mpi4py"]

    def breaks(world: Any) -> Any:
        peer = opened(world)
        return replace(peer, comm=Broken(peer.comm, how))

    peers._OPEN["mpi4py"] = breaks
    try:
        assert status(words) == 1
    finally:
        peers._OPEN["mpi4py"] = opened


def quickest_put() -> None:
    """Lower limit of the latency of devices' links, between any two ranks of a job."""
    world.prepare(["ours"])
    session: Any = SimpleNamespace(world=world.open_world(), memory=open_memory("host", 0))
    for pair in ((0, 2), (2, 1)):
        seconds = session.world.comm.allgather(_put_seconds(session, *pair))
        assert len(set(seconds)) == 1 and seconds[0] > 0, seconds
    session.world.close()


if __name__ == "__main__":
    broken("raise", " ".join(sys.argv[1:]))
