"""Channels: whole calls queued in streams, for communicators whose ranks all have devices.

The native part is in shm/channels.c and coll/schedule.c. A call is given to the devices when it is made: they wait for
each other, copy and compute without the host, except for the network threads between hosts (:mod:`.wires`). All ranks
must do so or none, for the same calls, so the decision uses only facts that all ranks know.

A ring takes pinned memory when a call first needs it, on each rank by itself: the ring of a message follows from its
length.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import env, log
from ..bindings import quarantine
from ..device import DeviceRuntime, kernels
from ..errors import DeviceError, ranks_text
from ..machine.facts import Facts
from ..native.libraries import c_text, ffi, lib, owned
from ..native.waiting import progress_until
from ..planner.topology import Topology, numbered, ranks_by
from ..types import DTYPES, OPS
from . import wires

#: Default size of a slot between hosts, in bytes.
SLOT = 2 << 20


class Channels:
    """Rings of one communicator; ``handle`` is the engine's object.

    ``native_in_stream``: on every rank the vendor's library does an island's collectives in a stream. ``computes``:
    every rank's device has a compiler for kernels.
    """

    def __init__(self, handle: Any, native_in_stream: bool, computes: bool, transports: Mapping[int, str]) -> None:
        self.handle, self.native_in_stream, self.computes = handle, native_in_stream, computes
        _open_count[0] += 1
        #: By rank, what carries its ring: ``shared`` memory, or a number of wires.
        self.transports = transports
        #: Lanes for messages in streams; NULL until there is one.
        self._lanes: Any = ffi.NULL

    def lanes(self, board: Any) -> Any:
        """The lanes for messages in streams of a communicator with this arrival board."""
        if self._lanes == ffi.NULL:
            self._lanes = owned(lib.ucch_lanes_new(self.handle, board), lib.ucch_lanes_free)
        return self._lanes

    def describe(self) -> str:
        """Text: what carries data to which ranks, the slots of the rings used so far, and their pinned memory."""
        ranks: dict[str, list[int]] = {}
        for rank, transport in self.transports.items():
            sizes = [int(lib.ucch_channels_slot(self.handle, rank, ring)) for ring in range(lib.UCCH_RINGS)]
            slots = ", ".join(f"{lib.UCCH_RING_SLOTS} x {size >> 10} KiB" for size in sizes if size)
            ranks.setdefault(f"{transport} ({slots or 'not used yet'})", []).append(rank)
        each = "; ".join(f"{ranks_text(some)} {what}" for what, some in ranks.items())
        return f"{each}; {lib.ucch_channels_held(self.handle) / (1 << 20):.1f} MiB pinned"

    def discard(self, worker: Any, tag: int, mask: int) -> int:
        """Discard messages by lanes that will not be received. Returns a rank for which :meth:`reach` has to be called
        first, or -1."""
        if self._lanes == ffi.NULL:
            return -1
        lib.ucch_lanes_discard(self._lanes)
        return int(lib.ucch_offers_discard(worker, self._lanes, tag, mask))

    def reach(self, rank: int, endpoint: Any) -> None:
        """Set the endpoint to a rank, so that it can be told that its message will not be received."""
        lib.ucch_lanes_reach(self._lanes, rank, len(self.transports) + 1, endpoint)

    def quiet(self) -> bool:
        """True if all queued calls have ended and the rings are empty, or if a call has failed."""
        return bool(lib.ucch_channels_quiet(self.handle))

    def close(self, timeout: float) -> None:
        """Free the memory once nothing is under way; collective. After ``timeout``, or a failure, rings are leaked."""
        until = time.monotonic() + timeout
        if self._lanes != ffi.NULL:
            lib.ucch_lanes_stop(self._lanes)
        while (quiet := lib.ucch_channels_quiet(self.handle)) != 1 or not self._idle():
            if quiet < 0 or time.monotonic() > until:
                return self.let_go()
            time.sleep(0)
        if self._lanes != ffi.NULL:
            lib.ucch_lanes_close(self._lanes)
        lib.ucch_channels_free(self.handle)
        _open_count[0] -= 1

    def let_go(self) -> None:
        """After a failure: free streams and memory of the device as soon as nothing uses them. Rings stay, as other
        ranks and libucp may still use them."""
        if self._lanes != ffi.NULL:
            lib.ucch_lanes_stop(self._lanes)
        quarantine.keep(self, self._has_let_go, Channels)

    def _has_let_go(self) -> bool:
        if not (self._idle() and lib.ucch_channels_let_go(self.handle)):
            return False
        if self._lanes != ffi.NULL:
            lib.ucch_lanes_close(self._lanes)
        _open_count[0] -= 1
        return True

    def passed(self, seconds: float) -> None:
        """Wait until streams have passed all queued calls, at most ``seconds``."""
        progress_until(lambda: lib.ucch_channels_passed(self.handle), seconds)

    def _idle(self) -> bool:
        return self._lanes == ffi.NULL or bool(lib.ucch_lanes_idle(self._lanes))


#: Number of this process's communicators with channels.
_open_count = [0]


def streams_wait() -> bool:
    """True if streams of this process may wait for other ranks."""
    return _open_count[0] > 0


def join(
    mpi: Any,
    topology: Topology,
    everyone: Sequence[Facts],
    runtime: DeviceRuntime | None,
    native_in_stream: bool,
    number: int,
) -> tuple[Channels | None, str]:
    """Make the channels of communicator ``number``, of ``everyone``; collective over ``mpi``, their exchange.

    Returns (channels, ""), or on all ranks (None, why not). ``DeviceError`` on all ranks if a rank has no pinned memory
    left: calls would otherwise be slow without notice. ``native_in_stream`` as in :class:`Channels`, for this rank."""
    quarantine.release(Channels)
    places = numbered(f.host.memory for f in everyone)  # by rank, the number of its host
    devices = [facts.device_memory for facts in everyone]
    if not all(devices):
        return None, "some ranks have host memory" if any(devices) else ""
    rank = int(mpi.Get_rank())
    offers = mpi.allgather(_offer(rank, topology, everyone, places, runtime, native_in_stream))
    why = _obstacle(rank, offers)
    if why:
        return None, why
    nwires = min(len(each.wires) for each in offers) if max(places) else 0
    slot = min((each.slot for each in offers if each.slot), default=usual_slot(nwires))
    handle = _connected(mpi, everyone, (rank, places), slot, offers, nwires, number)
    if handle is None:
        return None, _STRANGERS
    failures = mpi.allgather("" if lib.ucch_channels_open(handle) == 0 else c_text(lib.ucch_device_error()))
    if any(failures):
        lib.ucch_channels_free(handle)
        return None, _warn_without(rank, by_rank(failures))
    far = f"{nwires} wire" + "s" * (nwires > 1)
    transports = {r: "shared" if places[r] == places[rank] else far for r in range(len(places)) if r != rank}
    return Channels(handle, all(o.native_in_stream for o in offers), all(o.compiles for o in offers), transports), ""


def usual_slot(nwires: int) -> int:
    """Default slot size: ``SLOT`` or a little more, so that all wires carry the same number of ranges.

    With 2 MiB on 6 wires some carry three ranges and some two: an allreduce of 128 MiB took a sixth longer.
    """
    part = nwires * int(lib.UCCH_WIRE_RANGE)
    return -(-SLOT // part) * part if part else SLOT


def _obstacle(rank: int, offers: Sequence[_Offer]) -> str:
    """Why ranks with these offers have no channels; empty if they can."""
    if any(each.unwanted for each in offers):
        return by_rank([each.unwanted for each in offers])
    # Processes that share a device take turns: one that waits for the other on the device would keep it from running.
    boards = [each.board for each in offers]
    shared = ["shares its device with another rank" if boards.count(each) > 1 else "" for each in boards]
    lacks = [each.lack for each in offers]
    why = by_rank(lacks if any(lacks) else shared)
    return _warn_without(rank, why) if why else ""


def _disabled_by(hosts: bool) -> str:
    """The setting of this rank that disables channels (``hosts``: of ranks on several hosts); empty if none does."""
    settings = {"UCCH_CHANNELS=n": not env.get("CHANNELS")}
    if hosts:
        settings["UCCH_WIRES=0"] = env.get("WIRES") == 0
    return next((text for text, found in settings.items() if found), "")


def _device_lacks(runtime: DeviceRuntime | None, *, lazy: bool) -> str:
    """What this rank's device lacks for channels; empty if nothing.

    ``lazy``: its streams may wait for those of other ranks although it loads kernels at their first launch. Loading
    waits for the device, and so for calls of other ranks, and blocks all other driver calls. That is allowed if no
    progress by the engine that calls the driver is needed meanwhile (:func:`alone`; PyTorch calls of four ranks, two of
    each vendor, hung on an H100).
    """
    if runtime is None:
        return "no GPU runtime"
    if not (runtime.eager or lazy):
        return "load kernels at their first launch, docs/launch.md has the setting"
    anywhere = runtime.traits & lib.UCCH_WAITS_ANYWHERE  # or for the runtime's own words only
    waits = anywhere or kernels.ready(lib.UCCH_AWAIT, 0, 0, 0, insist=True)
    return "" if waits else "streams cannot wait for memory, nor is there a compiler of kernels that do"


def alone(topology: Topology) -> bool:
    """True if every rank is alone in its island: no vendor's library takes part in calls."""
    return all(island.size == 1 for island in topology.islands)


