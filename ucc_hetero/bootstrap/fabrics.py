"""Islands of a job by fabric: which ranks of a vendor its own library joins, decided from all ranks' facts alike."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..device import DeviceRuntime
from ..errors import counted, ranks_text
from ..machine.facts import Facts
from ..planner.topology import Topology, numbered
from ..transport import channels

#: Sockets of a rank for each rank on another host at most: two for each wire, and those of libucp.
_SOCKETS = 16


class Split(NamedTuple):
    """Fabric of each rank as a number, equal for ranks of one island, and why; no reason where hosts are no matter."""

    numbers: tuple[int, ...]
    why: str


def split(mpi: Any, everyone: Sequence[Facts], runtime: DeviceRuntime | None, library: Callable[[], bool]) -> Split:
    """Split ranks into islands by fabric; collective over ``mpi``, and the same on all ranks.

    UCCH_FABRIC decides, else the hosts' RDMA. Calls between devices of several
    islands must be queued in streams, or they are slower than over the sockets of the vendor's library. So where
    UCCH_FABRIC is not set and some rank cannot, vendors stay whole. ``library`` tells whether the vendor's library of
    collectives is there, for the stages inside an island.
    """
    whole = numbered([(f.vendor, f.host.node if f.vendor == "host" else ()) for f in everyone])
    spread = _spread(everyone)
    decided = any(f.fabric.wanted != "auto" for f in everyone)
    by_fabric = numbered([facts.joined for facts in everyone])
    why = "; ".join(_describe(vendor, ranks, everyone) for vendor, ranks in spread.items())
    devices = any(f.device_memory for f in everyone)
    if by_fabric == whole or not devices or decided:
        return Split(by_fabric, why)
    hosts = numbered([f.host.node for f in everyone])
    several = not channels.alone(Topology.group([f.vendor for f in everyone], hosts, fabrics=by_fabric))
    rank = int(mpi.Get_rank())
    far = len(hosts) - hosts.count(hosts[rank])
    obstacle = channels.obstacle(everyone[rank], runtime, lazy=not several) or few_files(far)
    if several and not obstacle and not library():
        obstacle = "no library of collectives for a host's devices"
    obstacles = channels.by_rank(mpi.allgather(obstacle))
    if not obstacles:
        return Split(by_fabric, why)
    return Split(whole, f"{', '.join(spread)}: all hosts, as streams cannot do calls between them ({obstacles})")


def few_files(far: int) -> str:
    """Reason why network threads cannot reach ``far`` ranks of other hosts: too few files; empty where they can."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or far * _SOCKETS <= most:
        return ""
    return f"{far * _SOCKETS} sockets for {counted(far, 'rank')} on other hosts, and ulimit -n is {most}"


def _spread(everyone: Sequence[Facts]) -> dict[str, list[int]]:
    """Vendors with ranks on several hosts, and these ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.vendor != "host":
            ranks.setdefault(facts.vendor, []).append(rank)
    return {vendor: some for vendor, some in ranks.items() if len({everyone[r].host.node for r in some}) > 1}


def _describe(vendor: str, ranks: Sequence[int], everyone: Sequence[Facts]) -> str:
    """Fabric of a vendor's ranks on several hosts, and why."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        fabric = everyone[rank].fabric
        reasons.setdefault((fabric.kind, fabric.why), []).append(rank)
    joined = len({everyone[rank].joined for rank in ranks}) == 1
    first = everyone[ranks[0]].fabric
    if joined and first.kind != "all":
        return f"{vendor}: all hosts ({first.kind})"
    if len(reasons) == 1:
        return f"{vendor}: {first.describe()}"
    each = (f"{ranks_text(some)}: {kind or why}" for (kind, why), some in reasons.items())
    return f"{vendor}: hosts apart ({'; '.join(each)})"
