"""Carriers: how bytes move between hosts, by which libucp, and why; and what is said where RDMA ports lie idle."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .. import env, log
from ..bindings.ucx import Context
from ..errors import LibraryError
from ..machine.discover import within_node
from ..machine.facts import Facts
from ..machine.rdma import CURE, Port, active, meant
from ..machine.vendors import VENDORS
from ..native.libraries import load
from ..native.wire_ucx import WireUCX, find

#: Transports of UCX that reach memory of this host alone, and names for several with those of devices among them.
_SHARED = ("posix", "sysv", "cma", "knem", "xpmem")
_GROUPS = frozenset({"sm", "shm", "mm", *(row.memory for row in VENDORS.values())})


class Carriers(NamedTuple):
    """Carriers between this host and others: the active ports, and those that libucc's UCX does not reach.

    ``own`` is the libucp that network threads have to themselves, with its transports, if there is one; ``notes`` say
    why others were passed over.
    """

    ports: tuple[Port, ...]
    idle: tuple[Port, ...]
    own: WireUCX | None
    transports: Mapping[str, list[str]]
    notes: tuple[str, ...]

    def describe(self, common: Mapping[str, list[str]]) -> dict[str, str]:
        """The carriers as text, and why these; ``common`` are the transports of libucc's UCX."""
        libraries = load()
        ours = f"{_text(common)}; UCX {libraries.ucx_version}, {libraries.ucx_path}"
        own = self.own and f"{_text(self.transports)}; UCX {self.own.version}, {self.own.path} ({self.own.origin})"
        return {
            "network threads": own or ours,
            "all else": ours,
            "this host": ", ".join(sorted({*common} & within_node() - {"self"})) or "none",
            "why": self._why(),
        }

    def _why(self) -> str:
        if not self.ports:
            return "no active port of InfiniBand, RoCE or EFA that UCX_TLS and UCX_NET_DEVICES let UCX use"
        lines = [f"active: {_list(self.ports)}"]
        lines += [f"libucc's UCX does not reach {_list(self.idle)}"] if self.idle else []
        return "; ".join([*lines, *self.notes])


def _list(ports: Sequence[object]) -> str:
    return ", ".join(map(str, ports))


def _text(found: Mapping[str, list[str]]) -> str:
    """Transports between hosts, with their devices."""
    near = within_node()
    return ", ".join(f"{name} ({', '.join(devices)})" for name, devices in found.items() if name not in near) or "none"


def idle_ports(common: Mapping[str, list[str]]) -> tuple[Port, ...]:
    """Active ports that libucc's UCX, whose transports these are, does not reach, though it may."""
    return tuple(port for port in meant(active(), os.environ) if not _reached(port, common))


def _reached(port: Port, by: Mapping[str, list[str]]) -> bool:
    return any(port.name in devices for devices in by.values())


_found: list[Carriers] = []


def look(idle: tuple[Port, ...]) -> Carriers:
    """The carriers of this process, found once; loads a libucp for network threads where ``idle`` ports need one."""
    if not _found:
        seen: dict[str, list[str]] = {}
        own, notes = None, list[str]()

        def probe() -> str:
            try:
                with Context({"TLS": transports(os.environ.get("UCX_TLS", ""))}, wires=True) as context:
                    seen.update(context.transports())
            except LibraryError as error:
                return str(error)
            if not idle or any(_reached(port, seen) for port in idle):
                return ""
            return f"does not see {_list(idle)}: no /dev/infiniband, or no driver for libibverbs"

        if env.get("WIRES") != 0 and (idle or env.get("WIRE_UCX_DIR")):
            own, notes = find({port.kind for port in idle}, probe)
        if env.get("WIRE_UCX_DIR") and own is None:
            log.log("net").warning("network threads use libucc's UCX: %s", "; ".join(notes) or "UCCH_WIRES=0")
        _found.append(Carriers(meant(active(), os.environ), idle, own, seen if own else {}, tuple(notes)))
    return _found[0]


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


def here() -> tuple[dict[str, str], Carriers]:
    """The carriers between this host and others, as text and as found."""
    with Context() as context:
        common = context.transports()
    found = look(idle_ports(common))
    return found.describe(common), found


_warned = [False]


def warn_idle(rank: int, everyone: Sequence[Facts], idle: Mapping[int, str]) -> None:
    """Warn once, on rank 0, of hosts whose RDMA ports lie idle: those of the ranks in ``idle``, each with why."""
    hosts = {everyone[r].host.hostname: everyone[r].idle_ports for r in idle if everyone[r].idle_ports}
    if rank or _warned[0] or not hosts or len({facts.host.node for facts in everyone}) < 2:
        return
    _warned[0] = True
    names = "; ".join(f"{host}: {_list(ports)}" for host, ports in hosts.items())
    reasons = "".join(f" ({text})" for text in dict.fromkeys(idle.values()) if text)
    log.log("net").warning(
        "RDMA ports lie idle, bytes between hosts go over TCP: UCX %s, %s, does not reach %s%s. Cure: %s",
        load().ucx_version, load().ucx_path, names, reasons, CURE,
    )  # fmt: skip
