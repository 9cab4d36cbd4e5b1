"""Agents: processes that find each other, prove that they know a secret, and go; and what strangers send them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveTimeout, PeerError
from ucc_hetero.rma import channel as channels
from ucc_hetero.rma.channel import Channel, ChannelError

SECRET = b"a secret of tests"
#: Inputs of each fuzzed reader; docs/rma.md says how many.
INPUTS = 200
fuzzed = settings(max_examples=INPUTS, deadline=None, database=None)


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def pair(secret: bytes = SECRET) -> tuple[Channel, Channel, socket.socket]:
    """Both ends of a connection, the server first, and the client's socket."""
    ours, theirs = socket.socketpair()
    found: list[Any] = []

    def serve() -> None:
        try:
            found.append(Channel(ours, SECRET, True))
        except ChannelError as error:
            found.append(error)
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client = Channel(theirs, secret, False)
    except ChannelError:
        theirs.close()
        raise
    finally:
        thread.join()
    return found[0], client, theirs


def test_messages_come_in_order_and_whole() -> None:
    server, client, _ = pair()
    said = [{"n": i, "text": "x" * (i * 1000)} for i in range(100)]
    threading.Thread(target=lambda: [client.send(each) for each in said]).start()
    assert [server.receive() for _ in said] == said
    server.send("back")
    assert client.receive() == "back"
    with pytest.raises(ValueError, match="1048576 may be"):
        client.send("x" * channels.MOST)
    client.close()
    with pytest.raises(ChannelError, match="has ended"):
        server.receive()
    server.close()


def test_another_secret_or_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChannelError, match="ended the connection|broke"):
        pair(b"another secret, as long")
    with sockets() as (ours, theirs):
        theirs.sendall(b"UCHA\x02\x00" + bytes(32))
        with pytest.raises(ChannelError, match="speaks version 2, and this is 1"):
            Channel(ours, SECRET, True)
    monkeypatch.setattr(channels, "PATIENCE", 0.1)
    with sockets() as (ours, theirs), pytest.raises(ChannelError, match="not proved and introduced itself"):
        Channel(ours, SECRET, True)


