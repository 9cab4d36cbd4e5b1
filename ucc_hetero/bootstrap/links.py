"""Links: TCP connections between processes of different hosts, separate from the data. Made here, served by a native
thread (net/link.c).

Each rank has a link with at least one rank of each neighbouring host, and with some ranks of its own host. Over them
ranks exchange which calls they make, and notice that a process or a host is gone. A process that connects proves that
it knows a secret, which ranks exchange when they create a communicator; both ends do, and other connections are closed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from .. import env, log
from ..machine import nics
from ..native.libraries import ffi, lib
from ..native.threaded import ThreadedCall
from ..planner.topology import ranks_by
from ..transport.wires import HEARTBEATS
from .board import Board
from .known import Contact, Known

#: Seconds that all connections of a communicator may take, and that one address may take.
_CONNECT_ALL_S, _CONNECT_S = 10.0, 3.0


def neighbours(count: int, position: int) -> set[int]:
    """Positions at distances 1, 2, 4, ... in a ring of ``count``: few, and the rest stays connected if many of them
    fail."""
    distances = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    return {(position + sign * distance) % count for distance in distances for sign in (1, -1)} - {position}


@lru_cache(maxsize=64)
def links_among(hosts: tuple[int, ...]) -> list[list[int]]:
    """The ranks to which each rank has a link: some of its own host, and at least one of each neighbouring host.

    ``hosts[r]`` is the host of rank r.
    """
    by_host, found = ranks_by(hosts), []
    for rank, host in enumerate(hosts):
        here = by_host[host]
        position = here.index(rank)
        linked = {here[each] for each in neighbours(len(here), position)}
        for other in neighbours(len(by_host), host):
            there = by_host[other]
            turns = range(position, max(len(here), len(there)), len(here))
            linked |= {there[turn % len(there)] for turn in turns}
        found.append(sorted(linked))
    return found


def _packed(address: tuple[str, str]) -> bytes:
    """An address in network order, padded to 16 bytes so that it cannot match part of two others."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.inet_pton(family, address[0]).ljust(16, b"\0")


class _Listener:
    """The socket on which this process accepts links."""

    def __init__(self) -> None:
        self.pid, self.secret = os.getpid(), os.urandom(32)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, backlog=512, dualstack_ipv6=both)
        self.port = int(self.socket.getsockname()[1])


_listeners: list[_Listener] = []
#: Numbers of the links with other processes, by process name.
_links: dict[str, int] = {}


def _listener() -> _Listener:
    if _listeners and _listeners[0].pid != os.getpid():
        _listeners.pop().socket.close()
        _links.clear()
    if not _listeners:
        _listeners.append(_Listener())
    return _listeners[0]


