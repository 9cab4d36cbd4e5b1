"""Channels: whole calls queued in streams, where the ranks of a communicator are devices of one host.

The native side is shm/ring.c and coll/schedule.c. A call is handed to the devices when it is
made: they wait for each other, copy and compute, and no host takes part any more. All ranks must do so or none, for the
same calls; so what decides is known to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .. import log
from ..device import DeviceRuntime, kernels
from ..machine.facts import Facts
from ..native.libraries import ffi, lib
from ..planner.topology import Topology
from ..types import DTYPES, OPS
from .segments import Windows, key_of, may_wait

__all__ = ["Channels", "join"]

#: A communicator takes this part of what its ranks have left of their windows.
_SHARE = 4


class Channels:
    """Those of one communicator; ``handle`` is the native engine's.

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

    ``able`` as in :class:`Channels`, of this rank.
    """
    if not windows.whole:
        return None
    rank, size = int(mpi.Get_rank()), int(mpi.Get_size())
    ready = may_wait(runtime)
    mine = everyone[rank]
    board = mine.vendor, runtime.bus(mine.device) if runtime is not None else ""
    where = rank, size, ffi.new("int[]", list(topology.island_of))
    room = lib.ucch_channels_offer(*where, lib.ucch_window_room() // _SHARE) if ready else 0
    # A usual kernel is made as a try: one vendor's compiler may be missing where the other's is there.
    compiles = ready and kernels.ready(lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code, 0, insist=True)
    rooms, ables, computes, boards = zip(*mpi.allgather((int(room), able, compiles, board)), strict=True)
    # Processes that share a device take turns at it: one that waits there would keep the other from what it waits for.
    if not min(rooms) or len({*boards}) < size:
        log.log("mem").info("no channels between devices: their hosts take part in calls")
        return None
    handle = lib.ucch_channels_new(*where, min(rooms))
    offsets = mpi.allgather(int(lib.ucch_channels_offset(handle)) if handle != ffi.NULL else -1)
    well = min(offsets) >= 0
    for peer, offset in enumerate(offsets):
        well = well and lib.ucch_channels_meet(handle, peer, key_of(everyone[peer]), offset) == 0
    well = well and lib.ucch_channels_open(handle) == 0
    if all(mpi.allgather(bool(well))):
        return Channels(handle, all(ables), all(computes))
    if handle != ffi.NULL:
        lib.ucch_channels_free(handle)
    log.log("mem").info("no channels between devices: %s", ffi.string(lib.ucch_device_error()).decode(errors="replace"))
    return None
