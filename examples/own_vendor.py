"""A user-defined vendor outside the package: an adapter in C (own_vendor.c), and a row in Python.

    cc -std=gnu11 -shared -fPIC -Icffi_build examples/own_vendor.c -o libsim.so -lpthread
    UCCH_SIM_LIB=$PWD/libsim.so UCCH_EMULATE=sim:2,nvidia:2 ucch-run -np 4 python examples/own_vendor.py

Its ranks send, receive, reduce and exchange data in their devices' memory with ranks of other vendors.
"""

from __future__ import annotations

import numpy as np

from ucc_hetero import Communicator, device
from ucc_hetero.machine.vendors import Library, Vendor

device.register(
    Vendor(
        name="sim",
        adapter="sim",
        library=Library("libsim.so"),
        setting="SIM_LIB",
        interfaces=("__sim_array_interface__",),
        streams=("sim_stream",),
    )
)


class Stream:
    """A stream as a library of the vendor would return it."""

    def __init__(self, stream: device.Stream) -> None:
        self.sim_stream = stream.handle


def check(comm: Communicator, n: int) -> None:
    """Make every kind of call with random numbers of each rank; receive buffers contain garbage before the call."""
    p, r = comm.size, comm.rank
    runtime = device.runtime_of(comm.topology.vendor(r))
    mine = np.random.default_rng().integers(0, 1 << 20, n * p).astype(np.float32)
    everyone = np.array(comm.mpi.allgather(mine))
    send, recv = device.Vector(mine, runtime), device.Vector(np.full(n * p, np.nan, np.float32), runtime)
    comm.Allreduce(send.buffer, recv.buffer)
    assert (recv.get() == everyone.sum(0, dtype=np.float32)).all(), ("allreduce", n)
    comm.Alltoall(send.buffer, recv.buffer)
    assert (recv.get() == everyone.reshape(p, p, n)[:, r].ravel()).all(), ("alltoall", n)
    comm.Sendrecv(send.buffer, (r + 1) % p, 1, recv.buffer, (r - 1) % p, 1)
    assert (recv.get() == everyone[r - 1]).all(), ("message", n)
    if runtime is not None:
        with runtime.stream() as stream:  # two calls, one after the other in a stream
            handle = Stream(stream) if runtime.vendor == "sim" else stream.handle
            requests = [comm.Iallreduce(send.buffer, recv.buffer, stream=handle)]
            requests.append(comm.Ialltoall(recv.buffer, send.buffer, stream=handle))
            for request in requests:
                request.Wait()
            stream.synchronize()
    else:
        comm.Allreduce(send.buffer, recv.buffer)
        comm.Alltoall(recv.buffer, send.buffer)
    total = everyone.sum(0, dtype=np.float32).reshape(p, n)
    assert (send.get() == np.tile(total[r], p)).all(), ("stream", n)
    send.close()
    recv.close()


def main() -> None:
    with Communicator() as comm:
        for n in (1, 1000, 300_000):
            check(comm, n)
        print(f"rank {comm.rank} of {comm.size}, {comm.topology.vendor(comm.rank)}: right")


if __name__ == "__main__":
    main()