class Links:
    """Links among the ranks of a communicator, ``known``, on several hosts; ``number`` is the communicator's.

    Collective over ``mpi`` to create, unless an earlier communicator of these ranks has made the links.
    """

    def __init__(self, known: Known, board: Board, number: int, mpi: Any) -> None:
        self._rank, self._processes, hosts = known.rank, known.processes, tuple(known.hosts)
        #: The communicator's number in messages; above those of all earlier ones of its ranks.
        self._key = number + 1
        mine = links_among(hosts)[self._rank]
        self._contacts = known.contacts = known.contacts or _inherited(known)
        if not self._contacts:
            self._meet(mine, mpi)
            known.contacts = self._contacts
        found = [rank for rank in mine if self._processes[rank] in _links]
        links = [_links[self._processes[rank]] for rank in found]
        handle = lib.ucch_host_exchange_new(
            board.native, self._key, self._rank, len(hosts), hosts, len(found), links, found
        )
        if handle == ffi.NULL:
            raise MemoryError("no memory for the exchange between hosts")
        self._handle = handle
        patience = HEARTBEATS * env.get("HEARTBEAT")
        for rank, host in enumerate(hosts) if patience else ():  # calls that wait long probe it
            if host not in (hosts[self._rank], *hosts[:rank]):
                addresses = b"".join(map(_packed, self._contacts[rank].addresses))
                if lib.ucch_host_exchange_add_host(handle, rank, addresses, len(addresses), patience):
                    raise MemoryError("no memory for the addresses of hosts")

    def _meet(self, mine: Sequence[int], mpi: Any) -> None:
        """Make the links that these ranks, the linked ones, lack; collective."""
        listener = _listener()
        alive = frozenset(name for name, link in list(_links.items()) if lib.ucch_link_fate(link) == lib.UCCH_THERE)
        contact = Contact(nics.addresses(), listener.port, listener.secret)
        self._contacts, connected = zip(*mpi.allgather((contact, alive)), strict=True)
        name = self._processes[self._rank]
        self._connect([r for r in mine if self._processes[r] not in alive or name not in connected[r]])
        if lost := [rank for rank in mine if self._processes[rank] not in _links]:
            log.log("live").warning(
                "rank %d: no control connection with rank(s) %s: whether they are alive and call the same is "
                "known at deadlines only; may the hosts connect by TCP ports above 1023?", self._rank, lost,
            )  # fmt: skip

    def _connect(self, ranks: Sequence[int]) -> None:
        """Connect with the higher ranks and, at the same time, accept connections of the lower ones."""
        for rank in ranks:
            _links.pop(self._processes[rank], None)
        out = [r for r in ranks if r > self._rank]
        until = time.monotonic() + _CONNECT_ALL_S
        sockets = [(r, ThreadedCall(partial(self._connect_to, self._contacts[r]))) for r in out]
        accepted = self._accept({r for r in ranks if r < self._rank})
        for rank, reached in sockets:
            if reached.ended(max(until - time.monotonic(), 0)) and (found := reached.result()) is not None:
                accepted[rank] = found
        for rank, each in accepted.items():
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = int(lib.ucch_link_new(each.detach(), env.get("HEARTBEAT")))
            if link >= 0:
                _links[self._processes[rank]] = link

    def _connect_to(self, contact: Contact) -> socket.socket | None:
        """Connect with a process by one of its addresses; those in networks that this host is in come first."""
        from ..rma.channel import Channel  # slow to import, and only jobs of several hosts need it

        ours = {network for _, network in self._contacts[self._rank].addresses}
        for address, _ in sorted(contact.addresses, key=lambda pair: pair[1] not in ours):
            with suppress(OSError):
                each = socket.create_connection((address, contact.port), _CONNECT_S)
                try:
                    Channel(each, contact.secret, False).send([self._key, self._rank])
                    return each
                except OSError:
                    each.close()
        return None

    def _accept(self, ranks: set[int]) -> dict[int, socket.socket]:
        """Accept connections of these ranks."""
        found: dict[int, socket.socket] = {}
        until = time.monotonic() + _CONNECT_ALL_S
        while ranks - set(found) and (left := until - time.monotonic()) > 0:
            with suppress(OSError):
                _listener().socket.settimeout(left)
                each, _ = _listener().socket.accept()
                rank = self._authenticate(each, ranks - set(found))
                if rank < 0:
                    each.close()
                else:
                    found[rank] = each
        return found

    def _authenticate(self, each: socket.socket, ranks: set[int]) -> int:
        """The rank that has connected, once it has proved to be one of ``ranks``; -1 for any other process."""
        from ..rma.channel import Channel

        try:
            hello = Channel(each, _listener().secret, True).receive()
        except OSError:
            return -1
        return next((rank for rank in ranks if hello == [self._key, rank]), -1)

    def note_deaths(self, ranks: Sequence[int]) -> None:
        """Note deaths of ranks that another source reported, and tell the other ranks."""
        for rank in ranks:
            lib.ucch_host_exchange_note_death(self._handle, rank)

    def close(self) -> None:
        """End the exchange of this communicator."""
        handle, self._handle = self._handle, ffi.NULL
        if handle != ffi.NULL:
            lib.ucch_host_exchange_free(handle)


def _inherited(known: Known) -> Sequence[Contact]:
    """The ranks' contacts if the ranks of which they are a part have made all their links; the same on all of them."""
    if known.origin is None:
        return ()
    whole, ranks = known.origin
    theirs = links_among(tuple(whole.hosts))
    for rank, linked in zip(ranks, links_among(tuple(known.hosts)), strict=True):
        if not {ranks[peer] for peer in linked} <= {*theirs[rank]}:
            return ()
    return [whole.contacts[rank] for rank in ranks] if whole.contacts else ()


def _any(processes: Iterable[str], fate: int) -> bool:
    found = map(_links.get, processes)
    return any(lib.ucch_link_fate(link) >= fate for link in found if link is not None)


def lost(processes: Iterable[str]) -> bool:
    """True if one of these processes has died or its host is out of reach, as a link with it shows."""
    return _any(processes, lib.UCCH_DIED)


def left(processes: Iterable[str]) -> bool:
    """True if one of these processes has left or was lost, as a link with it shows."""
    return _any(processes, lib.UCCH_LEFT)


def stop(well: bool) -> None:
    """This process ends: tell the peers so if it ends ``well``; otherwise they take it for dead."""
    if _listeners and _listeners[0].pid == os.getpid():
        lib.ucch_links_stop(well)
        _listeners.pop().socket.close()
        _links.clear()
