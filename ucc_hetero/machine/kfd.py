"""AMD devices as their kernel driver knows them: names, architectures, and which reach each other over xGMI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .vendors import Known, gfx, text

_NODES = "sys/class/kfd/kfd/topology/nodes"
#: Files of the driver that a machine's record holds.
FILES = (_NODES + "/*/{name,properties,io_links/*/properties}",)
#: KFD's io_link type of xGMI.
_XGMI = "11"


def details(root: Path, devices: Sequence[str]) -> dict[str, Known]:
    """Details of KFD's devices, by PCI address."""
    nodes = {}
    for node in root.glob(_NODES + "/*"):
        facts = _properties(node / "properties")
        if int(facts.get("gfx_target_version", 0)):
            at, domain = int(facts["location_id"]), int(facts.get("domain", 0))
            pci = f"{domain:04x}:{at >> 8 & 0xFF:02x}:{at >> 3 & 0x1F:02x}.{at & 7:x}"
            nodes[node.name] = pci, gfx(int(facts["gfx_target_version"])), node
    found = {}
    for pci, arch, node in nodes.values():
        links = [_properties(link) for link in sorted(node.glob("io_links/*/properties"), key=_number)]
        peers = [link["node_to"] for link in links if link.get("type") == _XGMI]
        found[pci] = Known(text(node / "name"), arch, tuple(nodes[peer][0] for peer in peers if peer in nodes))
    return found


def answers(root: Path, devices: Sequence[str]) -> dict[str, str]:
    """Nothing: all of it is in the kernel's files."""
    return {}


def _number(link: Path) -> int:
    return int(link.parent.name)


def _properties(path: Path) -> dict[str, str]:
    return dict(line.split(None, 1) for line in text(path).splitlines() if len(line.split()) == 2)
