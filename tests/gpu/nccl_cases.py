"""Cases of torch's tensors and streams, and of NCCL, on real GPUs."""

import time

import pytest
import torch
from mpi4py import MPI

from ucc_hetero import Communicator, DeviceError


def full(n, value):
    return torch.full((n,), value, device="cuda")


def job():
    """A communicator of all ranks, each with a device in use."""
    torch.cuda.set_device(MPI.COMM_WORLD.rank % torch.cuda.device_count())
    return Communicator()


def not_waited_for():
    with job() as comm:
        stream, x, y = torch.cuda.Stream(), full(2, 1.0), full(2, -7.0)
        torch.cuda.synchronize()
        for _ in range(20_000):
            comm.Iallreduce(x, y, stream=stream)
        stream.synchronize()
        assert (y == comm.size).all(), y
        until = time.monotonic() + 5
        while (left := comm._runner.launches) and time.monotonic() < until:
            time.sleep(0.01)
        assert not left, (left, "calls that have ended are kept")


def default_stream(has_begun_before):
    """In the default stream libucc's own kernels wait for nothing. libucc takes a request that is freed before its
    start for a failure of the vendor's library."""
    comm = job()
    if has_begun_before:
        x, y = full(64, 1.0), full(64, 0.0)
        comm.Allreduce(x, y)
        comm.Allreduce_init(x, y).Free()
    for _ in range(20):
        x, y = full(1 << 20, comm.rank + 1.0), full(1 << 20, -7.0)
        comm.Iallreduce(x, y, stream=torch.cuda.default_stream()).Wait()
        assert (y == comm.size * (comm.size + 1) / 2).all(), y


def cannot_begin():
    torch.cuda.set_device(MPI.COMM_WORLD.rank % torch.cuda.device_count())
    x, y = full(1 << 20, 1.0), full(1 << 20, 0.0)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with job() as comm, pytest.raises(DeviceError, match="NCCL_DEBUG=WARN"):
            comm.Iallreduce(x, y, stream=stream).Wait()
