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
from .device import DeviceRuntime, kernels, own_device
from .native import ffi, lib
from .residence import crowded_hosts
from .topology import Topology

__all__ = ["LEAST", "Windows", "join", "key_of", "may_wait"]

#: Messages of at least so many bytes go through windows: shorter ones are there sooner by libucp's own way.
LEAST = 64 << 10


class Windows(NamedTuple):
    """With whom a rank shares windows, and whether all ranks of the communicator do with all.

    ``streams``: with which of them messages are left to the streams of both sides.
    """

    peers: frozenset[int] = frozenset()
    whole: bool = False
    streams: frozenset[int] = frozenset()


def join(mpi: Any, topology: Topology, everyone: Sequence[Facts], runtime: Any) -> Windows:
    """The ranks that this one shares windows with; collective over ``mpi``, and symmetric.

    Those on its host that have devices, where devices of several islands are: no library moves data between these.
    Nobody, with ``UCCH_WINDOW=0``, or where a process may not open what another one has.
    """
    crowded = crowded_hosts(topology, everyone)
    if not crowded:
        return Windows()
    rank, size = int(mpi.Get_rank()), int(env.get("WINDOW"))
    here = everyone[rank].host.memory
    near = [r for r, f in enumerate(everyone) if f.device_memory and f.host.memory == here]
    mates = frozenset(near) - {rank} if rank in near and here in crowded else frozenset()
    file, nbytes = -1, ffi.new("size_t *", size)
    if mates and size and runtime is not None:
        file = lib.ucch_window_own(key_of(everyone[rank]), nbytes)
    offers = mpi.allgather((os.getpid(), int(file), int(nbytes[0])))
    there = {r for r in mates if file >= 0 and offers[r][1] >= 0}
    opened = {r for r in there if lib.ucch_window_open(key_of(everyone[r]), *offers[r]) == 0}
    if opened:
        with own_device():
            if lib.ucch_windows_pin() < 0:
                opened = set()
    able = bool(opened) and may_wait(runtime) and kernels.ready(lib.UCCH_CARRY, 0, 0, 0, insist=True)
    theirs, carry = zip(*mpi.allgather((opened, able)), strict=True)
    peers = frozenset(r for r in opened if rank in theirs[r])
    if size and len(peers) < len(mates):
        log.log("mem").warning(
            "no shared pinned memory with rank(s) %s of this host: messages between devices take the slow way",
            sorted(mates - peers),
        )
    streams = frozenset(r for r in peers if able and carry[r])
    return Windows(peers, all(len(other) == len(everyone) - 1 for other in theirs), streams)


def may_wait(runtime: DeviceRuntime | None) -> bool:
    """Whether this rank's streams may wait for those of others."""
    return bool(env.get("CHANNELS")) and runtime is not None and runtime.eager and _words(runtime)


def _words(runtime: DeviceRuntime) -> bool:
    """Whether the device's streams can wait for any memory: CUDA's do, HIP's only for some, and kernels do it."""
    return runtime.vendor != "amd" or kernels.all_ready([(lib.UCCH_AWAIT, 0, 0, 0), (lib.UCCH_POST, 0, 0, 0)])


def key_of(facts: Facts) -> int:
    """What the native engine knows a process's window by."""
    return int(facts.process, 16)