@fuzzed
@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_strangers_are_refused(data: bytes, server: bool, greets: bool) -> None:
    with sockets() as (ours, theirs):
        theirs.sendall((b"UCHA\x01\x00" + bytes(32) if greets else b"") + data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            Channel(ours, SECRET, server)


@fuzzed
@given(st.data())
def test_changed_frames_are_refused(data: st.DataObject) -> None:
    server, client, sock = pair()
    with contextlib.closing(server), contextlib.closing(client):
        taken: list[bytes] = []
        client._write = taken.append  # type: ignore[method-assign]
        client.send({"message": 1})
        client.send({"message": 2})
        frames = bytearray(b"".join(taken))
        how = data.draw(st.sampled_from(["flip", "cut", "swap", "noise"]))
        if how == "flip":
            frames[data.draw(st.integers(0, len(taken[0]) - 1))] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del frames[data.draw(st.integers(0, len(taken[0]) - 1)) :]
        elif how == "swap":
            frames = bytearray(taken[1] + taken[0])
        else:
            frames = bytearray(data.draw(st.binary(max_size=100)))
        sock.sendall(frames)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            server.receive()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
near = st.fixed_dictionaries(
    {}, optional={"message": anything, "regions": anything, "gone": anything, "name": anything}
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rma.Agent]:
    """An agent that publishes a region of 1,000 bytes."""
    with rma.Agent(f"unix://{tmp_path_factory.mktemp('agent')}/a.sock", SECRET, name="first") as made:
        made.publish("room", made.worker.register(np.zeros(1000, np.uint8)))
        yield made


@settings(max_examples=200, deadline=None, database=None)
@given(first=anything | near, second=anything | near)
def test_nonsense_of_one_that_knows_the_secret_harms_nobody(agent: rma.Agent, first: Any, second: Any) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(agent.address.removeprefix("unix://"))
        client = Channel(sock, SECRET, False)
        with contextlib.suppress(ChannelError):
            client.send(first)
            client.send(second)
            client.receive()
        client.close()


def test_agents_meet_and_part(agent: rma.Agent) -> None:
    with rma.Agent("tcp://127.0.0.1:0", SECRET, name="second") as other:
        peer = other.connect(agent.address)
        source = other.worker.register(np.full(1000, 9, np.uint8))
        peer.endpoint.put(source, peer.open("room")).Wait()
        room = next(iter(agent.worker.regions))
        assert (room._owner.array == 9).all()
        peer.send(["any", {"thing": 1}])
        who, said = agent.receive(600)
        assert (who.name, said) == ("second", ["any", {"thing": 1}])
        mine = other.worker.register(np.zeros(10, np.uint8))
        other.publish("mine", mine)
        target = who.open("mine", 10)
        other.withdraw("mine")
        assert target.stale
        with pytest.raises(CollectiveTimeout, match="'nothing'"):
            peer.open("nothing", 0.05)
    while who.alive:
        time.sleep(0.01)
    with pytest.raises(PeerError):
        who.send(1)
    assert not agent.peers


def test_mistakes_are_named(agent: rma.Agent, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        rma.Agent("tcp://127.0.0.1:0", b"short")
    for bad in ("host:7", "tcp://host", "tcp://h:99999", "unix://x/y", "http://h:1"):
        with pytest.raises(ValueError, match="is neither tcp://host:port nor unix:///path"):
            rma.Agent(bad, SECRET)
    with pytest.raises(ValueError, match="address: unix:///nowhere"):
        rma.Agent("unix:///nowhere/at/all", SECRET)
    with rma.Agent("tcp://127.0.0.1:0", bytes(16)) as stranger:
        with pytest.raises(ChannelError, match=r"a\.sock: the other side has (another secret|ended the connection)"):
            stranger.connect(agent.address)
        with pytest.raises(ChannelError, match="No such file"):
            stranger.connect(f"unix://{tmp_path}/none")


#: Another process: serves a region until it is killed.
SERVER = """
import sys, time
import numpy as np
from ucc_hetero import rma
agent = rma.Agent(sys.argv[1], sys.argv[2].encode(), name="server")
agent.publish("room", agent.worker.register(np.zeros(1 << 24, np.uint8)))
print(agent.address, flush=True)
while True:
    peer, said = agent.receive()
    peer.send(said)
"""


@contextlib.contextmanager
def served(address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Such a process, and its address."""
    command = [sys.executable, "-c", SERVER, address, SECRET.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_agent_that_dies_fails_its_own_transfers(kind: str, tmp_path: Path) -> None:
    address = "tcp://127.0.0.1:0" if kind == "tcp" else f"unix://{tmp_path}/{{}}.sock"
    with (
        served(address.format(1)) as (first, one),
        served(address.format(2)) as (_, two),
        rma.Agent(address.format(3), SECRET) as agent,
    ):
        dead, other = agent.connect(one), agent.connect(two)
        source = agent.worker.register(np.ones(1 << 24, np.uint8))
        rooms = {peer: peer.open("room") for peer in (dead, other)}
        dead.endpoint.put(source, rooms[dead]).Wait()
        first.send_signal(signal.SIGKILL)
        with pytest.raises(PeerError):
            while True:
                dead.endpoint.put(source, rooms[dead]).Wait()
        while dead.alive:
            time.sleep(0.01)
        other.endpoint.put(source, rooms[other]).Wait()
        other.send("still there")
        assert agent.receive(600)[1] == "still there"
        with served(address.format(1)) as (_, again):  # and it may come back
            peer = agent.connect(again)
            peer.endpoint.put(source, peer.open("room")).Wait()
        other.endpoint.close()  # and its target with it, as where its end is heard of
        for length in (None, 8):
            with pytest.raises(PeerError, match="closed"):
                other.endpoint.put(source, rooms[other], 0, 0, length)
        source.close()


def certificates(folder: Path, name: str, authority: str = "authority") -> rma.Certificates:
    """A certificate for 127.0.0.1, signed by an authority that is made with it, if need be."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not (folder / f"{authority}.pem").exists():
        openssl(
            "req", "-x509", *key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-subj", f"/CN={authority}"
        )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    by = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", f"{name}.csr", *by, "-out", f"{name}.pem")
    return rma.Certificates(*(str(folder / each) for each in (f"{name}.pem", f"{name}.key", f"{authority}.pem")))


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificates")
def test_certificates(tmp_path: Path) -> None:
    one, two, foreign = (certificates(tmp_path, name, by) for name, by in (("a", "ca"), ("b", "ca"), ("c", "other")))
    with rma.Agent("tcp://127.0.0.1:0", SECRET, tls=one) as server:
        server.publish("room", server.worker.register(np.zeros(8)))
        with rma.Agent("tcp://127.0.0.1:0", SECRET, tls=two) as client:
            peer = client.connect(server.address)
            peer.open("room")
            for i in range(100):
                peer.send(i)
            assert [server.receive(600)[1] for _ in range(100)] == list(range(100))
        for wrong in (foreign, None):
            with rma.Agent("tcp://127.0.0.1:0", SECRET, tls=wrong) as client, pytest.raises(ChannelError):
                client.connect(server.address)
