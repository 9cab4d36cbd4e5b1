"""The machine of this process, read from the kernel's files. Every file may be missing."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .vendors import VENDORS, Known, Vendor, number, text


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Identity of a host, or of a container on it."""

    hostname: str
    boot_id: str
    #: Namespaces. Two processes can share memory and see each other's process ids only if theirs are equal.
    ipc: str
    pid: str

    @property
    def node(self) -> tuple[str, ...]:
        """Equal for ranks on one node, as MPI and the fabric libraries see nodes."""
        return (self.hostname, self.boot_id)

    @property
    def memory(self) -> tuple[object, ...]:
        """Equal for ranks that can map each other's memfds and signal each other."""
        return (self.boot_id, self.ipc, self.pid)


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def host_identity() -> HostIdentity:
    return HostIdentity(
        hostname=socket.gethostname(),
        boot_id=text(Path("/proc/sys/kernel/random/boot_id")),
        ipc=_namespace("ipc"),
        pid=_namespace("pid"),
    )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def host_cores() -> set[int]:
    """Cores that this process may use on the host, regardless of a launcher's binding of the calling thread."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(1024))
        return os.sched_getaffinity(0)
    except OSError:
        return own
    finally:
        os.sched_setaffinity(0, own)


@dataclass(frozen=True, slots=True)
class Nic:
    """A network port. ``speed`` in Mbit/s, 0 if unknown; ``numa`` -1 if unknown; ``pci`` empty for a virtual port."""

    name: str
    kind: str
    speed: int
    pci: str = ""
    numa: int = -1


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that can hold buffers. ``fabric``: PCI addresses of the peers that the vendor's own links reach."""

    vendor: str
    pci: str
    name: str
    arch: str = ""
    numa: int = -1
    fabric: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices, links and ports of a host, from the kernel's files."""

    nics: tuple[Nic, ...]
    accelerators: tuple[Accelerator, ...]
    #: (NUMA node, its cores as the kernel lists them, such as ``0-31,64-95``).
    numa: tuple[tuple[int, str], ...]
    container: bool
    #: (accelerator, NIC, distance): PCI addresses, and ``switch``, ``bridge``, ``node`` or ``system``.
    distances: tuple[tuple[str, str, str], ...] = ()


#: PCI classes of display and processing accelerators.
_ACCELERATORS = ("0x0300", "0x0302", "0x0380", "0x1200")
_ETHERNET = "1"


def machine(root: Path = Path("/")) -> Machine:
    """Read the machine from ``/sys`` and ``/proc`` below ``root``. Missing files are skipped."""
    accelerators = tuple(_accelerators(root))
    ports = nics(root)
    pairs = [(a.pci, n.pci) for a in accelerators for n in ports if n.pci]
    distances = tuple((a, b, _distance(root, a, b)) for a, b in dict.fromkeys(pairs))
    return Machine(ports, accelerators, tuple(_numa(root)), _in_container(root), distances)


def link_speed(root: Path = Path("/")) -> int:
    """Total speed of this host's ports to other hosts in Mbit/s; 0 if unknown."""
    return sum(nic.speed for nic in nics(root))


