"""Agents of one-sided communication: how they find each other, authenticate, and end."""

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_child, until

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveTimeout, NotSupported, PeerError
from ucc_hetero.rma import channel as channels
from ucc_hetero.rma import worker as workers
from ucc_hetero.rma.channel import Channel, ChannelError

SECRET = b"a secret of tests"
#: Inputs of each fuzzed reader; docs/rma.md says how many.
INPUTS = 200
fuzzed = settings(max_examples=INPUTS, deadline=None, database=None)


@contextlib.contextmanager
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def pair(secret=SECRET):
    ours, theirs = socket.socketpair()

    def end(sock, known, server):
        try:
            return Channel(sock, known, server)
        except ChannelError:
            sock.close()
            raise

    with ThreadPoolExecutor() as pool:
        server = pool.submit(end, ours, SECRET, True)
        client = end(theirs, secret, False)
        return server.result(), client, theirs


def test_messages_come_in_order_and_whole():
    server, client, _ = pair()
    said = [{"n": i, "text": "x" * (i * 1000)} for i in range(100)]
    threading.Thread(target=lambda: [client.send(each) for each in said]).start()
    assert [server.receive() for _ in said] == said
    server.send("back")
    assert client.receive() == "back"
    with pytest.raises(ValueError, match="at most 1048576 are allowed"):
        client.send("x" * channels.MOST)
    client.close()
    with pytest.raises(ChannelError, match="has ended"):
        server.receive()
    server.close()


def test_another_secret_or_version_is_refused(monkeypatch):
    with pytest.raises(ChannelError, match="ended the connection|broke"):
        pair(b"another secret, as long")
    with sockets() as (ours, theirs):
        theirs.sendall(b"UCHA\x01\x00" + bytes(32))
        with pytest.raises(ChannelError, match="speaks version 1, but this side 2"):
            Channel(ours, SECRET, True)
    monkeypatch.setattr(channels, "PATIENCE", 0.1)
    with sockets() as (ours, theirs), pytest.raises(ChannelError, match="not proved and introduced itself"):
        Channel(ours, SECRET, True)


@fuzzed
@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_strangers_are_refused(data, server, greets):
    with sockets() as (ours, theirs):
        theirs.sendall((b"UCHA\x02\x00" + bytes(32) if greets else b"") + data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            Channel(ours, SECRET, server)


@fuzzed
@given(st.data())
def test_changed_frames_are_refused(data):
    server, client, sock = pair()
    with contextlib.closing(server), contextlib.closing(client):
        taken = []
        client._write = taken.append
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


texts = st.text("aZ0_/ \0\n\xa0é٣\u202e\U0001f600", max_size=20)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)
near = st.fixed_dictionaries({}, optional={"message": anything, "regions": anything, "name": anything})


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    with rma.Agent(f"unix://{tmp_path_factory.mktemp('agent')}/a.sock", SECRET, name="first") as made:
        made.publish("room", made.worker.register(np.zeros(1000, np.uint8)))
        yield made


@settings(max_examples=80, deadline=None, database=None)
@given(first=anything | near, second=anything | near)
def test_nonsense_of_one_that_knows_the_secret_harms_nobody(agent, first, second):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(agent.address.removeprefix("unix://"))
        client = Channel(sock, SECRET, False)
        with contextlib.suppress(ChannelError):
            client.send(first)
            client.send(second)
            client.receive()
        client.close()


def test_agents_meet_and_part(agent):
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
        target = peer.open("room")
        peer.endpoint.close()  # and its targets, as when the peer's end is noticed
        for length in (None, 8):
            with pytest.raises(PeerError, match="closed"):
                peer.endpoint.put(source, target, 0, 0, length)
    until(lambda: not who.alive)
    with pytest.raises(PeerError):
        who.send(1)
    assert not agent.peers


def test_an_agent_takes_its_endpoints_along_from_a_worker_that_stays(agent, tmp_path):
    """Also the memory that they have pinned."""
    with rma.Worker() as worker:
        with rma.Agent(f"unix://{tmp_path}/brief", SECRET, worker=worker) as brief:
            endpoint = brief.connect(agent.address).endpoint
            assert [*worker.peers.values()] == [endpoint]
        until(lambda: not worker.peers)


def test_an_agent_comes_back_where_one_was_killed(agent, tmp_path):
    """The killed agent's socket still exists. tests/cluster/test_rma.py tests the death itself."""
    address = f"unix://{tmp_path}/back.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(address.removeprefix("unix://"))
    with rma.Agent(address, SECRET) as back:
        assert agent.connect(back.address).alive


