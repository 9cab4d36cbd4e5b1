"""What ranks run in test_windows.py: messages between fake devices of two vendors on one host, through windows."""

COMMON = """
import numpy as np
from arrays import Array
from mpi4py import MPI
from ucc_hetero import Communicator
from ucc_hetero.errors import TruncationError

LONG = 300_000  # float32: pieces of 150 KiB
"""

MATCHING = (
    COMMON
    + """
with Communicator() as comm:
    p, r = comm.size, comm.rank
    assert comm._run.members.windows.whole and comm._run.members.windows.peers == set(range(p)) - {r}
    other, status = (r + 1) % p, MPI.Status()
    before = (r - 1) % p

    # In any order of tags: nothing is taken from a window for a message that nobody has matched.
    out = [Array(LONG).set(100 * r + k) for k in range(12)]
    into = [Array(LONG) for _ in out]
    sends = [comm.Isend(x, other, k) for k, x in enumerate(out)]
    for k in reversed(range(12)):
        comm.Recv(into[k], before, k)
        assert (into[k].peek == 100 * before + k).all(), (k, into[k].peek[:5])
    [s.Wait() for s in sends]

    # In the order of one tag, long and short, on devices and on the host, mixed.
    sizes = [LONG, 3, LONG, 5000, LONG + 1]
    parts = [Array(n).set(r + i) if i != 3 else np.full(n, r + i, np.float32) for i, n in enumerate(sizes)]
    sends = [comm.Isend(x, other, 7) for x in parts]
    for i, n in enumerate(sizes):
        got = np.full(n, -1, np.float32) if i in (2, 3) else Array(n)
        comm.Recv(got, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        data = got if i in (2, 3) else got.peek
        assert (data == before + i).all(), (i, data[:5])
        assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.FLOAT)) == (before, 7, n)
    [s.Wait() for s in sends]

    # A probe tells the length of the data, not of what says where it is; what it finds is received next.
    sends = [comm.Isend(Array(n).set(n), other, 9) for n in (LONG, LONG + 2)]
    comm.Probe(before, 9, status)
    assert status.Get_count(MPI.FLOAT) == LONG and status.Get_tag() == 9
    while not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        pass
    assert status.Get_count(MPI.FLOAT) == LONG
    first, second = Array(LONG), Array(LONG + 2)
    comm.Recv(first, before, 9)
    assert (first.peek == LONG).all()
    message = comm.Mprobe(before, 9, status)
    assert status.Get_count(MPI.FLOAT) == LONG + 2
    message.Recv(second)
    assert (second.peek == LONG + 2).all()
    [s.Wait() for s in sends]

    # A look at a later message does not let it overtake an earlier one.
    sends = [comm.Isend(np.full(3, k, np.float32) if k < 21 else Array(LONG).set(k), other, k) for k in (20, 21, 21)]
    comm.Probe(before, 21, status)
    assert status.Get_count(MPI.FLOAT) == LONG
    comm.Recv(np.empty(3, np.float32), before, MPI.ANY_TAG, status)
    assert status.Get_tag() == 20
    one, two = comm.Mprobe(before, 21), comm.Mprobe(before, 21, status)
    assert status.Get_count(MPI.FLOAT) == LONG and not comm.Iprobe(before, 21)
    del two  # thrown away: its sender goes on
    one.Recv(first)
    assert (first.peek == 21).all()
    [s.Wait() for s in sends]

    # A receive that is too short says so, and its sender is done.
    for short in (Array(3), Array(1000), np.empty(3, np.float32), np.empty(1000, np.float32)):
        send = comm.Isend(Array(LONG).set(1), other, 11)
        try:
            comm.Recv(short, before, 11, status)
        except TruncationError as error:
            assert str(4 * LONG) in str(error), error
        else:
            raise AssertionError("nothing was raised")
        send.Wait()

    # A synchronous send, and a receive that is taken back.
    receive = comm.Irecv(Array(LONG), before, 13)
    receive.Cancel()
    receive.Wait(status)
    assert status.Is_cancelled()
    send = comm.Issend(out[0], other, 12)
    assert not send.Test()
    comm.Barrier()
    comm.Recv(into[0], before, 12)
    send.Wait()
    assert (into[0].peek == 100 * before).all()
print("right")
"""
)

CROWD = (
    COMMON
    + """
# A window of few chunks, many messages and collectives at a time, both ways.
with Communicator() as comm:
    p, r = comm.size, comm.rank
    for round in range(3):
        x = [[Array(LONG).set(1000 * r + 10 * k + d) for k in range(5)] for d in range(p)]
        y = [[Array(LONG) for _ in range(5)] for _ in range(p)]
        requests = [comm.Irecv(y[s][k], s, k) for s in range(p) for k in range(5) if s != r]
        requests += [comm.Isend(x[d][k], d, k) for k in range(5) for d in range(p) if d != r]
        a, b = Array(LONG).set(r), Array(LONG)
        call = comm.Iallreduce(a, b)
        [q.Wait() for q in requests]
        call.Wait()
        assert (b.peek == p * (p - 1) / 2).all()
        for s in range(p):
            for k in range(5):
                assert s == r or (y[s][k].peek == 1000 * s + 10 * k + r).all()
    used = {choice.path for choice, *_ in comm._run.used.values()}
    assert used == {"window"}, used
print("right")
"""
)

OFF = (
    COMMON
    + """
with Communicator() as comm:
    r = comm.rank
    assert not comm._run.members.windows.peers
    x, y = Array(LONG).set(r), Array(LONG)
    comm.Sendrecv(x, 1 - r, 0, y, 1 - r, 0)
    assert (y.peek == 1 - r).all()
    comm.Allreduce(x, y)
    assert (y.peek == 1).all()
print("right")
"""
)

#: Rank 1 dies while its part of a long message is on its way; the others learn it.
DEATH = (
    COMMON
    + """
import os
import signal
from ucc_hetero.errors import UCCHError

with Communicator() as comm:
    r = comm.rank
    x, y = Array(20 * LONG).set(r), Array(20 * LONG)
    comm.Allreduce(x, y)
    if r == 1:
        send = comm.Isend(x, 0, 5)
        comm.Iallreduce(x, y)
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (lambda: comm.Recv(y, 1, 5), lambda: comm.Allreduce(x, y)):
        try:
            call()
        except UCCHError as error:
            print(type(error).__name__, flush=True)
    os._exit(0)
"""
)

#: What is given up on one side is given up on the other, and leaves windows usable; their size is what it first was.
GIVEN_UP = (
    COMMON
    + """
import os
from ucc_hetero.errors import CollectiveTimeout, PeerError

with Communicator() as comm:
    r = comm.rank
    x, y = Array(LONG).set(r), Array(LONG)
    for k in range(3):
        try:
            comm.Send(x, 1, k) if r == 0 else comm.mpi.Barrier()
        except CollectiveTimeout:
            comm.mpi.Barrier()
        if r == 1:
            try:
                comm.Recv(y, 0, k)
                raise AssertionError("its sender had given up")
            except PeerError:
                pass
    comm.Sendrecv(x, 1 - r, 9, y, 1 - r, 9)
    assert (y.peek == 1 - r).all()
    os.environ["UCCH_WINDOW"] = "1G"
    with Communicator(comm) as other:
        other.Sendrecv(x, 1 - r, 9, y.set(-1), 1 - r, 9)
        assert (y.peek == 1 - r).all()
print("right")
"""
)
