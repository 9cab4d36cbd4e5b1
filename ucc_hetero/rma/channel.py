"""Control channels between agents: frames of JSON over a socket, with a proof on both sides of a shared secret.

Each side sends a version and a random number, and shows what it makes of both by HMAC-SHA256; every frame is sealed
with a key of this connection's and its number. Nothing is read that is longer than it may be, and nothing is unpickled.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from .. import log
from ..errors import PeerError

#: Of the protocol; others are refused.
VERSION = 2
#: Bytes of a frame's JSON at most.
MOST = 1 << 20
#: Seconds within which both sides must have proved themselves.
PATIENCE = 5.0
#: Bytes of a secret at least.
_SECRET = 16
#: Connections at most that have not proved themselves yet, and seconds until one is accepted after one could not be.
_STRANGERS, _PAUSE = 64, 0.01

#: Seconds without a sign of life after which the kernel ends a connection: (idle, between probes, probes).
_ALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 1), (socket.TCP_USER_TIMEOUT, 1500))

_HELLO = struct.Struct("<4sH32s")
_LENGTH = struct.Struct("<I")
_PROOF = 32


class ChannelError(ConnectionError):
    """The other side of a control channel is not an agent of this version and secret, or sends a malformed message."""


class _EndedError(ChannelError):
    """The other side has ended the connection, as one that is not convinced does."""


class Channel:
    """One connection, once both sides have proved that they know ``secret``. One thread reads, any may send."""

    def __init__(self, sock: socket.socket, secret: bytes, server: bool) -> None:
        self._sock, self._server = sock, server
        self._sending, self._using = threading.Lock(), threading.Lock()
        self._sent = self._received = 0
        self._read = b""
        self._until: float | None = time.monotonic() + PATIENCE
        self._goes_on: Callable[[], bool] = lambda: True
        sock.setblocking(False)
        mine = os.urandom(32)
        self._write(_HELLO.pack(b"UCHA", VERSION, mine))
        magic, version, theirs = _HELLO.unpack(self._exactly(_HELLO.size))
        if magic != b"UCHA":
            raise ChannelError("the other side is not an agent")
        if version != VERSION:
            raise ChannelError(f"the other side speaks version {version}, and this is {VERSION}")
        both = theirs + mine if server else mine + theirs
        # Who has called proves itself first: a caller learns nothing from one that it cannot convince.
        if not server:
            self._write(_seal(secret, b"client", both))
        if not hmac.compare_digest(self._proof(), _seal(secret, b"client" if server else b"server", both)):
            raise ChannelError("the other side has another secret")
        if server:
            self._write(_seal(secret, b"server", both))
        self._key = _seal(secret, b"frames", both)

    def _proof(self) -> bytes:
        try:
            return self._exactly(_PROOF)
        except _EndedError as error:
            if self._server:
                raise
            raise ChannelError(f"{error}, and has not proved itself: this side has another secret than it") from None

    @property
    def ended(self) -> bool:
        """True once this side or the other one has ended the connection, be there messages that were not read."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
        except ValueError:
            return True
        return bool(poll.poll(0))

    def settle(self, goes_on: Callable[[], bool] | None = None) -> None:
        """Wait for messages as long as they take, from now on; but once a second ask if ``goes_on`` is still true."""
        self._until = None
        self._goes_on = goes_on or self._goes_on

    def send(self, message: Any) -> None:
        """Send what JSON can say, 1 MiB at most."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MOST:
            raise ValueError(f"a message of {len(body)} bytes is sent, and {MOST} may be")
        with self._sending:
            self._write(_LENGTH.pack(len(body)) + self._tag(self._server, self._sent, body) + body)
            self._sent += 1

    def receive(self) -> Any:
        """The next message; :class:`ChannelError` where the connection ends, or has brought anything else."""
        head = self._exactly(_LENGTH.size + _PROOF)
        (length,) = _LENGTH.unpack_from(head)
        if length > MOST:
            raise ChannelError(f"the other side announces {length} bytes, and {MOST} may be")
        body = self._exactly(length)
        if not hmac.compare_digest(head[_LENGTH.size :], self._tag(not self._server, self._received, body)):
            raise ChannelError("a message was changed on its way, or was not sent by the other side")
        self._received += 1
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"a message is not JSON: {error}") from None

    def answer(self) -> Any:
        """The answer to the last message, where every one has an answer; not those of waits that were interrupted."""
        while self._received + 1 < self._sent:
            self.receive()
        return self.receive()

    def close(self) -> None:
        """End the connection; threads that read or send find it closed."""
        with suppress(OSError, ValueError):  # the other side was first
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._using:
            self._sock.close()

    def _tag(self, server: bool, number: int, body: bytes) -> bytes:
        return _seal(self._key, b"server" if server else b"client", number.to_bytes(8, "little") + body)

    def _exactly(self, count: int) -> bytes:
        """So many bytes, and none behind them: those may be another reader's (:mod:`.bootstrap.links`)."""
        while len(self._read) < count:
            # One call at a time: no version of OpenSSL reads and writes one connection at once.
            with self._using:
                found = self._try(self._sock.recv, count - len(self._read))
            if found == b"":
                raise _EndedError("the other side has ended the connection")
            if found is None:
                self._wait(False)
            else:
                self._read += found
        out, self._read = self._read, b""
        return out

    def _write(self, data: bytes) -> None:
        while data:
            with self._using:
                count = self._try(self._sock.send, data)
            if count is None:
                self._wait(True)
            else:
                data = data[count:]

    def _try(self, call: Any, argument: Any) -> Any:
        """Result of the call, or None where it would have to wait."""
        try:
            return call(argument)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return None
        except OSError as error:
            raise ChannelError(f"the connection broke: {error}") from None

    def _wait(self, writes: bool) -> None:
        left = 1.0 if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise ChannelError(f"the other side has not proved and introduced itself in {PATIENCE:g} s")
        if not self._goes_on():
            raise ChannelError("libucp has given the peer up")
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLOUT if writes else select.POLLIN)
        except ValueError:
            raise ChannelError("the connection was closed") from None
        poll.poll(1e3 * min(left, 1.0))


