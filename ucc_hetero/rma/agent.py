"""Agents: processes that are started separately, find each other by an address, and come and go.

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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .. import log
from ..bindings.handle import Handle
from ..errors import CollectiveTimeout, PeerError
from .channel import PATIENCE, Channel, ChannelError, call, keep_alive, listen
from .endpoint import Endpoint, Target
from .wire_format import FormatError
from .worker import Region, Worker

#: Connections at most that have not proved themselves yet, and messages that were not taken: their sender waits then.
_STRANGERS = 64
_MESSAGES = 10_000


class Certificates(NamedTuple):
    """Files of this agent's certificate and key, and of the authority that has signed those of all agents."""

    certificate: str
    key: str
    authority: str

    def context(self, server: bool) -> ssl.SSLContext:
        """A context in which both sides must have such a certificate."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.load_cert_chain(self.certificate, self.key)
        made.load_verify_locations(self.authority)
        made.verify_mode = ssl.CERT_REQUIRED
        return made


class AgentPeer:
    """Another agent, while it is connected."""

    def __init__(self, name: str, endpoint: Endpoint, channel: Channel) -> None:
        self.name, self.endpoint, self.channel = name, endpoint, channel
        self._changed = threading.Condition()
        self._regions: dict[str, bytes] = {}
        self.alive = True

    def __repr__(self) -> str:
        return f"<AgentPeer {self.name!r}{'' if self.alive else ', which is gone'}>"

    def send(self, message: Any) -> None:
        """Send what JSON can say, 1 MiB at most; :class:`PeerError` when the peer is gone."""
        try:
            self.channel.send({"message": message})
        except ChannelError as error:
            raise PeerError(f"agent {self.name!r}: {error}") from None

    def open(self, name: str, timeout: float = 30.0) -> Target:
        """A region that the peer has published under this name, or publishes in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._regions or not self.alive, timeout):
                raise CollectiveTimeout(f"agent {self.name!r} has published no region {name!r} in {timeout:g} s")
            if not self.alive:
                raise PeerError(f"agent {self.name!r} is gone")
            descriptor = self._regions[name]
        return self.endpoint.open(descriptor, timeout)

    def published(self, regions: dict[str, bytes], gone: list[str]) -> None:
        """Note what the peer publishes and withdraws."""
        with self._changed:
            self._regions |= regions
            for name in gone:
                self._regions.pop(name, None)
            self._changed.notify_all()

    def leave(self) -> None:
        """Note that the connection has ended."""
        with self._changed:
            self.alive = False
            self._changed.notify_all()
        self.channel.close()


