"""The store that ranks meet at, and ranks that come later; ranks are threads here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero import Store, StoreServer
from ucc_hetero.bootstrap import growth
from ucc_hetero.bootstrap.storecomm import StoreComm
from ucc_hetero.errors import CollectiveTimeout
from ucc_hetero.native.libraries import load
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


def ranks(address: str, size: int) -> list[StoreComm]:
    load()
    return [StoreComm.first(Store(address, SECRET), rank, range(size), size, 30.0) for rank in range(size)]


def until_let_in(comm: StoreComm) -> StoreComm:
    """The exchange with two newcomers."""
    while (made := growth.let_in(comm, comm.store, 2, 30.0)) is None:
        pass
    return made


def test_newcomers_are_the_last_ranks(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a communicator that has grown before; who has come and gone is left out."""
    there = ranks(server.address, 2)
    let_in = [partial(growth.let_in, comm, comm.store, 1, 30.0) for comm in there]
    assert together(*let_in) == [None, None]
    store = Store(server.address, SECRET)
    store.add("ucch/growth/came", 1)  # and is seen no more
    with monkeypatch.context() as short:  # not for newcomers that do answer, when they have a core
        short.setattr(growth, "_ANSWER_S", 0.1)
        assert together(*let_in) == [None, None]
    for size in (4, 6):
        arrive = [partial(growth.arrive, Store(server.address, SECRET), 30.0) for _ in range(2)]
        found = together(*[partial(until_let_in, comm) for comm in there], *arrive)
        assert [each.Get_rank() for each in found[: size - 2]] == list(range(size - 2))
        there = sorted(found, key=StoreComm.Get_rank)
        gathered = together(*[partial(comm.allgather, comm.Get_rank()) for comm in there])
        assert gathered == [list(range(size))] * size


def test_nobody_lets_them_in(server: StoreServer) -> None:
    load()
    with pytest.raises(CollectiveTimeout, match="Grow"):
        growth.arrive(Store(server.address, SECRET), 0.2)
