"""Agent that others put to (serve), or that puts to two others until it has lost the first (use FOLDER); and a worker
whose address others get (be FOLDER), or one that connects once the host of that is gone (meet FOLDER)."""

import sys
import time
from pathlib import Path

import numpy as np

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveError, PeerError

SECRET = b"a secret of tests"
BYTES = 1 << 20


def serve() -> None:
    """Have a room for others, until the end."""
    agent = rma.Agent("tcp://0.0.0.0:7000", SECRET)
    agent.publish("room", agent.worker.register(np.full(BYTES, 7, np.uint8)))
    while True:
        peer, said = agent.receive(3600)
        peer.send(said)


def found(agent: rma.Agent, host: str) -> rma.AgentPeer:
    """Agent of another host, which may not have begun yet."""
    while True:
        try:
            return agent.connect(f"tcp://{host}:7000")
        except OSError:
            time.sleep(0.05)


def use(folder: Path) -> None:
    """Put to both peers; to the second one also when the first is lost."""
    agent = rma.Agent("tcp://0.0.0.0:7000", SECRET)
    dead, other = found(agent, "node1"), found(agent, "node2")
    source, back = np.zeros(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
    mine, here = agent.worker.register(source), agent.worker.register(back)
    rooms = {peer: peer.open("room") for peer in (dead, other)}
    rng = np.random.default_rng()

    def put(peer: rma.AgentPeer) -> None:
        source[:] = rng.integers(0, 256, BYTES, np.uint8)
        peer.endpoint.put(mine, rooms[peer], notify=b"there").Wait()
        back[:] = 0
        peer.endpoint.get(here, rooms[peer]).Wait()
        assert (back == source).all()

    put(dead)
    put(other)
    print(dead.endpoint.info(mine, rooms[dead]), flush=True)
    (folder / "ready").touch()
    try:
        while True:
            put(dead)
    except PeerError as error:
        print("lost:", error, time.time() - float((folder / "fault").read_text()), flush=True)
    while dead.alive:
        time.sleep(0.01)
    for _ in range(3):
        put(other)
    other.send({"still": "there"})
    assert agent.receive(3600)[1] == {"still": "there"}
    print("right", flush=True)


def be(folder: Path) -> None:
    """Have a room for others, whom nobody answers."""
    worker = rma.Worker()
    region = worker.register(np.zeros(64, np.uint8))
    (folder / "room").write_bytes(region.descriptor)
    (folder / "part").write_bytes(worker.address)
    (folder / "part").rename(folder / "address")
    time.sleep(3600)


def meet(folder: Path) -> None:
    """Connect once the fault has happened."""
    worker = rma.Worker(timeout=3)
    mine = worker.register(np.ones(64, np.uint8))
    (folder / "ready").touch()
    while not (folder / "fault").exists():
        time.sleep(0.01)
    peer = worker.connect((folder / "address").read_bytes())
    try:
        peer.put(mine, peer.open((folder / "room").read_bytes())).Wait()
    except CollectiveError as error:
        print("right:", type(error).__name__, error, flush=True)


if __name__ == "__main__":
    {"serve": serve, "use": use, "be": be, "meet": meet}[sys.argv[1]](*map(Path, sys.argv[2:]))
