"""A key-value store in a process of its own, where ranks meet that have no MPI job in common.

``python -m ucc_hetero store tcp://0.0.0.0:7000 SECRETFILE`` serves one. A client proves that it knows the secret.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import log
from ..rma.channel import Channel, ChannelError, Listener, call, keep_alive

_Word = bytes | str


def _text(value: _Word) -> str:
    """A value as JSON text: one character per byte. Text is UTF-8, as in torch's stores."""
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


class Store:
    """Client of a store, with the methods of torch's stores that ranks use to meet; thread-safe.

    Args:
        address: ``tcp://host:port`` or ``unix:///path`` of a :class:`StoreServer`.
        secret: The server's.
        timeout: Seconds to wait for the connection.

    Raises:
        OSError: There is no server, or its secret differs. All methods raise it once the server is gone.
    """

    def __init__(self, address: str, secret: bytes, timeout: float = 30.0) -> None:
        sock, self._asking = call(address, timeout), threading.Lock()
        try:
            keep_alive(sock)
            self._channel = Channel(sock, secret, False)
        except OSError:
            sock.close()
            raise
        self._channel.settle()

    def _ask(self, *question: Any) -> Any:
        with self._asking:
            self._channel.send(question)
            found = self._channel.answer()
        if not isinstance(found, dict) or "answer" not in found:
            raise ValueError(f"the store refuses {question[0]}: {found}")
        return found["answer"]

    def set(self, key: str, value: _Word) -> None:
        """Set the value of a key.

        Args:
            key: Text.
            value: Bytes or text.
        """
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Get the value of a key.

        Args:
            key: Text.

        Returns:
            The value, as bytes.

        Raises:
            KeyError: It has none.
        """
        found = self._ask("get", key)
        if found is None:
            raise KeyError(key)
        return str(found).encode("latin-1")

    def check(self, keys: list[str]) -> bool:
        """Check that keys have values.

        Args:
            keys: Texts.

        Returns:
            True if all have.
        """
        return bool(self._ask("check", *keys))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that is a key's value, at first 0.

        Args:
            key: Text.
            amount: Summand; 0 reads the number.

        Returns:
            The sum.

        Raises:
            ValueError: The key's value is not a number.
        """
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: _Word, desired: _Word) -> bytes:
        """Replace the value of a key if it is the expected one.

        Args:
            key: Text.
            expected: The value to be replaced; empty: no value.
            desired: The new value.

        Returns:
            The value afterwards.
        """
        return str(self._ask("compare_set", key, _text(expected), _text(desired))).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        """Delete a key.

        Args:
            key: Text.

        Returns:
            True if it existed.
        """
        return bool(self._ask("delete_key", key))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __del__(self) -> None:
        if hasattr(self, "_channel"):
            self.close()


class StoreServer:
    """A store that this process serves until it is closed.

    Args:
        address: ``tcp://host:port``, with port 0 for a free one, or ``unix:///path``.
        secret: At least 16 bytes that all clients must know.

    Raises:
        ValueError: The secret is too short.
        OSError: The address is not available.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret, self._values, self._lock = secret, dict[str, str](), threading.Lock()
        self._listener = Listener(address, secret, "ucch-store")
        self.address = self._listener.address
        self._listener.accept(self._welcome)

    def _welcome(self, sock: Any) -> Callable[[], None]:
        keep_alive(sock)
        channel = Channel(sock, self._secret, True)
        channel.settle()
        return partial(self._serve, channel)

    def _serve(self, channel: Channel) -> None:
        try:
            while True:
                channel.send(self._answer(channel.receive()))
        except ChannelError as error:
            log.log("net").info("a connection with the store has ended: %s", error)
        finally:
            channel.close()

    def _answer(self, said: Any) -> dict[str, Any]:
        try:
            name, *words = said
            if not all(isinstance(word, int if (name, i) == ("add", 1) else str) for i, word in enumerate(words)):
                raise TypeError(f"{words!r} are no texts")
            with self._lock:
                return {"answer": self._done(name, *words)}
        except (TypeError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _done(self, *question: Any) -> Any:
        values = self._values
        match question:
            case "set", key, value:
                values[key] = value
                return None
            case "get", key:
                return values.get(key)
            case "check", *keys:
                return all(key in values for key in keys)
            case "add", key, amount:
                total = int(values.get(key, "0")) + amount
                values[key] = str(total)
                return total
            case "compare_set", key, expected, desired:
                if values.get(key, "") == expected:
                    values[key] = desired
                return values.get(key, "")
            case "delete_key", key:
                return values.pop(key, None) is not None
        raise ValueError(f"{question!r:.100} is no question to a store")

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.close()
