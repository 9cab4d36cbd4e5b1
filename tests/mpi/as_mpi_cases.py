"""Buffers as programs on mpi4py pass them: each case is run by MPI and three times by this package, and must come out
the same. Started by test_collectives.py under mpirun."""

import array
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent))
from cases import run

from ucc_hetero import Communicator

Array = np.ndarray[Any, Any]
#: A case: makes calls on a communicator, MPI's or this package's, and returns what must be the same.
Calls = Callable[[Any], list[Any]]


def data(comm: Any, n: int, dtype: str = "d") -> Array:
    """Numbers that tell ranks and places apart, and whose sums are exact."""
    return (np.arange(n) + 100 * (comm.Get_rank() + 1)).astype(dtype)


def blank(n: int, dtype: str = "d") -> Array:
    return np.full(n, -1, dtype)


@contextmanager
def columns(rows: int, width: int) -> Iterator[dict[str, MPI.Datatype]]:
    """A column of a matrix of doubles, in all the ways to say it; successive ones lie beside each other."""
    base, size = MPI.DOUBLE, MPI.DOUBLE.Get_size()
    steps = [i * width for i in range(rows)]
    inner = {
        "vector": base.Create_vector(rows, 1, width),
        "hvector": base.Create_hvector(rows, 1, width * size),
        "indexed": base.Create_indexed([1] * rows, steps),
        "hindexed": base.Create_hindexed([1] * rows, [i * size for i in steps]),
        "indexed_block": base.Create_indexed_block(1, steps),
        "subarray": base.Create_subarray([rows, width], [rows, 1], [0, 0]),
    }
    made = {name: each.Create_resized(0, size).Commit() for name, each in inner.items()}
    try:
        yield made
    finally:
        for each in [*inner.values(), *made.values()]:
            each.Free()


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


def counts_from_the_receivers(comm: Any) -> list[Any]:
    """Without recvcounts a Reduce_scatter has those of the ranks' recvbufs."""
    rank, size = comm.Get_rank(), comm.Get_size()
    into, total = blank(rank + 1), size * (size + 1) // 2
    comm.Reduce_scatter(data(comm, total), into)
    swapped = blank(size - rank + 2)
    comm.Reduce_scatter(data(comm, total), [swapped, (size - rank, 1), MPI.DOUBLE], op=MPI.MAX)
    return [into, swapped]


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


def columns_by_scatterv(comm: Any) -> list[Any]:
    """Numerical libraries send columns of a matrix so, by any constructor, with counts and displacements in columns."""
    rank, size = comm.Get_rank(), comm.Get_size()
    rows, width = 3, 2 * size + 1
    counts = [1 + (r < 2) for r in range(size)]
    displs = [int(n) for n in np.cumsum([0, *counts[:-1]]) + 1]
    results: list[Any] = []
    with columns(rows, width) as all_types:
        for column in all_types.values():
            matrix, out = data(comm, rows * width).reshape(rows, width), blank(rows * width).reshape(rows, width)
            mine = blank(rows * counts[rank])
            comm.Scatterv([matrix, (counts, displs), column] if rank == 0 else None, mine, 0)
            comm.Gatherv(mine, [out, (counts, displs), column] if rank == 0 else None, 0)
            every, across = blank(rows * width).reshape(rows, width), blank(rows * width).reshape(rows, width)
            comm.Allgatherv(mine, [every, (counts, displs[::-1] if size < 3 else displs), column])
            there = [counts[rank]] * size
            starts = [r * counts[rank] for r in range(size)]
            comm.Alltoallv([matrix, (counts, displs), column], [across, (there, starts), column])
            results += [mine, out, every, across]
    return results


