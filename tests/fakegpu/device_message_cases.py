"""Cases of messages by MPI's rules between devices of two vendors on one host."""

import ctypes
import os
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
from arrays import Array, begin_case, runtime
from mpi4py import MPI
from ranks import around, held, own_device

from ucc_hetero import Communicator
from ucc_hetero.errors import CollectiveError, CollectiveTimeout, DeviceError, PeerError
from ucc_hetero.p2p import messages as p2p

LONG = 300_000  # float32: longer than what libucp sends unasked


def host(n):
    return np.empty(n, np.float32)


def at(memory):
    return memory if isinstance(memory, np.ndarray) else memory.peek


def until_released(comm):
    """Wait until no message has memory whose call was given up."""
    while p2p.held:
        comm.Iprobe(MPI.ANY_SOURCE, 11)
        time.sleep(1e-4)


def death(comm, before):
    """Rank 1 is killed before or during the receive of its long message: the receiver gets an error, or the whole
    message."""
    x, y = Array(20 * LONG).set(comm.rank), Array(20 * LONG).set(-1)
    comm.Allreduce(x, y)
    if comm.rank == 1:
        comm.mpi.send(os.getpid(), 0)
        send = comm.Isend(x.set(7), 0, 5)
        send.Wait()
        time.sleep(1000)  # killed before that
    victim = comm.mpi.recv(source=1)
    comm.Probe(1, 5)
    if before:
        os.kill(victim, signal.SIGKILL)
        while not comm._messages.is_gone(1):
            time.sleep(0.001)
    receive = comm.Irecv(y, 1, 5)
    if not before:
        os.kill(victim, signal.SIGKILL)
    with suppress(PeerError):
        receive.Wait()
        assert not before and (y.peek == 7).all()
    with pytest.raises(PeerError):
        comm.Allreduce(x, y)
    print("told", flush=True)
    os._exit(0)


def given_up(comm):
    """A cancelled receive gets none of the later messages; a cancelled send continues until it is received."""
    r = comm.rank
    kinds = [(LONG, Array, Array), (LONG, Array, host), (LONG, host, Array), (3, Array, Array)]
    for k, (n, from_where, to_where) in enumerate(kinds):
        x, y, later = from_where(n), Array(n), to_where(n)
        at(x)[:], at(y)[:], at(later)[:] = 10 + k, -1, -1
        if r == 0:
            comm._messages.timeout = 0.2
            with pytest.raises(CollectiveTimeout):
                comm.Ssend(x, 1, k)
            with pytest.raises(CollectiveTimeout):
                comm.Recv(y, 1, k)
            comm._messages.timeout = 200.0
            assert [kept.what for kept in p2p.held.all()] == ["synchronous send"]
        gone = comm.mpi.Ibarrier()
        while not gone.Test():  # in MPI's Barrier the other would take a core meanwhile
            time.sleep(0.01)
        if r == 1:
            comm.Recv(later, 0, k)
            assert (at(later) == 10 + k).all()
        until_released(comm)  # until then its memory is the message's
        # What comes now is for the next receive.
        at(x)[:] = 100 + r
        comm.Sendrecv(x, 1 - r, k, later, 1 - r, k)
        assert (at(later) == 101 - r).all() and (at(y) == -1).all()


def copies(comm):
    """Long messages use no multiprocessors: copy engines move them, to devices and to hosts."""
    r, n, driver = comm.rank, 6_000_000, ctypes.CDLL(runtime().path)
    x, y = Array(n), Array(n)
    for turn in range(4):
        x.peek[:] = np.random.default_rng(100 * turn + r).integers(-99, 99, n)
        sent = np.random.default_rng(100 * turn + 1 - r).integers(-99, 99, n).astype("f4")
        before, got = driver.fakegpu_movers(), host(n) if turn == 3 else y.set(-1)
        comm.Sendrecv(x, 1 - r, turn, got, 1 - r, turn)
        assert (at(got) == sent).all(), turn
        assert driver.fakegpu_movers() == before


def in_streams(comm):
    """Messages in streams, some of which never get to them."""
    r, (right, left), gpu, status = comm.rank, around(comm), own_device(comm), MPI.Status()
    stream, x, y = gpu.stream(), Array(LONG).set(-1), Array(LONG).set(-1)
    x.fill(stream, 11.0 + r)
    send = comm.Issend(x, right, 3, stream=stream)
    comm.Recv(y, left, 3, stream=0)
    send.Wait()
    assert (y.peek == 11 + left).all()
    # A receive whose stream never gets there is taken back, or ends with its time; those behind it go on.
    stuck, gate = held()
    waiting = comm.Irecv(Array(LONG), left, 8, stream=stuck)
    waiting.Cancel()
    waiting.Wait(status)
    assert status.Is_cancelled()
    comm._messages.timeout, before = 0.3, comm._messages.timeout
    with pytest.raises(CollectiveTimeout):
        comm.Recv(Array(LONG), left, 8, stream=stuck)
    comm._messages.timeout = before
    comm.mpi.Barrier()
    comm.Sendrecv(x, right, 8, y.set(-1), left, 8)
    assert (y.peek == 11 + left).all()
    comm._messages.timeout = 0.3
    # Nor is another communicator's message kept; and what the stream has still to copy into is not used again.
    short = Array(5000).set(r)
    with pytest.raises(CollectiveTimeout):
        comm.Send(short, right, 9, stream=stuck)
    comm._messages.timeout = before
    assert "send" in [kept.what for kept in p2p.held.all()]
    behind = comm.Isend(short, right, 10, stream=stuck)
    with comm.Dup() as other:
        other.Sendrecv(short, right, 1, y, left, 1)
        assert (y.peek[:5000] == left).all()
    gate.open()
    comm.Recv(y, left, 10)
    behind.Wait()
    until_released(comm)
    with pytest.raises(Exception, match="contiguous"):  # what is not there yet is not copied
        comm.Isend(np.zeros(100, np.float32)[::2], right, stream=0)