def key_of(facts: Facts) -> int:
    return int(facts.process, 16)


def obstacle(mine: Facts, runtime: DeviceRuntime | None, *, lazy: bool) -> str:
    """Why this rank's calls with ranks of other hosts cannot be queued, as far as it knows before trying; empty if they
    can.

    ``lazy`` as in :func:`_device_lacks`.
    """
    return "host memory" if not mine.device_memory else _disabled_by(True) or _device_lacks(runtime, lazy=lazy)


def by_rank(texts: Sequence[str]) -> str:
    """Reasons, each with the ranks that gave it."""
    return "; ".join(f"{ranks_text(some)}: {text}" for text, some in ranks_by(texts).items() if text)


def _warn_without(rank: int, why: str) -> str:
    """Warn once that there are no channels, as calls are then slow. Returns the reason."""
    if rank == 0 and why not in _logged:
        _logged.add(why)
        log.log("mem").warning("no channels between devices (%s): their hosts take part in calls, which is slower", why)
    return why


#: Reasons that were logged.
_logged: set[str] = set()


class _Offer(NamedTuple):
    """A rank's offer: the setting that disables channels, what it lacks, and what it has.

    ``slot``: the slot size that it wants; 0: default.
    """

    unwanted: str
    lack: str
    native_in_stream: bool
    compiles: bool
    board: tuple[object, str, str]
    slot: int
    #: Addresses of its wires; none if all ranks are on one host.
    wires: tuple[tuple[bytes, bytes], ...]


