"""Cases of ranks without devices on several hosts."""

import fcntl
import os
import signal
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ucc_hetero.launch.emulate import Cluster


def sums(comm):
    rng = np.random.default_rng(comm.rank)
    for count in (3, 1 << 16):
        mine = rng.integers(0, 1 << 20, count).astype(np.float64)
        total, everything = np.full(count, -1.0), comm.mpi.allgather(mine)
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


def hostnames():
    """By MPI alone."""
    world, data = MPI.COMM_WORLD, np.full(1 << 18, MPI.COMM_WORLD.rank + 1.0, np.float32)
    world.Allreduce(MPI.IN_PLACE, data)
    assert (data == world.size * (world.size + 1) / 2).all()
    names = world.gather(os.uname().nodename)
    if world.rank == 0:
        print(*names)


def owner(end):
    """Start two emulated hosts, and end without closing them."""
    cluster = Cluster(hosts=2).start()
    cluster.hosts[1].popen(["sleep", "600"])
    print(cluster.directory, *(os.readlink(f"/proc/{host.pid}/ns/net") for host in cluster.hosts), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "raise":
        raise RuntimeError("a bug in the program")


def placed(comm):
    """As ucch-run has placed the ranks, and told them so."""
    assert comm.rank == int(os.environ["RANK"]) and comm.size == int(os.environ["WORLD_SIZE"])
    data = np.full(1 << 16, comm.rank + 1, np.float32)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size * (comm.size + 1) // 2).all()
    told = comm.mpi.gather((os.uname().nodename, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]))
    if comm.rank == 0:
        print(*(f"{island.vendor} {len(island.ranks)}" for island in comm.topology.islands))
        print(told)


def kills(path, by):
    """Rank ``by`` kills its parent: mpirun on the first host, its daemon on the other one. All ranks would stay."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        Path(path + os.environ["RANK"]).touch()
        while not all(os.path.exists(path + rank) for rank in "0123"):
            time.sleep(0.01)
        if os.environ["RANK"] == by:
            wrapper = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(wrapper.split()[3]), signal.SIGKILL)
        time.sleep(200)
