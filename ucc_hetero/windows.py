"""Windows: which ranks of a host can hand device memory to each other through shared pinned memory.

The native side is ``cffi_build/window.c``. A window is an anonymous file, which peers open by way of ``/proc``: it
needs no room in ``/dev/shm``, and nothing is left of it when a process dies, however it does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import env, log
from .agreement import Facts
from .device import own_device
from .native import lib
from .topology import Topology

__all__ = ["LEAST", "Windows", "join"]

#: Messages of at least so many bytes go through windows: shorter ones are there sooner by libucp's own way.
LEAST = 64 << 10


class Windows(NamedTuple):
    """With whom a rank shares windows, and whether all ranks of the communicator do with all."""

    peers: frozenset[int] = frozenset()
    whole: bool = False


def join(mpi: Any, topology: Topology, everyone: Sequence[Facts], runtime: Any) -> Windows:
    """The ranks that this one shares windows with; collective over ``mpi``, and symmetric.

    Those on its host that have devices, where devices of several islands are: no library moves data between these.
    Nobody, with ``UCCH_WINDOW=0``, or where a process may not open what another one has.
    """
    rank, size = int(mpi.Get_rank()), int(env.get("WINDOW"))
    mates = _mates(topology, everyone, rank)
    if not any(_mates(topology, everyone, r) for r in range(len(everyone))):
        return Windows()
    file = lib.ucch_window_own(size) if mates and size and runtime is not None else -1
    offers = mpi.allgather((os.getpid(), int(file), size))
    opened = {r for r in mates if file >= 0 and offers[r][1] >= 0 and lib.ucch_window_open(*offers[r]) == 0}
    if opened:
        with own_device():
            if lib.ucch_windows_pin() < 0:
                opened = set()
    theirs = mpi.allgather(opened)
    peers = frozenset(r for r in opened if rank in theirs[r])
    if size and len(peers) < len(mates):
        log.log("mem").warning(
            "no shared pinned memory with rank(s) %s of this host: messages between devices take the slow way",
            sorted(mates - peers),
        )
    return Windows(peers, all(len(other) == len(everyone) - 1 for other in theirs))


def _mates(topology: Topology, everyone: Sequence[Facts], rank: int) -> frozenset[int]:
    """The other ranks with devices on a rank's host, if these are not all of one island."""
    mine = everyone[rank]
    if not mine.device_memory:
        return frozenset()
    here = [r for r, f in enumerate(everyone) if f.device_memory and f.host.memory == mine.host.memory]
    if len({topology.island_of[r] for r in here}) < 2:
        return frozenset()
    return frozenset(here) - {rank}
