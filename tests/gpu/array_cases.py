"""Cases of test_arrays.py: calls on device arrays of several libraries, and wrong arguments.

Rank r uses device r. Odd ranks use it through the HIP runtime ``CASES_ODD_HIP``, if that is set. With
``CASES_ODD_BLIND`` odd ranks see no device, and have their arrays in host memory.
"""

import faulthandler
import itertools
import os

import numpy as np
import pytest
from array_kinds import KINDS, RawArray

from ucc_hetero import AVG, MAX, Communicator, device
from ucc_hetero.errors import DeviceError, MismatchError
from ucc_hetero.native.libraries import load

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
if hip := os.environ.get("CASES_ODD_HIP"):
    os.environ |= (
        {"UCCH_CUDA_LIB": "none", "UCCH_HIP_LIB": hip, "HIP_ENABLE_DEFERRED_LOADING": "0", "UCCH_HOLD": "y"}
        if RANK % 2
        else {"UCCH_HIP_LIB": "none"}
    )
if blind := os.environ.get("CASES_ODD_BLIND") == "1" and RANK % 2 == 1:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "UCCH_CUDA_LIB": "none", "UCCH_HIP_LIB": "none"}
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

SIZES = (1, 1000, 300_001, 5_000_000)


def data(rank, n, dtype="float32", seed=0):
    """A rank's contribution: small integers, exact in every type."""
    return np.random.default_rng([seed, rank, n]).integers(-9, 10, n).astype(dtype)


def everyone(comm, n, dtype="float32", seed=0):
    return np.stack([data(rank, n, dtype, seed) for rank in range(comm.size)])


def blank(n, dtype="float32"):
    return np.full(n, 99, dtype)


def same(got, want):
    np.testing.assert_array_equal(got, want)


def calls(comm, kind):
    """Calls and messages from and into such arrays, under way at the same time, waited for in another order, with
    several types. test_random_calls.py has random ones of all forms."""
    p, r = comm.size, comm.rank
    right, left, uneven = (r + 1) % p, (r - 1) % p, [300 + rank for rank in range(p)]
    for n, dtype in itertools.product(SIZES, ("float32", "int64", "float16")):
        each, mine = everyone(comm, n, dtype), kind.put(data(r, uneven[r]))
        x, two, joined = kind.put(each[r]), kind.into(each[r]), kind.into(blank(sum(uneven)))
        one, y, z = (kind.into(blank(n, dtype)) for _ in range(3))
        under_way = [
            comm.Iallreduce(x, one), comm.Iallreduce(None, two, MAX), comm.Iallgatherv(mine, [joined, uneven]),
            comm.Irecv(y, right, 2), comm.Irecv(z, left, 3), comm.Isend(x, left, 2), comm.Isend(x, right, 3),
        ]  # fmt: skip
        for request in reversed(under_way):
            request.Wait()
        for found, due in (one, each.sum(0)), (two, each.max(0)), (y, each[right]), (z, each[left]):
            same(kind.get(found), due)
        same(kind.get(joined), np.concatenate([data(rank, k) for rank, k in enumerate(uneven)]))
        comm.Bcast(x if r == 0 else y, 0)
        same(kind.get(x if r == 0 else y), each[0])
    repeated = comm.Allreduce_init(x, two, AVG)
    for _ in range(3):
        repeated.Start()
        repeated.Wait()
    same(kind.get(two), (each.astype("float64").sum(0) / p).astype(dtype))
    repeated.Free()


def forms(comm, kind):
    """Parts of an array, several dimensions, a datatype; arrays with gaps raise."""
    each = everyone(comm, 600)
    x = kind.put(each[comm.rank].reshape(20, 30))
    y = kind.into(blank(600).reshape(20, 30))
    comm.Allreduce(x, y)
    same(kind.get(y), each.sum(0).reshape(20, 30))
    y = kind.into(blank(600))
    comm.Allreduce([x, 100, "float32"], [y, 100])
    same(kind.get(y), np.concatenate([each.sum(0)[:100], blank(500)]))
    if kind.streams:
        with pytest.raises(BufferError, match="contiguous"):
            comm.Allreduce(kind.strided(each[comm.rank]), kind.into(blank(300)))
    else:
        with pytest.raises(BufferError, match=f"recvbuf on rank {comm.rank}.*read-only"):
            comm.Allreduce(y, kind.put(each[0]))


def streams(comm, kind):
    """Between work of one stream, which is still busy when calls and messages are made; nothing is waited for in
    between. A send takes the data as of its place in the stream; a receive writes once earlier work has read the old
    data."""
    if not kind.streams:
        return
    p, r = comm.size, comm.rank
    stream, before, right, left = kind.stream(), kind.stream(), (r + 1) % p, (r - 1) % p
    kind.read(kind.put(blank(1)), stream)  # kernels are there from now on
    for seed, n in enumerate((1, 200_000, 200_000, 5_000_000)):
        each = everyone(comm, n, seed=seed)
        x, y, z, g = kind.put(blank(n)), kind.into(blank(n)), kind.into(blank(n)), kind.into(blank(n * p))
        kind.work(stream)
        kind.fill(x, each[r], stream)
        requests = [
            comm.Iallreduce(x, y, stream=stream), comm.Iallgather(y, g, stream=stream),
            comm.Irecv(z, left, seed, stream=stream), comm.Isend(x, right, seed, stream=stream),
        ]  # fmt: skip
        same(kind.read(g, stream), np.tile(each.sum(0), p))
        for request in requests:
            request.Wait()
        same(kind.get(z), each[left])
    comm.Allreduce(x, y, stream=before)
    same(kind.read(y, before), each.sum(0))


