"""Hosts with several plain network ports: how all of them carry data.

Over TCP all of UCX's data goes by active messages, which use one port unless UCX_MAX_EAGER_RAILS allows more lanes. On
emulated hosts with two links each, an allreduce took 2.0 times the theoretical minimum with one rail, 1.2 to 1.3 times
with two, and 1.1 to 1.2 times with one port per rank. So transfers are spread if every host has several ports as fast
as its fastest. Ports of different speed are not: UCX knows the speeds, but counts everything above about 18 Gbit/s as
that (UCX_TCP_MAX_BW), so ports of 100 and 25 Gbit/s would get equal shares. InfiniBand and RoCE are left to UCX. Each
network thread uses one port (few threads the slower ones), and runs on cores near it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from . import rdma
from .discover import Nic, host_cores, nics
from .vendors import cpus_of, text

#: PCI vendor of a cloud's network cards -> (name, Mbit/s to which the cloud limits one connection).
FLOW_LIMITS = {"0x1d0f": ("Amazon EC2", 5000)}

#: Network threads use ports down to the host's fastest speed divided by this. Slower ones would add less than a
#: quarter, and often are for management.
_SLOWEST = 4

_GET_FLAGS, _GET_ADDRESS, _GET_NETMASK = 0x8913, 0x8915, 0x891B
_RUNS = 0x1 | 0x40


class Port(NamedTuple):
    """A network interface: its network (address and mask as one number), Mbit/s (0: unknown), and IPv4 address."""

    name: str
    network: int
    speed: int
    address: int = 0


def ports(allowed: str, root: Path = Path("/")) -> tuple[Port, ...]:
    """This host's Ethernet ports in ``allowed`` (UCX's list), by network. None if there is a better transport."""
    here = nics(root)
    if any((root / "sys/class/infiniband" / nic.name).exists() for nic in here):
        return ()
    found = [
        Port(nic.name, (address & mask) << 32 | mask, nic.speed, address)
        for nic in _chosen(here, allowed)
        for address, mask in [_address(nic.name)]
        if address
    ]
    return tuple(sorted(found, key=lambda port: port.network))


def _chosen(here: Sequence[Nic], allowed: str) -> list[Nic]:
    names = {name.partition(":")[0] for name in allowed.split(",")}
    return [nic for nic in here if allowed in ("", "all") or nic.name in names]


def near(allowed: str, root: Path = Path("/")) -> set[int]:
    """Cores of the NUMA nodes of this host's ports in ``allowed``. Empty if any port's node is unknown."""
    lists = [_pci_text(root, nic, "local_cpulist") for nic in _chosen(nics(root), allowed)]
    return set().union(*map(cpus_of, lists)) if all(lists) else set()


def flow_limit(allowed: str, root: Path = Path("/")) -> tuple[str, int]:
    """The row of :data:`FLOW_LIMITS` that applies to ports in ``allowed``; ("", 0) if none does."""
    vendors = [_pci_text(root, nic, "vendor") for nic in _chosen(nics(root), allowed)]
    return next((FLOW_LIMITS[vendor] for vendor in vendors if vendor in FLOW_LIMITS), ("", 0))


def _pci_text(root: Path, nic: Nic, name: str) -> str:
    return text(root / "sys/bus/pci/devices" / nic.pci / name) if nic.pci else ""


def cores_for(threads: int, ranks_here: int, beside: Set[int]) -> set[int]:
    """Cores for the ``threads`` network threads of each of the host's ranks. ``beside``: cores near the port.

    Of these, the cores that the launcher has bound this rank to, if they suffice; else those of the host; else any
    core.
    """
    own, every = os.sched_getaffinity(0), host_cores()
    choices = [(own, threads + 1)] * (own != every) + [(every, threads * ranks_here)]
    return next((cores & beside for cores, needed in choices if len(cores & beside) >= needed), every)


def _ask(name: str, *requests: int) -> list[bytes]:
    """Replies of the kernel to ioctl requests about an interface (netdevice(7)); empty if it does not exist."""
    given = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return [fcntl.ioctl(sock, request, given)[16:] for request in requests]
    except OSError:
        return []


def _address(name: str) -> tuple[int, int]:
    """(IPv4 address, mask) of an interface; 0 if it has none."""
    answers = _ask(name, _GET_ADDRESS, _GET_NETMASK) or (b"", b"")
    address, mask = (int.from_bytes(answer[4:8], "big") for answer in answers)
    return address, mask


def address_of(name: str) -> str:
    """IPv4 address of an interface; empty if it has none."""
    address, _ = _address(name) if name in (other for _, other in socket.if_nameindex()) else (0, 0)
    return socket.inet_ntoa(address.to_bytes(4, "big")) if address else ""


def interfaces(root: Path = Path("/")) -> dict[str, int]:
    """Interface -> IPv4 address, for interfaces that are up. Without bridges, which libucp does not use."""
    found = {}
    for _, name in socket.if_nameindex():
        runs = any(int.from_bytes(flags[:2], sys.byteorder) & _RUNS == _RUNS for flags in _ask(name, _GET_FLAGS))
        if runs and not (root / "sys/class/net" / name / "bridge").exists() and (address := _address(name)[0]):
            found[name] = address
    return found


def repeated(hosts: Sequence[Hashable], found: Sequence[Collection[int]]) -> frozenset[int]:
    """Addresses that occur on several hosts: they belong to networks inside a host (containers, management). libucp
    would take these for one network, and a connection to such an address would stay on its own host.

    ``found[r]``: addresses of host ``hosts[r]``. Hosts with identical sets are containers that share a host's network.
    """
    there: dict[Hashable, set[int]] = {}
    for host, addresses_here in zip(hosts, found, strict=True):
        there.setdefault(host, set()).update(addresses_here)
    count = Counter(address for addresses_here in set(map(frozenset, there.values())) for address in addresses_here)
    return frozenset(address for address, times in count.items() if times > 1 and address >> 24 != 127)


def without(unwanted: Set[int], allowed: str, root: Path = Path("/")) -> str:
    """libucp's devices in ``allowed`` without those that have these addresses; empty if nothing has to be left out."""
    here = interfaces(root)
    out = {name for name, address in here.items() if address in unwanted}
    listed = allowed.split(",") if allowed not in ("", "all") else [*(port.name for port in rdma.active(root)), *here]
    kept = [name for name in listed if name not in out]
    return ",".join(kept) if kept and len(kept) < len(listed) else ""


