"""``python -m ucc_hetero topo``: the tree of hosts, processors, devices, network ports, ranks and islands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..errors import ranks_text
from ..machine.discover import Accelerator, Machine, Nic
from ..planner.topology import Topology

#: (depth, text) of each line.
Lines = list[tuple[int, str]]


class DrawnHost(NamedTuple):
    """A host of the drawing: name, machine, (rank, vendor, device) of its ranks, what UCX uses for it."""

    name: str
    machine: Machine
    ranks: Sequence[tuple[int, str, int]] = ()
    transport: Mapping[str, str] = MappingProxyType({})


def _nic(nic: Nic) -> str:
    speed = f"{nic.speed / 1000:g} Gbit/s" if nic.speed else "speed unknown"
    return f"port {nic.name}: {nic.kind}, {speed}" + (f", {nic.pci}" if nic.pci else ", virtual")


def _device(device: Accelerator, machine: Machine) -> str:
    text = f"device {device.pci}: {device.vendor} {device.name}"
    text += f" {device.arch}" if device.arch else ""
    near = [
        nic.name
        for a, pci, d in machine.distances
        for nic in machine.nics
        if (a, nic.pci, d) == (device.pci, pci, "switch")
    ]
    text += f", same switch as {', '.join(near)}" if near else ""
    return text + (f", own fabric to {', '.join(device.fabric)}" if device.fabric else "")


def tree(
    hosts: Sequence[DrawnHost],
    topology: Topology | None = None,
    rings: Sequence[Sequence[str]] = (),
    fabric: Sequence[str] = (),
) -> Lines:
    """Draw a job, or this host, as lines. ``fabric``: lines about which hosts a vendor's ranks are joined on."""
    lines: Lines = []
    for number, host in enumerate(hosts):
        lines += _host(number, host, topology)
    if topology is not None:
        lines.append((0, f"islands ({topology.fingerprint()})"))
        for one in topology.islands:
            lines.append((1, f"island {one.index}: {one.vendor}, {ranks_text(one.ranks)}"))
        lines += [(1, f"fabric between hosts: {text}") for text in fabric]
        if topology.deep:  # levels between the job and the ranks
            groups = [group for group in topology.tree.walk() if group is not topology.tree]
            lines += [(1, f"group of height {g.height}: {ranks_text(g.ranks)}") for g in reversed(groups)]
        if topology.weights:
            lines.append((1, f"weights of the ranks' links: {', '.join(map(str, topology.weights[:32]))}"))
    if any(rings):
        lines.append((0, "rings between devices, pinned when calls first need them"))
        lines += [(1, f"rank {rank}: {text}") for rank, texts in enumerate(rings) for text in texts]
    return lines


def _host(number: int, host: DrawnHost, topology: Topology | None) -> Lines:
    machine = host.machine
    lines: Lines = [(0, f"host {number} {host.name}{', in a container' if machine.container else ''}")]
    nodes = [node for node, _ in machine.numa] or [-1]
    for node in nodes:
        if machine.numa:
            lines.append((1, f"NUMA node {node}: cores {dict(machine.numa)[node]}"))
        # A device with NUMA node -1 belongs to the only node.
        mine = {node, -1} if node == nodes[0] else {node}
        depth = 2 if machine.numa else 1
        lines += [(depth, _device(d, machine)) for d in machine.accelerators if d.numa in mine]
        lines += [(depth, _nic(nic)) for nic in machine.nics if nic.numa in mine]
    for rank, vendor, device in host.ranks:
        island = f", island {topology.island_of[rank]}" if topology else ""
        on = f" on device {device}" if vendor != "host" else ""
        lines.append((1, f"rank {rank}: {vendor} memory{on}{island}"))
    return lines + [(1, f"transport, {what}: {by}") for what, by in host.transport.items()]


def draw(lines: Lines) -> str:
    out = []
    for i, (depth, text) in enumerate(lines):
        prefix = ""
        for level in range(1, depth + 1):
            # Depth of the next line on this level or above.
            later = next((d for d, _ in lines[i + 1 :] if d <= level), 0)
            more = later == level
            prefix += ("├─ " if more else "└─ ") if level == depth else ("│  " if more else "   ")
        out.append(prefix + text)
    return "\n".join(out)
