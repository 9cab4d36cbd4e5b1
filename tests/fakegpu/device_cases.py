"""Cases of calls on fake GPUs, on one host and on several: streams, refusals, and failures of the driver."""

import ctypes
import time

import numpy as np
import pytest
from arrays import Array, Gate, runtime
from mpi4py import MPI
from processes import in_threads
from ranks import around, own_device, queued

from ucc_hetero import Communicator
from ucc_hetero.device import kernels
from ucc_hetero.errors import CollectiveError, CollectiveTimeout, DeviceError, MismatchError, RefusedError

N = 3000
sleep_with_gil = ctypes.PyDLL(None).usleep


def launch(comm):
    """One collective between two kernels, held until everything was issued; True if the result is right."""
    stream, x, y = own_device(comm).stream(), Array(N), Array(N)
    gate = Gate(stream)
    x.fill(stream, comm.rank + 1.0)
    request = comm.Iallreduce(x, y, stream=stream)
    y.scale(stream, 3.0)
    gate.open()
    got = y.copied(stream)
    request.Wait()
    return bool((got == comm.size * (comm.size + 1) / 2 * 3).all())


def streams(comm):
    for _ in range(5):
        assert launch(comm)
    # Without Python: a thread that holds the GIL delays nothing.
    gpu, x, y = runtime(), Array(N), Array(N)
    stream, done = gpu.stream(), gpu.event()
    x.fill(stream, 1.0)
    requests = [comm.Iallreduce(x, y, stream=stream) for _ in range(3)]
    done.record(stream.handle)
    for _ in range(400):
        if done.done():
            break
        sleep_with_gil(50000)
    assert done.done() and (y.peek == comm.size).all()
    del requests  # nobody waits for them
    comm.Ibarrier(stream=stream)
    # Several communicators, streams and threads.
    with Communicator(comm) as second:
        right = in_threads(*(lambda each=each: [launch(each) for _ in range(5)] for each in (comm, second)))
        assert right == [[True] * 5] * 2


def refusals(comm):
    """Memory that is not this rank's device's, or is gone; and what ranks do not agree about."""
    gpu, place = runtime(), comm._runner.members.place
    x, host, late = Array(8).set(1), np.ones(8, np.float32), Array(8)

    def refused(kind, text, call, *args):
        with pytest.raises(kind, match=rf"(?s)(?=.*{text}).*rank {comm.rank}"):
            call(*args)

    refused(ValueError, "both must be in one place", comm.Allreduce, x, host)
    gpu.use(3 - place.device)
    elsewhere = Array(8)
    gpu.use(place.device)
    refused(DeviceError, f"works with device {place.device}", comm.Allreduce, elsewhere, x)
    gone = Array(8)
    gone.block.handle, kept = 4096, gone.block.handle
    refused(BufferError, "freed", comm.Allreduce, gone, x)
    gone.block.handle = kept
    again = comm.Send_init(late, 1 - comm.rank, 3)
    late.block.close()
    refused(DeviceError, "freed", again.Start)
    gaps = type("Gaps", (), {})()
    gaps.__cuda_array_interface__ = {**x.__cuda_array_interface__, "shape": (4,), "strides": (8,)}
    refused(BufferError, "contiguous", comm.Allreduce, gaps, Array(4))
    # The thread's device stays what the caller has chosen.
    gpu.use(3 - place.device)
    comm.Allreduce(x, x)
    assert gpu.current() == 3 - place.device and (x.peek == comm.size).all()
    gpu.use(place.device)
    told = []
    try:
        comm.Allreduce(*((x, Array(8)) if comm.rank else (host, host.copy())))
    except MismatchError as error:
        told.append(error)
    assert any(comm.mpi.allgather(len(told)))


def timeout():
    """A call whose other rank never comes; the communicator is not freed."""
    comm = Communicator()
    gpu, x, y = runtime(), Array(64), Array(64)
    stream, done = gpu.stream(), gpu.event()
    if comm.rank == 0:
        comm._runner.timeout = 2.0
        request = comm.Iallreduce(x, y, stream=stream)
        done.record(stream.handle)
        with pytest.raises(CollectiveTimeout, match=r"^rank 0: allreduce float32\[64\] SUM"):
            request.Wait()
        while not done.done():
            time.sleep(0.001)
    comm.mpi.Barrier()