def test_a_forked_child_that_leaves_a_with_block_ends_nothing(agent):
    """For example by sys.exit(): its parent's peers used to be told that it had ended. A worker of the child's, which
    nobody could have connected to, is refused."""
    with rma.Agent("tcp://127.0.0.1:0", SECRET) as other:
        peer = other.connect(agent.address)

        def leaves():
            other.__exit__(None, None, None)
            with pytest.raises(NotSupported, match="spawn"):
                rma.Worker()

        in_child(leaves)
        peer.send("still here")
        assert agent.receive(600)[1] == "still here"
        source = other.worker.register(np.full(1000, 9, np.uint8))
        peer.endpoint.put(source, peer.open("room")).Wait()
        assert agent.connect(other.address).alive


#: The number of messages that an agent keeps for `receive`.
MESSAGES = 10_000


@pytest.fixture
def connected(tmp_path):
    """Return an agent, one that has connected to it, and the connection as the latter sees it."""
    with rma.Agent(f"unix://{tmp_path}/a", SECRET) as called, rma.Agent(f"unix://{tmp_path}/b", SECRET) as calling:
        yield called, calling, calling.connect(called.address)


@contextmanager
def half_connected(called, calling, name):
    """Return a connection of this test to an agent, which has introduced itself and waits for the test's answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(called.address.removeprefix("unix://"))
        channel = Channel(sock, SECRET, False)
        channel.send({"name": name, "worker": calling.worker.address.hex()})
        assert "worker" in channel.receive()
        yield channel


def test_a_connection_that_begins_while_the_one_before_it_ends_keeps_its_endpoint(connected):
    called, calling, first = connected
    with half_connected(called, calling, "second") as second:
        assert second.receive() == {"ready": True}
        first.leave()
        until(lambda: not called.peers)
        second.send({"ready": True})
        until(lambda: called.peers)
        assert called.peers[0].endpoint.alive
        second.close()


def test_a_connection_that_is_made_anew_before_the_end_of_the_last_was_read_has_a_new_endpoint(connected):
    """Like the other side's. The thread that would read the end waits here until messages are received."""
    called, calling, first = connected
    until(lambda: called.peers)
    (theirs,) = called.peers
    for i in range(MESSAGES + 1):
        first.send(i)
    first.leave()
    until(lambda: not calling.peers)
    second = calling.connect(called.address)
    until(lambda: called.peers[-1] is not theirs)  # this side sends the last message of the handshake
    assert theirs in called.peers, "its end was read"
    again = called.peers[-1]
    assert not theirs.endpoint.alive
    for _ in range(MESSAGES + 1):
        called.receive(600)
    until(lambda: theirs not in called.peers)
    assert again.endpoint.alive
    room, given = np.zeros(1000, np.uint8), np.frombuffer(secrets.token_bytes(1000), np.uint8).copy()
    called.publish("room", called.worker.register(room))
    second.endpoint.put(calling.worker.register(given), second.open("room")).Wait()
    assert (room == given).all()


def test_regions_that_change_while_agents_meet_are_told(connected):
    called, calling, _ = connected
    before, after = (called.worker.register(np.zeros(1000, np.uint8)) for _ in range(2))
    called.publish("anew", before)
    called.publish("taken back", called.worker.register(np.zeros(1000, np.uint8)))
    with half_connected(called, calling, "second") as second:
        assert second.receive() == {"ready": True}
        called.publish("anew", after)
        called.withdraw("taken back")
        called.publish("later", before)
        second.send({"ready": True})
        assert second.receive() == {"regions": {"anew": after.descriptor.hex(), "later": before.descriptor.hex()}}
        called.withdraw("anew")
        assert second.receive() == {"regions": {"anew": None}}
        second.close()


def test_more_is_published_than_a_message_or_a_socket_holds(connected):
    """On both sides, before they connect: raises ValueError; its socket used to stay open."""
    called, calling, _ = connected
    with rma.Agent(calling.address + "2", SECRET) as third:
        names = [f"{i:x<990}" for i in range(3000)]
        for each in (called, third):
            region = each.worker.register(np.full(8, 7, np.uint8))
            for name in names:
                each.publish(name, region)
            with pytest.raises(ValueError, match="at most 1000 are allowed"):
                each.publish("x" * 1001, region)
        peer = third.connect(called.address)
        until(lambda: len(called.peers) == 2)  # this side sends the last message of the handshake
        _, theirs = called.peers
        for side in (peer, theirs):
            assert all(side.open(name, 600).nbytes == 8 for name in random.sample(names, 5))


