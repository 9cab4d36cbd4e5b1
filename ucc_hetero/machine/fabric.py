"""Fabric that joins this host to others for a vendor's library of collectives: RDMA that the library will use.

NCCL and RCCL take InfiniBand and RoCE by themselves, EFA by a plugin, and sockets where settings or missing files leave
neither. Sockets are no fabric: calls over our own wires are faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .rdma import RdmaPort, active
from .vendors import VENDORS, Network, text

#: Values of UCCH_FABRIC.
WORDS = ("auto", "host", "all")
_VERBS = "libibverbs.so.1"
#: Folders that the dynamic linker searches without its cache.
_FOLDERS = ("lib", "lib64", "usr/lib", "usr/lib64")


class Fabric(NamedTuple):
    """Fabric of one rank. Ranks of one vendor whose ``kind`` is the same, and not empty, are joined by it."""

    #: ``InfiniBand``, ``RoCE``, ``EFA``, or ``all`` where UCCH_FABRIC says so; empty: nothing joins the host to others.
    kind: str = ""
    #: Ports, or what is in the way.
    why: str = ""
    #: UCCH_FABRIC of the rank.
    wanted: str = "auto"

    def describe(self) -> str:
        """Which hosts a vendor's ranks are joined on, and why."""
        if self.wanted == "all" and self.kind:
            return f"all hosts ({self.why})"
        return f"hosts with {self.kind} ({self.why})" if self.kind else f"each host by itself ({self.why})"


#: Of a rank that nothing joins to other hosts.
NO_FABRIC = Fabric()


def fabric_of(vendor: str, wanted: str, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Fabric:
    """The fabric of a rank on this host. ``wanted`` is UCCH_FABRIC's value: ``auto`` looks for RDMA, others decide.

    ``environ``: settings of the vendor's library, by default those of this process.
    """
    network = VENDORS[vendor].network
    if vendor == "host":
        return Fabric("", "host memory", wanted)
    if wanted != "auto":
        return Fabric("all" if wanted == "all" else "", f"UCCH_FABRIC={wanted}", wanted)
    if network is None:
        return Fabric("", f"no library of collectives for {vendor}")
    return _found(network, _configured(network, os.environ if environ is None else environ, root), root)


def _found(network: Network, settings: Mapping[str, str], root: Path) -> Fabric:
    ports = active(root)
    if not ports:
        return Fabric("", "no active port of InfiniBand, RoCE or EFA")
    if settings.get("NCCL_NET", "").lower() == "socket":
        return Fabric("", "NCCL_NET=Socket")
    lacks = {port: _lack(port, network, settings, root) for port in ports}
    # All hosts must come to the same kind where they have the same ports: the first in this order.
    for kind in ("EFA", "InfiniBand", "RoCE"):
        usable = [port for port in ports if port.kind == kind and not lacks[port]]
        if usable:
            return Fabric(kind, ", ".join(port.name for port in usable))
    return Fabric("", "; ".join(dict.fromkeys(lacks.values())))


def _lack(port: RdmaPort, network: Network, settings: Mapping[str, str], root: Path) -> str:
    """Reason why the vendor's library does not use a port; empty where it does."""
    net, device = settings.get("NCCL_NET", ""), port.name.partition(":")[0]
    if not _node(device, root):
        return f"no /dev/infiniband for {device}"
    if port.kind == "EFA":
        named = settings.get("NCCL_NET_PLUGIN", "")
        plugins = _plugins(network, named)
        if net.lower() == "ib" or not any(_loadable(name, settings, root) for name in plugins):
            return "NCCL_NET=IB" if net.lower() == "ib" else f"no plugin for EFA ({', '.join(plugins) or named})"
        return ""
    if net and net.lower() != "ib":
        return ""  # a plugin that the user has chosen
    if settings.get("NCCL_IB_DISABLE", "0").strip() not in ("", "0"):
        return f"NCCL_IB_DISABLE={settings['NCCL_IB_DISABLE']}"
    if not _chosen(port.name, settings.get("NCCL_IB_HCA", "")):
        return f"NCCL_IB_HCA={settings['NCCL_IB_HCA']}"
    return "" if _loadable(_VERBS, settings, root) else f"no {_VERBS}"


def _configured(network: Network, environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Settings as the library finds them: the environment's, then those of its files (``name=value`` lines)."""
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.{network.configuration}"
    found: dict[str, str] = {}
    for path in (root / f"etc/{network.configuration}", root / own.lstrip("/")):
        lines = (line.partition("=") for line in text(path).splitlines() if not line.lstrip().startswith("#"))
        found |= {name.strip(): value.strip() for name, equals, value in lines if equals}
    return found | dict(environ)


def _plugins(network: Network, named: str) -> list[str]:
    """Files that the library tries as its network plugin."""
    if named == "none":
        return []
    words = [word.strip() for word in named.split(",") if word.strip()]
    if not words:
        return [f"{stem}.so" for stem in network.plugins]
    return [file for word in words for file in (word, *(f"{stem}-{word}.so" for stem in network.plugins))]


def _chosen(port: str, choice: str) -> bool:
    """True if ``NCCL_IB_HCA`` leaves a port: names or their beginnings, ``=`` for whole names, ``^`` for all but."""
    if not choice:
        return True
    others, exact = choice.startswith("^"), choice.lstrip("^").startswith("=")
    device, _, number = port.partition(":")

    def fits(word: str) -> bool:
        name, _, only = word.partition(":")
        return (device == name if exact else device.startswith(name)) and only in ("", number)

    return any(map(fits, filter(None, choice.lstrip("^").lstrip("=").split(",")))) != others


def _node(device: str, root: Path) -> bool:
    """True if this process may open the device: containers see every port of the host, and not its files."""
    numbers = (at.parent.name for at in (root / "sys/class/infiniband_verbs").glob("*/ibdev") if text(at) == device)
    return any(os.access(root / "dev/infiniband" / number, os.R_OK | os.W_OK) for number in numbers)


def _loadable(name: str, environ: Mapping[str, str], root: Path) -> bool:
    """True if the dynamic linker finds a library."""
    if "/" in name:
        return (root / name.lstrip("/")).exists()
    folders: Iterable[str] = (*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *_FOLDERS)
    if any((root / folder.lstrip("/") / name).exists() for folder in folders):
        return True
    try:
        cache = (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return False
    return b"/" + name.encode() + b"\0" in cache
