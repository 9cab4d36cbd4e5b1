"""Cases of messages between the streams of two ranks (p2p/lane.c); `crowded` also runs on real GPUs."""

import ctypes
import os
import signal
import time
from unittest import mock

import numpy as np
import pytest
from arrays import Array
from mpi4py import MPI
from ranks import around, held, own_device

from ucc_hetero import Communicator
from ucc_hetero.errors import CollectiveError, CollectiveTimeout, NotSupported, PeerError, TruncationError

LONG = 300_000  # float32: several pieces


def streams_wait(comm):
    """Streams wait, and hosts do not: nothing moves before the sender's or receiver's stream gets there."""
    r, (right, left), gpu = comm.rank, around(comm), own_device(comm)
    for n in (5, LONG):
        (outof, first), (into, second) = held(), held()
        x, y = Array(n).set(-5), Array(n).set(-1)
        x.fill(outof, 10.0 + r)
        y.fill(into, -7.0)
        requests = [comm.Irecv(y, left, 4, stream=into), comm.Isend(x, right, 4, stream=outof)]
        comm.mpi.Barrier()
        assert not any(request.Test() for request in requests)
        comm.mpi.Barrier()
        first.open()
        for _ in range(100):
            assert not requests[0].Test()
        comm.mpi.Barrier()
        second.open()
        [request.Wait() for request in requests]
        assert (y.peek == 10 + left).all(), y.peek[:3]
    # Sends in two streams, of which one waits for something else: the other goes on.
    (late, gate), aside, x, z, y = held(), gpu.stream(), Array(9), Array(9), [Array(9).set(-1) for _ in range(2)]
    x.fill(late, 1.0 + r)
    first = comm.Isend(x, right, 0, stream=late)
    z.fill(aside, 2.0 + r)
    second = comm.Isend(z, right, 1, stream=aside)
    z.fill(aside, -5.0)
    z.copied(aside)
    receives = [comm.Irecv(each, left, stream=into) for each in y]
    gate.open()
    [request.Wait() for request in (*receives, first, second)]
    assert (y[0].peek == 1 + left).all() and (y[1].peek == 2 + left).all()


def room(comm):
    """A sender runs ahead by as much as the ring holds, without anybody who receives; and more messages than a lane
    numbers at a time wait for room, at most until the deadline."""
    r, (right, left), gpu = comm.rank, around(comm), own_device(comm)
    stream, xs = gpu.stream(), [Array(9).set(10 * r + k) for k in range(8)]
    for k, x in enumerate(xs):
        comm.Send(x, right, k, stream=stream)
    late = comm.Isend(xs[0], right, 8, stream=stream)
    synchronous = comm.Issend(xs[1], right, 9, stream=stream)
    comm.mpi.Barrier()
    assert not late.Test() and not synchronous.Test()
    comm.mpi.Barrier()
    for k in range(10):
        y = Array(9).set(-1)
        comm.Recv(y, left, k, stream=stream)
        assert (y.peek == 10 * left + k % 8).all(), k
    [request.Wait() for request in (late, synchronous)]
    (outof, first), (into, second), limit = held(), held(), comm._messages.timeout
    xs, ys, waits = [Array(9).set(1000 * r + k) for k in range(100)], [Array(9).set(-1) for _ in range(100)], []
    post_when_room = type(comm._messages)._post_when_room

    def full(messages, message, timeout, status):
        if status and not waits:
            messages.timeout = 0.05
            with pytest.raises(CollectiveTimeout, match=f"to rank {right}.*: timeout, 64 earlier messages"):
                post_when_room(messages, message, timeout, status)
            messages.timeout = limit
            first.open()
            second.open()
        waits.extend([message] * (status != 0))
        post_when_room(messages, message, timeout, status)

    with mock.patch.object(type(comm._messages), "_post_when_room", full):
        requests = []
        for x, y in zip(xs, ys, strict=True):
            requests += comm.Isend(x, right, 3, stream=outof), comm.Irecv(y, left, 3, stream=into)
    assert waits
    [request.Wait() for request in requests]
    assert all((y.peek == 1000 * left + k).all() for k, y in enumerate(ys))


