"""Cases in which queued calls fail."""

import ctypes
import os
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from arrays import Array, Gate, runtime
from mpi4py import MPI
from processes import in_threads
from ranks import failure, own_device, queued, reached

from ucc_hetero import SUM, Communicator
from ucc_hetero.errors import CollectiveError
from ucc_hetero.native.libraries import lib
from ucc_hetero.transport import wires


def missing():
    """A rank that never calls: the others' streams continue, and an error is raised at the latest in their next call;
    also for a call that the host waits for, and for one whose request is never checked. A failed blocking call no
    longer writes to its buffers. A new communicator works."""
    for way, n in [(way, n) for n in (1000, 300_000) for way in ("waited for", "blocking")] + [("not looked at", 1000)]:
        comm, stream, x, y = Communicator(), runtime().stream(), Array(n).set(1), Array(n).set(-1)
        comm.Allreduce(x, y)
        assert queued(comm) == {"allreduce"} and (y.peek == comm.size).all()
        if comm.rank == 0:
            comm._runner.timeout = 0.5
            never_comes(comm, way, stream, x, y)
        MPI.COMM_WORLD.Barrier()


def never_comes(comm, way, stream, x, y):
    def begin():
        return comm.Iallreduce(x, y, stream=stream)

    if way == "blocking":
        assert failure(lambda: comm.Allreduce(x, y)) == "CollectiveTimeout"
        y.set(7)
        while not lib.ucch_channels_passed(comm._runner.members.channels.handle):
            time.sleep(1e-3)
        assert (y.peek == 7).all()
    else:
        waits = [begin().Wait]
        for _ in range(2 * (way == "waited for")):
            with suppress(CollectiveError):  # on a busy machine the first one has failed by now
                waits.append(begin().Wait)
        reached(stream)
        if way == "waited for":
            first, *others = map(failure, waits)
            assert first == "CollectiveTimeout" and "nothing" not in others
    assert failure(begin) == "CollectiveError"


def garbage():
    """A rank that gives up lets its streams continue with garbage, which must not be reported as a result. Two threads
    with one communicator each: calls are ordered within each communicator, not between the two."""
    done = []
    in_threads(*(partial(gives_up, Communicator(), n, done) for n in (1000, 300_000)))
    assert len(done) == 2
    MPI.COMM_WORLD.Barrier()


def gives_up(comm, n, done):
    r, p, stream = comm.rank, comm.size, own_device(comm).stream()
    x, y, z = Array(n).set(r + 1), Array(n).set(-1), Array(n).set(-1)
    good = comm.Iallreduce(x, z, stream=stream)
    reached(stream)
    good.Wait()
    if r:
        MPI.COMM_WORLD.recv(source=0, tag=n)  # the last one comes once the first has given up, the others before
    else:
        comm._runner.timeout = 1.0

    def attempt():
        request = comm.Iallreduce(x, y, stream=stream)
        if not r:
            [MPI.COMM_WORLD.send(None, other, tag=n) for other in range(1, p - 1)]
        request.Wait()

    outcome = failure(attempt)
    if not r:
        MPI.COMM_WORLD.send(None, p - 1, tag=n)
    reached(stream)  # until then it writes to the memory
    # What the first has sent before it gives up may be all that another one needs.
    assert outcome != "nothing" or (r and (y.peek == p * (p + 1) / 2).all()), (r, y.peek[:5])
    assert (z.peek == p * (p + 1) / 2).all() and queued(comm) == {"allreduce"}
    done.append(outcome)


def different():
    """Ranks make different calls; earlier results stay correct, or are reported as wrong. Data of another call that
    would fit is not accepted for this one."""
    for n in (1, 70_000):
        comm, x, y, z = Communicator(), Array(n).set(1), Array(2 * n).set(2), Array(2 * n)
        comm.Allgather(x, z)
        call, given = (comm.Alltoall, y) if comm.rank else (comm.Allgather, x)
        assert failure(lambda call=call, given=given, z=z: call(given, z)) == "MismatchError"
    for n in (1000, 300_000):
        comm, stream = Communicator(), runtime().stream()
        r, x, y, z = comm.rank, Array(n).set(comm.rank + 1), Array(n).set(-1), Array(n).set(-1)
        comm.Allreduce(x, y)
        comm.Reduce(x, y)  # or the other rank sees what we are about to call before we call it
        assert queued(comm) == {"allreduce", "reduce"}
        gate = Gate(stream) if r == 1 else None
        before = comm.Iallreduce(x, y.set(-1), stream=stream)
        MPI.COMM_WORLD.Barrier()
        call, more = (comm.Iallreduce, ()) if r else (comm.Ireduce, (SUM, 0))
        said = [failure(lambda call=call, x=x, z=z, more=more, on=stream: call(x, z, *more, stream=on).Wait())]
        if gate:
            gate.open()
        reached(stream)
        said.append(failure(before.Wait))
        assert said[1] != "nothing" or (y.peek == comm.size * (comm.size + 1) / 2).all(), (r, y.peek[:5])
        said.append(failure(lambda comm=comm, x=x, y=y: comm.Allreduce(x, y)))
        assert said[0] == "MismatchError" and said[2] == "CollectiveError", said
        MPI.COMM_WORLD.Barrier()