class Agent(Handle):
    """This process among others that know ``secret``, reached at ``address``: ``tcp://host:port`` or ``unix://path``.

    Port 0 takes a free one; :attr:`address` then has it. ``tls``: :class:`Certificates`, and the same on all agents.
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
        if not isinstance(secret, bytes) or len(secret) < 16:
            raise ValueError("secret: at least 16 bytes that all agents know, such as os.urandom(32)")
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._secret, self._tls, self._own = secret, tls, worker is None
        self._listener, self.address, self._path = listen(address)
        self.worker = worker or Worker()
        self._lock = threading.Lock()
        self._peers: list[AgentPeer] = []
        self._regions: dict[str, Region] = {}
        self._inbox: queue.Queue[tuple[AgentPeer, Any]] = queue.Queue(_MESSAGES)
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._closed = False
        self._start(self._accept)

    @property
    def peers(self) -> list[AgentPeer]:
        """The agents that are connected."""
        with self._lock:
            return list(self._peers)

    def connect(self, address: str, timeout: float = 30.0) -> AgentPeer:
        """Connect with the agent at ``address``; :class:`ChannelError` where there is none that knows the secret."""
        try:
            sock = call(address, timeout)
            if self._tls is not None:
                host = urlsplit(address).hostname or "localhost"
                sock.settimeout(PATIENCE)
                sock = self._tls.context(False).wrap_socket(sock, server_hostname=host)
        except OSError as error:
            raise ChannelError(f"{address}: {error}") from None
        try:
            return self._meet(sock, server=False)
        except ChannelError as error:
            sock.close()
            raise ChannelError(f"{address}: {error}") from None

    def publish(self, name: str, region: Region) -> None:
        """Let all peers :meth:`AgentPeer.open` a region by ``name``, those that connect later, too."""
        with self._lock:
            self._regions[name] = region
        self._tell_all({"regions": {name: region.descriptor.hex()}})

    def withdraw(self, name: str) -> None:
        """Take a published region back, and close it."""
        with self._lock:
            region = self._regions.pop(name)
        self._tell_all({"gone": [name]})
        region.close()

    def receive(self, timeout: float | None = None) -> tuple[AgentPeer, Any]:
        """The next message of any peer: (who, what). :class:`CollectiveTimeout` where none comes in time."""
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeout(f"no message has come in {timeout:g} s") from None

    def close(self) -> None:
        """Leave: the peers hear of it at once, and transfers with this agent fail there."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)
        for peer in self.peers:
            peer.leave()
        if self._own:
            self.worker.close()

    # --- connections --------------------------------------------------------------------------------------------------

    def _start(self, what: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=what, args=args, name="ucch-agent", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            if self._strangers.acquire(blocking=False):
                self._start(self._welcome, sock)
            else:
                sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            if self._tls is not None:
                sock.settimeout(PATIENCE)
                sock = self._tls.context(True).wrap_socket(sock, server_side=True)
            self._meet(sock, server=True)
        except (ChannelError, OSError, PeerError) as error:
            log.log("net").info("a connection to agent %r came to nothing: %s", self.name, error)
            sock.close()
        finally:
            self._strangers.release()

    def _meet(self, sock: socket.socket, server: bool) -> AgentPeer:
        """Prove, be convinced, and exchange addresses; the peer then has a thread that reads."""
        keep_alive(sock)
        channel = Channel(sock, self._secret, server)
        with self._lock:
            regions = {name: region.descriptor.hex() for name, region in self._regions.items()}
        channel.send({"name": self.name, "worker": self.worker.address.hex(), "regions": regions})
        name, address, theirs = _introduction(channel.receive())
        try:
            endpoint = self.worker.connect(address)
        except FormatError as error:
            channel.close()
            raise ChannelError(str(error)) from None
        # Both know each other before either uses the other.
        channel.send({"ready": True})
        if channel.receive() != {"ready": True}:
            raise ChannelError("the other side is not ready")
        channel.settle()
        peer = AgentPeer(name, endpoint, channel)
        peer.published(theirs, [])
        with self._lock:
            self._peers.append(peer)
            now = {n: r.descriptor.hex() for n, r in self._regions.items() if n not in regions}
        if now:
            channel.send({"regions": now})
        self._start(self._read, peer)
        return peer

    def _read(self, peer: AgentPeer) -> None:
        try:
            while True:
                self._handle(peer, peer.channel.receive())
        except ChannelError as error:
            if not self._closed:
                log.log("net").info("agent %r: %s", peer.name, error)
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
            last = not any(other.endpoint is peer.endpoint for other in self._peers)
        peer.leave()
        if last:  # two agents may have called each other at once
            peer.endpoint.lose()
            if not self._closed:
                peer.endpoint.close()

    def _handle(self, peer: AgentPeer, said: Any) -> None:
        if not isinstance(said, dict):
            raise ChannelError("a message is no JSON object")
        if "message" in said:
            self._inbox.put((peer, said["message"]))
        else:
            peer.published(_regions(said.get("regions", {})), _names(said.get("gone", [])))

    def _tell_all(self, said: Any) -> None:
        for peer in self.peers:
            with suppress(ChannelError):
                peer.channel.send(said)


def _introduction(said: Any) -> tuple[str, bytes, dict[str, bytes]]:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ChannelError("the other side does not introduce itself")
    return said["name"][:200], _bytes(said.get("worker")), _regions(said.get("regions"))


def _regions(said: Any) -> dict[str, bytes]:
    if not isinstance(said, dict):
        raise ChannelError("a list of regions is no JSON object")
    return {name: _bytes(value) for name, value in said.items()}


def _names(said: Any) -> list[str]:
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise ChannelError("a list of names is none")
    return said


def _bytes(said: Any) -> bytes:
    try:
        return binascii.unhexlify(said)
    except (TypeError, ValueError) as error:
        raise ChannelError(f"bytes are no hexadecimal number: {error}") from None
