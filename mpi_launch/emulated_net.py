"""The layout of an emulated cluster as plain data, and the ``ip`` and ``tc`` batches that build it. Runs nothing.

Every host has the interfaces ``eth0`` … ``eth<L-1>``. Interface ``k`` of host ``h`` is one end of a veth pair whose
other end, ``port<h>.<k>``, belongs to bridge ``br<k>`` in the switch's network namespace, so each link has a subnet of
its own, ``10.<10+k>.0.0/16``. Both ends of a pair are shaped by a token bucket: the host's end limits what the host
sends, the switch's end what it receives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_HOSTS = 200
MAX_LINKS = 8

#: Seconds of a link's rate that its token bucket holds, but at least two full segments of offloaded TCP. A smaller
#: bucket loses rate when the kernel refills it late, as it does on few cores (half of this cost 3 to 8 % with both
#: directions busy); a larger one lets longer messages pass unshaped.
BURST_SECONDS = 0.001
BURST_LEAST = 128 * 1024

#: Seconds of a link's rate that may queue before packets are dropped, but at least TCP's usual maximum window, so that
#: a single connection into a slower link loses nothing. This is about the buffer of a switch.
QUEUE_SECONDS = 0.020
QUEUE_LEAST = 4 << 20

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?bit)(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Link:
    """One network interface of an emulated host."""

    #: Name of the interface in the host: ``eth0``, ``eth1``, …
    name: str
    #: Name of the other end, in the switch.
    port: str
    #: Bridge of the switch to which it belongs.
    bridge: str
    #: IPv4 address.
    address: str
    #: Bits per second in each direction; 0 if unlimited.
    rate: int


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Name, MPI slots and links of an emulated host."""

    name: str
    slots: int
    links: tuple[Link, ...]


def parse_rate(text: str) -> int:
    """Return bits per second from ``"4gbit"``, ``"800mbit"`` or ``"none"`` (unlimited: 0).

    Raises ``ValueError`` for anything else, and below 1 Mbit/s, at which MPI jobs do not start in time.
    """
    if text.strip().lower() == "none":
        return 0
    match = _RATE.fullmatch(text.strip())
    value = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if value < 10**6:
        raise ValueError(
            f"rate {text!r}: expected a number and a unit such as 4gbit or 800mbit, at least 1mbit, or none"
        )
    return value


def parse_rates(rate: str, hosts: int, links: int) -> list[tuple[int, ...]]:
    """Return the rate of each link of each host.

    ``rate`` is one rate for all hosts, or one per host separated by commas. A host's rate may list one per link, joined
    by ``+``: ``"4gbit+1gbit"``. Raises ``ValueError`` if the numbers do not fit.
    """

    def spread(text: str, between: str, count: int, what: str) -> list[str]:
        words = text.split(between)
        if len(words) not in (1, count):
            raise ValueError(f"rate {text!r}: {len(words)} rates for {count} {what}; give one, or one each")
        return words if len(words) == count else words * count

    return [tuple(map(parse_rate, spread(one, "+", links, "links"))) for one in spread(rate, ",", hosts, "hosts")]


def layout(hosts: int, slots: int | Sequence[int], rate: str, links: int) -> tuple[HostLayout, ...]:
    """Return the hosts ``node0`` … of a cluster. Raises ``ValueError`` that names an invalid argument."""
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"hosts={hosts}: expected 1 to {MAX_HOSTS}")
    if not 1 <= links <= MAX_LINKS:
        raise ValueError(f"links={links}: expected 1 to {MAX_LINKS}")
    per_host = [slots] * hosts if isinstance(slots, int) else list(slots)
    if len(per_host) != hosts or min(per_host) < 1:
        raise ValueError(f"slots={slots!r}: expected one positive number, or {hosts} of them")
    rates = parse_rates(rate, hosts, links)

    def link(h: int, k: int) -> Link:
        return Link(f"eth{k}", f"port{h}.{k}", f"br{k}", f"10.{10 + k}.0.{h + 1}", rates[h][k])

    wires = [tuple(link(h, k) for k in range(links)) for h in range(hosts)]
    return tuple(HostLayout(f"node{h}", per_host[h], wires[h]) for h in range(hosts))


def hosts_file(hosts: Sequence[HostLayout]) -> str:
    """Return ``/etc/hosts`` of the cluster: a host's name is its first link, ``<name>-eth1`` … are the others."""
    lines = ["127.0.0.1 localhost"]
    for host in hosts:
        lines.append(f"{host.links[0].address} {host.name} {host.name}-eth0")
        lines += [f"{link.address} {host.name}-{link.name}" for link in host.links[1:]]
    return "\n".join(lines) + "\n"


def shape(device: str, rate: int, before: int = 0) -> str:
    """Return the ``tc`` line that sets the rate of either end of a link that had rate ``before`` (0: unlimited)."""
    if rate == before:
        return ""
    if not rate:
        return f"qdisc del dev {device} root\n"
    burst = max(BURST_LEAST, round(rate / 8 * BURST_SECONDS))
    queue = burst + max(QUEUE_LEAST, round(rate / 8 * QUEUE_SECONDS))
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst} limit {queue}\n"


def switch_batches(hosts: Sequence[HostLayout], pids: Sequence[int], mtu: int) -> tuple[str, str]:
    """Return the ``ip`` and ``tc`` batches for the switch. ``pids``: processes in the hosts' network namespaces."""
    bridges = sorted({link.bridge for host in hosts for link in host.links})
    ip = [f"link add name {bridge} mtu {mtu} up type bridge" for bridge in bridges]
    tc = []
    for host, pid in zip(hosts, pids, strict=True):
        for link in host.links:
            peer = f"peer name {link.name} mtu {mtu} netns {pid}"
            ip.append(f"link add name {link.port} mtu {mtu} master {link.bridge} up type veth {peer}")
            tc.append(shape(link.port, link.rate))
    return "\n".join(ip) + "\n", "".join(tc)


def host_batches(host: HostLayout) -> tuple[str, str]:
    """Return the ``ip`` and ``tc`` batches for a host, to be run after the switch's."""
    ip = ["link set dev lo up"]
    for link in host.links:
        ip += [f"address add {link.address}/16 dev {link.name}", f"link set dev {link.name} up"]
    return "\n".join(ip) + "\n", "".join(shape(link.name, link.rate) for link in host.links)


def with_rate(host: HostLayout, link: int, rate: int) -> HostLayout:
    """Return the host with a new rate (bits per second, 0: unlimited) on one of its links."""
    changed = replace(host.links[link], rate=rate)
    return replace(host, links=(*host.links[:link], changed, *host.links[link + 1 :]))