def _offer(
    rank: int,
    topology: Topology,
    everyone: Sequence[Facts],
    places: Sequence[int],
    runtime: DeviceRuntime | None,
    native_in_stream: bool,
) -> _Offer:
    hosts = max(places) > 0
    mine = everyone[rank]
    unwanted = _disabled_by(hosts)
    lack = "" if unwanted else _device_lacks(runtime, lazy=alone(topology))
    board = mine.host.memory, mine.vendor, mine.board
    # A common kernel is compiled as a trial: one vendor's compiler may be missing.
    ready = not (unwanted or lack)
    sums = lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code, 0
    copies = [lib.UCCH_LANE_COPY, *([lib.UCCH_RING_COPY] if hosts else [])]
    compiles = ready and kernels.all_ready([sums, *((kind, 0, 0, 0) for kind in copies)])
    count = wires.wanted() if ready and hosts else 0
    addresses = wires.addresses(count)[:count] if count else ()
    if ready and hosts and not addresses:
        lack = "no network threads"
    slot = 0 if env.get("WIRE_SLOT") == "auto" else int(env.get("WIRE_SLOT"))
    return _Offer(unwanted, lack, native_in_stream, compiles, board, slot, addresses)


def _connected(
    mpi: Any,
    everyone: Sequence[Facts],
    where: tuple[int, Sequence[int]],
    slot: int,
    offers: Sequence[_Offer],
    nwires: int,
    number: int,
) -> Any:
    """Make the native channels, whose ranks share memory or are connected by wires; collective."""
    rank, places = where
    handle = lib.ucch_channels_new(key_of(everyone[rank]), rank, len(places), list(places), slot)
    files = mpi.allgather((os.getpid(), int(lib.ucch_channels_file(handle)) if handle != ffi.NULL else -1))
    failure = "" if handle != ffi.NULL else "no room for a file of shared memory"
    if min(file for _, file in files) >= 0:
        statuses = [int(lib.ucch_channels_map(handle, rank, key_of(everyone[rank]), *files[rank]))]
        for r, file in enumerate(files):
            key = key_of(everyone[r])
            if r != rank and statuses[-1] >= 0 and places[r] == places[rank]:
                statuses.append(int(lib.ucch_channels_map(handle, r, key, *file)))
            elif r != rank and statuses[-1] >= 0:
                reached = wires.connect(key, offers[r].wires, nwires)
                carried = reached and lib.ucch_channels_connect(handle, r, key, nwires, number) == 0
                statuses.append(0 if carried else int(lib.UCCH_FAIL_PEER))
        failure = c_text(lib.ucch_device_error()) if min(statuses) < 0 else ""
        failure = _STRANGERS if lib.UCCH_FAIL_PEER in statuses else failure
    failures = [(r, text) for r, text in enumerate(mpi.allgather(failure)) if text]
    if not failures:
        return handle
    if handle != ffi.NULL:
        lib.ucch_channels_free(handle)
    at, text = failures[0]
    if text == _STRANGERS:
        _warn_without(rank, f"rank {at} {text}")
        return None
    raise DeviceError(
        f"rank {at} has no pinned memory for this communicator's channels ({text}; rank {rank} has pinned "
        f"{lib.ucch_channels_pinned() >> 20} MiB for other communicators): free those that are not needed, or set "
        "UCCH_CHANNELS=n, so that hosts take part in calls"
    )


#: Reason of a rank that cannot access another's memory or wires.
_STRANGERS = "cannot open the memory of a peer on its host, or reach one elsewhere"