def fails_often():
    """Communicators that have failed give back what they took on the device once their streams have no work."""
    driver, stream, n, left = ctypes.CDLL(runtime().path), runtime().stream(), 70_000, []
    x, y = Array(n).set(1), Array(n).set(-1)
    for _ in range(8):
        comm = Communicator()
        comm.Allreduce(x, y)
        comm.Sendrecv(x, 1 - comm.rank, 0, y, 1 - comm.rank, 0, stream=stream)
        call, more = (comm.Iallreduce, ()) if comm.rank else (comm.Ireduce, (SUM, 0))
        assert failure(lambda call=call, more=more: call(x, y, *more, stream=stream).Wait()) == "MismatchError"
        reached(stream)
        comm.Free()
        MPI.COMM_WORLD.Barrier()
        left.append((driver.fakegpu_streams(), runtime().room()))
    for _ in range(100 * (left[-1] > left[2])):  # on a busy machine a stream has its last work still before it
        Communicator().Free()
        left.append((driver.fakegpu_streams(), runtime().room()))
    assert min(left[3:]) <= left[2], left


def halfway(after):
    """A rank dies before its messages, or in the middle, after some seconds: no rank waits for ever, or gets garbage
    for a sum."""
    comm = Communicator()
    r, p, n = comm.rank, comm.size, 2_000_000
    stream, x, y = runtime().stream(), Array(n).set(r + 1), Array(n).set(-1)
    comm.Allreduce(x, y)
    assert queued(comm) == {"allreduce"} and (y.peek == p * (p + 1) / 2).all()
    MPI.COMM_WORLD.Barrier()
    request = comm.Iallreduce(x, y.set(-1), stream=stream)
    if r == p - 1:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)
    reached(stream)
    outcome = failure(request.Wait)
    assert outcome != "nothing" or (y.peek == p * (p + 1) / 2).all()
    assert failure(lambda: comm.Allreduce(x, y)) in ("CollectiveError", "PeerError")
    print("died", flush=True)
    os._exit(0)


def sockets():
    """Names of this process's sockets, with their numbers."""
    found = {}
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{file}")] = int(file)
    return {name: file for name, file in found.items() if name.startswith("socket")}


def cut():
    """Connections of network threads break, but no rank dies: calls fail with an error, and the next communicator
    reconnects."""
    meet, of_wires, n = wires.connect, set(), 2_000_000

    def noted(*args):
        before = {*sockets()}
        reached = meet(*args)
        of_wires.update({*sockets()} - before)
        return reached

    with mock.patch.object(wires, "connect", noted):
        comm = Communicator()
        x, y, z = Array(n).set(1), Array(n), Array(1000)
        comm.Allreduce(x, y)
        late = comm.Irecv(z, 1 - comm.rank, stream=runtime().stream())
        MPI.COMM_WORLD.Barrier()
    if comm.rank == 0:
        for name, file in sockets().items():
            if name in of_wires:
                with suppress(OSError), socket.socket(fileno=os.dup(file)) as each:
                    each.shutdown(socket.SHUT_RDWR)
    for waits in (lambda: [comm.Allreduce(x, y) for _ in range(1000)], late.Wait):
        with pytest.raises(CollectiveError, match=f"connection with rank {1 - comm.rank}") as caught:
            waits()
        assert caught.type is CollectiveError
    goes_on(MPI.COMM_WORLD, x, y)


def goes_on(ranks, x, y):
    """A new communicator works."""
    with Communicator(ranks) as other:
        other.Allreduce(x, y.set(-1))
        assert queued(other) == {"allreduce"} and (y.peek == other.size).all()


def cut_link(folder):
    """One of two links is cut from outside once all ranks are ready, and restored once all have failed. A new
    communicator works. Ranks are pairs between hosts, with a wire on each link, and with one wire on the link that is
    cut."""
    n, folder, world = 1_000_000, Path(folder), MPI.COMM_WORLD
    os.environ |= [{"UCCH_WIRES": "2"}, {"UCCH_WIRES": "1", "UCX_NET_DEVICES": "eth1"}][world.rank % 2]
    pair = world.Split(world.rank % 2)
    comm, x, y = Communicator(pair), Array(n).set(1), Array(n)
    comm.Allreduce(x, y)
    (folder / f"up{world.rank}").touch()
    said = r"does not answer over the link 10\.11\.0\.[12] - 10\.11\.0\.[12], "
    with pytest.raises(CollectiveError, match=said):
        while True:
            comm.Allreduce(x, y)
    (folder / f"down{world.rank}").touch()
    while not (folder / "back").exists():
        time.sleep(0.01)
    goes_on(pair, x, y)