def addresses(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """(address, network) by which other hosts may reach this one, IPv4 first."""
    found = []
    for _, name in socket.if_nameindex():
        address, mask = _address(name)
        if address >> 24 not in (0, 127):
            found.append((socket.inet_ntoa(address.to_bytes(4, "big")), f"{address & mask:x}/{mask:x}"))
    for line in text(root / "proc/net/if_inet6").splitlines():
        digits, _, prefix, scope, *_ = line.split()
        if scope == "00":  # global
            found.append(
                (socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), f"{digits[: int(prefix, 16) // 4]}")
            )
    return tuple(found)


class Spread(NamedTuple):
    """How a rank uses its host's ports in a job of several hosts."""

    #: Number of ports over which each transfer between hosts is spread; equal on every rank.
    rails: int = 1
    #: Ports in networks that all hosts share, if the host has others too. Empty if libucp may choose: libucp 1.18
    #: assumes that any two ports are connected.
    joining: tuple[str, ...] = ()
    #: Ports for network threads in networks that all hosts share, with the speed of each network's slowest port,
    #: fastest first. Equal on all ranks except for the names. Empty if there are fewer than two.
    shared: tuple[tuple[str, int], ...] = ()


def spread(hosts: Sequence[Hashable], offers: Sequence[tuple[Port, ...]], rank: int) -> Spread:
    """Decide how to use the ports. ``hosts[r]``: host of rank r; ``offers[r]``: what ``ports`` returned there."""
    if len(set(hosts)) < 2:
        return Spread()
    rails, wide = _joining(offers, 1), _joining(offers, _SLOWEST)
    names = {port.network: port.name for port in wide[rank]}
    speeds = {port.network: port.speed for port in sorted(chain(*wide), key=lambda port: -port.speed)}
    order = sorted(names, key=lambda network: (-speeds[network], network))
    return Spread(
        max(1, min(map(len, rails))),
        tuple(port.name for port in rails[rank]) if len(rails[rank]) < len(offers[rank]) else (),
        tuple((names[network], speeds[network]) for network in order) if len(order) > 1 else (),
    )


def _joining(offers: Sequence[tuple[Port, ...]], slowest: int) -> list[list[Port]]:
    """Each rank's ports that are not much slower than its fastest, in networks that every host has."""
    fit = [[p for p in each if p.speed * slowest >= max(q.speed for q in each)] for each in offers]
    common = set.intersection(*({port.network for port in each} for each in fit))
    return [[port for port in each if port.network in common] for each in fit]


def use(names: str, rails: int = 1) -> None:
    """Restrict libucp to these devices (if any), and set the number of rails. To be called before libucp starts."""
    if names:
        os.environ["UCX_NET_DEVICES"] = names
    if rails > 1:
        os.environ.setdefault("UCX_MAX_EAGER_RAILS", str(rails))