def columns_of_a_type_each(comm: Any) -> list[Any]:
    """``Alltoallw`` with and without counts and displacements."""
    size = comm.Get_size()
    results: list[Any] = []
    with columns(2, size) as all_types:
        column, row = all_types["vector"], MPI.DOUBLE.Create_contiguous(2).Commit()
        matrix, out, same = data(comm, 2 * size), blank(2 * size), blank(2 * size)
        comm.Alltoallw(
            [matrix, ([1] * size, [8 * r for r in range(size)]), [column] * size],
            [out, np.ones(size, "i"), np.arange(size) * 16, [row] * size],
        )
        comm.Alltoallw([matrix, [column] * size], [same, ([1] * size, [16 * r for r in range(size)]), [row] * size])
        row.Free()
        results += [out, same]
    return results


def constant_root(comm: Any) -> list[Any]:
    """A column of memory that cannot be written to is sent to all."""
    with columns(3, 4) as all_types:
        matrix = data(comm, 12)
        matrix.flags.writeable = comm.Get_rank() != 0
        comm.Bcast([matrix, 2, all_types["vector"]], 0)
        request = comm.Ibcast([matrix, 1, all_types["indexed"]], 0)
        request.Wait()
    return [matrix]


def scattered_among_neighbours(comm: Any) -> list[Any]:
    """Entries without any order in even blocks along edges."""
    circle = comm.Create_cart([comm.Get_size()], [True])
    kind = MPI.DOUBLE.Create_indexed_block(1, [3, 0, 2]).Commit()
    out, into = data(comm, 16), blank(16)
    if comm.Get_size() > 2:  # of two ranks each is the other's neighbour on both sides
        circle.Neighbor_alltoall([out, 2, kind], [into, 2, kind])
        circle.Neighbor_allgather([out, 2, kind], [into, (2, 0), kind])
    kind.Free()
    circle.Free()
    return [into]


def numbers_of_numpy(comm: Any) -> list[Any]:
    """Roots and counts that are numpy's integers or arrays of no dimension, and counts in any sequence."""
    size, results = comm.Get_size(), []
    for kind in (np.int64, np.uint8, np.array):
        root, one = kind(size - 1), kind(1)
        buffer, every, gathered = data(comm, 3), blank(2 * size), blank(size)
        comm.Bcast([buffer, kind(2), MPI.DOUBLE], root)
        comm.Allgatherv([buffer, kind(2)], [every, kind(2)])
        comm.Gatherv([buffer, one], [gathered, (np.ones(size, "i"), array.array("q", range(size)))], root)
        comm.Reduce([buffer, (kind(2), one)], [every, kind(2)], root=root)
        results += [buffer, every, gathered]
    return results


def absolute_addresses(comm: Any) -> list[Any]:
    """``MPI.BOTTOM`` with a datatype of addresses."""
    one, two, into = data(comm, 2), data(comm, 3), blank(5)
    kind = MPI.DOUBLE.Create_hindexed([2, 3], [MPI.Get_address(one), MPI.Get_address(two)]).Commit()
    comm.Sendrecv([MPI.BOTTOM, 1, kind], comm.Get_rank(), 1, into, comm.Get_rank(), 1)
    comm.Bcast([MPI.BOTTOM, 1, kind], 0)
    kind.Free()
    comm.Send(None, MPI.PROC_NULL)
    comm.Recv(None, MPI.PROC_NULL)
    return [one, two, into]


def case_as_mpi_does(comm: Communicator) -> None:
    """Every case by MPI, and by this package: the first time, and as what looks like an earlier call."""
    made: tuple[Calls, ...] = (
        empty, nothing_from_some, scattered_in_place, counts_from_the_receivers, displaced, known_and_unknown_counts,
        columns_by_scatterv, columns_of_a_type_each, constant_root, scattered_among_neighbours, numbers_of_numpy,
        absolute_addresses,
    )  # fmt: skip
    for calls in made:
        wanted = [np.asarray(each).tolist() for each in calls(comm.mpi)]
        for turn in range(3):
            got = [np.asarray(each).tolist() for each in calls(comm)]
            assert got == wanted, f"{calls.__name__}, time {turn}, rank {comm.rank}:\n{got}\nMPI: {wanted}"


if __name__ == "__main__":
    run(globals())
