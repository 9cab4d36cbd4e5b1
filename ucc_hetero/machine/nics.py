"""Several plain network ports per host: how all of them come to carry data.

UCX sends what goes by active messages, which over TCP is everything, over one port unless it is told to use more lanes
(``UCX_MAX_EAGER_RAILS``): measured on emulated hosts with two links each, an allreduce took 2.0 times the limit with
one, 1.2 to 1.3 times with two, and 1.1 to 1.2 times where each rank used one port alone. So transfers are spread where
every host has several ports as fast as its fastest. Of others UCX knows the speed, too, but takes what is above about
18 Gbit/s as that (``UCX_TCP_MAX_BW``): 100 and 25 would each have half. InfiniBand and RoCE are left to UCX. Network
threads take one port each, few of them a slower one, and run on the cores beside it.
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

#: Clouds that limit what one connection carries, by the PCI vendor of their cards: name, and Mbit/s.
FLOW_LIMITS = {"0x1d0f": ("Amazon EC2", 5000)}

#: A port that is so many times slower than its host's fastest is the slowest that network threads take; others add
#: less than a quarter, and rather are for management.
_SLOWEST = 4

_GET_FLAGS, _GET_ADDRESS, _GET_NETMASK = 0x8913, 0x8915, 0x891B
_RUNS = 0x1 | 0x40


class Port(NamedTuple):
    """A network interface: network (address and mask in one number), Mbit/s (0: unknown), and IPv4 address."""

    name: str
    network: int
    speed: int
    address: int = 0


def ports(allowed: str, root: Path = Path("/")) -> tuple[Port, ...]:
    """This host's Ethernet ports among ``allowed`` (UCX's list), by network; none where there is anything better."""
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
    """Cores of the NUMA nodes of the ports among ``allowed``, as for ``ports``; none where some port's are unknown."""
    lists = [_pci_text(root, nic, "local_cpulist") for nic in _chosen(nics(root), allowed)]
    return set().union(*map(cpus_of, lists)) if all(lists) else set()


def flow_limit(allowed: str, root: Path = Path("/")) -> tuple[str, int]:
    """The row of :data:`FLOW_LIMITS` that holds for ports among ``allowed``; 0 Mbit/s without one."""
    vendors = [_pci_text(root, nic, "vendor") for nic in _chosen(nics(root), allowed)]
    return next((FLOW_LIMITS[vendor] for vendor in vendors if vendor in FLOW_LIMITS), ("", 0))


def _pci_text(root: Path, nic: Nic, name: str) -> str:
    return text(root / "sys/bus/pci/devices" / nic.pci / name) if nic.pci else ""


def cores_for(threads: int, ranks_here: int, beside: Set[int]) -> set[int]:
    """Cores on which each of the host's ranks should run so many network threads, ``beside`` being those by the port.

    Of those that a launcher has bound this rank to, where it has and they are enough; else of the host's; else any.
    """
    own, every = os.sched_getaffinity(0), host_cores()
    choices = [(own, threads + 1)] * (own != every) + [(every, threads * ranks_here)]
    return next((cores & beside for cores, needed in choices if len(cores & beside) >= needed), every)


def _ask(name: str, *requests: int) -> list[bytes]:
    """What the kernel answers to requests of an interface's (netdevice(7)); nothing where it does not have it."""
    given = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            return [fcntl.ioctl(sock, request, given)[16:] for request in requests]
    except OSError:
        return []


def _address(name: str) -> tuple[int, int]:
    """The IPv4 address of an interface, and its mask; 0 without one."""
    answers = _ask(name, _GET_ADDRESS, _GET_NETMASK) or (b"", b"")
    address, mask = (int.from_bytes(answer[4:8], "big") for answer in answers)
    return address, mask


def address_of(name: str) -> str:
    """The IPv4 address of an interface; empty without one."""
    address, _ = _address(name) if name in (other for _, other in socket.if_nameindex()) else (0, 0)
    return socket.inet_ntoa(address.to_bytes(4, "big")) if address else ""


def interfaces(root: Path = Path("/")) -> dict[str, int]:
    """Interfaces that are up and have an IPv4 address, with it; without bridges, which libucp leaves out."""
    found = {}
    for _, name in socket.if_nameindex():
        runs = any(int.from_bytes(flags[:2], sys.byteorder) & _RUNS == _RUNS for flags in _ask(name, _GET_FLAGS))
        if runs and not (root / "sys/class/net" / name / "bridge").exists() and (address := _address(name)[0]):
            found[name] = address
    return found


def repeated(hosts: Sequence[Hashable], found: Sequence[Collection[int]]) -> frozenset[int]:
    """Addresses that several hosts have: those of networks inside each host, for its containers or its management.
    libucp takes them for one network, and a connection with such an address ends on its own host.

    ``found[r]`` has the addresses of the host ``hosts[r]``. Hosts that have the same ones, all of them, are containers
    that share a host's network.
    """
    there: dict[Hashable, set[int]] = {}
    for host, addresses_here in zip(hosts, found, strict=True):
        there.setdefault(host, set()).update(addresses_here)
    count = Counter(address for addresses_here in set(map(frozenset, there.values())) for address in addresses_here)
    return frozenset(address for address, times in count.items() if times > 1 and address >> 24 != 127)


def without(unwanted: Set[int], allowed: str, root: Path = Path("/")) -> str:
    """libucp's list of devices among ``allowed`` but for those with these addresses; empty if there are none to leave
    out."""
    here = interfaces(root)
    out = {name for name, address in here.items() if address in unwanted}
    listed = allowed.split(",") if allowed not in ("", "all") else [*(port.name for port in rdma.active(root)), *here]
    kept = [name for name in listed if name not in out]
    return ",".join(kept) if kept and len(kept) < len(listed) else ""


def addresses(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Addresses by which other hosts may reach this one, each with its network: those of IPv4 first."""
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
    """What a rank does with its host's ports, where there are several hosts."""

    #: Ports that every transfer between hosts can be spread over; equal on every rank.
    rails: int = 1
    #: Ports in networks that join all hosts, where the host has others, too; nothing where libucp may choose: libucp
    #: 1.18 takes any two ports for connected.
    joining: tuple[str, ...] = ()
    #: Ports of network threads, in networks that join all hosts, and the speed of each network's slowest: equal on all
    #: ranks but for the names, the fastest first; nothing where they are not several.
    shared: tuple[tuple[str, int], ...] = ()


def spread(hosts: Sequence[Hashable], offers: Sequence[tuple[Port, ...]], rank: int) -> Spread:
    """Spread data over the ports: ``hosts[r]`` is the host of rank r and ``offers[r]`` what ``ports`` found there."""
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
    """Of each rank's ports those that are not much slower than its fastest, in networks that every host is in."""
    fit = [[p for p in each if p.speed * slowest >= max(q.speed for q in each)] for each in offers]
    common = set.intersection(*({port.network for port in each} for each in fit))
    return [[port for port in each if port.network in common] for each in fit]


def use(names: str, rails: int = 1) -> None:
    """Let libucp use these devices alone, if any are named, and spread transfers over so many; before it begins."""
    if names:
        os.environ["UCX_NET_DEVICES"] = names
    if rails > 1:
        os.environ.setdefault("UCX_MAX_EAGER_RAILS", str(rails))
