"""Helpers of cases on fake GPUs, and on real ones."""

import os
import secrets
import time

import numpy as np
from arrays import Gate, runtime


def dice_of(comm):
    """Random numbers, the same on every rank; ``DICE`` is the seed."""
    seed = comm.mpi.bcast(int(os.environ.get("DICE") or secrets.randbelow(1 << 30)))
    print(f"DICE={seed}", flush=True)
    return np.random.default_rng(seed)


def numbers(k, rank, n):
    """Return a rank's contribution to the k-th call, which every rank can compute. Sums are exact."""
    return np.random.default_rng([k, rank]).integers(-40, 40, n).astype(np.float32)


def sums(comm, k, n):
    """The sum of all ranks' numbers."""
    return np.sum([numbers(k, rank, n) for rank in range(comm.size)], axis=0)


def queued(comm):
    """The collectives whose calls were all queued in streams."""
    used = [(label.split()[0], how.name == "QUEUED") for label, (*_, how) in comm._runner.used.items()]
    return {name for name, _ in used} - {name for name, whole in used if not whole}


def right(call, stream):
    """Check the results of a queued `collective_call.Call`."""
    [buffer.seen(stream) for buffer in call.buffers()]
    assert not (wrong := call.verify()), (call.case, wrong)


def around(comm):
    """The next and the previous rank of a ring."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def own_device(comm):
    """The runtime, with this rank's device in use."""
    runtime().use(comm._runner.members.place.device)
    return runtime()


def held():
    """Return a blocked stream, and the gate that blocks it."""
    stream = runtime().stream()
    return stream, Gate(stream)


def reached(stream):
    done = runtime().event()
    done.record(stream.handle)
    while not done.done():
        time.sleep(1e-3)


def failure(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"