def on_its_way(comm):
    """A receive times out while data arrives, on a device or the host: nothing more is written to its memory, its
    sender completes, and the next message arrives."""
    r, n = comm.rank, 12_000_000  # more than a ring holds
    x = Array(n)
    for turn, y in enumerate((Array(n), Array(n), host(n))):
        there = at(y)
        there[:], x.peek[:] = -1, turn
        if r == 0:
            send = comm.Isend(x, 1, 1)
            comm.mpi.recv(source=1)
            send.Wait()
        else:
            comm.Probe(0, 1)
            comm._messages.timeout, before = 0.05, comm._messages.timeout
            with pytest.raises(CollectiveTimeout):
                comm.Recv(y, 0, 1)
            comm._messages.timeout = before
            comm.mpi.send(None, 0)
            until_released(comm)  # what its stream has been given
            assert there[-1] == -1
            had = there.copy()
        comm.mpi.Barrier()
        comm.Send(x.set(10 + turn), 1, 2) if r == 0 else comm.Recv(z := Array(n), 0, 2)
        assert r == 0 or ((z.peek == 10 + turn).all() and (there == had).all())


def early():
    """Rank 1's device is slow: its host, which receives other messages, frees no slots that the stream has yet to
    read."""
    os.environ["FAKEGPU_DELAY_US"] = "50000" if MPI.COMM_WORLD.rank else "0"
    begin_case()
    with Communicator() as comm:
        n, rng = 1_500_000, np.random.default_rng(comm.mpi.bcast(time.time_ns()))
        x = [rng.integers(-99, 99, n).astype("f4") for _ in range(6)]
        if comm.rank == 0:
            sends = [comm.Isend(Array(n).set(each), 1, k) for k, each in enumerate(x)]
            [send.Wait() for send in sends]
        else:
            y = [np.full(n, -1, np.float32) if k % 2 else Array(n).set(-1) for k in range(6)]
            receives = [comm.Irecv(each, 0, k) for k, each in enumerate(y)]
            for k, receive in enumerate(receives):
                receive.Wait()
                assert (at(y[k]) == x[k]).all(), k


def pins(comm):
    """While the driver delays a receiver that pins memory (it learns only now who sends a long message), others
    continue; if its device cannot allocate the memory, both ranks get an error for that message only."""
    r, driver = comm.rank, ctypes.CDLL(runtime().path)
    x, y, status = Array(LONG), Array(LONG).set(-1), MPI.Status()
    comm.Sendrecv(Array(3).set(r), 1 - r, 0, Array(3), 1 - r, 0)
    if r == 1:
        os.environ["FAKEGPU_PINNED_MB"] = "1"
        with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
            comm.Recv(y, 0, 1)
        del os.environ["FAKEGPU_PINNED_MB"]
    else:
        with pytest.raises(CollectiveError, match="rank 1 could not receive it"):
            comm.Send(x.set(1), 1, 1)
    assert (y.peek == -1).all()
    driver.fakegpu_stand_pins(r)
    request = comm.Isend(x.set(2), 1, 2) if r == 0 else comm.Irecv(y, MPI.ANY_SOURCE, 2)
    while r == 1 and not driver.fakegpu_pins_waiting():
        comm.Iprobe(0, 11)
    comm.mpi.Barrier()
    comm.Sendrecv(np.full(3, r), 1 - r, 0, got := np.empty(3, int), 1 - r, 0)
    assert (got == 1 - r).all() and not request.Test()
    driver.fakegpu_stand_pins(0)
    request.Wait(status)
    assert r == 0 or ((y.peek == 2).all() and status.Get_source() == 0)
    # Of any length a message needs no more pinned memory than that.
    os.environ["FAKEGPU_PINNED_MB"] = "150"
    n = 50_000_000
    x, y, into = Array(n).set(r), Array(n), host(LONG)
    comm.Sendrecv(x, 1 - r, 4, y, 1 - r, 4)
    assert (y.peek == 1 - r).all()
    comm.Recv(into, 0, 5) if r == 1 else comm.Send(Array(LONG).set(5), 1, 5)
    comm.Recv(y, 0, 6) if r == 1 else comm.Send(np.full(n, 6, np.float32), 1, 6)
    assert r == 0 or ((into == 5).all() and (y.peek == 6).all())
