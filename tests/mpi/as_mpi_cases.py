"""Calls in the forms of programs on mpi4py. Each case is run once by MPI and three times by this package, with equal
results."""

import array
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from mpi4py import MPI

from ucc_hetero import Communicator

PAIR = np.dtype([("value", "f8"), ("index", "i4")], align=True)
FORMS = ("{}", "I{}", "{}_init")
Calls = Callable[[Any], list[Any]]


def data(comm, n, dtype="d"):
    return (np.arange(n) + 100 * (comm.Get_rank() + 1)).astype(dtype)


def blank(n, dtype="d"):
    return np.full(n, -1, dtype)


def run(comm, form, name, *args, fill=lambda: None):
    """Make a call on the data of ``fill``. MPI makes the blocking form. This package's second call is persistent, with
    another call before it.
    """
    if not isinstance(comm, Communicator):
        form = "{}"
    if not form.endswith("_init"):
        fill()
    request = getattr(comm, form.format(name.lower() if form[0] == "I" else name))(*args)
    if form.endswith("_init"):
        request.Start()
        request.Wait()
        fill()
        request.Start()
    if request is not None:
        request.Wait()


def empty(comm):
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


def nothing_from_some(comm):
    """Some ranks pass an empty bytearray."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [2 * (r % 2) for r in range(size)]
    send, out = bytearray(b"ab") if rank % 2 else bytearray(), bytearray(b"." * sum(counts))
    comm.Allgatherv(send, [out, counts])
    back = bytearray(counts[rank])
    comm.Scatterv([out, counts], back, 0)
    return [out, back]


def pairs(comm):
    """MINLOC and MAXLOC on MPI's pair types."""
    results = []
    for (op, name), form in product(((MPI.MAXLOC, "maxloc"), (MPI.MINLOC, "MinLoc")), FORMS):
        said = name if isinstance(comm, Communicator) and form == "{}" else op
        mine, out = np.zeros(100, PAIR), np.zeros(100, PAIR)

        def fill(mine=mine):
            rank = comm.Get_rank()
            mine["value"], mine["index"] = np.random.default_rng([3, rank]).integers(0, 9, 100), rank

        run(comm, form, "Allreduce", [mine, MPI.DOUBLE_INT], [out, MPI.DOUBLE_INT], said, fill=fill)
        results += [out["value"], out["index"]]
    return results


def compose(a, b, _):
    """Affine maps x -> m x + c: b after a."""
    left, right = np.frombuffer(a, "f8").reshape(-1, 2), np.frombuffer(b, "f8").reshape(-1, 2)
    right[:] = np.stack([left[:, 0] * right[:, 0], left[:, 1] * right[:, 0] + right[:, 1]], axis=1)


def own_operation(comm):
    """A user-defined operation that does not commute."""
    op, results = MPI.Op.Create(compose, commute=False), []
    rank, mine = comm.Get_rank(), np.arange(1.0, 21.0) + comm.Get_rank()
    for form in FORMS:
        for name in ("Allreduce", "Scan"):
            run(comm, form, name, mine, out := blank(20), op)
            results.append(out)
        run(comm, form.replace("_init", ""), "Allreduce", MPI.IN_PLACE, out := mine.copy(), op)
        results.append(out)
        for root in {0, comm.Get_size() - 1}:
            run(comm, form, "Reduce", mine, out if rank == root else None, op, root)
            results.append(out.copy())
    op.Free()
    return results


def add(a, b, _):
    np.frombuffer(b, "i8")[:] += np.frombuffer(a, "i8")


