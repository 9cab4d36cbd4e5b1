"""Where data is, in host memory or on this rank's device; and the paths of messages between these."""

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
    """True if messages on device memory go by way of the host by default; equal on every rank.

    ``wanted`` is ``UCCH_STAGING``. ``auto`` means direct if every rank's libucp supports the device memory of all ranks
    on its host, and no host has devices of two vendors: between these only the CPU moves data, piece by piece. A libucp
    that does not support a peer's memory cannot receive long messages from it (UCX 1.22 on a rank that sees no GPU:
    "cannot find remote protocol for rndv_recv", and a hang).
    """
    without = [rank for rank, f in enumerate(everyone) if not _knows(f)]  # libucp cannot move their device's memory
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
    """Hosts where ranks of several islands have devices: no library moves data between the memory of these."""
    seen: dict[tuple[object, ...], set[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.device_memory:
            seen.setdefault(facts.host.memory, set()).add(topology.island_of[rank])
    return frozenset(host for host, islands in seen.items() if len(islands) > 1)


def _knows(facts: Facts) -> bool:
    """True if a rank's libucp can move the memory of its device."""
    return facts.device_memory in ("", *facts.memory_types)


class MessagePaths:
    """Paths of one rank's messages on device memory: direct, or by way of the host if they must.

    Each end decides for itself: one end may send from pinned memory and the other receive on its device.
    """

    def __init__(self, rank: int, everyone: Sequence[Facts], topology: Topology, staged: bool) -> None:
        self._rank, self._everyone = rank, everyone
        #: Device memory always goes by way of the host: it is a setting, or libucp cannot move this memory.
        self._always = staged or not _knows(everyone[rank])
        self._crowded = crowded_hosts(topology, everyone)
        self._free = env.get("STAGING") == "auto"
        self._spread = len({facts.host.memory for facts in everyone}) > 1
        #: True if this rank loads kernels at their first launch: :meth:`wanted` may then change its answer.
        self.lazy_loading = everyone[rank].lazy_loading

    def wanted(self, peer: int, *, in_stream: bool = False) -> bool:
        """True if a message with ``peer`` (negative: any rank) goes by way of the host.

        ``in_stream``: it is part of a stream's work. Between hosts the stream then does all copies itself: libucp would
        do them in a thread that must not wait for a thread that launches kernels. The same holds on one host while a
        kernel may be loaded as streams wait:
        libucp's thread would block in the driver.
        """
        if self.lazy_loading and streams_wait():
            return True
        here = self._host(self._rank)
        if in_stream and self._free and (self._spread if peer < 0 else self._host(peer) != here):
            return True
        return self._always or (here in self._crowded and (peer < 0 or self._host(peer) == here))

    def undecided(self, peer: int) -> bool:
        """True if no setting decides how a message with a rank of another host goes."""
        return self._free and self._host(peer) != self._host(self._rank)

    def _host(self, rank: int) -> object:
        return self._everyone[rank].host.memory


@dataclass(frozen=True, slots=True)
class Device:
    """This rank's device, as one communicator knows it; ``runtime`` is None for a rank without a device."""

    rank: int
    place: Place
    runtime: DeviceRuntime | None
    #: Why no library does collectives on the devices of this rank's island; empty if one does.
    by_host: str
    #: True if every rank of the communicator has a device.
    everywhere: bool
    #: True if the libraries reduce half precision on every rank's device, and can move its memory.
    halves: bool

    @classmethod
    def of(cls, rank: int, island: Sequence[int], everyone: Sequence[Facts], runtime: DeviceRuntime | None) -> Device:
        """From the facts of all ranks; ``island``: the ranks of this rank's island."""
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
        """UCC's and UCX's memory type of this rank's device memory.

        Managed memory gets the same type: if ranks of a team named different types, they would run different
        algorithms.
        """
        assert self.runtime is not None
        return self.runtime.memory_type

    def check(self, buffers: Sequence[tuple[str, Buffer | None]]) -> None:
        """Raise if the named buffers of a call, some of which are on a device, are not all usable.

        All of a rank's buffers must be on its device, or all on the host: libraries choose by memory type, and would
        choose differently for each buffer.
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
        # With a rehearsal library in place of a vendor's, memory of the type that it stands for counts as this rank's,
        # too.
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
