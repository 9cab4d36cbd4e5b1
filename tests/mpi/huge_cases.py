"""More elements than a signed 32-bit integer can count, on two ranks; every element of the result is checked."""

import numpy as np
from mpi4py import MPI

COUNT = 2**31 + 4099


def pattern(start, count, salt):
    """Bytes whose values depend on their position."""
    return (np.arange(start, start + count, dtype=np.uint64) * 2654435761 + salt >> 13).astype(np.int8)


def same(got, salt):
    """Compare in pieces: the reference needs eight times the memory."""
    step = 1 << 24
    pieces = ((k, got[k : k + step]) for k in range(0, got.size, step))
    return all(np.array_equal(piece, pattern(k, piece.size, salt)) for k, piece in pieces)


def fill(array, salt):
    for k in range(0, array.size, 1 << 24):
        piece = array[k : k + (1 << 24)]
        piece[:] = pattern(k, piece.size, salt)


def uncounted(comm, data):
    """A non-blocking call of uneven blocks, one of which is longer than libucc's limit."""
    long, short = 3 << 29, 5
    me, size = comm.rank, comm.size
    sent = [0] * size
    sent[(me + 1) % size] = long if me == 0 else short
    due = [0] * size
    due[(me - 1) % size] = long if me == 1 else short
    mine = data[: sum(sent)]
    fill(mine, me)
    into = np.zeros(sum(due), np.int8)
    comm.Ialltoallv([mine, sent], [into, due]).Wait()
    return same(into, (me - 1) % size)


def main(comm):
    data = np.zeros(COUNT, np.int8)
    if comm.rank == 1:
        fill(data, 5)
    comm.Bcast(data, root=1)
    assert same(data, 5), "bcast"
    comm.Allreduce(MPI.IN_PLACE, data, op=MPI.MAX)
    assert same(data, 5), "allreduce"
    # Few elements, and displacements beyond 2**31.
    data[:] = -1
    mine = np.full(3, comm.rank, np.int8)
    comm.Allgatherv(mine, [data, ([3, 3], [1, COUNT - 4])])
    assert list(data[1:4]) == [0, 0, 0] and list(data[-4:-1]) == [1, 1, 1]
    assert data[0] == data[4] == data[-5] == data[-1] == -1 and (data == -1).sum() == COUNT - 6
    assert uncounted(comm, data), "Ialltoallv"
