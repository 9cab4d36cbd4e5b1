"""JAX's arrays, which are read-only and come by DLPack, as what is sent. Skipped where JAX is not installed."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: pip install jax")

SCRIPT = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp
import numpy as np
import pytest
import ucc_hetero
with ucc_hetero.Communicator() as comm:
    rank, size = comm.rank, comm.size
    mine, out = jnp.arange(1000, dtype=jnp.float32) + rank, np.empty(1000, np.float32)
    due = np.arange(1000, dtype=np.float32) * size + sum(range(size))
    for _ in range(3):
        comm.Allreduce(mine, out)
        assert (jnp.asarray(out) == due).all(), "and back"
    comm.Allgather(mine[:4].astype(jnp.bfloat16), gathered := np.empty(4 * size, jnp.bfloat16))
    assert (gathered.astype(np.float32).reshape(size, 4) == np.add.outer(np.arange(size), np.arange(4))).all()
    # A slice is an array of its own; results of a computation that may still be running are waited for.
    comm.Iallreduce(mine[::2] * 2, half := np.empty(500, np.float32)).Wait()
    assert (half == 2 * due[::2]).all()
    comm.Bcast(into := mine if rank == 0 else np.empty(1000, np.float32), root=0)  # the root's is only read
    assert (np.asarray(into) == np.arange(1000)).all()
    comm.Sendrecv(mine, (rank + 1) % size, 0, out, (rank - 1) % size, 0)
    assert (out == np.arange(1000) + (rank - 1) % size).all()
    for wrong in (lambda: comm.Allreduce(out, mine), lambda: comm.Recv(mine, 0)):
        with pytest.raises(BufferError, match="buf"):
            wrong()
print("fine", flush=True)
"""


def test_sent_from_jax(mpirun):
    assert mpirun(SCRIPT, 3, env={"UCCH_EMULATE": "nvidia:2,amd:1"}, timeout=120).said("fine") == 3
