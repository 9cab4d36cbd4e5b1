"""Store of keys and values in a process of its own, at which ranks meet that have no MPI job in common.

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
    """A value as JSON has it: a character for each byte."""
    return value if isinstance(value, str) else value.decode("latin-1")


class Store:
    """The store at an address, with the methods of torch's that ranks meet by; from any thread.

    Args:
        address: ``tcp://host:port`` or ``unix:///path`` of a :class:`StoreServer`.
        secret: That of the server.
        timeout: Seconds in which it must be connected with.

    Raises:
        OSError: There is no server, or its secret is another one. All methods raise it once the server is gone.
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
            found = self._channel.receive()
        if not isinstance(found, dict) or "answer" not in found:
            raise ValueError(f"the store refuses {question[0]}: {found}")
        return found["answer"]

    def set(self, key: str, value: _Word) -> None:
        """Give a key a value.

        Args:
            key: Text.
            value: Bytes or text.
        """
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Read the value of a key.

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
        """Tell if keys have values.

        Args:
            keys: Texts.

        Returns:
            True if all of them have.
        """
        return bool(self._ask("check", *keys))

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key has, 0 at first.

        Args:
            key: Text.
            amount: What to add; 0 reads it.

        Returns:
            The sum.

        Raises:
            ValueError: The key's value is no number.
        """
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: _Word, desired: _Word) -> bytes:
        """Replace the value of a key if it is the expected one.

        Args:
            key: Text.
            expected: Value that the key has; empty for none.
            desired: Value that it is to have.

        Returns:
            The value that it has then.
        """
        return str(self._ask("compare_set", key, _text(expected), _text(desired))).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        """Forget a key and its value.

        Args:
            key: Text.

        Returns:
            True if there was one.
        """
        return bool(self._ask("delete_key", key))

    def close(self) -> None:
        """Leave the store."""
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
        OSError: The address cannot be had.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret, self._values, self._lock = secret, dict[str, str](), threading.Lock()
        self._methods: dict[str, Callable[..., Any]] = {
            "set": self._set, "get": self._get, "check": self._check, "add": self._add,
            "compare_set": self._compare_set, "delete_key": self._delete_key,
        }  # fmt: skip
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
            with self._lock:
                return {"answer": self._methods[name](*words)}
        except (TypeError, ValueError, KeyError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _set(self, key: str, value: str) -> None:
        self._values[_str(key)] = _str(value)

    def _get(self, key: str) -> str | None:
        return self._values.get(_str(key))

    def _check(self, *keys: str) -> bool:
        return all(_str(key) in self._values for key in keys)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(_str(key), "0")) + int(amount)
        self._values[key] = str(total)
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        if self._values.get(_str(key), "") == _str(expected):
            self._values[key] = _str(desired)
        return self._values.get(key, "")

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(_str(key), None) is not None

    def close(self) -> None:
        """Serve no more connections."""
        self._listener.close()


def _str(word: Any) -> str:
    if not isinstance(word, str):
        raise TypeError(f"{word!r} is no text")
    return word
