"""Several ports per host and several levels, on emulated hosts: who uses what, and that the sums are right."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ucc_hetero.launch.emulate import Cluster

JOB = """
import os
import numpy as np
import ucc_hetero
with ucc_hetero.Communicator() as comm:
    rng = np.random.default_rng(comm.rank)
    for count in (3, 1 << 18):
        mine = rng.integers(0, 1 << 20, count).astype(np.float64)
        total, own = np.full(count, -1.0), np.full(count // 3, -1.0)
        everything = comm.mpi.allgather(mine)
        comm.Allreduce(mine, total)
        assert (total == sum(everything)).all()
        every = np.full((comm.size, count), -1.0)
        comm.Allgather(mine, every)
        assert (every == everything).all()
        blocks = np.tile(mine, (comm.size, 1)) + np.arange(comm.size)[:, None]
        mine[:] = -1
        comm.Reduce_scatter_block(blocks, mine)
        assert (mine == sum(everything) + comm.size * comm.rank).all()
    found = comm.mpi.gather((os.environ["UCX_NET_DEVICES"], comm.topology.tree.height))
    if comm.rank == 0:
        print("found", found)
"""


def _found(cluster: Cluster, env: dict[str, str]) -> str:
    done = cluster.mpirun([sys.executable, "-c", JOB], env={"UCCH_TIMEOUT": "200", **env}, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("found"))


def test_ranks_of_a_host_take_turns_at_its_ports(emulate: Callable[..., Cluster]) -> None:
    cluster = emulate(hosts=2, slots=2, links=2, rate="1gbit")
    assert _found(cluster, {"UCCH_PORTS": "turns"}) == f"found {[('eth0', 1), ('eth1', 1)] * 2}"
    assert _found(cluster, {}) == f"found {[('eth0,eth1', 1)] * 4}"


def test_hosts_inside_vendors(emulate: Callable[..., Cluster]) -> None:
    cluster = emulate(hosts=3, slots=2, rate="1gbit")
    assert _found(cluster, {"UCCH_EMULATE": "nvidia:4,amd:2"}) == f"found {[('eth0', 2)] * 6}"
