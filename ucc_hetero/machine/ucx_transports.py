"""Names of UCX transports (of one host, of devices, of RDMA), and values of ``UCX_TLS`` and the like."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .vendors import VENDORS

#: Transports to memory of the same host only.
SHARED_MEMORY = frozenset({"cma", "knem", "posix", "sysv", "xpmem"})
#: Aliases in UCX_TLS for several of them.
_SHARED_GROUPS = frozenset({"sm", "shm", "mm"})
#: Prefixes of RDMA transports.
RDMA = ("ib", "rc", "ud", "dc", "srd")
#: Values of UCX_TLS that can set up connections between hosts; transports that are only reliable ones cannot.
WIRE_UP = frozenset({"all", "tcp", "ib", "ud", "ud_v", "ud_x", "dc", "dc_x", "rc"})

#: Files of a host on which UCX registers memory: of network cards, and of modules that copy between processes.
_REGISTERS = ("sys/class/infiniband/*", "dev/kgni*", "dev/knem", "dev/xpmem")


def of_devices() -> frozenset[str]:
    """Transports to memory of the vendors' devices."""
    return frozenset(name for row in VENDORS.values() for name in row.transports)


def within_host() -> frozenset[str]:
    """Transports that do not leave the host."""
    return SHARED_MEMORY | of_devices() | {"self"}


def without(users: str, names: Iterable[str]) -> str:
    """UCX_TLS ``users`` (may be empty) without these transports."""
    shut = sorted(names)
    if users in ("", "all", "^"):
        return "^" + ",".join(shut)
    if users.startswith("^"):
        return ",".join([users, *shut])
    return ",".join(name for name in users.split(",") if name not in shut)


def without_devices(users: str, *, shared: bool = False) -> str:
    """UCX_TLS ``users`` without device transports, for contexts that see only host memory.

    ``shared``: keep the transports to memory of the same host.
    """
    groups = _SHARED_GROUPS | {row.memory for row in VENDORS.values()}
    found = without(users, of_devices() if shared else of_devices() | SHARED_MEMORY)
    if found.startswith("^"):
        return found
    left = [name for name in found.split(",") if shared or name not in groups]
    return ",".join(left) if set(left) - {"", "self"} else "tcp,self"


def tcp_connections(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for making contexts and workers: let TCP connect without blocking, unless the user decides otherwise.

    By default UCX waits for each connection, for two minutes if a host is gone, and blocks all other threads of the
    process meanwhile.
    """
    source = os.environ if environ is None else environ
    return {"UCX_TCP_CONN_NB": source.get("UCX_TCP_CONN_NB", "y")}


def memory_hooks(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> dict[str, str]:
    """Environment for loading UCX on a host without devices and without what registers memory: no memory hooks, unless
    the user chooses them.

    UCX would patch 80 functions for its cache of registered memory. It waits for 5 ms at each, 0.4 s in all, in a loop
    that yields the core.
    """
    source = os.environ if environ is None else environ
    drivers = [row.module for row in VENDORS.values() if row.module]
    needed = any(any(root.glob(each)) for each in (*_REGISTERS, *drivers))
    chosen = {"UCX_MEM_MMAP_HOOK_MODE", "UCX_MEM_EVENTS"} & source.keys()
    return {} if needed or chosen else {"UCX_MEM_MMAP_HOOK_MODE": "none"}
