"""Places of data, in host memory or on this rank's device; and paths of messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import env
from ..buffers import Buffer
from ..device import DeviceRuntime, Place, report
from ..errors import AgreementError, DeviceError
from ..machine.facts import Facts
from ..machine.vendors import of_memory
from ..planner.topology import Topology
from .channels import streams_wait


def staged(everyone: Sequence[Facts], wanted: str) -> bool:
    """True if messages on device memory usually go by way of the host; equal on every rank.

    ``wanted`` is ``UCCH_STAGING``. ``auto`` is direct where every rank's libucp knows the device memory of all ranks on
    its host, and no host has devices of two kinds: nothing moves data between these but the processor, piece by piece.
    A libucp that does not know a peer's memory cannot receive long messages from there (seen with UCX 1.22 and a rank
    that sees no GPU: "cannot find remote protocol for rndv_recv", and a hang).
    """
    without = [rank for rank, f in enumerate(everyone) if not _knows(f)]  # whose libucp cannot move its device's memory
    if wanted == "direct" and without:
        raise AgreementError(
            f"UCCH_STAGING=direct, but libucp of rank(s) {without} cannot move the memory of their devices: "
            "use a build that can, or UCCH_STAGING=auto"
        )
    there: dict[tuple[object, ...], set[str]] = {}
    for facts in everyone:
        there.setdefault(facts.host.memory, set()).update(filter(None, [facts.device_memory]))
    apart = any(len(there[f.host.memory]) > 1 or not there[f.host.memory] <= {*f.memory_types} for f in everyone)
    return wanted == "staged" or (wanted == "auto" and apart)


def crowded_hosts(topology: Topology, everyone: Sequence[Facts]) -> frozenset[tuple[object, ...]]:
    """The hosts where ranks of several islands have devices: no library moves data between the memory of these."""
    seen: dict[tuple[object, ...], set[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.device_memory:
            seen.setdefault(facts.host.memory, set()).add(topology.island_of[rank])
    return frozenset(host for host, islands in seen.items() if len(islands) > 1)


def _knows(facts: Facts) -> bool:
    """True if a rank's libucp can move the memory of its own device."""
    return facts.device_memory in ("", *facts.memory_types)


class MessagePaths:
    """Paths of one rank's messages on device memory: by way of the host where they must.

    Either end decides for its own part: data that one end sends from pinned memory may arrive on the other's device.
    """

    def __init__(self, rank: int, everyone: Sequence[Facts], topology: Topology, staged: bool) -> None:
        self._rank, self._everyone = rank, everyone
        #: Device memory always goes by way of the host: so wanted, or this libucp cannot move it.
        self._always = staged or not _knows(everyone[rank])
        self._crowded = crowded_hosts(topology, everyone)
        self._free = env.get("STAGING") == "auto"
        self._spread = len({facts.host.memory for facts in everyone}) > 1
        #: True if this rank loads kernels at their first launch: the answer of :meth:`wanted` may then change.
        self.lazy_loading = everyone[rank].lazy_loading

    def wanted(self, peer: int, *, in_stream: bool = False) -> bool:
        """True if a message with ``peer`` (negative: any rank) goes by way of the host.

        ``in_stream``: it is part of a stream's work. Between hosts the stream then does all copies itself: libucp would
        do them in a thread which must not wait for a thread that launches kernels. So would it on one host, where that
        thread could not get past a kernel that is loaded while streams wait.
        """
        if self.lazy_loading and streams_wait():
            return True
        here = self._host(self._rank)
        if in_stream and self._free and (self._spread if peer < 0 else self._host(peer) != here):
            return True
        return self._always or (here in self._crowded and (peer < 0 or self._host(peer) == here))

    def undecided(self, peer: int) -> bool:
        """True if no setting says how a message with a rank of another host goes."""
        return self._free and self._host(peer) != self._host(self._rank)

    def _host(self, rank: int) -> object:
        return self._everyone[rank].host.memory


@dataclass(frozen=True, slots=True)
class Device:
    """This rank's device, as one communicator knows it; ``runtime`` is None for a rank without one."""

    rank: int
    place: Place
    runtime: DeviceRuntime | None
    #: Why no library does collectives on the devices of this rank's island; empty where one does.
    by_host: str
    #: Every rank of the communicator has a device.
    everywhere: bool
    #: The libraries reduce half precision on every rank's device, and can move its memory.
    halves: bool

    @classmethod
    def of(cls, rank: int, island: Sequence[int], everyone: Sequence[Facts], runtime: DeviceRuntime | None) -> Device:
        """From the facts of all ranks; ``island`` are the ranks of this one's."""
        mine = everyone[rank]
        lacking = [not _knows(f) for f in everyone]
        boards = [(everyone[r].host.memory, everyone[r].board) for r in island if everyone[r].board]
        by_host = "libucp cannot move the memory of every device" if any(lacking[r] for r in island) else ""
        if len(set(boards)) < len(boards):
            by_host = by_host or "two ranks share a device, which NCCL and RCCL refuse"
        kinds = {f.device_memory for f in everyone}
        halves = not kinds & {"", "host"} and not any(lacking)
        return cls(rank, Place(mine.vendor, mine.device), runtime, by_host, "" not in kinds, halves)

    @property
    def memory(self) -> int:
        """The memory type under which UCC and UCX know this rank's device memory.

        Managed memory goes by it too: ranks of one team that name different types would run different algorithms.
        """
        assert self.runtime is not None
        return self.runtime.memory_type

    def check(self, buffers: Sequence[tuple[str, Buffer | None]]) -> None:
        """Raise what is wrong with where the named buffers of a call lie, of which some are on a device.

        All of a rank's buffers are on its device, or all are on the host: libraries choose by the kind of memory, and
        would choose differently for each side.
        """
        here = [name for name, b in buffers if b is not None and b.vendor == "host"]
        for name, buffer in buffers:
            if buffer is None or buffer.vendor == "host":
                continue
            if here:
                raise ValueError(
                    f"{name} on rank {self.rank} is on a device and {here[0]} is in host memory: both must be in one "
                    "place"
                )
            self._check(name, buffer)

    def _check(self, name: str, buffer: Buffer) -> None:
        # A library that stands in for a vendor's (rehearsals) has another vendor's memory: then that is ours, too.
        mine = () if self.runtime is None else (self.place.vendor, of_memory(self.runtime.memory_type).name)
        where = f"{name} on rank {self.rank} is in memory of {buffer.vendor} device {buffer.device}"
        if self.runtime is None or buffer.vendor not in mine:
            why = report(buffer.vendor) if self.runtime is None else f"it works with {self.place.vendor}"
            raise DeviceError(f"{where}, which this rank cannot use ({why})")
        if buffer.device != self.place.device:
            raise DeviceError(
                f"{where}, but the rank works with device {self.place.device}: choose the device before the first "
                "Communicator is made, or move the data"
            )
        if buffer.count and self.runtime.pointer(buffer.ptr).kind not in ("device", "managed"):
            raise DeviceError(f"{where}, says its owner, but the runtime does not know {buffer.ptr:#x}: it was freed")