def test_a_peer_that_does_not_read_holds_up_no_other(connected):
    """For example a stopped peer. Once it reads it gets everything, messages after the published data included."""
    called, calling, peer = connected
    with half_connected(called, calling, "stopped") as stopped:
        stopped.send({"ready": True})
        until(lambda: len(called.peers) == 2)
        region, names = called.worker.register(np.zeros(8, np.uint8)), {f"{i:x<990}" for i in range(3000)}
        for name in names:
            called.publish(name, region)
        assert all(peer.open(name, 600).nbytes == 8 for name in random.sample([*names], 5))
        for other in called.peers:
            threading.Thread(target=other.send, args=("behind it",), daemon=True).start()
        assert calling.receive(600) == (peer, "behind it")
        assert stopped.receive() == {"ready": True}
        heard = {}
        while "message" not in (said := stopped.receive()):
            heard |= said["regions"]
        assert set(heard) == names
        stopped.close()


@pytest.fixture
def by_tcp(monkeypatch):
    """Make processes believe that they are on different hosts; return a function that ends all of libucp's
    connections."""
    monkeypatch.setattr(workers, "_may_open", lambda process: False)
    monkeypatch.setenv("UCX_TLS", "tcp")
    before = set(os.listdir("/proc/self/fd"))

    def cut():
        for file in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(OSError):  # it is already closed, or was not connected
                if os.readlink(f"/proc/self/fd/{file}").startswith("socket"):
                    with socket.socket(fileno=os.dup(int(file))) as each:
                        listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        if each.family == socket.AF_INET and not listens:
                            each.shutdown(socket.SHUT_RDWR)

    return cut


@pytest.mark.parametrize("is_one_sided", [False, True])
def test_an_endpoint_that_libucp_gives_up_takes_the_connection_along(by_tcp, connected, is_one_sided):
    """On both sides, or if only one side has noticed. The next connection can be made at once."""
    called, calling, peer = connected
    room = np.zeros(1000, np.uint8)
    called.publish("room", called.worker.register(room))

    def put(peer):
        given = np.frombuffer(secrets.token_bytes(1000), np.uint8).copy()
        peer.endpoint.put(calling.worker.register(given), peer.open("room")).Wait()
        assert (room == given).all()

    put(peer)
    (theirs,) = called.peers
    if is_one_sided:
        random.choice([theirs, peer]).endpoint.lose()
    else:
        by_tcp()
        with pytest.raises(PeerError):
            while True:
                put(peer)
        until(lambda: not (theirs.endpoint.alive or peer.endpoint.alive))
    again = calling.connect(called.address)
    until(lambda: not (peer.alive or theirs.alive))
    until(lambda: [each.endpoint for each in calling.peers] == [again.endpoint])
    while True:
        try:
            return put(again)
        except PeerError:  # a network thread had not noticed the lost connection yet
            assert not is_one_sided
            again = calling.connect(called.address)


def test_mistakes_are_named(agent, tmp_path):
    with pytest.raises(ValueError, match="at least 16 bytes"):
        rma.Agent("tcp://127.0.0.1:0", b"short")
    for bad in ("host:7", "tcp://host", "tcp://h:99999", "unix://x/y", "http://h:1"):
        with pytest.raises(ValueError, match="is neither tcp://host:port nor unix:///path"):
            rma.Agent(bad, SECRET)
    with pytest.raises(ValueError, match="address: unix:///nowhere"):
        rma.Agent("unix:///nowhere/at/all", SECRET)
    with rma.Worker() as other, pytest.raises(ValueError, match="region: it is of another worker"):
        agent.publish("theirs", other.register(np.zeros(8)))
    with rma.Agent("tcp://127.0.0.1:0", bytes(16)) as stranger:
        with pytest.raises(ChannelError, match=r"a\.sock: the other side has (another secret|ended the connection)"):
            stranger.connect(agent.address)
        with pytest.raises(ChannelError, match="No such file"):
            stranger.connect(f"unix://{tmp_path}/none")


def certificates(folder, name, authority="authority"):
    """Make a certificate for 127.0.0.1, signed by an authority that is created if necessary."""

    def openssl(*words):
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


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, which makes certificates")
def test_certificates(tmp_path):
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