def refused(comm):
    """What cannot be."""
    (right, _), stream, y = around(comm), own_device(comm).stream(), Array(9)
    with pytest.raises(NotSupported, match="name its source"):
        comm.Irecv(y, stream=stream)
    with pytest.raises(NotSupported, match="memory of this rank's device"):
        comm.Isend(np.zeros(3, np.float32), right, stream=stream)
    for wrong in ("nonsense", object()):
        with pytest.raises(TypeError):
            comm.Isend(y, right, stream=wrong)


def crowded(comm, count):
    """More streams than queues, which go on behind a kernel that runs, but not behind a second one of its stream: a
    rank gets what it waits for once it has sent, for which its receives may not block the queues, nor may sends for
    which its rings have no room."""
    r, peer, stream = comm.rank, 1 - comm.rank, own_device(comm).stream()
    groups, kept = [comm.Dup() for _ in range(int(count))], []
    n = np.random.default_rng(comm.bcast(time.time_ns())).integers(1, [9000, 300_000] * len(groups)).tolist()
    x, y = ([Array(each) for each in n] for _ in range(2))
    for k, each in enumerate(x):
        for array, value in (each, 1000 * r + k), (y[k], -1):
            getattr(array.set(value), "push", bool)()
    for k, group in enumerate(groups * 2):
        kept.append(group.Irecv(y[k], peer, k, stream=stream))
    if r:  # then it sends only after it has received
        [request.Wait() for request in kept]
    for k, group in enumerate(groups * 2):
        kept.append(group.Isend(x[k], peer, k, stream=stream))
    [request.Wait() for request in kept]
    assert all((each.peek == 1000 * peer + k).all() for k, each in enumerate(y))
    x, y, kept = [Array(n).set(1000 * r + n) for n in (300_000, 9, 50_000)], [], []
    [getattr(each, "push", bool)() for each in x]
    for group in groups if not r else ():
        kept += [group.Isend(each, peer, stream=stream) for each in x[:2]]
    for group, n in (comm, 50_000), *((group, n) for group in groups for n in (300_000, 9)):
        if r:
            y.append(Array(n).set(-1))
            getattr(y[-1], "push", bool)()
            group.Recv(y[-1], peer, stream=stream)
        elif group is comm:
            comm.Isend(x[2], peer, stream=stream).Wait()
    [request.Wait() for request in kept]
    assert all((each.peek == 1000 * peer + each.peek.size).all() for each in y)
    [each.Free() for each in groups]
    print("right", flush=True)


def copies(comm):
    """Messages that need not wait use no multiprocessors: long sends that fit into rings, receives of data that has
    arrived."""
    r, (right, left), gpu = comm.rank, around(comm), own_device(comm)
    stream, driver = gpu.stream(), ctypes.CDLL(gpu.path)
    for n in (1_100_000, 1_500_000, 4_000_000, 1_300_000):
        for room in (n, n + 7):
            mine, theirs = (np.random.default_rng(n + room + k).integers(-99, 99, n).astype("f4") for k in (r, left))
            x, y, before = Array(n).set(mine), Array(room).set(-1), driver.fakegpu_movers()
            comm.Send(x, right, 1, stream=stream)
            x.fill(stream, -5.0)
            x.copied(stream)
            comm.mpi.Barrier()
            comm.Recv(y, left, 1, stream=stream)
            assert (y.peek[:n] == theirs).all() and (y.peek[n:] == -1).all(), (n, room)
            assert driver.fakegpu_movers() == before, (n, room)
            comm.mpi.Barrier()