def _seal(key: bytes, who: bytes, data: bytes) -> bytes:
    return hmac.digest(key, who + data, "sha256")


def _place(address: str) -> tuple[socket.AddressFamily, Any]:
    parts = urlsplit(address)
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return socket.AF_UNIX, parts.path
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
            return family, (parts.hostname, parts.port)
    except ValueError:
        pass  # a port that is none
    raise ValueError(f"address: {address!r} is neither tcp://host:port nor unix:///path")


class Listener:
    """A socket that is listened at; each connection has a thread. ``secret`` is what both sides of one must know.

    Attributes:
        address: Where it is reached, with the port that it has.
        closed: True once it is closed.
    """

    def __init__(self, address: str, secret: bytes, name: str) -> None:
        if not isinstance(secret, bytes) or len(secret) < _SECRET:
            raise ValueError(f"secret: at least {_SECRET} bytes that all sides know, such as os.urandom(32)")
        self._name, self.closed = name, False
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._socket, self.address, self._path = _listen(address)

    def start(self, what: Callable[..., None], *args: Any) -> None:
        """Have something done in a thread."""
        threading.Thread(target=what, args=args, name=self._name, daemon=True).start()

    def accept(self, welcome: Callable[[socket.socket], Callable[[], None]]) -> None:
        """Accept connections: ``welcome`` lets one prove itself, and returns what its thread does from then on."""
        self.start(self._accept, welcome)

    def _accept(self, welcome: Callable[[socket.socket], Callable[[], None]]) -> None:
        while not self.closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed; or the process has no file left, which may pass
                time.sleep(_PAUSE)
                continue
            if self._strangers.acquire(blocking=False):
                self.start(self._serve, welcome, sock)
            else:
                sock.close()

    def _serve(self, welcome: Callable[[socket.socket], Callable[[], None]], sock: socket.socket) -> None:
        try:
            go_on = welcome(sock)
        except (OSError, PeerError) as error:
            log.log("net").info("a connection with %s failed: %s", self.address, error)
            sock.close()
            return
        finally:
            self._strangers.release()
        go_on()

    def close(self) -> None:
        """Accept no more connections; those that there are go on."""
        self.closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)


def _listen(address: str) -> tuple[socket.socket, str, str]:
    """(socket that listens, address with its port, path to remove at the end)."""
    family, place = _place(address)
    sock = socket.socket(family)
    try:
        if family == socket.AF_UNIX:
            _bury(place)
            before = os.umask(0o177)  # for this user alone
            try:
                sock.bind(place)
            finally:
                os.umask(before)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
        sock.listen()
    except OSError as error:
        sock.close()
        raise ValueError(f"address: {address}: {error}") from None
    if family == socket.AF_UNIX:
        return sock, address, place
    host = f"[{place[0]}]" if family == socket.AF_INET6 else place[0]
    return sock, f"tcp://{host}:{sock.getsockname()[1]}", ""


def _bury(path: str) -> None:
    """Remove the socket of an agent that has died."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return  # there is none, or it is no socket


def call(address: str, timeout: float) -> socket.socket:
    """A connection with what listens there."""
    family, place = _place(address)
    sock = socket.socket(family)
    sock.settimeout(timeout)
    try:
        sock.connect(place)
    except OSError:
        sock.close()
        raise
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other end gives no sign of life."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
