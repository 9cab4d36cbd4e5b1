"""How bytes move between hosts, by which transports of UCX, and what is said where RDMA ports are not used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .. import log
from ..bindings.ucx import Context
from ..machine.facts import Facts
from ..machine.rdma import CURE, RdmaPort, active, meant
from ..machine.ucx_transports import within_host
from ..native.libraries import load


def _list(ports: Sequence[object]) -> str:
    return ", ".join(map(str, ports))


def _text(found: Mapping[str, list[str]]) -> str:
    """Transports between hosts, with their devices."""
    near = within_host()
    return ", ".join(f"{name} ({', '.join(devices)})" for name, devices in found.items() if name not in near) or "none"


def idle_ports(found: Mapping[str, list[str]]) -> tuple[RdmaPort, ...]:
    """Active RDMA ports that UCX, which has ``found`` transports and devices, does not reach although its settings let
    it."""
    reached = {name for devices in found.values() for name in devices}
    return tuple(port for port in meant(active(), os.environ) if port.name not in reached)


def survey() -> tuple[list[str], dict[str, list[str]]]:
    """UCX on this host: the kinds of memory that it moves, and its transports, each with its devices."""
    with Context() as context:
        return context.memory_types(), context.transports()


def describe(found: Mapping[str, list[str]]) -> dict[str, str]:
    """UCX's transports ``found`` on this host, as text: those between hosts, those within it, and why these."""
    libraries, ports, idle = load(), meant(active(), os.environ), idle_ports(found)
    why = f"active: {_list(ports)}" if ports else _NO_PORTS
    return {
        "between hosts": f"{_text(found)}; UCX {libraries.ucx_version}, {libraries.ucx_path}",
        "this host": ", ".join(sorted({*found} & within_host() - {"self"})) or "none",
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