def mistakes(comm):
    """Messages that do not match are an error on both sides, and later ones continue."""
    r, (right, left) = comm.rank, around(comm)
    stream, x = own_device(comm).stream(), Array(LONG).set(r)
    # On two hosts the pieces of a message have nowhere to go where no receive has had room for such a one.
    y = Array(LONG).set(-1)
    comm.Sendrecv(x, right, 1, y, left, 1, stream=stream)
    for n in (10, LONG):
        for tag, room, error in ((1, n - 1, TruncationError), (2, n, CollectiveError)):
            source = Array(n).set(r)
            send = comm.Isend(source, right, tag, stream=stream)
            short = Array(room).set(-3)
            with pytest.raises(error, match=f"rank {left} sent {4 * n} bytes with tag {tag}"):
                comm.Recv(short, left, 1, stream=stream)
            assert (short.peek == -3).all()
            send.Wait()
            comm.mpi.Barrier()
            heard = all_heard = False
            while not all_heard:  # between hosts it is heard of a moment later; all go on in step
                try:
                    good = comm.Isend(source, right, 1, stream=stream)
                except CollectiveError as failure:
                    assert not heard and f"rank {right} refused an earlier message" in str(failure)
                    heard, good = True, comm.Isend(source, right, 1, stream=stream)
                comm.Recv(y.set(-1), left, 1, stream=stream)
                good.Wait()
                assert (y.peek[:n] == left).all()
                all_heard = comm.mpi.allreduce(heard, MPI.MIN)
            comm.mpi.Barrier()
            comm.Sendrecv(source, right, 1, y.set(-1), left, 1, stream=stream)
            assert (y.peek[:n] == left).all()


def late(comm):
    """A message that never arrives ends at its timeout, and so does its stream's wait; no later message uses this
    lane."""
    r, (right, left), gpu = comm.rank, around(comm), own_device(comm)
    stream, after, x, y = gpu.stream(), gpu.stream(), Array(LONG).set(r), Array(LONG).set(-1)
    if r == 0:
        request = comm.Irecv(y, right, 1, stream=stream)
        y.fill(after, 5.0)
        request._timeout = 1.0
        request._arm()
        with pytest.raises(CollectiveTimeout, match="timeout"):
            request.Wait()
        with pytest.raises(CollectiveError, match="an earlier message with stream="):
            comm.Irecv(y, right, 1, stream=stream)
        stream.synchronize()
    comm.mpi.Barrier()
    if r == 0:
        comm.Send(x, right, 2, stream=stream)
    elif left == 0:
        comm.Recv(y, left, 2, stream=stream)
        assert (y.peek == 0).all()
    comm.Sendrecv(x, right, 3, y, left, 3)
    assert (y.peek == left).all()
    for _ in range(5):  # what nobody receives keeps nobody
        comm.Isend(x, right, 4, stream=stream) if r else None


def death(comm):
    """A sender dies before its stream gets to the data: the receiver's stream continues, and its host gets an error."""
    (right, left), gpu = around(comm), own_device(comm)
    stream, gate = held()
    x, y = Array(LONG).set(comm.rank), Array(LONG)
    comm.Sendrecv(x, right, 3, y, left, 3, stream=gpu.stream())
    if comm.rank == 1:
        comm.Isend(x, 0, 5, stream=stream)
        comm.mpi.Barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    gate.open()
    request = comm.Irecv(y, 1, 5, stream=stream)
    comm.mpi.Barrier()
    with pytest.raises(PeerError):
        request.Wait()
    y.copied(stream)
    print("told", flush=True)
    os._exit(0)


def groups(comm):
    """Many communicators with calls, and then short messages in both directions that are not waited for one by one,
    more than may be in progress at a time."""
    r, other, stream = comm.rank, 1 - comm.rank, own_device(comm).stream()
    every, x, y, status = [Communicator(comm) for _ in range(16)], Array(LONG).set(r), Array(LONG), MPI.Status()
    for group in every:
        group.Allreduce(x, y.set(-1))
        assert (y.peek == 1).all()
    last, under_way = every[-1], []
    for _ in range(13):
        outof, into = [Array(2).set(10 * k + r) for k in range(150)], [Array(2).set(-1) for _ in range(150)]
        for k in range(150):
            under_way.append(last.Irecv(into[k], other, stream=stream))
            last.Isend(outof[k], other, k, stream=stream)
        for k in range(150):
            under_way.pop(0).Wait(status)
            assert status.Get_tag() == k and (into[k].peek == 10 * k + other).all(), k
    [group.Free() for group in every]
