"""The store that ranks meet at, and ranks that come later; ranks are threads here."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero import Store, StoreServer
from ucc_hetero.rma.channel import ChannelError

SECRET = os.urandom(32)


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    made = StoreServer("tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/store", SECRET)
    yield made
    made.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results, or exceptions, of calls at the same time."""
    found: dict[int, Any] = {}

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return [found[place] for place in range(len(calls))]


def test_keys_and_values(server: StoreServer) -> None:
    one, other = (Store(server.address, SECRET) for _ in range(2))
    data = bytes(range(256)) * 300
    one.set("a", data)
    one.set("b", "ü")
    assert other.get("a") == data and other.get("b").decode("latin-1") == "ü"
    assert other.check(["a", "b"]) and not other.check(["a", "c"])
    with pytest.raises(KeyError):
        other.get("c")
    assert other.compare_set("c", "", "first") == one.compare_set("c", "", "second") == b"first"
    assert one.compare_set("c", b"first", b"third") == b"third"
    assert one.delete_key("c") and not other.delete_key("c") and not other.check(["c"])
    with pytest.raises(ValueError, match="the store refuses add"):
        one.add("a", 1)
    assert one.get("a") == data  # it goes on
    calls = [lambda: Store(server.address, SECRET).add("n", 1) for _ in range(20)]
    assert sorted(together(*calls)) == list(range(1, 21))


def test_a_server_that_has_no_file_left_for_a_connection_goes_on(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, accept = [OSError(errno.EMFILE, "too many open files")], socket.socket.accept

    def accepted(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    Store(server.address, SECRET).set("a", "b")  # accepted before
    assert Store(server.address, SECRET).get("a") == b"b" and not failures


def test_strangers_are_refused(server: StoreServer) -> None:
    with pytest.raises(ChannelError):
        Store(server.address, b"another secret of theirs")
    if server.address.startswith("tcp"):
        host, port = server.address[6:].split(":")
        with socket.create_connection((host, int(port))) as stranger, suppress(OSError):
            stranger.sendall(os.urandom(4096))
    Store(server.address, SECRET).set("a", "b")
    with pytest.raises(ValueError, match="16 bytes"):
        StoreServer("tcp://127.0.0.1:0", b"short")
