"""Active RDMA ports of this host, from the kernel's own files, and what of UCX reaches each kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..installed import extra
from .vendors import text

#: Kind of a port -> the module of UCX that reaches it.
MODULES = {"InfiniBand": "ib", "RoCE": "ib", "EFA": "ib_efa"}
#: Cure of ports that lie idle.
CURE = (
    f"for calls among devices {extra('rdma')} on every host, or UCCH_WIRE_UCX_DIR=<a UCX with RDMA>; for "
    "all else UCCH_UCX_DIR=<a UCX with RDMA>; UCX_TLS=tcp says that this is meant"
)
_LAYERS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
#: iWARP, which UCX has nothing for.
_IWARP = "RNIC"
#: Words of UCX_TLS that let RDMA transports in.
_WORDS = ("all", "ib", "rc", "ud", "dc", "srd")


class Port(NamedTuple):
    """An active port as UCX names it (``mlx5_0:1``), and its kind."""

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


def active(root: Path = Path("/")) -> tuple[Port, ...]:
    """Active ports that some UCX can use."""
    found = []
    for at in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = at.parent.parent
        if "ACTIVE" not in text(at / "state") or _IWARP in text(device / "node_type"):
            continue
        kind = _LAYERS.get(text(at / "link_layer"), "")
        if not kind and (device / "device/driver").resolve().name == "efa":
            kind = "EFA"
        if kind:
            found.append(Port(f"{device.name}:{at.name}", kind))
    return tuple(found)


def meant(ports: tuple[Port, ...], environ: Mapping[str, str]) -> tuple[Port, ...]:
    """The ports among these that the user's settings of UCX (``UCX_TLS``, ``UCX_NET_DEVICES``) let it use."""
    words = environ.get("UCX_TLS", "").split(",")
    if words[0] and not words[0].startswith("^") and not any(word.startswith(_WORDS) for word in words):
        return ()
    names = environ.get("UCX_NET_DEVICES", "")
    chosen = set(names.split(",")) if names not in ("", "all") else None
    return tuple(p for p in ports if chosen is None or {p.name, p.name.partition(":")[0]} & chosen)
