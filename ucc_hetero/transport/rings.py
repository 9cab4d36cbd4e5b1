"""Channels: whole calls queued in streams, where all ranks of a communicator are devices.

The native side is shm/ring.c and coll/schedule.c. A call is handed to the devices when it is made: they wait for each
other, copy and compute, and no program of the host's takes part any more, but for the network threads between hosts
(:mod:`.wires`). All ranks must do so or none, for the same calls; so what decides is known to all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import env, log
from ..device import DeviceRuntime, kernels
from ..errors import DeviceError
from ..machine.facts import Facts
from ..native.libraries import ffi, lib
from ..planner.rules import Wires
from ..planner.topology import Topology
from ..types import DTYPES, OPS
from . import wires
from .segments import Windows, key_of, may_wait

__all__ = ["SLOT", "Channels", "join"]

#: Most bytes of a slot between hosts, where nothing else was measured.
SLOT = 2 << 20


class Channels:
    """Ring buffers of one communicator; ``handle`` is the native engine's.

    ``able``: on every rank the vendor's library does an island's collectives, and can be told to in a stream.
    ``computes``: every rank's device has a compiler for its arithmetic. ``idle``: by rank, why its RDMA ports are of no
    use.
    """

    def __init__(self, handle: Any, able: bool, computes: bool, idle: Mapping[int, str]) -> None:
        self.handle, self.able, self.computes, self.idle = handle, able, computes, idle

    def close(self, timeout: float) -> None:
        """Give the memory back once nothing is under way; collective. What does not end by then is left alone."""
        until = time.monotonic() + timeout
        while (quiet := lib.ucch_channels_quiet(self.handle)) != 1:
            if quiet < 0 or time.monotonic() > until:
                return
            time.sleep(0)
        lib.ucch_channels_free(self.handle)


def join(
    mpi: Any,
    windows: Windows,
    topology: Topology,
    everyone: Sequence[Facts],
    runtime: DeviceRuntime | None,
    able: bool,
    measured: Wires,
) -> Channels | None:
    """The channels of a communicator; collective over ``mpi``, None on all ranks where they are not for all of them.

    ``able`` as in :class:`Channels`, of this rank; ``measured`` holds where settings say nothing else. Raises
    :class:`DeviceError` on all ranks where one of them has no pinned memory left: calls of this communicator would be
    slow, and nobody would know.
    """
    rank, size = int(mpi.Get_rank()), int(mpi.Get_size())
    mine, places = everyone[rank], _places(everyone)
    if not (windows.complete or (max(places) and not topology.flat and all(facts.device_memory for facts in everyone))):
        return None
    wanted = not max(places) or (env.get("WIRES") != 0 and env.get("CHANNELS") and env.get("STAGING") != "direct")
    words = ffi.new("size_t *", 2 * int(env.get("ARENA")))
    apart = len({*places}) == size
    ready = wanted and may_wait(runtime, apart=apart) and lib.ucch_window_own(key_of(mine), words) >= 0
    board = mine.host.memory, mine.vendor, runtime.bus(mine.device) if runtime is not None else ""
    where = rank, size, ffi.new("int[]", list(topology.island_of)), ffi.new("int[]", places)
    # A usual kernel is made as a try: one vendor's compiler may be missing where the other's is there.
    compiles = ready and kernels.ready(lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code, 0, insist=True)
    version, idle = _carrier(mpi, everyone, wanted) if max(places) else ("", {})
    reach = _Reach.of(rank, places, measured.number) if ready and version else _Reach()
    late = runtime is not None and not (runtime.eager or apart)
    offers = mpi.allgather(
        (bool(wanted), _offer(where, measured.slot) if ready else (0, 0), able, compiles, board, reach, late)
    )
    wishes, sizes, ables, computes, boards, reaches, lazy = zip(*offers, strict=True)
    if not all(wishes):
        return None
    far, slot = (min(each) for each in zip(*sizes, strict=True))
    nwires = min(len(reach.wires) for reach in reaches) if max(places) else 0
    # Processes that share a device take turns at it: one that waits there would keep the other from what it waits for.
    tardy = [r for r, loads in enumerate(lazy) if loads]
    lacks = [
        *([f"rank(s) {tardy} load kernels at their first launch, docs/launch.md has the setting"] if tardy else []),
        *(["no room in UCCH_CHANNEL_MEMORY, or streams that cannot wait"] if not (far or tardy) else []),
        *(["ranks that share a device"] if len({*boards}) < size else []),
        *(["no network threads"] if max(places) and not nwires and version else []),
        *(["network threads with different versions of UCX"] if max(places) and not version else []),
    ]
    if lacks:
        # Between hosts that is several times slower, where one host's calls lose a little.
        say = log.log("mem").warning if max(places) and rank == 0 else log.log("mem").info
        say("no channels between devices (%s): their hosts take part in calls", "; ".join(lacks))
        return None
    handle = _connected(mpi, everyone, where, (far, slot), reaches, nwires)
    if handle is None:
        return None
    well = lib.ucch_channels_open(handle) == 0
    if all(mpi.allgather(well)):
        return Channels(handle, all(ables), all(computes), idle)
    lib.ucch_channels_free(handle)
    log.log("mem").info("no channels between devices: %s", _reason())
    return None


def _carrier(mpi: Any, everyone: Sequence[Facts], wanted: bool) -> tuple[str, dict[int, str]]:
    """(version of UCX that all wires are to use; by rank, why these make no use of its RDMA ports); collective."""
    mine = everyone[mpi.Get_rank()].idle_ports
    offers = mpi.allgather(wires.offer(mine) if wanted else wires.Offer((), False, ()))
    version, idle = wires.agree(offers, mine), {}
    for rank, offer in enumerate(offers):
        if everyone[rank].idle_ports and not offer.rdma:
            idle[rank] = "; ".join(offer.why)
        elif everyone[rank].idle_ports and offer.versions[0] != version:
            others = {everyone[r].host.hostname for r, each in enumerate(offers) if each.versions != offer.versions}
            lack = f"not {', '.join(sorted(others))}, where network threads cannot use UCX {offer.versions[0]}"
            idle[rank] = f"{everyone[rank].host.hostname} could, but {lack}"
    return version, idle


class _Reach(NamedTuple):
    """Reach of a rank between hosts: a number that no communicator of its has had, and the addresses of its wires."""

    serial: int = 0
    wires: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def of(cls, rank: int, places: Sequence[int], measured: int) -> _Reach:
        """That of this rank, ``places`` being the hosts of all: without wires where they are on one host."""
        here = places.count(places[rank])
        count = wires.wanted(here, measured) if max(places) else 0
        return cls(_last[0] + 1, wires.addresses(count, here)[:count] if count else ())


#: The last number by which this process's flows were told apart.
_last = [0]


def _places(everyone: Sequence[Facts]) -> list[int]:
    """By rank, the number of its host."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(f.host.memory, len(numbers)) for f in everyone]


