"""UCC and UCX take emulated hosts for hosts: shared memory within one, the links' TCP between them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.launch.emulate import Cluster
from ucc_hetero.native.libraries import load

#: Loaded before MPI, whose own copy of UCX would otherwise serve UCC too.
ALLREDUCE = """
from ucc_hetero.native.libraries import load
load()
import numpy as np
from mpi4py import MPI
from ucc_hetero.bindings.oob import MPIExchange
from ucc_hetero.types import DTYPES, OPS
from ucc_hetero.ucc import Coll, Lib
comm = MPI.COMM_WORLD
with Lib() as library, library.context(MPIExchange(comm.Dup())) as context, context.team(range(comm.size)) as team:
    for n in (1, 1 << 20):
        x, y = np.full(n, comm.rank + 1, np.float32), np.zeros(n, np.float32)
        with team.collective(Coll.ALLREDUCE, src=x, dst=y, dtype=DTYPES["float32"], op=OPS["SUM"]) as request:
            request.post()
            request.wait()
        assert (y == comm.size * (comm.size + 1) // 2).all()
    comm.Barrier()
print("sums are right")
"""

SHARED_MEMORY = {"sysv", "posix", "cma", "xpmem"}


def transports(cluster: Cluster, env: dict[str, str] | None = None) -> set[str]:
    """The transports, and the devices of networks, that UCX's log says the ranks' endpoints were made of."""
    try:
        load()
    except LibraryNotFound as error:
        pytest.skip(str(error).splitlines()[0])
    log = {"UCX_LOG_LEVEL": "info", **(env or {})}
    result = cluster.mpirun([sys.executable, "-c", ALLREDUCE], env=log, options=["--mca", "pml", "ob1"])
    assert result.stdout.count("sums are right") == cluster.slots, result.stdout + result.stderr
    lanes = re.findall(r" (?:tag|am)\(([^)]*)\)", result.stdout)
    words = {word for lane in lanes for word in lane.split()}
    return {word.partition("/")[0] if word.endswith(("/memory", "/memory0")) else word for word in words}


def test_between_hosts_only_the_network(emulate: Callable[..., Cluster]) -> None:
    found = transports(emulate(hosts=3, slots=1, rate="4gbit"))
    assert "tcp/eth0" in found
    assert not found & SHARED_MEMORY


def test_within_hosts_shared_memory(cluster: Cluster) -> None:
    found = transports(cluster)
    assert "tcp/eth0" in found
    assert found & SHARED_MEMORY


def test_both_links_are_used(emulate: Callable[..., Cluster]) -> None:
    found = transports(emulate(hosts=2, slots=1, links=2, rate="4gbit"))
    assert {"tcp/eth0", "tcp/eth1"} <= found