def another_device(comm, kind):
    """The calling thread may have selected any device, but the memory must be on the rank's."""
    (gpu,) = device.available()
    if gpu.count() < 2:
        return
    each = everyone(comm, 1000)
    own = gpu.current()
    other = (own + 1) % gpu.count()
    x, y = kind.put(each[comm.rank]), kind.into(blank(1000))
    gpu.use(other)
    elsewhere = RawArray(gpu, blank(1000))
    comm.Allreduce(x, y)
    assert gpu.current() == other
    comm.Sendrecv(x, comm.rank, 0, y, comm.rank, 0)
    with pytest.raises(DeviceError, match=f"recvbuf on rank {comm.rank} .*works with device {own}"):
        comm.Allreduce(x, elsewhere)
    with pytest.raises(DeviceError, match=f"on rank {comm.rank} .*works with device {own}"):
        comm.Isend(elsewhere, comm.rank)
    gpu.use(own)
    same(kind.get(y), each[comm.rank])


def mistakes(comm, kind):
    """Wrong arguments raise on their rank before anything is sent, and the communicator stays usable.

    Mistakes that only all ranks together can see end the communicator, and no other one.
    """
    (gpu,) = device.available()
    r, each, host = comm.rank, everyone(comm, 1000), blank(1000)
    x, y = kind.put(each[r]), kind.into(blank(1000))
    with pytest.raises(ValueError, match="both must be in one place"):
        comm.Allreduce(x, host)
    with pytest.raises(ValueError, match="both must be in one place"):
        comm.Iallgather(host, kind.into(blank(1000 * comm.size)))
    freed, not_there = RawArray(gpu, blank(1 << 22)), RawArray(gpu, blank(1000))
    address = freed.block.handle
    freed.block.close()
    freed.block.handle = address  # a pointer that was kept after the memory was freed
    for call in (comm.Allreduce, comm.Iallreduce):
        with pytest.raises((BufferError, DeviceError), match="freed"):
            call(freed, freed)
    with pytest.raises((BufferError, DeviceError), match="freed"):
        comm.Send(freed, r)
    freed.block.handle = 0
    kept, not_there.block.handle = not_there.block.handle, host.ctypes.data
    with pytest.raises(BufferError, match="not a device pointer"):
        comm.Allreduce(not_there, y)
    not_there.block.handle = kept
    with pytest.raises(DeviceError, match=f"{1 << 50} bytes of device memory"):
        gpu.alloc(1 << 50)
    with pytest.raises(TypeError, match="stream"):
        comm.Iallreduce(x, y, stream="the first")
    with Communicator(comm) as another, pytest.raises(MismatchError):
        another.Allreduce(*((x, y) if r else (host, host.copy())))
    comm.Allreduce(x, y)
    same(kind.get(y), each.sum(0))


def no_runtime(comm, kind):
    """With both runtimes disabled device memory raises on every rank, while host memory works."""
    assert not device.available()
    x = kind.put(data(comm.rank, 1000))
    with pytest.raises((BufferError, DeviceError), match=f"rank {comm.rank}.*UCCH_CUDA_LIB"):
        comm.Allreduce(x, x)
    out = blank(1000)
    comm.Allreduce(data(comm.rank, 1000), out)
    same(out, everyone(comm, 1000).sum(0))


def exhaust(gpu):
    """Allocate all of the device's memory, except for an amount too small for anything."""
    taken = []
    for size in (8 << 30, 1 << 30, 64 << 20, 2 << 20):
        try:
            while True:
                taken.append(gpu.alloc(size))
        except DeviceError as error:
            assert f"{size} bytes of device memory" in str(error), error
    return taken


def memory_runs_out(comm, kind):
    """Rank 0 has no memory left for scratch: the call succeeds, or raises the reason on every rank."""
    faulthandler.dump_traceback_later(60, exit=True)  # nobody else has any memory meanwhile
    (gpu,) = device.available()
    n = 1 << 26
    x, y = kind.put(np.ones(n, np.float32)), kind.into(blank(n))
    taken = exhaust(gpu) if comm.rank == 0 else []
    end = "right"
    try:
        comm.Allreduce(x, y, AVG)
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    comm.mpi.Barrier()  # the other rank has finished too
    for block in taken:
        block.close()
    if end == "right":
        same(kind.get(y), np.ones(n))
    print(f"rank {comm.rank} ended: {end}", flush=True)


def run(name, cases):
    """Run cases on the arrays of a library."""
    faulthandler.dump_traceback_later(150, exit=True)
    load()  # before MPI and libraries that bring their own
    (gpu,) = device.available() or [None]
    mine = RANK % gpu.count() if gpu else 0
    if gpu:
        gpu.use(mine)
    kind = KINDS["host" if blind else name]()
    if name == "cupy":
        kind.cupy.cuda.Device(RANK % kind.cupy.cuda.runtime.getDeviceCount()).use()
    if name == "numba":
        kind.cuda.select_device(mine)
    if gpu:
        gpu.use(mine)  # JAX initialises all devices and leaves the last one current
    with Communicator() as comm:
        for each in cases:
            globals()[each](comm, kind)
            comm.mpi.Barrier()
