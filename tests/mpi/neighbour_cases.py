"""Neighbourhood collectives against MPI's own."""

from collections import Counter
from itertools import chain

import numpy as np
from cases import raises
from mpi4py import MPI

import ucc_hetero


def topologies(comm):
    """Grids with borders, with both neighbours on one rank, with itself as neighbour; graphs with parallel edges."""
    p, me = comm.size, comm.rank
    for dims, periods in (
        ([p], [True]), ([p], [False]), ([p // 2, 2] if p % 2 == 0 else [p, 1], [True, True]), ([1, p], [True, False]),
    ):  # fmt: skip
        yield f"cart {dims} {periods}", comm.Create_cart(dims, periods=periods)
    # Every rank has all others as neighbours; rank 0 has each of them twice.
    lists = [[q for q in range(p) if q != r] * (2 if r == 0 else 1) for r in range(p)]
    for r in range(1, p):
        lists[r] += [0]
    if p > 1:
        yield (
            "graph",
            comm.Create_graph(np.cumsum([len(found) for found in lists]).tolist(), [*chain.from_iterable(lists)]),
        )
    right, left = (me + 1) % p, (me - 1) % p
    yield "adjacent", comm.Create_dist_graph_adjacent([left, me, left, left], [right, right, me, right])
    with comm.Create_cart([p], periods=[True]) as ring:
        yield "adjacent of a grid", ring.Create_dist_graph_adjacent([left], [right])
    # No rank sends to rank 0, and the last rank sends to none.
    yield "chain", comm.Create_dist_graph([me], [int(me + 1 < p)], [me + 1] if me + 1 < p else [])


def variants(comm, name, send, recv):
    """A call in its three forms; the caller checks the result after each."""
    getattr(comm, name)(send, recv)
    yield
    request = getattr(comm, f"I{name[0].lower()}{name[1:]}")(send, recv)
    assert request.Wait() and not request
    yield
    again = getattr(comm, f"{name}_init")(send, recv, MPI.INFO_NULL)
    for _ in range(2):
        again.Start()
        ucc_hetero.Request.Waitall([again])
        yield
    again.Free()


def received(comm, blocks):
    """The block that arrives along each edge, computed from what all ranks send; None for no sender."""
    everyone = comm.mpi.allgather((comm.outedges, blocks))
    grid, seen, found = comm.mpi.Get_topology() == MPI.CART, Counter[int](), []
    for j, source in enumerate(comm.inedges):
        if source == MPI.PROC_NULL:
            found.append(None)
            continue
        destinations, theirs = everyone[source]
        # On a grid data that is sent down arrives from above; parallel edges of graphs follow the order of both lists.
        found.append(theirs[j ^ 1 if grid else [i for i, d in enumerate(destinations) if d == comm.rank][seen[source]]])
        seen[source] += 1
    return found


def compare(comm, name, send, recv, into, blocks, what):
    """Compare a call's result in every row of ``into``; the rest must stay unchanged."""
    right = np.frombuffer(b"\xa5" * into.nbytes, into.dtype).reshape(into.shape).copy()
    for row, block in zip(right, blocks, strict=True):
        if block is not None:
            row[: len(block)] = block
    into.view(np.uint8)[...] = 0xA5
    for form, _ in enumerate(variants(comm, name, send, recv)):
        assert (into.view(np.uint8) == right.view(np.uint8)).all(), (what, name, form, comm.rank, into, right)
        into.view(np.uint8)[...] = 0xA5


def case_all_topologies(comm):
    """All five calls with random numbers and gaps; and MPI's own on grids."""
    rng = np.random.default_rng()
    for what, topo in topologies(comm):
        rows, outs, n = len(topo.inedges), len(topo.outedges), int(comm.mpi.bcast(rng.integers(1, 9)))
        one, many = rng.random(n), rng.random((outs, n))
        along = {"Neighbor_allgather": received(topo, [one] * outs), "Neighbor_alltoall": received(topo, [*many])}
        into, wide = np.empty((rows, n)), np.empty((rows, n + 3))
        for name, blocks in along.items():
            compare(topo, name, many if "to" in name else one, into, into, blocks, what)
            # Rows further apart than their counts: the v form; displacements in bytes and a type for each: the w form.
            takes = [wide, ([n] * rows, [i * (n + 3) for i in range(rows)]), MPI.DOUBLE]
            compare(topo, f"{name}v", [many, n] if "to" in name else one, takes, wide, blocks, what)
        size, types = MPI.DOUBLE.extent, [MPI.DOUBLE]
        sends = [many, ([n] * outs, [i * n * size for i in range(outs)]), types * outs]
        takes = [wide, ([n] * rows, [i * (n + 3) * size for i in range(rows)]), types * rows]
        compare(topo, "Neighbor_alltoallw", sends, takes, wide, along["Neighbor_alltoall"], what)
        if what.startswith("cart"):  # with parallel edges MPI's other forms differ from the blocking one in Open MPI 5
            topo.mpi.Neighbor_alltoall(many, into)
            assert all(block is None or (row == block).all() for row, block in zip(into, blocks, strict=True)), what
        topo.Free()


def case_columns(comm):
    """Borders of a field on a grid, as datatypes with gaps, in both directions at once."""
    topo = comm.Create_cart([comm.size], periods=[True])
    field = np.random.default_rng(comm.rank).random((6, 5))
    other = field.copy()
    column = MPI.DOUBLE.Create_vector(6, 1, 5).Commit()
    size = MPI.DOUBLE.extent
    sends, takes = ([1, 1], [size, 3 * size]), ([1, 1], [0, 4 * size])
    topo.Neighbor_alltoallw([field, sends, [column] * 2], [field, takes, [column] * 2])
    topo.mpi.Neighbor_alltoallw([other, sends, [column] * 2], [other, takes, [column] * 2])
    assert (field == other).all()
    column.Free()
    topo.Free()


def case_callers_messages_are_apart(comm):
    """A receive from any source does not match messages of neighbourhood collectives."""
    topo = comm.Create_cart([comm.size], periods=[True])
    into = np.full(3, -1.0)
    request = topo.Irecv(into)
    rows = np.empty((2, 4))
    topo.Neighbor_allgather(np.full(4, float(topo.rank)), rows)
    assert rows[:, 0].tolist() == [(topo.rank - 1) % topo.size, (topo.rank + 1) % topo.size]
    assert not request.Test() and not topo.Iprobe()
    topo.Barrier()
    topo.Send(np.ones(3), (topo.rank + 1) % topo.size)
    request.Wait()
    assert (into == 1).all()
    topo.Free()


def case_mistakes(comm):
    """Errors name call and rank. After different sizes later neighbourhood calls fail too, but no other calls."""
    me, one, rows = f"rank {comm.rank}", np.zeros(4), np.zeros((2, 4))
    with raises(ValueError, "no topology", me, "Create_cart"):
        comm.Neighbor_allgather(one, rows)
    topo = comm.Create_cart([comm.size], periods=[True])
    with raises(ValueError, "neighbor_allgather: recvbuf", me):
        topo.Neighbor_allgather(one, np.zeros(7))
    with raises(TypeError, "neighbor_alltoall: sendbuf", me):
        topo.Neighbor_alltoall(None, rows)
    with raises(ValueError, "neighbor_alltoallv: recvbuf", me):
        topo.Neighbor_alltoallv([one, [2, 2]], [rows, [4, 4, 4]])
    with raises(ucc_hetero.MismatchError, me, "sent 16 bytes", "has 32"):
        topo.Neighbor_alltoall(np.zeros((2, 2)), rows)
    with raises(ucc_hetero.CollectiveError, "neighbor_alltoall failed", me):
        topo.Ineighbor_allgather(one, rows)
    topo.Barrier()
    topo.Free()
    alone = comm.Create_dist_graph_adjacent([], [])
    for turn in range(2):  # the first rank comes after the others
        comm.Barrier()
        if comm.rank == 0 and turn:
            with raises(ucc_hetero.MismatchError, me, "neighbor_alltoall", "neighbor_allgather"):
                alone.Neighbor_alltoall(one, one)
        elif comm.rank and not turn:
            alone.Neighbor_allgather(one, one)
    alone.Barrier()
    alone.Free()
    with raises(ValueError, "freed"):
        topo.Neighbor_allgather(one, rows)
