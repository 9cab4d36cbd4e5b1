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
    mine = jnp.arange(1000, dtype=jnp.float32) + rank
    due = np.arange(1000, dtype=np.float32) * size + sum(range(size))
    out = np.empty(1000, np.float32)
    for _ in range(3):
        comm.Allreduce(mine, out)
        assert (out == due).all()
    comm.Iallreduce([mine, "float32"], out).Wait()
    assert (jnp.asarray(out) == due).all(), "and back"
    # Datatypes that numpy lacks.
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2):
        block = (jnp.arange(4) + rank).astype(dtype)
        gathered = np.empty(4 * size, block.dtype)
        comm.Allgather(block, gathered)
        assert (gathered.astype(np.float32).reshape(size, 4) == np.add.outer(np.arange(size), np.arange(4))).all()
    comm.Allreduce(jnp.ones(5, jnp.bfloat16), total := np.empty(5, jnp.bfloat16))
    assert (total.astype(np.float32) == size).all()
    # A slice is an array of its own; results of a computation that may still be running are waited for.
    comm.Allreduce(mine[::2] * 2, half := np.empty(500, np.float32))
    assert (half == 2 * due[::2]).all()
    # The root's buffer of a broadcast is only read.
    into = mine if rank == 0 else np.empty(1000, np.float32)
    comm.Bcast(into, root=0)
    assert (np.asarray(into) == np.arange(1000)).all()
    comm.Sendrecv(mine, (rank + 1) % size, 0, out, (rank - 1) % size, 0)
    assert (out == np.arange(1000) + (rank - 1) % size).all()
    with pytest.raises(BufferError, match="recvbuf"):
        comm.Allreduce(out, mine)
    with pytest.raises(BufferError, match="buf"):
        comm.Recv(mine, 0)
print("fine", flush=True)
"""


@pytest.mark.parametrize("vendors", ["", "nvidia:2,amd:1"], ids=["one island", "two islands"])
def test_sent_from_jax(mpirun, vendors: str) -> None:
    env = {"UCCH_EMULATE": vendors}
    assert mpirun(SCRIPT, 3, env=env, timeout=120).said("fine") == 3
