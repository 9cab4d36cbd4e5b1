"""Fabric between hosts for a vendor's collective library: RDMA that the library will actually use.

NCCL and RCCL use InfiniBand and RoCE by themselves, EFA by a plugin, and fall back to sockets if settings or missing
files rule these out. Sockets do not count as fabric: this package's own wires are faster.
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
    """Fabric of one rank. It joins ranks of one vendor that have the same non-empty ``kind``."""

    #: ``InfiniBand``, ``RoCE`` or ``EFA``; ``all`` if UCCH_FABRIC says so; empty if nothing joins the host to others.
    kind: str = ""
    #: The ports, or the reason why there is no fabric.
    why: str = ""
    #: The rank's UCCH_FABRIC.
    wanted: str = "auto"

    def describe(self) -> str:
        """Text: on which hosts a vendor's ranks are joined, and why."""
        if self.wanted == "all" and self.kind:
            return f"all hosts ({self.why})"
        return f"hosts with {self.kind} ({self.why})" if self.kind else f"each host by itself ({self.why})"


#: For a rank that no fabric joins to other hosts.
NO_FABRIC = Fabric()


def fabric_of(vendor: str, wanted: str, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Fabric:
    """The fabric of a rank on this host. ``wanted``: value of UCCH_FABRIC; ``auto`` looks for RDMA.

    ``environ``: environment that the vendor's library reads; by default this process's.
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
    # In a fixed order, so that all hosts with the same ports find the same kind.
    for kind in ("EFA", "InfiniBand", "RoCE"):
        usable = [port for port in ports if port.kind == kind and not lacks[port]]
        if usable:
            return Fabric(kind, ", ".join(port.name for port in usable))
    return Fabric("", "; ".join(dict.fromkeys(lacks.values())))


def _lack(port: RdmaPort, network: Network, settings: Mapping[str, str], root: Path) -> str:
    """Why the vendor's library will not use a port; empty if it will."""
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
        return ""  # the user has chosen a plugin
    if settings.get("NCCL_IB_DISABLE", "0").strip() not in ("", "0"):
        return f"NCCL_IB_DISABLE={settings['NCCL_IB_DISABLE']}"
    if not _chosen(port.name, settings.get("NCCL_IB_HCA", "")):
        return f"NCCL_IB_HCA={settings['NCCL_IB_HCA']}"
    return "" if _loadable(_VERBS, settings, root) else f"no {_VERBS}"


def _configured(network: Network, environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Settings as the library sees them: environment variables, then its configuration files (``name=value`` lines)."""
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.{network.configuration}"
    found: dict[str, str] = {}
    for path in (root / f"etc/{network.configuration}", root / own.lstrip("/")):
        lines = (line.partition("=") for line in text(path).splitlines() if not line.lstrip().startswith("#"))
        found |= {name.strip(): value.strip() for name, equals, value in lines if equals}
    return found | dict(environ)


def _plugins(network: Network, named: str) -> list[str]:
    """Files that the library tries to load as its network plugin."""
    if named == "none":
        return []
    words = [word.strip() for word in named.split(",") if word.strip()]
    if not words:
        return [f"{stem}.so" for stem in network.plugins]
    return [file for word in words for file in (word, *(f"{stem}-{word}.so" for stem in network.plugins))]


def _chosen(port: str, choice: str) -> bool:
    """True if ``NCCL_IB_HCA`` allows a port. It lists prefixes of names; ``=`` means whole names, ``^`` all others."""
    if not choice:
        return True
    others, exact = choice.startswith("^"), choice.lstrip("^").startswith("=")
    device, _, number = port.partition(":")

    def fits(word: str) -> bool:
        name, _, only = word.partition(":")
        return (device == name if exact else device.startswith(name)) and only in ("", number)

    return any(map(fits, filter(None, choice.lstrip("^").lstrip("=").split(",")))) != others


def _node(device: str, root: Path) -> bool:
    """True if this process may open the device. Containers see all ports in sysfs, but not their device files."""
    numbers = (at.parent.name for at in (root / "sys/class/infiniband_verbs").glob("*/ibdev") if text(at) == device)
    return any(os.access(root / "dev/infiniband" / number, os.R_OK | os.W_OK) for number in numbers)


def _loadable(name: str, environ: Mapping[str, str], root: Path) -> bool:
    """True if the dynamic linker would find a library."""
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
