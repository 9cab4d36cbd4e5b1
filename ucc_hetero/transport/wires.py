"""Wires: this process's network threads, which carry slots of rings between hosts and access host memory only
(net/wire.c).

A wire is two threads, one that sends and one that receives, each with a UCX context and worker of its own, without
device transports. They are started with the first communicator that has devices on several hosts, and end with the
process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence, Set

from .. import env, log
from ..bindings.ucx import Context, check
from ..errors import LibraryError
from ..machine import nics
from ..machine.discover import host_cores
from ..machine.facts import Facts
from ..machine.rdma import CURE, RdmaPort, active, meant
from ..machine.ucx_transports import within_host, without_devices
from ..native.libraries import ffi, lib, load

#: Default number of wires of a process by transport. A TCP connection is limited by the work of a core, not by the
#: link, or by what a cloud allows it; with RDMA a core only handles requests.
USUAL = {"tcp": 4, "limited": 8, "rdma": 2}
#: Most wires over TCP of a rank that has a host for itself, whose threads can have two cores each: between two hosts an
#: allreduce of 128 MiB took 19 ms with 4 and 12 with 6, and a bcast of 256 MiB, which uses the links in one direction,
#: 20 ms with 6 and 15 with 12. With two ranks per host an allreduce of 16 MiB took 1.8 ms with 6, 1.4 with 4.
ALONE = 12

#: TCP segment that holds a range with its headers: it is sent without a copy, and copied once from the receive buffer.
#: In UCX's default segments of 8 and 64 KiB it is copied twice on each side, for 2.5 times the CPU time. UCX's
#: rendezvous needs a transport that can read or write the peer's memory.
_SEGMENT = str(lib.UCCH_WIRE_RANGE + (32 << 10))
_SETTINGS = {"TCP_TX_SEG_SIZE": _SEGMENT, "TCP_RX_SEG_SIZE": _SEGMENT, "TCP_CONN_NB": "y"}

#: A link that is silent for this many ``UCCH_HEARTBEAT`` while others are not counts as cut: at 1.5 s TCP has
#: retransmitted five times by then.
HEARTBEATS = 5

#: Held while wires are made: several threads may ask for them.
_making = threading.Lock()
_contexts: list[Context] = []
_addresses: list[tuple[bytes, bytes]] = []
_ports: tuple[tuple[str, int], ...] = ()
_devices = ""
_pid = 0
_sharing = 1


def wanted() -> int:
    """Number of wires that this process should have."""
    asked = env.get("WIRES")
    return count(transport(), len(host_cores()), _sharing) if asked == "auto" else int(asked)


def count(transport: str, cores: int, ranks_here: int) -> int:
    """Number of wires of each of ``ranks_here`` ranks that share a host's cores: a wire has two threads."""
    each = cores // ranks_here
    ample = min(ALONE, each // 4) if transport == "tcp" and ranks_here == 1 else 0
    return max(1, min(max(USUAL[transport], ample), each // 2))


def share(ranks_here: int) -> None:
    """Note that the job has ``ranks_here`` ranks on this host, in all communicators together."""
    global _sharing
    _sharing = max(_sharing, ranks_here)


def transport() -> str:
    """What carries bytes between hosts: ``rdma``, ``tcp``, or ``limited`` if a cloud limits each TCP connection."""
    if addresses(1) and set(_contexts[0].transports()) - {"tcp", "self"}:
        return "rdma"
    return "limited" if nics.flow_limit(_devices_of(0)[0])[1] else "tcp"


def spread(ports: tuple[tuple[str, int], ...]) -> None:
    """Let the wires share these ports, given with their speeds; wires of equal number on two hosts are in the same
    network."""
    global _ports
    if ports and not _contexts:
        _ports = ports


def leave_out(repeated: Set[int]) -> None:
    """Let wires that are made later leave out interfaces with these addresses, which a peer's host has, too."""
    global _devices
    _devices = _devices or nics.without(repeated, os.environ.get("UCX_NET_DEVICES", ""))


def port_of(number: int, speeds: Sequence[int]) -> int:
    """Index of the port that a wire takes: the one with most bandwidth left beside the wires before it. Ports of equal
    speed are taken in turn; wires are then about equally fast, as a short call's ranges are divided evenly among them.
    """
    taken = [0] * len(speeds)
    port = 0
    for _ in range(number + 1):
        port = max(range(len(speeds)), key=lambda each: max(speeds[each], 1) / (taken[each] + 1))
        taken[port] += 1
    return port


def _devices_of(number: int) -> tuple[str, bool]:
    """``UCX_NET_DEVICES`` of a wire, and True if its port is slower than others."""
    if not _ports:
        return _devices or os.environ.get("UCX_NET_DEVICES", ""), False
    speeds = [speed for _, speed in _ports]
    port = port_of(number, speeds)
    return _ports[port][0], speeds[port] < max(speeds)


def addresses(count: int) -> tuple[tuple[bytes, bytes], ...]:
    """Addresses of this process's wires, (sender, receiver); ``count`` of them at least if UCX can make so many."""
    global _pid
    with _making:
        if _pid != os.getpid():
            _contexts.clear()
            _addresses.clear()
            _pid = os.getpid()
        try:
            # After a failure none is tried again: sending and receiving wires must alternate.
            while len(_addresses) < count and len(_contexts) == 2 * len(_addresses):
                devices, slower = _devices_of(len(_addresses))
                cores = nics.cores_for(2 * count, _sharing, nics.near(devices))
                sender, receiver = _open(devices, slower, cores), _open(devices, slower, cores)
                _addresses.append((_address(sender), _address(receiver)))
        except LibraryError as error:
            log.log("net").warning("no network threads for calls between hosts: %s", error)
        return tuple(_addresses)


def connect(key: int, addresses_there: Sequence[tuple[bytes, bytes]], count: int) -> bool:
    """Connect the first ``count`` wires with those of process ``key``. Returns whether all were connected."""
    pairs = [(2 * i + side, addresses_there[i][1 - side]) for i in range(count) for side in (0, 1)]
    return all(lib.ucch_wire_connect(wire, key, ffi.from_buffer(address)) == 0 for wire, address in pairs)


def cut_text(link: str) -> str:
    """Text of a link that is cut; for an empty one, that libucp has given up a connection."""
    if not link:
        return "libucp has given up the connection"
    return (
        f"its host does not answer over the link {link}, but over another one; mend it: what is made anew uses it, "
        "too, unless its port is left out of UCX_NET_DEVICES"
    )


def stop() -> None:
    """End the threads before the process ends; no channel may use them any more."""
    global _ports
    _ports = ()
    if _pid == os.getpid():
        for wire in range(len(_contexts)):
            lib.ucch_wire_stop(wire)
    _contexts.clear()
    _addresses.clear()


def _open(devices: str, slower: bool, cores: set[int]) -> int:
    only = {"NET_DEVICES": devices} if devices else {}
    settings = {"TLS": without_devices(os.environ.get("UCX_TLS", "")), **_SETTINGS, **only}
    context = Context(settings)
    eager = set(context.transports()) <= {"tcp", "self"} and "UCX_RNDV_THRESH" not in os.environ
    wire = int(lib.ucch_wire_new(context.handle, eager, slower, sorted(cores), len(cores)))
    if wire < 0:
        context.close()
        check("ucp_worker_create", wire)
    _contexts.append(context)
    return wire


def _address(wire: int) -> bytes:
    address, length = ffi.new("void **"), ffi.new("size_t *")
    check("ucp_worker_get_address", lib.ucch_wire_address(wire, address, length))
    found = bytes(ffi.buffer(address[0], length[0]))
    lib.ucch_wire_release_address(wire, address[0])
    return found


def _list(ports: Sequence[object]) -> str:
    return ", ".join(map(str, ports))


def _text(found: Mapping[str, list[str]]) -> str:
    """Transports between hosts, with their devices, as text."""
    near = within_host()
    return ", ".join(f"{name} ({', '.join(devices)})" for name, devices in found.items() if name not in near) or "none"


def idle_ports(found: Mapping[str, list[str]]) -> tuple[RdmaPort, ...]:
    """Active RDMA ports that UCX's ``found`` transports do not use although its settings allow it."""
    reached = {name for devices in found.values() for name in devices}
    return tuple(port for port in meant(active(), os.environ) if port.name not in reached)


def survey() -> tuple[list[str], dict[str, list[str]]]:
    """(memory types that UCX supports on this host, its transports with the devices of each)."""
    with Context() as context:
        return context.memory_types(), context.transports()


def describe(found: Mapping[str, list[str]]) -> dict[str, str]:
    """UCX's transports ``found`` on this host, as text: between hosts, within it, and why these."""
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
    """Warn once, on rank 0 of a communicator of several hosts, about RDMA ports that UCX does not use."""
    hosts = {facts.host.hostname: facts.idle_ports for facts in everyone if facts.idle_ports}
    if rank or _warned[0] or not hosts or len({facts.host.node for facts in everyone}) < 2:
        return
    _warned[0] = True
    names = "; ".join(f"{host}: {_list(ports)}" for host, ports in hosts.items())
    log.log("net").warning(
        "RDMA ports are not used, bytes between hosts go over TCP: UCX %s, %s, does not reach %s. Cure: %s",
        load().ucx_version, load().ucx_path, names, CURE,
    )  # fmt: skip