def _offer(where: tuple[int, int, Any, Any], measured: int) -> tuple[int, int]:
    """Bytes of the rings between islands, and of the slots between hosts, for which this rank has room."""
    slot = env.get("WIRE_SLOT")
    most = (measured or SLOT) if slot == "auto" else int(slot)
    sizes = lib.ucch_channels_offer(*where, int(env.get("CHANNEL_MEMORY")), most)
    return int(sizes.far), int(sizes.slot)


def _connected(
    mpi: Any,
    everyone: Sequence[Facts],
    where: tuple[int, int, Any, Any],
    sizes: tuple[int, int],
    reaches: Sequence[_Reach],
    nwires: int,
) -> Any:
    """The native side of channels, whose ranks see each other's memory or have wires between them; collective."""
    rank, places = where[0], where[3]
    handle = lib.ucch_channels_new(*where, sizes)
    files = mpi.allgather((os.getpid(), int(lib.ucch_channels_file(handle)) if handle != ffi.NULL else -1))
    failure = "" if handle != ffi.NULL else "no room for a file of shared memory"
    _last[0] = max(reach.serial for reach in reaches)
    if min(file for _, file in files) >= 0:
        met = [int(lib.ucch_channels_meet(handle, rank, key_of(everyone[rank]), *files[rank]))]
        for r, file in enumerate(files):
            key = key_of(everyone[r])
            if r != rank and met[-1] >= 0 and places[r] == places[rank]:
                met.append(int(lib.ucch_channels_meet(handle, r, key, *file)))
            elif r != rank and met[-1] >= 0:
                reached = wires.meet(key, reaches[r].wires, nwires)
                carried = reached and lib.ucch_channels_carry(handle, r, key, nwires, _last[0]) == 0
                met.append(0 if carried else int(lib.UCCH_FAIL_PEER))
        failure = _STRANGERS if lib.UCCH_FAIL_PEER in met else _reason() if min(met) < 0 else ""
    failures = [(r, text) for r, text in enumerate(mpi.allgather(failure)) if text]
    if not failures:
        return handle
    if handle != ffi.NULL:
        lib.ucch_channels_free(handle)
    at, text = failures[0]
    if text == _STRANGERS:
        log.log("mem").warning("rank %d %s: hosts take part in calls between devices, which is slower", at, text)
        return None
    raise DeviceError(
        f"rank {at} has no pinned memory for this communicator's channels ({text}; rank {rank} has pinned "
        f"{lib.ucch_channels_pinned() >> 20} MiB for those of others): free communicators that are not needed, or set "
        f"UCCH_CHANNEL_MEMORY lower, or UCCH_CHANNELS=n, so that hosts take part in calls"
    )


#: Said of a rank that another's processes keep out.
_STRANGERS = "cannot open the memory of a peer on its host, or reach one elsewhere"


def _reason() -> str:
    return str(ffi.string(lib.ucch_device_error()).decode(errors="replace"))