def own_operation_on_long_vectors(comm):
    """A commutative operation, of which each rank reduces a block in a blocking call; datatypes freed before the
    end."""
    op, results, size = MPI.Op.Create(add, commute=True), [], comm.Get_size()
    counts = [1 + (r * 7) % 3 for r in range(size)]
    for form, n in product(FORMS, (16_384, 20_011)):
        mine = np.random.default_rng([n, comm.Get_rank()]).integers(-99, 99, n)
        run(comm, form, "Allreduce", mine, out := np.full(n, -1), op)
        run(comm, form, "Exscan", mine, before := np.zeros(n, int), op)
        part, uneven = (np.full(k + 2, -1) for k in (n // size, counts[comm.Get_rank()]))
        run(comm, form, "Reduce_scatter_block", mine[: n // size * size], part[1:-1], op)
        run(comm, form, "Reduce_scatter", mine[: sum(counts)], uneven[1:-1], counts, op)
        results += [out, before, part, uneven]
    comm.Allreduce(MPI.IN_PLACE, mine, op)
    pairs = MPI.INT64_T.Create_vector(2, 1, 2).Create_resized(0, 32).Commit()
    halves, out = MPI.Op.Create(_halves), np.full(20, -1)
    request = comm.Iallreduce([mine, 5, pairs], [out, 5, pairs], halves)
    if isinstance(comm, Communicator):
        pairs.Free()
    request.Wait()
    # Numbers far apart, in entries that overlap, for which mpi4py takes no counts.
    wide = MPI.INT64_T.Create_vector(2, 1, 100_000).Create_resized(0, 8).Commit()
    far, last = np.arange(100_000 + size) + comm.Get_rank(), np.full(100_001, -1)
    if isinstance(comm, Communicator):
        comm.Reduce_scatter_block([far, size, wide], [last, 1, wide], op)
    else:
        last[0] = sum(comm.Get_rank() + rank for rank in range(size))
    return [*results, mine, out, last[:1]]


def _halves(a, b, _):
    """Sum the two numbers of each entry, which has a gap behind both."""
    left, right = (np.frombuffer(each, "i8")[: len(each) // 32 * 4].reshape(-1, 4) for each in (a, b))
    right[:, ::2] += left[:, ::2]


def redistributed(comm):
    """Rows become columns by subarray types, in blocks larger than those that numpy's allocator keeps."""
    p, me = comm.Get_size(), comm.Get_rank()
    rows, columns = 101, 40 * p + 1
    grid = np.arange(rows * columns, dtype="f4").reshape(rows, columns)
    heights, widths = ([len(part) for part in np.array_split(np.arange(n), p)] for n in (rows, columns))
    starts, lefts = ([sum(sizes[:r]) for r in range(p)] for sizes in (heights, widths))
    mine, shape = grid[starts[me] :][: heights[me]].copy(), (rows, widths[me])
    outof = [MPI.FLOAT.Create_subarray(mine.shape, [heights[me], widths[r]], [0, lefts[r]]).Commit() for r in range(p)]
    into = [MPI.FLOAT.Create_subarray(shape, [heights[r], widths[me]], [starts[r], 0]).Commit() for r in range(p)]
    results, whole = [], ([1] * p, [0] * p)
    for form in FORMS:
        run(comm, form, "Alltoallw", [mine, whole, outof], [out := np.full(shape, -1, "f4"), whole, into])
        results.append(out)
    for kind in (*outof, *into):
        kind.Free()
    return results


def long_doubles(comm):
    """numpy's long double types, which are moved and not reduced."""
    rank, size = comm.Get_rank(), comm.Get_size()
    results = []
    for form, code in product(FORMS, "gG"):
        place, out, block, uneven = data(comm, 6, code), blank(3 * size, code), blank(3, code), blank(size, code)
        run(comm, form, "Bcast", place, size - 1)
        run(comm, form, "Allgather", data(comm, 3, code) / 3, out)
        run(comm, form, "Scatter", [data(comm, 3 * size, code), code], [block, code], 0)
        run(comm, form, "Allgatherv", data(comm, 1, code), [uneven, [1] * size])
        comm.Sendrecv(place, (rank + 1) % size, 0, passed := blank(6, code), (rank - 1) % size)
        results += [place, out, block, uneven, passed]
    return results


CALLS = (
    empty, nothing_from_some, pairs, own_operation,
    own_operation_on_long_vectors, redistributed, long_doubles,
)  # fmt: skip


def case_as_mpi_does(comm):
    """Every case by MPI and by this package, as a first call and as a repetition."""
    for calls in CALLS:
        wanted = [np.asarray(each).tolist() for each in calls(comm.mpi)]
        for turn in range(3):
            got = [np.asarray(each).tolist() for each in calls(comm)]
            assert got == wanted, f"{calls.__name__}, time {turn}, rank {comm.rank}:\n{got}\nMPI: {wanted}"