def _names(folder: Path) -> list[str]:
    """Entries of a folder, with numbers in numeric order."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _pci_of(device: Path) -> str:
    """The PCI address that a ``device`` link of sysfs leads to; empty for a virtual device."""
    try:
        target = os.readlink(device)
    except OSError:
        return ""
    found = re.findall(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", target)
    return found[-1] if found else ""


def nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """This host's network ports that are up: ports of InfiniBand devices, then other hardware interfaces.

    If there is no hardware port, as in containers, which have one end of a veth pair, virtual interfaces count.
    """
    found: list[Nic] = []
    base = root / "sys/class/infiniband"
    for name in _names(base):
        pci, numa = _pci_of(base / name / "device"), number(text(base / name / "device/numa_node"), -1)
        for port in (base / name / "ports" / entry for entry in _names(base / name / "ports")):
            if "ACTIVE" in text(port / "state"):
                kind = text(port / "link_layer").lower() or "infiniband"
                rate = re.match(r"[\d.]+", text(port / "rate"))
                found.append(Nic(name, kind, round(float(rate[0]) * 1000) if rate else 0, pci, numa))
    known = {nic.pci for nic in found}
    virtual: list[Nic] = []
    base = root / "sys/class/net"
    for name in _names(base):
        at = base / name
        if text(at / "operstate") not in ("up", "unknown") or text(at / "type") != _ETHERNET:
            continue
        pci, speed = _pci_of(at / "device"), max(number(text(at / "speed")), 0)
        nic = Nic(name, "ethernet", speed, pci, number(text(at / "device/numa_node"), -1))
        if not pci:
            # Bridges and bonds use ports that are counted themselves.
            if not any((at / part).exists() for part in ("bridge", "bonding")):
                virtual.append(nic)
        elif pci not in known:
            found.append(nic)
    return tuple(found or virtual)


def _accelerators(root: Path) -> Iterator[Accelerator]:
    base = root / "sys/bus/pci/devices"
    known: dict[str, Known] = {}
    for module, addresses in _knowing(root):
        known |= module.details(root, addresses)
    for pci, row in _cards(base):
        more = known.get(pci, Known())
        name = more.name or f"device {text(base / pci / 'device')}"
        yield Accelerator(row.name, pci, name, more.arch, number(text(base / pci / "numa_node"), -1), more.peers)


def _cards(base: Path) -> Iterator[tuple[str, Vendor]]:
    """(PCI address, vendor) of the accelerators of known vendors."""
    rows = {row.pci: row for row in VENDORS.values() if row.pci}
    for pci in _names(base):
        row = rows.get(text(base / pci / "vendor"))
        if row is not None and text(base / pci / "class").startswith(_ACCELERATORS):
            yield pci, row


def _knowing(root: Path) -> Iterator[tuple[Any, list[str]]]:
    """(module with details of a vendor's devices, addresses of these devices)."""
    cards = list(_cards(root / "sys/bus/pci/devices"))
    for row in VENDORS.values():
        if row.details:
            module = import_module(f".{row.details}", __package__)
            yield module, [pci for pci, owner in cards if owner is row]


def _numa(root: Path) -> Iterator[tuple[int, str]]:
    base = root / "sys/devices/system/node"
    for name in _names(base):
        if re.fullmatch(r"node\d+", name):
            yield int(name[4:]), text(base / name / "cpulist")


def _in_container(root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv", root / "run/.singularity.d")
    return any(mark.exists() for mark in marks) or "kubepods" in text(root / "proc/1/cgroup")


def _distance(root: Path, one: str, other: str) -> str:
    """Distance of two PCI devices: same ``switch``, host ``bridge``, NUMA ``node``, or across the ``system``."""
    base = root / "sys/bus/pci/devices"
    try:
        ways = [os.readlink(base / pci).split("/") for pci in (one, other)]
    except OSError:
        return "system"
    same = [a for a, b in zip(*ways, strict=False) if a == b and (a.startswith("pci") or ":" in a)]
    if len(same) > 1:
        return "switch"
    if same:
        return "bridge"
    nodes = [number(text(base / pci / "numa_node"), -1) for pci in (one, other)]
    return "node" if nodes[0] == nodes[1] >= 0 else "system"


#: Files that ``machine`` reads, as glob patterns below the root.
_RECORDED = (
    "sys/class/net/*/{type,speed,operstate,device/numa_node}",
    "sys/class/infiniband/*/{device/numa_node,ports/*/state,ports/*/rate,ports/*/link_layer}",
    "sys/bus/pci/devices/*/{vendor,device,class,numa_node}",
    "sys/devices/system/node/node*/cpulist",
)
_LINKS = ("sys/class/net/*/device", "sys/class/infiniband/*/device", "sys/bus/pci/devices/*")
_PRIVATE = re.compile(r"^(GPU UUID|Device Minor|unique_id)\b.*\n?", re.MULTILINE)


def record(root: Path = Path("/")) -> dict[str, str]:
    """The files that ``machine`` reads: path -> text, or ``-> target`` for a link. Serial numbers are removed."""
    found: dict[str, str] = {}
    for pattern in (*_RECORDED, *(pattern for module, _ in _knowing(root) for pattern in module.FILES)):
        stem, brace, rest = pattern.partition("{")
        for end in rest.rstrip("}").split(",") if brace else [""]:
            for path in sorted(root.glob(stem + end)):
                if contents := _PRIVATE.sub("", text(path) + "\n").rstrip("\n"):
                    found[str(path.relative_to(root))] = contents
    if _in_container(root):
        found[".dockerenv"] = ""
    for pattern in _LINKS:
        for path in sorted(root.glob(pattern)):
            if path.is_symlink():
                found[str(path.relative_to(root))] = "-> " + os.readlink(path)
    return found


def replay(files: Mapping[str, str], folder: Path) -> Path:
    """Write recorded files below ``folder``, so that ``machine(folder)`` reads them. Returns ``folder``."""
    links = {name: contents[3:] for name, contents in files.items() if contents.startswith("-> ")}
    for name, target in links.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        # Create the targets of links, which are folders of the device tree, so that files behind links can be written.
        Path(os.path.normpath(place.parent / target)).mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(target)
    for name, contents in files.items():
        if name not in links:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(contents + "\n")
    return folder
