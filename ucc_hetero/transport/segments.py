"""Windows and arenas: which ranks of a host can hand device memory to each other, and by way of what.

The native side is shm/segment.c: shared pinned memory. A window is an anonymous file, which peers open by way
of ``/proc``: it needs no room in ``/dev/shm``, and nothing is left of it when a process dies, however it does. Where
devices of one vendor open each other's memory, messages lie in that, and only words about them
in windows.
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
    """With whom a rank shares windows, and whether all ranks of the communicator do with all.

    ``near``: by rank, whose arenas it has opened, and they its own; nothing where nobody has. ``streams``: with whom
    messages are left to the streams of both sides.
    """

    peers: frozenset[int] = frozenset()
    complete: bool = False
    streams: frozenset[int] = frozenset()
    near: tuple[frozenset[int], ...] = ()


def crowded_hosts(topology: Topology, everyone: Sequence[Facts]) -> frozenset[tuple[object, ...]]:
    """The hosts where ranks of several islands have devices: no library moves data between the memory of these."""
    seen: dict[tuple[object, ...], set[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.device_memory:
            seen.setdefault(facts.host.memory, set()).add(topology.island_of[rank])
    return frozenset(host for host, islands in seen.items() if len(islands) > 1)


def join(
    mpi: Any, topology: Topology, everyone: Sequence[Facts], runtime: DeviceRuntime | None, arenas: bool
) -> Windows:
    """The ranks that this one shares windows or arenas with; collective over ``mpi``, and symmetric.

    Windows: ranks on its host that have devices, where devices of several islands are, as no library moves data between
    these. Nobody, with ``UCCH_WINDOW=0``, or where a process may not open what another one has. ``arenas``, if wanted:
    those of its vendor on its host. Nobody, with ``UCCH_ARENA=0``, or where devices cannot reach each other's memory.
    Neither where streams wait though kernels are loaded late: the progress of what hosts move needs the driver.
    """
    rank, size = int(mpi.Get_rank()), int(env.get("WINDOW"))
    crowded, same_vendor = crowded_hosts(topology, everyone), _same_vendor(everyone if arenas else ())
    late = any(facts.late for facts in everyone) and alone(topology)
    if (not crowded and not any(same_vendor)) or late:
        return Windows()
    mine, arena = everyone[rank], int(env.get("ARENA"))
    here = mine.host.memory
    beside = frozenset(r for r, f in enumerate(everyone) if f.device_memory and f.host.memory == here) - {rank}
    candidates = beside if mine.device_memory and here in crowded and size else frozenset()
    wanted = candidates | (same_vendor[rank] if any(same_vendor) and arena else frozenset())
    # Where it has words only, as many of them as the arena has places, and more.
    offers = mpi.allgather(_offer(mine, runtime if wanted else None, size if candidates else 2 * arena))
    opened = _opened(everyone, wanted if offers[rank].file >= 0 else (), offers, whole=bool(candidates))
    able = bool(opened) and may_wait(runtime) and kernels.ready(lib.UCCH_STREAM_COPY, 0, 0, 0, insist=True)
    shared, apart = opened & candidates, set()
    if able and any(same_vendor) and arena:
        # A device that two processes share has them take turns: kernels might wait for each other.
        apart = {r for r in opened & same_vendor[rank] if offers[r].board != offers[rank].board}
    handle = _own_arena(arena, runtime, mine.device) if apart else b""
    theirs, carry, aparts, handles = zip(*mpi.allgather((shared, able, apart, handle)), strict=True)
    peers = frozenset(r for r in shared if rank in theirs[r])
    if len(peers) < len(candidates):
        _tell(sorted(candidates - peers))
    near: tuple[frozenset[int], ...] = ()
    if any(same_vendor):
        known = {r for r in apart if runtime and runtime.same_board(mine.device, offers[r].device, offers[r].board)}
        near = _open_arenas(mpi, everyone, {r: handles[r] for r in known if handle and rank in aparts[r]})
    streams = frozenset(r for r in peers if able and carry[r]).union(near[rank] if near else ())
    return Windows(peers, all(len(other) == len(everyone) - 1 for other in theirs), streams, near)


def _tell(apart: Sequence[int]) -> None:
    log.log("mem").warning(
        "no shared pinned memory with rank(s) %s of this host: messages between devices take the slow way", apart
    )


class _Offer(NamedTuple):
    """Memory that a process lets others open; ``file`` is negative where there is none."""

    pid: int
    file: int
    nbytes: int
    board: str
    device: int


def _offer(mine: Facts, runtime: DeviceRuntime | None, size: int) -> _Offer:
    """That of this rank, of ``size`` bytes if it has none yet; nothing without a ``runtime``."""
    file, nbytes = -1, ffi.new("size_t *", size)
    if runtime is not None:
        file = lib.ucch_window_own(key_of(mine), nbytes)
    board = runtime.bus(mine.device) if runtime is not None else ""
    return _Offer(os.getpid(), file, int(nbytes[0]), board, mine.device)


def _opened(everyone: Sequence[Facts], wanted: Iterable[int], offers: Sequence[_Offer], *, whole: bool) -> set[int]:
    """Ranks whose memory this one has opened and pinned, ``whole`` or its words only."""
    there = {r for r in wanted if offers[r].file >= 0}
    opened = {r for r in there if lib.ucch_window_open(key_of(everyone[r]), *offers[r][:3]) == 0}
    if not opened:
        return set()
    with own_device():
        return opened if lib.ucch_windows_pin(whole) >= 0 else set()


def _same_vendor(everyone: Sequence[Facts]) -> list[frozenset[int]]:
    """By rank: others with devices of its vendor on its host."""
    places: dict[object, set[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.device_memory:
            places.setdefault((facts.host.memory, facts.vendor), set()).add(rank)
    return [frozenset(places.get((f.host.memory, f.vendor), ())) - {r} for r, f in enumerate(everyone)]


def _own_arena(nbytes: int, runtime: DeviceRuntime | None, device: int) -> bytes:
    """Handle that others open this process's arena by; nothing where there can be none."""
    if runtime is None or not runtime.coherent(device):
        log.log("mem").info("no device memory for messages within a vendor: devices may not see each other's writes")
        return b""
    handle = ffi.new("char[]", lib.UCCH_SHARE_BYTES)
    if lib.ucch_arena_own(nbytes, handle) < 0:
        _say("no device memory for messages within a vendor")
        return b""
    return bytes(ffi.buffer(handle))


def _open_arenas(mpi: Any, everyone: Sequence[Facts], handles: dict[int, bytes]) -> tuple[frozenset[int], ...]:
    """Open the arenas of some ranks; by rank, whose it has opened, and they its own."""
    opened = set()
    for rank, handle in handles.items():
        if handle and lib.ucch_arena_open(key_of(everyone[rank]), ffi.from_buffer(handle)) == 0:
            opened.add(rank)
        elif handle:
            _say(f"messages with rank {rank} are left to libucp")
    theirs = mpi.allgather(opened)
    both = tuple(frozenset(o for o in other if rank in theirs[o]) for rank, other in enumerate(theirs))
    for rank in opened - both[int(mpi.Get_rank())]:
        lib.ucch_arena_close(key_of(everyone[rank]))
    return both if any(both) else ()


def _say(what: str) -> None:
    log.log("mem").info("%s: %s", what, ffi.string(lib.ucch_device_error()).decode(errors="replace"))


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
