"""One random collective for ranks that may die in it: fresh data, one of its forms, and its result by numpy."""

import random
from dataclasses import replace

import numpy as np
from collective_call import Call
from collective_cases import draw, start
from collective_reference import FOREIGN

from ucc_hetero import PersistentRequest

NAMES = ("allreduce", "bcast", "allgather", "reduce_scatter_block", "alltoall")


def one_call(comm, seed):
    """A random collective, the same on all ranks for equal seeds; its result is compared."""
    rng = np.random.default_rng(random.Random(seed).getrandbits(32))
    if rng.random() < 0.15:
        comm.Barrier()
        return
    case = draw(rng, comm.size, int(rng.integers(1 << 30)), NAMES)
    if case.dtype in FOREIGN:
        case = replace(case, dtype="float32", op=case.op and "SUM")
    call = Call(case, comm)
    call.refill()
    request = start(comm, call)
    if isinstance(request, PersistentRequest):
        request.Start()
    if request is not None:
        request.Wait()
    wrong = call.verify()
    assert not wrong, (seed, case, wrong)
    if isinstance(request, PersistentRequest):
        request.Free()
