"""UCX's transports by name: those of one host, of devices and of RDMA, and values of ``UCX_TLS`` and the like."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from .vendors import VENDORS

#: Transports that reach memory of this host alone.
SHARED_MEMORY = frozenset({"cma", "knem", "posix", "sysv", "xpmem"})
#: Words of UCX_TLS that stand for several of them.
_SHARED_GROUPS = frozenset({"sm", "shm", "mm"})
#: Beginnings of the names of transports of RDMA.
RDMA = ("ib", "rc", "ud", "dc", "srd")
#: Words of UCX_TLS, or names of transports, that can begin a connection between hosts: reliable ones alone cannot.
WIRE_UP = frozenset({"all", "tcp", "ib", "ud", "ud_v", "ud_x", "dc", "dc_x", "rc"})


def of_devices() -> frozenset[str]:
    """Transports that reach memory of the vendors' devices."""
    return frozenset(name for row in VENDORS.values() for name in row.transports)


def within_host() -> frozenset[str]:
    """Transports that do not leave a host."""
    return SHARED_MEMORY | of_devices() | {"self"}


def without(users: str, names: Iterable[str]) -> str:
    """The value ``users`` of UCX_TLS, which may be empty, with these transports shut out."""
    shut = sorted(names)
    if users in ("", "all", "^"):
        return "^" + ",".join(shut)
    if users.startswith("^"):
        return ",".join([users, *shut])
    return ",".join(name for name in users.split(",") if name not in shut)


def without_devices(users: str, *, shared: bool = False) -> str:
    """The value ``users`` of UCX_TLS without transports of devices, for contexts that see host memory only.

    ``shared``: keep transports that reach memory of this host alone.
    """
    groups = _SHARED_GROUPS | {row.memory for row in VENDORS.values()}
    found = without(users, of_devices() if shared else of_devices() | SHARED_MEMORY)
    if found.startswith("^"):
        return found
    left = [name for name in found.split(",") if shared or name not in groups]
    return ",".join(left) if set(left) - {"", "self"} else "tcp,self"


def tcp_connections(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for making contexts and workers: TCP connects beside everything else, unless the user has said.

    UCX waits for each connection otherwise, and for two minutes where a host is gone, while no other thread gets into
    the libraries.
    """
    source = os.environ if environ is None else environ
    return {"UCX_TCP_CONN_NB": source.get("UCX_TCP_CONN_NB", "y")}
