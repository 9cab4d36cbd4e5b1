"""Several plain network ports per host: which of them each rank uses, so that all carry data.

UCX can spread a transfer over several ports, but over TCP reaches less than the two links together that way (measured
on emulated hosts with two links each: 2.3 times the limit, a port per rank 1.3 times). So the ranks of a host take
turns, where every host has ports in the same networks; InfiniBand and RoCE are left to UCX.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from .discover import nics

__all__ = ["Port", "assign", "ports", "use"]

_GET_ADDRESS, _GET_NETMASK = 0x8915, 0x891B


class Port(NamedTuple):
    """A network interface: its IPv4 network (address and mask in one number) and its speed in Mbit/s, 0 unknown."""

    name: str
    network: int
    speed: int


def ports(allowed: str, root: Path = Path("/")) -> tuple[Port, ...]:
    """This host's Ethernet ports among ``allowed`` (UCX's list of devices; empty or ``all``: any), by network.

    None where there is anything better than plain Ethernet, or only one.
    """
    here = nics(root)
    if any(_is_rdma(root, nic.name) for nic in here):
        return ()
    names = set(allowed.split(",")) if allowed not in ("", "all") else {nic.name for nic in here}
    chosen = [nic for nic in here if nic.name in names]
    found = [Port(nic.name, network, nic.speed) for nic in chosen if (network := _network(nic.name))]
    return tuple(sorted(found, key=lambda port: port.network)) if len(found) > 1 else ()


def _is_rdma(root: Path, name: str) -> bool:
    return (root / "sys/class/infiniband" / name).exists()


def _network(name: str) -> int:
    """The IPv4 network of an interface; 0 without one."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            address, mask = (
                int.from_bytes(fcntl.ioctl(sock, what, request)[20:24], "big") for what in (_GET_ADDRESS, _GET_NETMASK)
            )
    except OSError:
        return 0
    return (address & mask) << 32 | mask


def assign(hosts: Sequence[Hashable], offers: Sequence[tuple[Port, ...]]) -> list[str]:
    """The port of each rank; empty names leave it to UCX. Equal on every rank that knows the same.

    ``hosts[r]`` is the host of rank r and ``offers[r]`` what ``ports`` found there. Ranks take turns where there are
    several hosts with ports in the same networks, of equal speed on each, and at least a rank for each port.
    """
    here: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        here.setdefault(host, []).append(rank)
    networks = {tuple(port.network for port in offer) for offer in offers}
    out = [""] * len(hosts)
    if len(here) < 2 or len(networks) != 1:
        return out
    (shared,) = networks
    unlike = any(len({port.speed for port in offer}) > 1 for offer in offers)
    if unlike or len(set(shared)) < 2 or len(set(shared)) < len(shared):
        return out
    if min(len(ranks) for ranks in here.values()) < len(shared):
        return out
    for ranks in here.values():
        for i, rank in enumerate(ranks):
            out[rank] = offers[rank][i % len(shared)].name
    return out


def use(name: str) -> None:
    """Let libucx use this port alone; before it begins."""
    if name:
        os.environ["UCX_NET_DEVICES"] = name
