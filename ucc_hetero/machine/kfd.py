"""AMD devices in the kernel driver's files: names, architectures, and which peers xGMI joins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .vendors import KFD_NODES, Known, gfx, kfd_address, kfd_nodes, kfd_properties, number, text

#: Files of the driver for :func:`.discover.record`.
FILES = (KFD_NODES + "/*/{name,properties,io_links/*/properties}",)
#: Value of KFD's io_link type for xGMI.
_XGMI = "11"


def details(root: Path, devices: Sequence[str]) -> dict[str, Known]:
    """PCI address -> details of the device. Partitions of a device share its address, and their peers are merged."""
    nodes = {}
    for node, facts in kfd_nodes(root):
        if number(facts.get("gfx_target_version", "")):
            nodes[node.name] = kfd_address(root, facts), gfx(number(facts["gfx_target_version"])), node
    found: dict[str, Known] = {}
    for pci, arch, node in nodes.values():
        links = [kfd_properties(link) for link in sorted(node.glob("io_links/*/properties"), key=_number)]
        ends = [link["node_to"] for link in links if link.get("type") == _XGMI]
        peers = [*found.get(pci, Known()).peers, *(nodes[end][0] for end in ends if end in nodes)]
        others = tuple(dict.fromkeys(peer for peer in peers if peer != pci))
        found[pci] = Known(text(node / "name"), arch, others)
    return found


def _number(link: Path) -> int:
    return int(link.parent.name)
