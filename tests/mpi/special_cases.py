"""Cases beside the random ones: datatypes with gaps, pairs, the user's operations."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ucc_hetero import Communicator, Request

PAIR = np.dtype([("value", "f8"), ("index", "i4")], align=True)
FORMS = ("{}", "I{}", "{}_init")


def run(comm: Communicator, form: str, name: str, *args: Any, refill: Callable[[], None] = lambda: None) -> None:
    """Call one form of a collective; a persistent one twice, with ``refill`` before the second time."""
    result = getattr(comm, form.format(name.lower() if form[0] == "I" else name))(*args)
    if form.endswith("_init"):
        for again in range(2):
            if again:
                refill()
            result.Start()
            result.Wait()
        result.Free()
    elif result is not None:
        result.Wait()


def pairs(comm: Communicator) -> None:
    """MINLOC and MAXLOC on MPI's pair types."""
    rng = np.random.default_rng([3, comm.rank])
    for op, best in ((MPI.MAXLOC, np.argmax), (MPI.MINLOC, np.argmin)):
        for form in FORMS:
            mine, out = np.zeros(100, PAIR), np.zeros(100, PAIR)

            def fill(mine: np.ndarray = mine) -> None:
                mine["value"], mine["index"] = rng.integers(0, 9, 100), comm.rank

            fill()
            run(comm, form, "Allreduce", [mine, MPI.DOUBLE_INT], [out, MPI.DOUBLE_INT], op, refill=fill)
            every = np.array(comm.mpi.allgather(mine["value"].copy()))
            assert (out["index"] == best(every, axis=0)).all()
            assert (out["value"] == every[best(every, axis=0), np.arange(100)]).all()


def own_operations(comm: Communicator) -> None:
    """The user's operations, also one that does not commute, mixed with calls of ours in flight."""

    def compose(a: Any, b: Any, _: MPI.Datatype) -> None:
        """Affine maps x -> m x + c: b after a."""
        left, right = np.frombuffer(a, "f8").reshape(-1, 2), np.frombuffer(b, "f8").reshape(-1, 2)
        right[:] = np.stack([left[:, 0] * right[:, 0], left[:, 1] * right[:, 0] + right[:, 1]], axis=1)

    op = MPI.Op.Create(compose, commute=False)
    mine = np.arange(1.0, 21.0) + comm.rank
    every = comm.mpi.allgather(mine)

    def due(arrays: list[np.ndarray]) -> np.ndarray:
        out = arrays[0].copy()
        for array in arrays[1:]:
            step = array.copy()
            compose(out, step, MPI.DOUBLE)
            out = step
        return out

    for form in FORMS:
        out = np.zeros_like(mine)
        run(comm, form, "Allreduce", mine, out, op)
        assert np.array_equal(out, due(every))
        run(comm, form, "Scan", mine, out, op)
        assert np.array_equal(out, due(every[: comm.rank + 1]))
        out = mine.copy()
        if form != "{}_init":  # in place the second start would reduce the first one's result
            run(comm, form, "Allreduce", MPI.IN_PLACE, out, op)
            assert np.array_equal(out, due(every))
        for root in {0, comm.size - 1}:
            run(comm, form, "Reduce", mine, out if comm.rank == root else None, op, root)
            assert comm.rank != root or np.array_equal(out, due(every))
    sums, out = np.zeros(5), np.zeros_like(mine)
    requests: list[Request] = [comm.Iallreduce(np.ones(5), sums), comm.Iallreduce(mine, out, op)]
    if comm.rank % 2:
        requests.reverse()
    while not Request.Testall(requests):
        time.sleep(1e-4)  # others need the core
    assert sums[0] == comm.size and np.array_equal(out, due(every))
    requests = [comm.Iallreduce(mine, out, op), comm.Iallreduce(np.ones(5), sums)]
    seen = [Request.Waitany(requests), Request.Waitany(requests)]
    assert sorted(seen) == [0, 1] and Request.Waitsome(requests) is None
    op.Free()


def strided(comm: Communicator) -> None:
    """MPI vector types: taken out of, and put back between, what stays as it was; anew at each start."""
    column = MPI.DOUBLE.Create_vector(6, 1, 4).Create_resized(0, 8)
    column.Commit()
    for form in FORMS:
        rng = np.random.default_rng([comm.rank, len(form)])
        grid, out = rng.random((6, 4)), np.full((6, 4), -1.0)

        def fill(grid: np.ndarray = grid) -> None:
            grid[:] = np.random.default_rng([comm.rank, 99]).random((6, 4))

        run(comm, form, "Allreduce", [grid, 1, column], [out, 1, column], refill=fill)
        assert np.allclose(out[:, 0], sum(comm.mpi.allgather(grid[:, 0].copy())))
        assert (out[:, 1:] == -1).all()
        run(comm, form, "Bcast", [grid, 1, column], comm.size - 1)
        assert np.array_equal(grid[:, 0], comm.mpi.bcast(grid[:, 0].copy(), comm.size - 1))
    column.Free()


def redistributed(comm: Communicator) -> None:
    """Rows become columns by subarray types: blocks of more than numpy keeps when they are given back."""
    p, me = comm.size, comm.rank
    rows, columns = 101, 40 * p + 1
    grid = np.arange(rows * columns, dtype="f4").reshape(rows, columns)
    heights, widths = ([len(part) for part in np.array_split(np.arange(n), p)] for n in (rows, columns))
    starts, lefts = ([sum(sizes[:r]) for r in range(p)] for sizes in (heights, widths))
    mine = grid[starts[me] :][: heights[me]].copy()
    outof = [MPI.FLOAT.Create_subarray(mine.shape, [heights[me], widths[r]], [0, lefts[r]]).Commit() for r in range(p)]
    shape = rows, widths[me]
    into = [MPI.FLOAT.Create_subarray(shape, [heights[r], widths[me]], [starts[r], 0]).Commit() for r in range(p)]
    for form in FORMS:
        out = np.full(shape, -1, "f4")
        run(comm, form, "Alltoallw", [mine, ([1] * p, [0] * p), outof], [out, ([1] * p, [0] * p), into])
        assert np.array_equal(out, grid[:, lefts[me] : lefts[me] + widths[me]]), (form, me)
    for kind in (*outof, *into):
        kind.Free()


def main() -> None:
    with Communicator() as comm:
        for check in (pairs, own_operations, strided, redistributed):
            check(comm)
            comm.Barrier()