def driver_fails(comm, *names):
    """A call of the driver fails on one rank: it says which, and the others which rank has given up; a new oneunicator
    is whole."""
    gpu, who = own_device(comm), comm.size - 1
    driver, stream, x, y = ctypes.CDLL(gpu.path), gpu.stream(), Array(100_000).set(1), Array(100_000)

    def work(one):
        one.Allreduce(x, y.set(-1))
        one.Iallreduce(x, y, stream=stream).Wait()
        assert (y.peek == one.size).all()

    work(comm)
    for name in names:
        with Communicator() as one:
            work(one)
            one.mpi.Barrier()
            if one.rank == who:
                driver.fakegpu_fail(name.encode(), 0)
            words = r"FAKE_ERROR \(719\)" if one.rank == who else f"rank {who} (has given up|refused)"
            with pytest.raises((CollectiveError, DeviceError), match=words):
                for _ in range(3):
                    work(one)
    work(comm)


def no_spare_streams(made):
    """The device has room for ``made`` streams in advance on the last rank, and later for those that are needed."""
    gpu = runtime()
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        ctypes.CDLL(gpu.path).fakegpu_fail(b"cuStreamCreateWithPriority", 3 + int(made))
    with Communicator() as comm:
        (right, left), stream = around(comm), own_device(comm).stream()
        for n in (9, 300_000):
            x, y = Array(n).set(comm.rank), Array(n).set(-1)
            comm.Sendrecv(x, right, 1, y, left, 1, stream=stream)
            assert (y.peek == left).all()
            comm.Iallreduce(x, y, stream=stream).Wait()
            assert (y.peek == sum(range(comm.size))).all()
        assert queued(comm) == {"allreduce"}, comm.plan_summary()


def uneven(comm):
    """Refused calls among uneven ones keep their numbers: also in streams, and if ranks learn of the refusal before
    they have begun."""
    r, p, stream = comm.rank, comm.size, runtime().stream()
    for into, make in (({"stream": stream}, Array), ({}, Array), ({}, lambda n: np.zeros(n, np.float32))):
        one = Communicator()
        for turn in range(8):
            n, refuses = 3 + turn, turn % 3 == 0 and turn % p
            counts = [n + (r + q) % 2 for q in range(p)]
            x, y = make(sum(counts)), make(sum(counts))
            sent = np.repeat(100 * r + 10 * np.arange(p) + turn, counts)
            x.set(sent) if hasattr(x, "set") else np.copyto(x, sent)
            try:
                wrong = [10**6] * p if turn % 3 == 0 and r == refuses else counts
                one.Ialltoallv([x, counts], [y, wrong], **into).Wait()
            except (RefusedError, ValueError) as error:
                assert turn % 3 == 0, (turn, error)
                one.Free()
                one = Communicator()
            else:
                assert turn % 3, turn
                found = y.copied(stream) if make is Array else y
                assert (found == np.repeat(100 * np.arange(p) + 10 * r + turn, counts)).all(), (turn, found)
        one.Free()


def in_order(comm):
    """No rank waits for requests of calls by way of the host; streams wait for their ends, or hosts if streams must
    not."""
    p, x, y, stream = comm.size, Array(70000), [Array(70000) for _ in range(20)], runtime().stream()
    for k, result in enumerate(y):
        x.fill(stream, float(k + comm.rank))
        comm.Iallreduce(x, result, stream=stream)
    for k, result in enumerate(y):
        assert (result.copied(stream) == p * k + sum(range(p))).all(), k
    assert "by way of the host" in comm.plan_summary(), comm.plan_summary()


def at_once(comm):
    """Streams that cannot be held."""
    stream, x, y = runtime().stream(), Array(500), Array(500)
    x.fill(stream, 1.0)
    request = comm.Iallreduce(x, y, stream=stream)
    y.scale(stream, 2.0)
    assert request.finished, comm.plan_summary()
    assert (y.copied(stream) == 2 * comm.size).all()


def doctor(comm):
    """The doctor's measurements."""
    from ucc_hetero.launch.doctor import measure  # as installed: only there is mpi_launch a part of the package

    with measure._vectors([1.0]) as (vector,):
        assert vector.block is not None
    assert [found.code for found in measure.canaries(comm)] == ["collectives"]
    assert list(measure.pairs(comm, 20)) == [(0, 1)]


class Image(bytes):
    """A kernel's image, which HIP reads in place."""

    gone = 0

    def __del__(self):
        Image.gone += 1


def images():
    made, compile = [], kernels._Compiler.compile
    kernels._Compiler.compile = lambda *args: made.append(1) or Image(compile(*args))
    with Communicator() as comm:
        x = Array(1000).set(comm.rank + 1)
        comm.Allreduce(x, y := Array(1000).set(-1))
        assert (y.peek == 3).all() and made and not Image.gone


def twice(comm):
    Communicator(comm).Free()


def tune(path):
    from ucc_hetero.__main__ import main

    assert main(["tune", "--file", path, "--collective", "allreduce", "--sizes", "512K:512K"]) == 0
    assert main(["topo"]) == 0
