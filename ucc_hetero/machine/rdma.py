"""Active RDMA ports of this host, from the kernel's files, and the UCX module that supports each kind."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from .ucx_transports import RDMA
from .vendors import text

#: Kind of a port -> UCX module that supports it.
MODULES = {"InfiniBand": "ib", "RoCE": "ib", "EFA": "ib_efa"}
#: Way out if UCX does not support the ports.
CURE = (
    "UCCH_UCX_DIR=<the folder of a UCX with RDMA: the site's, HPC-X's, one of Spack's> on every host; UCX_TLS=tcp says "
    "that TCP is meant"
)
_LAYERS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
#: iWARP, which UCX does not support.
_IWARP = "RNIC"


class RdmaPort(NamedTuple):
    """An active port, named as in UCX (``mlx5_0:1``), and its kind."""

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


def active(root: Path = Path("/")) -> tuple[RdmaPort, ...]:
    found = []
    for at in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = at.parent.parent
        if "ACTIVE" not in text(at / "state") or _IWARP in text(device / "node_type"):
            continue
        kind = _LAYERS.get(text(at / "link_layer"), "")
        if not kind and (device / "device/driver").resolve().name == "efa":
            kind = "EFA"
        if kind:
            found.append(RdmaPort(f"{device.name}:{at.name}", kind))
    return tuple(found)


def meant(ports: tuple[RdmaPort, ...], environ: Mapping[str, str]) -> tuple[RdmaPort, ...]:
    """Those of the ports that the user's UCX settings (``UCX_TLS``, ``UCX_NET_DEVICES``) allow."""
    words = environ.get("UCX_TLS", "").split(",")
    if words[0] and not words[0].startswith("^") and not any(word.startswith(("all", *RDMA)) for word in words):
        return ()
    names = environ.get("UCX_NET_DEVICES", "")
    chosen = set(names.split(",")) if names not in ("", "all") else None
    return tuple(p for p in ports if chosen is None or {p.name, p.name.partition(":")[0]} & chosen)


def site_ucx(kinds: Collection[str], environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """The first folder on this host with a UCX that has modules for these kinds, by its files; empty if none has."""
    hpcx = environ.get("HPCX_UCX_DIR", "")
    usual = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/local/lib")
    for name in (f"{hpcx}/lib" if hpcx else "", *environ.get("LD_LIBRARY_PATH", "").split(":"), *usual):
        folder = root / name.lstrip("/")
        modules = [any((folder / "ucx").glob(f"libuct_{MODULES[kind]}.so*")) for kind in kinds]
        if name and all(modules) and (folder / "libucp.so.0").exists():
            return name
    return ""
