"""An agent that other agents put to (serve), or that puts to two others until the first is lost (use FOLDER); a worker
whose address others get (be FOLDER), or that connects once the address's host is gone (meet FOLDER); an agent that
loses agents of its own host during long puts (outlive FOLDER); these agents are processes of another one (hold
FOLDER)."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveError, PeerError

SECRET = b"a secret of tests"
BYTES = 1 << 20
#: Bytes of a put that takes long enough to die in, and the number of agents that die.
LONG, DEATHS = 1 << 26, 12


def serve():
    agent = rma.Agent("tcp://0.0.0.0:7000", SECRET)
    agent.publish("room", agent.worker.register(np.full(BYTES, 7, np.uint8)))
    while True:
        peer, said = agent.receive(3600)
        peer.send(said)


def found(agent, host):
    while True:
        try:
            return agent.connect(f"tcp://{host}:7000")
        except OSError:
            time.sleep(0.05)


def use(folder):
    """Put to both peers, and to the second one also after the first is lost."""
    agent = rma.Agent("tcp://0.0.0.0:7000", SECRET)
    dead, other = found(agent, "node1"), found(agent, "node2")
    source, back = np.zeros(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
    mine, here = agent.worker.register(source), agent.worker.register(back)
    rooms = {peer: peer.open("room") for peer in (dead, other)}
    rng = np.random.default_rng()

    def put(peer):
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


def be(folder):
    """Register memory for peers, and answer none of them."""
    worker = rma.Worker()
    region = worker.register(np.zeros(64, np.uint8))
    (folder / "room").write_bytes(region.descriptor)
    (folder / "part").write_bytes(worker.address)
    (folder / "part").rename(folder / "address")
    time.sleep(3600)


def meet(folder):
    """Connect after the fault has happened."""
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


def hold(folder):
    """Start several agents with much registered memory, each a process that prints its process id and address."""
    for _ in range(DEATHS):
        if not os.fork():
            agent = rma.Agent(f"unix://{folder}/{os.getpid()}", SECRET)
            agent.publish("room", agent.worker.register(np.zeros(LONG, np.uint8)))
            os.write(1, f"{os.getpid()} {agent.address}\n".encode())
            agent.receive(3600)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def outlive(folder):
    """Kill one agent after the other at a random moment of a put, and end as the put has ended."""
    command = [sys.executable, __file__, "hold", str(folder)]
    source = np.ones(LONG, np.uint8)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        for _ in range(DEATHS):
            number, address = holder.stdout.readline().split()
            with rma.Agent(f"unix://{folder}/outliving", SECRET) as agent:
                mine, peer = agent.worker.register(source), agent.connect(address)
                room, begun = peer.open("room"), time.perf_counter()
                peer.endpoint.put(mine, room).Wait()
                took = time.perf_counter() - begun
                put = peer.endpoint.put(mine, room)
                time.sleep(random.uniform(0, took))
                os.kill(int(number), signal.SIGKILL)
                with contextlib.suppress(PeerError):
                    put.Wait()
    print("right", flush=True)


if __name__ == "__main__":
    {"serve": serve, "use": use, "be": be, "meet": meet, "hold": hold, "outlive": outlive}[sys.argv[1]](
        *map(Path, sys.argv[2:])
    )
