"""Channels: whole calls queued in streams, where the ranks of a communicator are devices of one host.

The native side is shm/ring.c and coll/schedule.c. A call is handed to the devices when it is
made: they wait for each other, copy and compute, and no host takes part any more. All ranks must do so or none, for the
same calls; so what decides is known to all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from .. import env, log
from ..device import DeviceRuntime, kernels
from ..errors import DeviceError
from ..machine.facts import Facts
from ..native.libraries import ffi, lib
from ..planner.topology import Topology
from ..types import DTYPES, OPS
from .segments import Windows, key_of, may_wait

__all__ = ["Channels", "join"]


class Channels:
    """Ring buffers of one communicator; ``handle`` is the native engine's.

    ``able``: on every rank the vendor's library does an island's collectives, and can be told to in a stream.
    ``computes``: every rank's device has a compiler for its arithmetic.
    """

    def __init__(self, handle: Any, able: bool, computes: bool) -> None:
        self.handle, self.able, self.computes = handle, able, computes

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
) -> Channels | None:
    """The channels of a communicator; collective over ``mpi``, None on all ranks where they are not for all of them.

    ``able`` as in :class:`Channels`, of this rank. Raises :class:`DeviceError` on all ranks where one of them has no
    pinned memory left: calls of this communicator would be slow, and nobody would know.
    """
    if not windows.whole:
        return None
    rank, size = int(mpi.Get_rank()), int(mpi.Get_size())
    ready = may_wait(runtime)
    mine = everyone[rank]
    board = mine.vendor, runtime.bus(mine.device) if runtime is not None else ""
    where = rank, size, ffi.new("int[]", list(topology.island_of))
    room = lib.ucch_channels_offer(*where, int(env.get("CHANNEL_MEMORY"))) if ready else 0
    # A usual kernel is made as a try: one vendor's compiler may be missing where the other's is there.
    compiles = ready and kernels.ready(lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code, 0, insist=True)
    rooms, ables, computes, boards = zip(*mpi.allgather((int(room), able, compiles, board)), strict=True)
    # Processes that share a device take turns at it: one that waits there would keep the other from what it waits for.
    if not min(rooms) or len({*boards}) < size:
        log.log("mem").info("no channels between devices: their hosts take part in calls")
        return None
    handle = _connected(mpi, everyone, where, min(rooms))
    well = lib.ucch_channels_open(handle) == 0
    if all(mpi.allgather(well)):
        return Channels(handle, all(ables), all(computes))
    lib.ucch_channels_free(handle)
    log.log("mem").info("no channels between devices: %s", _reason())
    return None


def _connected(mpi: Any, everyone: Sequence[Facts], where: tuple[int, int, Any], room: int) -> Any:
    """The native side of channels with rings of ``room`` bytes, whose ranks see each other's memory; collective."""
    handle = lib.ucch_channels_new(*where, room)
    files = mpi.allgather((os.getpid(), int(lib.ucch_channels_file(handle)) if handle != ffi.NULL else -1))
    failure = "" if handle != ffi.NULL else "no room for a file of shared memory"
    if min(file for _, file in files) >= 0:
        met = [lib.ucch_channels_meet(handle, r, key_of(everyone[r]), *file) for r, file in enumerate(files)]
        failure = "a peer's cannot be opened" if lib.UCCH_FAIL_PEER in met else _reason() if min(met) < 0 else ""
    failures = [(rank, text) for rank, text in enumerate(mpi.allgather(failure)) if text]
    if not failures:
        return handle
    if handle != ffi.NULL:
        lib.ucch_channels_free(handle)
    rank, text = failures[0]
    raise DeviceError(
        f"rank {rank} has no pinned memory for this communicator's channels ({text}; rank {where[0]} has pinned "
        f"{lib.ucch_channels_pinned() >> 20} MiB for those of others): free communicators that are not needed, or set "
        f"UCCH_CHANNEL_MEMORY lower, or UCCH_CHANNELS=n, so that hosts take part in calls"
    )


def _reason() -> str:
    return str(ffi.string(lib.ucch_device_error()).decode(errors="replace"))
