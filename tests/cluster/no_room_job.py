"""A rank that has no memory for an unexpected message: LIBRARY WHAT, a message or a collective."""

import ctypes
import os
import sys

room = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # before libucp

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from ucc_hetero import Communicator  # noqa: E402
from ucc_hetero.errors import CollectiveError  # noqa: E402

COUNT = 1000  # libucp keeps messages longer than all previous ones in a separate pool, which is empty
comm, world = Communicator(), MPI.COMM_WORLD
seed = world.bcast(np.random.SeedSequence().entropy)
first, second = np.random.default_rng(seed).integers(1, 1 << 20, (2, COUNT))
said = []


def attempt(call, got, due):
    """Record how a call that may fail ends; ``due`` is the only data that it may have received."""
    try:
        call()
        said.append("right" if np.array_equal(got, due) else f"WRONG {got[:3]}, not {due[:3]}")
    except CollectiveError as error:
        said.append(str(error))


def receive():
    """The first of two messages with one tag arrives before it is received."""
    got = np.full(COUNT, -1)
    if comm.rank == 0:
        comm.Send(first, 1, 1)
        world.recv()
        comm.Send(second, 1, 1)
    else:
        run_out()
        world.send(None, 0)
        attempt(lambda: comm.Recv(got, 0, 1), got, first)
        attempt(lambda: comm.Recv(got, 0, 1), got, second)


def reduce():
    """A part of a collective arrives before this rank makes the call."""
    got = np.full(COUNT, -1)
    if comm.rank == 0:
        request = comm.Iallreduce(first, got)  # may never end: the other rank's fails, before it sends or afterwards
        while not world.Iprobe():
            request.Test()
        world.recv()
    else:
        run_out()
        attempt(lambda: comm.Allreduce(first, got), got, 2 * first)
        world.send(None, 0)


def run_out():
    """Probe until a message has arrived for which there is no memory, and which is dropped."""
    room.run_out(1)
    while not room.run_out(1):
        comm.Iprobe(0, 9)
    assert room.run_out(0) == 1


comm.Allreduce(np.ones(1), np.empty(1))
world.Barrier()
{"message": receive, "collective": reduce}[sys.argv[2]]()
world.Barrier()
fresh, total = Communicator(), np.zeros(COUNT, int)
fresh.Allreduce(first, total)
assert np.array_equal(total, 2 * first)
print(f"rank {comm.rank}: {' | '.join(said)}\n", end="", flush=True)
MPI.Finalize()
os._exit(0)
