"""Calls as programs on mpi4py make them, again and again: each case is run by MPI and three times by this package, and
must come out the same."""

import array
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ucc_hetero import Communicator

Array = np.ndarray[Any, Any]
#: A case: makes calls on a communicator, MPI's or this package's, and returns what must be the same.
Calls = Callable[[Any], list[Any]]


def data(comm: Any, n: int, dtype: str = "d") -> Array:
    """Numbers that tell ranks and places apart, and whose sums are exact."""
    return (np.arange(n) + 100 * (comm.Get_rank() + 1)).astype(dtype)


def blank(n: int, dtype: str = "d") -> Array:
    return np.full(n, -1, dtype)


def empty(comm: Any) -> list[Any]:
    """Empty bytearrays, array.arrays and memoryviews, which share an address, in all calls."""
    zeros = [0] * comm.Get_size()
    for make in (bytearray, lambda: array.array("d"), lambda: memoryview(bytearray()), lambda: np.empty(0)):
        send, recv = make(), make()
        comm.Allgatherv(send, [recv, zeros])
        comm.Alltoallv([send, zeros], [recv, zeros])
        comm.Gatherv(send, [recv, zeros], 0)
        comm.Scatterv([send, zeros], recv, 0)
        comm.Allgather(send, recv)
        comm.Alltoall(send, recv)
        comm.Gather(send, recv)
        comm.Allreduce([send, MPI.INT], [recv, MPI.INT])
        comm.Reduce_scatter([send, MPI.INT], [recv, MPI.INT], zeros)
        comm.Reduce_scatter_block([send, MPI.INT], [recv, MPI.INT])
        comm.Bcast(send)
    comm.Allgatherv([None, MPI.INT], [None, zeros, MPI.INT])
    comm.Alltoallv([None, 0, MPI.INT], [None, zeros, MPI.INT])
    comm.Allreduce([None, 0, MPI.INT], [None, 0, MPI.INT])
    return []


def nothing_from_some(comm: Any) -> list[Any]:
    """Ranks with an empty bytearray among others."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [2 * (r % 2) for r in range(size)]
    send, out = bytearray(b"ab") if rank % 2 else bytearray(), bytearray(b"." * sum(counts))
    comm.Allgatherv(send, [out, counts])
    back = bytearray(counts[rank])
    comm.Scatterv([out, counts], back, 0)
    return [out, back]


def scattered_in_place(comm: Any) -> list[Any]:
    """Memory beyond the result stays as it is."""
    size = comm.Get_size()
    results = []
    for n in (1, 2, 5):
        one, two = data(comm, n * size), data(comm, n * size, "i")
        comm.Reduce_scatter_block(MPI.IN_PLACE, one)
        comm.Reduce_scatter(MPI.IN_PLACE, two, [n] * size, MPI.MAX)
        results += [one[:n], two[:n]]
        if isinstance(comm, Communicator):
            assert (one[n:] == data(comm, n * size)[n:]).all() and (two[n:] == data(comm, n * size, "i")[n:]).all()
    return results


def displaced(comm: Any) -> list[Any]:
    """``[array, (count, displacement)]`` on either side; made again, which looks up what was done last time."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [r % 2 + 1 for r in range(size)]
    mine, total = counts[rank], sum(counts)
    results: list[Any] = []
    for again in range(3):
        source = data(comm, 3 * total + 4) + again
        every, at_root, part, reduced, w = blank(total), blank(total), blank(mine + 3), blank(mine + 2), blank(total)
        comm.Allgatherv([source, (mine, 3)], [every, counts])
        comm.Gatherv([source, mine, 2, MPI.DOUBLE], [at_root, counts] if rank == 0 else None, 0)
        comm.Scatterv([source, (counts, [2 * r for r in range(size)])], [part, (mine, 2), "d"], 0)
        comm.Reduce_scatter([source, (total, 1)], [reduced, (mine, 2)], counts)
        comm.Allreduce([source, (total, 2)], [w, (total, 0)])
        results += [every, at_root, part, reduced, w]
    return results


def known_and_unknown_counts(comm: Any) -> list[Any]:
    """A blocking call whose counts are what rank 0 knew of those of a non-blocking one before."""
    rank, size = comm.Get_rank(), comm.Get_size()
    matrices = (
        [[2 + abs(r - s) for s in range(size)] for r in range(size)],
        [[(2 + abs(r - s)) * (not r * s) for s in range(size)] for r in range(size)],
    )
    results: list[Any] = []
    for counts, form in zip(matrices, ("Ialltoallv", "Alltoallv"), strict=True):
        place, out = data(comm, sum(counts[rank])), blank(sum(counts[rank]))
        for send, recv in ((MPI.IN_PLACE, place), (data(comm, len(out)), out)):
            request = getattr(comm, form)(send if send is MPI.IN_PLACE else [send, counts[rank]], [recv, counts[rank]])
            if request is not None:
                request.Wait()
        results += [place, out]
    return results


def case_as_mpi_does(comm: Communicator) -> None:
    """Every case by MPI, and by this package: the first time, and as what looks like an earlier call."""
    made: tuple[Calls, ...] = (empty, nothing_from_some, scattered_in_place, displaced, known_and_unknown_counts)
    for calls in made:
        wanted = [np.asarray(each).tolist() for each in calls(comm.mpi)]
        for turn in range(3):
            got = [np.asarray(each).tolist() for each in calls(comm)]
            assert got == wanted, f"{calls.__name__}, time {turn}, rank {comm.rank}:\n{got}\nMPI: {wanted}"
