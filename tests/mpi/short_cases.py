"""Repeated short calls on host memory, and calls that look like them."""

import gc
import time
import weakref
from functools import partial
from itertools import product

import numpy as np
import pytest
from frames import files_of, frames_of
from mpi4py import MPI
from processes import in_threads

from ucc_hetero import CollectiveError, Communicator, MismatchError, RefusedError, Request

world = MPI.COMM_WORLD


def few_files():
    """A first call passes the files of docs/design.md, and no other layers."""
    with Communicator(world) as comm:
        total = np.empty(world.bcast(np.random.default_rng().integers(5, 62)))  # of which few tests have a plan
        found = files_of(lambda: comm.Allreduce(np.full(total.size, 2.0), total))
    assert (total == 2 * comm.size).all()
    assert len(found) <= 15, sorted(found)


def few_frames():
    """A repeated call runs at most four of the package's Python functions, for any length; one of many in flight is
    not lowered again."""
    with Communicator(world) as comm:
        for n in (4, 1 << 16):
            count_frames(comm, n)
        for n in (3, 300):
            repeat_bunch(comm, n)


def count_frames(comm, n):
    dice = np.random.default_rng(int.from_bytes(np.random.bytes(4), "little"))
    mine, part, whole = dice.random(n), np.empty(n), np.empty(n * comm.size)
    every = dice.random(n * comm.size)
    request, total = comm.Allreduce_init(mine, part), np.sum(world.allgather(mine), axis=0)

    me, ns, starts = comm.rank, [n] * comm.size, np.arange(comm.size) * n

    def at(root, array):
        return array if comm.rank == root else None

    def done(request, *_):
        request.Wait()

    calls = {
        "Barrier": comm.Barrier, "Allreduce": lambda: comm.Allreduce(mine, part),
        "Bcast": lambda: comm.Bcast(part, 1), "Reduce": lambda: comm.Reduce(mine, at(1, part), root=1),
        "Reduce to one, arrays of all": lambda: comm.Reduce(mine, part, root=1),
        "Allgather": lambda: comm.Allgather(mine, whole), "Scatter": lambda: comm.Scatter(at(0, every), part),
        "Scatter of one, arrays of all": lambda: comm.Scatter(every, part),
        "Gather": lambda: comm.Gather(mine, at(0, whole)), "Alltoall": lambda: comm.Alltoall(every, whole),
        "Reduce_scatter_block": lambda: comm.Reduce_scatter_block(every, part),
        "Start, Wait": lambda: (request.Start(), request.Wait()),
        "Gatherv": lambda: comm.Gatherv(mine, at(0, [whole, ns])),
        "Alltoallv": lambda: comm.Alltoallv([every, ns, starts, MPI.DOUBLE], [whole, (ns, starts)]),
        "Reduce_scatter": lambda: comm.Reduce_scatter(every, part, ns),
        "Alltoallw": lambda: comm.Alltoallw(
            [every, (ns, (8 * starts).tolist()), [MPI.DOUBLE, MPI.INT64_T] * (comm.size // 2)],
            [whole, (ns, (8 * starts).tolist()), [MPI.DOUBLE] * comm.size],
        ),
        "Sendrecv": lambda: comm.Sendrecv(mine, me, 1, part, me, 1),
        "Send, Recv": lambda: done(comm.Isend(mine, me), comm.Recv(part)),
        "Isend, Probe, Recv, Wait": lambda: done(comm.Isend(mine, me), comm.Probe(me), comm.Recv(part, me)),
        "Irecv, Send, Wait": lambda: done(comm.Irecv(part, me, 2), comm.Send(mine, me, 2)),
        "Irecv, Isend, Waitall": lambda: Request.Waitall([comm.Irecv(part), comm.Isend(mine, me)]),
    }  # fmt: skip
    begun = {
        "Iallreduce, Wait": lambda: done(comm.Iallreduce(mine, part)),
        "Ibcast, Wait": lambda: done(comm.Ibcast(part, 1)),
        "Isend, Irecv, Iallgatherv, Waitall": lambda: Request.Waitall(
            [comm.Isend(mine, me), comm.Irecv(part), comm.Iallgatherv(mine, [whole, ns])]
        ),
    }  # fmt: skip
    if n < 1000:  # a long one may wait, and a long wait goes on in Python
        calls |= begun
    for name, call in calls.items():
        for _ in range(4):
            call()
        part[:] = np.nan
        found = world.allgather(min((frames_of(call) for _ in range(8)), key=len))  # of a call that need not wait
        assert max(map(len, found)) <= 4, (name, n, found)
        if name in ("Allreduce", "Start, Wait") or (name.startswith("Reduce to") and comm.rank == 1):
            np.testing.assert_allclose(part, total)
        elif name.startswith("Reduce to"):
            assert np.isnan(part).all()
        elif "Recv" in name or "Isend" in name:
            assert (part == mine).all(), name
    request.Free()


def repeat_bunch(comm, n):
    mine, got = np.random.default_rng(comm.rank).random((48, n)), np.empty((48, n))
    due = np.sum(world.allgather(mine), axis=0)

    def bunch():
        for request in [comm.Iallreduce(x, y) for x, y in zip(mine, got, strict=True)]:
            request.Wait()

    bunch()
    got[:] = np.nan
    found = files_of(bunch)
    np.testing.assert_allclose(got, due)
    assert "engine/lowering.py" not in found, sorted(found)


def own_operations():
    """A short reduction by a user-defined operation is prepared once for all similar calls."""

    def made(combine):
        def apply(a, b, _):
            into = np.frombuffer(b, "f8")
            into[:] = combine(np.frombuffer(a, "f8"), into)

        return MPI.Op.Create(apply, commute=True)

    with Communicator(world) as comm:
        calls = {
            "Allreduce": lambda op, x, y: comm.Allreduce(x, y, op),
            "Iallreduce": lambda op, x, y: comm.Iallreduce(x, y, op).Wait(),
            "Reduce": lambda op, x, y: comm.Reduce(x, y, op, root=1),
        }
        for (name, call), due in product(calls.items(), (np.add, np.maximum, np.multiply) * 2):
            op, mine, out = made(due), np.random.default_rng(comm.rank).random(5), np.empty(5)
            found = frames_of(lambda call=call, op=op, mine=mine, out=out: call(op, mine, out))
            total = due.reduce(np.array(world.allgather(mine)))
            if name != "Reduce" or comm.rank == 1:
                np.testing.assert_allclose(out, total)
            op.Free()
            kept = weakref.ref(out)
            del out
            gc.collect()
            assert kept() is None, name
        assert len(found) <= 32, found


def ahead():
    """A root that never waits, more calls than parcels, and one among them that a rank refuses."""
    comm = Communicator(world)
    rank, size = comm.rank, comm.size
    data = np.zeros(3, np.int64)
    for call in range(400):
        root = call // 150 % size  # each rank in turn is far ahead
        if rank == root:
            data[:] = call
        elif call % 50 == 0:
            time.sleep(0.01)
        comm.Bcast(data, root)
        assert (data == call).all(), (call, data)
    for refused in (-1, 40):
        sent = [np.full(2, rank + call, np.int32) for call in range(200)]
        got = [np.zeros(2, np.int32) for _ in sent]
        requests = []
        for call, (one, other) in enumerate(zip(sent, got, strict=True)):
            if call == refused and rank == 0:
                with pytest.raises(TypeError):
                    comm.Iallreduce(one, "nothing")
                continue
            try:
                requests.append((call, comm.Iallreduce(one, other)))
            except CollectiveError as error:
                assert 0 <= refused <= call and "rank 0 refused" in str(error), (call, error)
        for call, request in requests:
            if call == refused:
                with pytest.raises(RefusedError):
                    request.Wait()
            else:
                try:
                    request.Wait()
                except RefusedError:  # those behind it
                    assert 0 <= refused < call
                    continue
                assert call < refused or refused < 0
                assert (got[call] == size * call + size * (size - 1) // 2).all(), (call, got[call])
    comm.Free()
    comm = Communicator(world)
    for call in range(200):
        comm.Allreduce(sent[call], got[0])
        assert (got[0] == size * call + size * (size - 1) // 2).all()
    comm.Free()


def known():
    """A call that differs in more than addresses is another one, or an error; a long one continues in Python."""
    comm = Communicator(world)
    rank, size = comm.rank, comm.size

    def sums(send, recv, *more):
        comm.Allreduce(send, recv, *more)
        return recv.tolist()

    for _ in range(5):  # repeated calls are recognised from the third on
        a, b = np.full(4, rank + 1, np.float32), np.empty(4, np.float32)
        gc.collect()
        assert sums(a, b) == [size * (size + 1) / 2] * 4
    with pytest.raises(BufferError):
        comm.Allreduce(np.ones(8, np.float32)[::2], b)
    assert sums(a.astype(">f4").byteswap().view("<f4"), b) == sums(a, b)
    assert sums(a.view(np.int32) * 0 + 1, b.view(np.int32)) == [size] * 4
    assert sums(np.ones((2, 2), np.float32), b.reshape(2, 2)) == [[size] * 2] * 2
    assert sums(a, b, MPI.MAX) == [size] * 4 and sums(a, b, MPI.SUM) == sums(a, b)
    b.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        comm.Allreduce(a, b)
    kept = weakref.ref(b)
    b = np.empty(4, np.float32)
    assert kept() is None, "what is remembered of a call must not keep its memory"
    with pytest.raises(TypeError):
        comm.Allreduce(a)
    comm.Barrier()
    if rank:
        time.sleep(0.2)  # longer than C waits by itself
    assert sums(a, b) == [size * (size + 1) / 2] * 4
    comms = [Communicator(world) for _ in range(3)]

    def work(mine):
        x, y = np.ones(2), np.empty(2)
        for _ in range(300):
            mine.Allreduce(x, y)
            assert (y == size).all()

    in_threads(*(partial(work, each) for each in comms))
    eight = np.ones(8), np.empty(8)
    for _ in range(4):
        comm.Allreduce(*eight)
        comm.Allreduce(eight[0][:2], eight[1][:2])
    with pytest.raises(MismatchError, match="float64.8.*float64.2|float64.2.*float64.8"):
        comm.Allreduce(*(each[: 2 if rank else 8] for each in eight))
    [each.Free() for each in comms]
