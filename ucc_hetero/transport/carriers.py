"""How bytes move between hosts, by which transports of UCX, and what is said where RDMA ports are not used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .. import log
from ..machine.discover import within_node
from ..machine.facts import Facts
from ..machine.rdma import CURE, Port, active, meant
from ..machine.vendors import VENDORS
from ..native.libraries import load

#: Transports of UCX that reach memory of this host alone, and names for several with those of devices among them.
_SHARED = ("posix", "sysv", "cma", "knem", "xpmem")
_GROUPS = frozenset({"sm", "shm", "mm", *(row.memory for row in VENDORS.values())})


def _list(ports: Sequence[object]) -> str:
    return ", ".join(map(str, ports))


def _text(found: Mapping[str, list[str]]) -> str:
    """Transports between hosts, with their devices."""
    near = within_node()
    return ", ".join(f"{name} ({', '.join(devices)})" for name, devices in found.items() if name not in near) or "none"


def idle_ports(found: Mapping[str, list[str]]) -> tuple[Port, ...]:
    """Active RDMA ports that UCX does not reach, though ``UCX_TLS`` and ``UCX_NET_DEVICES`` let it.

    Args:
        found: UCX's transports on this host, each with its devices.
    """
    reached = {name for devices in found.values() for name in devices}
    return tuple(port for port in meant(active(), os.environ) if port.name not in reached)


def transports(users: str, *, shared: bool = False) -> str:
    """``UCX_TLS`` of a wire's context: the user's choice without what reaches devices, or memory of this host alone.

    With ``shared`` that stays.
    """
    shut = [*(() if shared else _SHARED), *(name for row in VENDORS.values() for name in row.transports)]
    if not users or users in ("all", "^"):
        return "^" + ",".join(shut)
    if users.startswith("^"):
        return ",".join([users, *shut])
    left = [name for name in users.split(",") if name not in shut and (shared or name not in _GROUPS)]
    return ",".join(left) if set(left) - {"self"} else "tcp,self"


def connections(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for making contexts and workers: TCP connects beside everything else, unless the user has said.

    UCX waits for each connection otherwise, and for two minutes where a host is gone, while nobody else gets into the
    libraries.
    """
    source = os.environ if environ is None else environ
    return {"UCX_TCP_CONN_NB": source.get("UCX_TCP_CONN_NB", "y")}


def describe(found: Mapping[str, list[str]]) -> dict[str, str]:
    """UCX's transports ``found`` on this host, as text: those between hosts, those within it, and why these."""
    libraries, ports, idle = load(), meant(active(), os.environ), idle_ports(found)
    why = f"active: {_list(ports)}" if ports else _NO_PORTS
    return {
        "between hosts": f"{_text(found)}; UCX {libraries.ucx_version}, {libraries.ucx_path}",
        "this host": ", ".join(sorted({*found} & within_node() - {"self"})) or "none",
        "why": f"{why}; UCX does not reach {_list(idle)}" if idle else why,
    }


_NO_PORTS = "no active port of InfiniBand, RoCE or EFA that UCX_TLS and UCX_NET_DEVICES let UCX use"
_warned = [False]


def warn_idle(rank: int, everyone: Sequence[Facts]) -> None:
    """Warn once in a process, on rank 0 of a communicator of several hosts, of RDMA ports that UCX does not reach."""
    hosts = {facts.host.hostname: facts.idle_ports for facts in everyone if facts.idle_ports}
    if rank or _warned[0] or not hosts or len({facts.host.node for facts in everyone}) < 2:
        return
    _warned[0] = True
    names = "; ".join(f"{host}: {_list(ports)}" for host, ports in hosts.items())
    log.log("net").warning(
        "RDMA ports are not used, bytes between hosts go over TCP: UCX %s, %s, does not reach %s. Cure: %s",
        load().ucx_version, load().ucx_path, names, CURE,
    )  # fmt: skip
