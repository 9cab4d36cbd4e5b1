"""Control channels between agents: JSON frames over a socket, after both sides have proved that they know a secret.

Each side sends a version and a random number, and an HMAC-SHA256 of both. Every frame carries a MAC with this
connection's key and the frame's number. Lengths are limited before anything is read, and nothing is unpickled.
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

#: Version of the protocol; others are refused.
VERSION = 2
#: Maximum bytes of a frame's JSON.
MOST = 1 << 20
#: Seconds within which both sides must authenticate.
PATIENCE = 5.0
#: Minimum bytes of a secret.
_SECRET = 16
#: Maximum number of connections that are not authenticated; seconds to wait after an accept that failed.
_STRANGERS, _PAUSE = 64, 0.01

#: TCP keepalive: (idle seconds, interval, probes), and the limit for unacknowledged data in ms.
_ALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 1), (socket.TCP_USER_TIMEOUT, 1500))

_HELLO = struct.Struct("<4sH32s")
_LENGTH = struct.Struct("<I")
_PROOF = 32


class ChannelError(ConnectionError):
    """The other side of a control channel is not an agent of this version and secret, or sends a malformed message."""


class _EndedError(ChannelError):
    """The other side has closed the connection, as it does if authentication fails."""


class Channel:
    """An authenticated connection. One thread may read, any thread may send."""

    def __init__(self, sock: socket.socket, secret: bytes, server: bool) -> None:
        self._sock, self._server, self._pid = sock, server, os.getpid()
        self._sending, self._using = threading.Lock(), threading.Lock()
        self._sent = self._received = 0
        self._read = self._unsent = b""
        self._until: float | None = time.monotonic() + PATIENCE
        self._goes_on: Callable[[], bool] = lambda: True
        sock.setblocking(False)
        mine = os.urandom(32)
        self._write(_HELLO.pack(b"UCHA", VERSION, mine))
        magic, version, theirs = _HELLO.unpack(self._exactly(_HELLO.size))
        if magic != b"UCHA":
            raise ChannelError("the other side is not an agent")
        if version != VERSION:
            raise ChannelError(f"the other side speaks version {version}, but this side {VERSION}")
        both = theirs + mine if server else mine + theirs
        # The caller proves itself first, and gets no proof unless it knows the secret.
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
        """True once either side has ended the connection, even if messages are unread."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
        except ValueError:
            return True
        return bool(poll.poll(0))

    def settle(self, goes_on: Callable[[], bool] | None = None) -> None:
        """Let reads wait without a limit from now on; once a second ``goes_on`` is checked."""
        self._until = None
        self._goes_on = goes_on or self._goes_on

    def send(self, message: Any) -> None:
        """Send a JSON value of up to 1 MiB."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MOST:
            raise ValueError(f"a message has {len(body)} bytes; at most {MOST} are allowed")
        with self._sending:
            frame = _LENGTH.pack(len(body)) + self._tag(self._server, self._sent, body) + body
            self._sent += 1  # first: a message that Ctrl-C interrupts may have been sent, and is answered then
            self._write(frame)

    def receive(self) -> Any:
        """Receive the next message. :class:`ChannelError` if the connection ends or sends something else."""
        head = self._exactly(_LENGTH.size + _PROOF)
        (length,) = _LENGTH.unpack_from(head)
        if length > MOST:
            raise ChannelError(f"the other side sends a message of {length} bytes; at most {MOST} are allowed")
        body = self._exactly(length)
        if not hmac.compare_digest(head[_LENGTH.size :], self._tag(not self._server, self._received, body)):
            raise ChannelError("a message was modified, or was not sent by the other side")
        self._received += 1
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"a message is not JSON: {error}") from None

    def answer(self) -> Any:
        """Receive the answer to the last message, if every message has one. Skips answers to interrupted waits."""
        while self._received + 1 < self._sent:
            self.receive()
        return self.receive()

    def close(self) -> None:
        """End the connection; in a forked child it stays the parent's. Threads that read or send get an error."""
        with suppress(OSError, ValueError):  # the other side may have closed it
            if self._pid == os.getpid():
                self._sock.shutdown(socket.SHUT_RDWR)
        with self._using:
            self._sock.close()

    def _tag(self, server: bool, number: int, body: bytes) -> bytes:
        return _seal(self._key, b"server" if server else b"client", number.to_bytes(8, "little") + body)

    def _exactly(self, count: int) -> bytes:
        """Read exactly ``count`` bytes: later ones may belong to another reader (:mod:`.bootstrap.links`)."""
        while len(self._read) < count:
            # One call at a time: OpenSSL does not allow a concurrent read and write of one connection.
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
        """Send everything, behind what is left of an interrupted message."""
        self._unsent += data
        while self._unsent:
            with self._using:
                count = self._try(self._sock.send, self._unsent)
            if count is None:
                self._wait(True)
            else:
                self._unsent = self._unsent[count:]

    def _try(self, call: Any, argument: Any) -> Any:
        """The result of the call, or None if it would block."""
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
        pass  # not a number
    raise ValueError(f"address: {address!r} is neither tcp://host:port nor unix:///path")


class Listener:
    """A listening socket with a thread for each connection. ``secret``: what both sides of a connection must know.

    Attributes:
        address: The address, with the actual port.
        closed: True once it is closed.
    """

    def __init__(self, address: str, secret: bytes, name: str) -> None:
        if not isinstance(secret, bytes) or len(secret) < _SECRET:
            raise ValueError(f"secret: at least {_SECRET} bytes that all sides know, such as os.urandom(32)")
        self._name, self.closed = name, False
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._socket, self.address, self._path = _listen(address)

    def start(self, what: Callable[..., None], *args: Any) -> None:
        """Run a function in a daemon thread."""
        threading.Thread(target=what, args=args, name=self._name, daemon=True).start()

    def accept(self, welcome: Callable[[socket.socket], Callable[[], None]]) -> None:
        """Accept connections. ``welcome`` authenticates one, and returns the function that its thread then runs."""
        self.start(self._accept, welcome)

    def _accept(self, welcome: Callable[[socket.socket], Callable[[], None]]) -> None:
        while not self.closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed; or out of descriptors, which may pass
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
        """Accept no more connections. Existing ones stay open."""
        self.closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)


def _listen(address: str) -> tuple[socket.socket, str, str]:
    """Returns (listening socket, address with its port, path to remove at the end)."""
    family, place = _place(address)
    sock = socket.socket(family)
    try:
        if family == socket.AF_UNIX:
            _bury(place)
            before = os.umask(0o177)  # readable and writable by this user only
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
    """Remove the socket file of an agent that has died."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return  # no file, or not a socket


def call(address: str, timeout: float) -> socket.socket:
    """Connect to a listener."""
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
    """Enable keepalive, so that the kernel ends a connection with a peer that is unreachable."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
