"""Agents: processes that are started separately, connect by an address, and may leave and return.

agent = rma.Agent("tcp://0.0.0.0:7000", secret)          # or unix:///run/kv.sock
agent.publish("kv", agent.worker.register(cache))
peer = other_agent.connect("tcp://host:7000")
peer.endpoint.put(mine, peer.open("kv")).Wait()
"""

from __future__ import annotations

import binascii
import os
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .. import log
from ..bindings.handle import Handle
from ..errors import CollectiveTimeout, PeerError
from .channel import MOST, PATIENCE, Channel, ChannelError, Listener, call, keep_alive
from .endpoint import Endpoint, Target
from .region import Region
from .wire_format import Address, FormatError
from .worker import Worker

#: Maximum number of received messages in the queue; then the sender's connection waits.
_MESSAGES = 10_000
#: Maximum number of characters in a region's name.
_NAME = 1000


class Certificates(NamedTuple):
    """Files for TLS between agents.

    Attributes:
        certificate: This agent's certificate.
        key: Its key.
        authority: The authority that has signed the certificates of all agents.
    """

    certificate: str
    key: str
    authority: str

    def context(self, server: bool) -> ssl.SSLContext:
        """Make a TLS context that requires a certificate of this authority from the other side.

        Args:
            server: True for the side that accepts connections.

        Returns:
            ssl.SSLContext: The context.

        Raises:
            OSError: A file cannot be read, or is not a certificate.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.load_cert_chain(self.certificate, self.key)
        made.load_verify_locations(self.authority)
        made.verify_mode = ssl.CERT_REQUIRED
        return made


class AgentPeer:
    """Another agent, while connected; made by :meth:`Agent.connect`.

    Attributes:
        name: The other agent's name.
        endpoint: For transfers with it.
        alive: False once the connection has ended. If libucp has given the endpoint up, the connection ends within
            a second.
    """

    def __init__(self, name: str, endpoint: Endpoint, channel: Channel) -> None:
        self.name, self.endpoint, self.channel = name, endpoint, channel
        self._changed = threading.Condition()
        self._regions: dict[str, bytes] = {}
        self.alive = True
        self.ready = False  # until both sides know each other
        #: Regions that the peer has been told of, and whether a thread is telling it more.
        self.told: dict[str, Region] = {}
        self.is_told = False

    def __repr__(self) -> str:
        return f"<AgentPeer {self.name!r}{'' if self.alive else ', which is gone'}>"

    def send(self, message: Any) -> None:
        """Send a message to the peer's :meth:`Agent.receive`. Regions published before are known there by then.

        Args:
            message: Any value that JSON can represent, up to 1 MiB.

        Raises:
            ValueError: The message is longer.
            PeerError: The peer is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self.is_told and self.alive))
        try:
            self.channel.send({"message": message})
        except ChannelError as error:
            raise PeerError(f"agent {self.name!r}: {error}") from None

    def open(self, name: str, timeout: float = 30.0) -> Target:
        """Open a region by the name under which the peer publishes it; wait until it does.

        Args:
            name: Name of the region.
            timeout: Seconds to wait.

        Returns:
            Target: The region, for :meth:`Endpoint.put` and :meth:`Endpoint.get`.

        Raises:
            CollectiveTimeout: The peer published no region of this name in time.
            PeerError: The peer is gone.
            RefusedError: The peer has withdrawn the region.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._regions or not self.alive, timeout):
                raise CollectiveTimeout(f"agent {self.name!r} has published no region {name!r} in {timeout:g} s")
            if not self.alive:
                raise PeerError(f"agent {self.name!r} is gone")
            descriptor = self._regions[name]
        return self.endpoint.open(descriptor, timeout)

    def published(self, regions: dict[str, bytes | None]) -> None:
        """Record what the peer publishes; None for a region that it withdraws."""
        with self._changed:
            now = self._regions | regions
            self._regions = {name: descriptor for name, descriptor in now.items() if descriptor is not None}
            self._changed.notify_all()

    def news(self, regions: dict[str, Region]) -> dict[str, Region | None]:
        """Return what the peer must be told: regions that are new, and None for withdrawn ones; empty if nothing."""
        with self._changed:
            before, self.told = self.told, regions
            found: dict[str, Region | None] = dict.fromkeys(before.keys() - regions.keys())
            found |= {name: region for name, region in regions.items() if before.get(name) is not region}
            self.is_told = bool(found)
            self._changed.notify_all()
        return found

    def leave(self) -> None:
        """Record that the connection has ended."""
        with self._changed:
            self.alive = False
            self._changed.notify_all()
        self.channel.close()


class Agent(Handle):
    """A process that other agents find by an address. It may join and leave at any time.

    Args:
        address: Address to listen at: ``tcp://host:port`` or ``unix://path``. Port 0 takes a free port.
        secret: At least 16 bytes that all agents know.
        name: Name that peers see; host and process number by default.
        tls: Certificates, if all agents have some.
        worker: Worker for the transfers; a new one by default.

    Attributes:
        address: The address, with the actual port.
        worker: The worker, for :meth:`Worker.register`.

    Raises:
        ValueError: ``secret`` is too short.
        OSError: The agent cannot listen at the address.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        name: str = "",
        tls: Certificates | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._listener = Listener(address, secret, "ucch-agent")
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._secret, self._tls, self._own = secret, tls, worker is None
        self.address = self._listener.address
        self.worker = worker or Worker()
        self._lock = threading.Lock()
        #: All connections whose threads run; and those that the other side has not confirmed yet.
        self._connections: list[AgentPeer] = []
        self._regions: dict[str, Region] = {}
        self._inbox: queue.Queue[tuple[AgentPeer, Any]] = queue.Queue(_MESSAGES)
        self._listener.accept(self._welcome)

    @property
    def peers(self) -> list[AgentPeer]:
        """The connected agents."""
        with self._lock:
            return [peer for peer in self._connections if peer.ready]

    def connect(self, address: str, timeout: float = 30.0) -> AgentPeer:
        """Connect with another agent.

        Args:
            address: The other agent's :attr:`address`.
            timeout: Seconds to wait.

        Returns:
            AgentPeer: The connection, after both sides have proved that they know the secret.

        Raises:
            ChannelError: No agent listens at the address, or its secret differs.
        """
        try:
            sock = call(address, timeout)
            if self._tls is not None:
                host = urlsplit(address).hostname or "localhost"
                sock.settimeout(PATIENCE)
                sock = self._tls.context(False).wrap_socket(sock, server_hostname=host)
            peer = self._meet(sock, server=False)
        except OSError as error:
            raise ChannelError(f"{address}: {error}") from None
        self._tell(peer)
        return peer

    def publish(self, name: str, region: Region) -> None:
        """Let all peers open a region by name, also those that connect later.

        Args:
            name: Name for :meth:`AgentPeer.open`.
            region: A region of this agent's worker.

        Raises:
            ValueError: The name has more than 1,000 characters, or the region belongs to another worker.
        """
        if len(name) > _NAME:
            raise ValueError(f"name: {len(name)} characters; at most {_NAME} are allowed")
        if region.worker is not self.worker:
            raise ValueError("region: it is of another worker; register the memory with this agent's worker")
        with self._lock:
            self._regions[name] = region
        self._tell(*self.peers)

    def withdraw(self, name: str) -> None:
        """Withdraw a published region from all peers, and close it.

        Args:
            name: The name under which it was published.

        Raises:
            KeyError: There is no such region.
            CollectiveTimeout: A peer that is alive does not release the region.
        """
        with self._lock:
            region = self._regions.pop(name)
        self._tell(*self.peers)
        region.close()

    def receive(self, timeout: float | None = None) -> tuple[AgentPeer, Any]:
        """Wait for the next message of any peer.

        Args:
            timeout: Seconds to wait; no limit by default.

        Returns:
            tuple[AgentPeer, Any]: The sender, and the message.

        Raises:
            CollectiveTimeout: No message came in time.
        """
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeout(f"no message has come in {timeout:g} s") from None

    def close(self) -> None:
        """Disconnect. Peers are told at once, and transfers with this agent fail there."""
        if self._listener.closed:
            return
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for peer in connections:
            peer.leave()
        if self._own:
            self.worker.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _welcome(self, sock: socket.socket) -> Callable[[], None]:
        if self._tls is not None:
            sock.settimeout(PATIENCE)
            sock = self._tls.context(True).wrap_socket(sock, server_side=True)
        return partial(self._tell, self._meet(sock, server=True))

    def _meet(self, sock: socket.socket, server: bool) -> AgentPeer:
        """Authenticate both ways, exchange addresses, and start the thread that reads."""
        try:
            keep_alive(sock)
            for lost in self.peers:  # an old connection's end must not end the endpoint of the new one
                if not lost.endpoint.alive:
                    lost.leave()
            channel = Channel(sock, self._secret, server)
            channel.send({"name": self.name[:200], "worker": self.worker.address.hex()})
            peer = self._join(*_introduction(channel.receive()), channel)
        except BaseException:
            sock.close()
            raise
        try:
            # Both know each other before either uses the other.
            channel.send({"ready": True})
            if channel.receive() != {"ready": True}:
                raise ChannelError("the other side is not ready")
            channel.settle(lambda: peer.endpoint.alive)
            peer.ready = True
            self._listener.start(self._read, peer)
        except BaseException:
            self._part(peer)
            raise
        return peer

    def _join(self, name: str, address: bytes, channel: Channel) -> AgentPeer:
        """Add a connection. Connections with the same peer share an endpoint.

        The other side frees its endpoint when its last connection with this agent ends. This side must then use a new
        one, even if its own thread has not read that end yet.
        """
        with self._lock:
            if self._listener.closed:
                raise ChannelError("this agent is closed")
            try:
                known = self.worker.peers.get(Address.unpack(address).uid)
                before = [peer for peer in self._connections if peer.endpoint is known]
                if before and not any(peer.alive and not peer.channel.ended for peer in before):
                    before[0].endpoint.lose()
                peer = AgentPeer(name, self.worker.connect(address), channel)
            except FormatError as error:
                raise ChannelError(str(error)) from None
            self._connections.append(peer)
        return peer

    def _part(self, peer: AgentPeer) -> None:
        """Remove a connection, and its endpoint if no other connection uses that."""
        with self._lock:
            self._connections.remove(peer)
            is_last = not any(other.endpoint is peer.endpoint for other in self._connections)
            if is_last:  # under the lock, as a new connection may be about to share it
                peer.endpoint.lose()
        peer.leave()
        if is_last and not (self._own and self._listener.closed):  # otherwise the worker closes all endpoints
            peer.endpoint.close()

    def _read(self, peer: AgentPeer) -> None:
        try:
            while True:
                self._handle(peer, peer.channel.receive())
        except ChannelError as error:
            if not self._listener.closed:
                log.log("net").info("agent %r: %s", peer.name, error)
        self._part(peer)

    def _handle(self, peer: AgentPeer, said: Any) -> None:
        if not isinstance(said, dict):
            raise ChannelError("a message is not a JSON object")
        if "message" in said:
            self._inbox.put((peer, said["message"]))
        else:
            peer.published(_regions(said.get("regions", {})))

    def _tell(self, *peers: AgentPeer) -> None:
        """Send peers what was published and withdrawn, each in a thread: a peer may be slow to read."""
        with self._lock:
            waiting = [peer for peer in peers if not peer.is_told]
            for peer in waiting:
                peer.is_told = True
        for peer in waiting:
            self._listener.start(self._tells, peer)

    def _tells(self, peer: AgentPeer) -> None:
        with suppress(ChannelError):
            while news := self._news(peer):
                for part in _parts(news):
                    peer.channel.send({"regions": part})

    def _news(self, peer: AgentPeer) -> dict[str, Region | None]:
        with self._lock:
            return peer.news(dict(self._regions))


def _parts(news: dict[str, Region | None]) -> Iterator[dict[str, str | None]]:
    """Regions by name as JSON values, in parts that each fit into a message."""
    part: dict[str, str | None] = {}
    size = 0
    for name, region in news.items():
        part[name] = None if region is None else region.descriptor.hex()
        size += 12 * len(name) + len(part[name] or "")  # an upper bound on the JSON characters
        if size > MOST // 2:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _introduction(said: Any) -> tuple[str, bytes]:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ChannelError("the other side does not introduce itself")
    return said["name"][:200], _bytes(said.get("worker"))


def _regions(said: Any) -> dict[str, bytes | None]:
    if not isinstance(said, dict):
        raise ChannelError("the regions are not a JSON object")
    return {name: None if value is None else _bytes(value) for name, value in said.items()}


def _bytes(said: Any) -> bytes:
    try:
        return binascii.unhexlify(said)
    except (TypeError, ValueError) as error:
        raise ChannelError(f"bytes are not a hexadecimal number: {error}") from None
