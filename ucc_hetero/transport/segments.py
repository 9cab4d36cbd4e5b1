"""Windows: which ranks of a host can hand device memory to each other.

The native side is shm/segment.c: shared pinned memory. A window is an anonymous file, which peers open by way
of ``/proc``: it needs no room in ``/dev/shm``, and nothing is left of it when a process dies, however it does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .. import env, log
from ..device import DeviceRuntime, kernels, own_device
from ..machine.facts import Facts
from ..native.libraries import ffi, lib
from ..planner.topology import Topology

#: Messages of at least so many bytes go through windows: shorter ones are there sooner by libucp's own way.
LEAST = 64 << 10


class Windows(NamedTuple):
    """With whom a rank shares windows, and whether all ranks of the communicator do with all."""

    peers: frozenset[int] = frozenset()
    complete: bool = False


def crowded_hosts(topology: Topology, everyone: Sequence[Facts]) -> frozenset[tuple[object, ...]]:
    """The hosts where ranks of several islands have devices: no library moves data between the memory of these."""
    seen: dict[tuple[object, ...], set[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.device_memory:
            seen.setdefault(facts.host.memory, set()).add(topology.island_of[rank])
    return frozenset(host for host, islands in seen.items() if len(islands) > 1)


def join(mpi: Any, topology: Topology, everyone: Sequence[Facts]) -> Windows:
    """The ranks that this one shares windows with; collective over ``mpi``, and symmetric.

    Those on its host that have devices, where devices of several islands are, as no library moves data between these.
    Nobody, with ``UCCH_WINDOW=0``, or where a process may not open what another one has; nor where streams wait though
    kernels are loaded late: the progress of what hosts move needs the driver.
    """
    rank, size = int(mpi.Get_rank()), int(env.get("WINDOW"))
    crowded = crowded_hosts(topology, everyone)
    late = any(facts.late for facts in everyone) and alone(topology)
    if not crowded or late:
        return Windows()
    mine = everyone[rank]
    here = mine.host.memory
    beside = frozenset(r for r, f in enumerate(everyone) if f.device_memory and f.host.memory == here) - {rank}
    candidates = beside if mine.device_memory and here in crowded and size else frozenset()
    offers = mpi.allgather(_offer(mine, size) if candidates else _Offer(os.getpid(), -1, 0))
    opened = _opened(everyone, candidates if offers[rank].file >= 0 else (), offers)
    theirs = mpi.allgather(opened)
    peers = frozenset(r for r in opened if rank in theirs[r])
    if len(peers) < len(candidates):
        _tell(sorted(candidates - peers))
    return Windows(peers, all(len(other) == len(everyone) - 1 for other in theirs))


def _tell(apart: Sequence[int]) -> None:
    log.log("mem").warning(
        "no shared pinned memory with rank(s) %s of this host: messages between devices take the slow way", apart
    )


class _Offer(NamedTuple):
    """Memory that a process lets others open; ``file`` is negative where there is none."""

    pid: int
    file: int
    nbytes: int


def _offer(mine: Facts, size: int) -> _Offer:
    """That of this rank, of ``size`` bytes if it has none yet."""
    nbytes = ffi.new("size_t *", size)
    file = lib.ucch_window_own(key_of(mine), nbytes)
    return _Offer(os.getpid(), file, int(nbytes[0]))


def _opened(everyone: Sequence[Facts], wanted: Iterable[int], offers: Sequence[_Offer]) -> set[int]:
    """Ranks whose memory this one has opened and pinned."""
    there = {r for r in wanted if offers[r].file >= 0}
    opened = {r for r in there if lib.ucch_window_open(key_of(everyone[r]), *offers[r]) == 0}
    if not opened:
        return set()
    with own_device():
        return opened if lib.ucch_windows_pin() >= 0 else set()


def alone(topology: Topology) -> bool:
    """Whether every rank is the only one of its island, so that no vendor's library has a part in calls."""
    return all(island.size == 1 for island in topology.islands)


def may_wait(runtime: DeviceRuntime | None, *, late: bool = False) -> bool:
    """Whether this rank's streams may wait for those of others; ``late``: though it loads kernels at their first
    launch, which waits for the device, and so for calls of others, while nothing else gets to the driver. It may where
    nobody needs progress of ours meanwhile that calls it (:func:`alone`; PyTorch's calls of four ranks, two of either
    vendor, stood still on an H100)."""
    waits = runtime is not None and (runtime.eager or late) and _words(runtime)
    return bool(env.get("CHANNELS")) and waits


def _words(runtime: DeviceRuntime) -> bool:
    """Whether the device's streams can wait for any memory, or have kernels that do it for them."""
    return runtime.waits_anywhere or kernels.all_ready([(lib.UCCH_AWAIT, 0, 0, 0), (lib.UCCH_POST, 0, 0, 0)])


def key_of(facts: Facts) -> int:
    """Key of a process's window in the native engine."""
    return int(facts.process, 16)
