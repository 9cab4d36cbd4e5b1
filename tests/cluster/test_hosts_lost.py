"""Processes and hosts that are lost: all ranks that are left know within a moment, whom they have lost, and go on."""

import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults import judge
from tests.faults.menu import Trial
from ucc_hetero.launch import emulated_host

pytestmark = pytest.mark.usefixtures("libraries")
PARTING = Path(__file__).with_name("parting_job.py")
#: Of calls, which must have no part in it.
DEADLINE = 300.0


def hole(cluster, host, link=0, to="nomaster"):
    """Frames of a host end in the switch, and it has no way of noticing."""
    batch = f"link set dev {cluster.layout[host].links[link].port} {to}\n"
    emulated_host.configure(cluster._switch_pid(), batch, "")


OUTSIDE = {
    "cut": lambda cluster, host: cluster.set_link(host, up=False),
    "hole": hole,
    "off": lambda cluster, host: cluster.power_off(host),
}


@pytest.fixture
def outputs(emulate, launch, appear, tmp_path, room):
    """Call as ``outputs(slots, fault, lost)``: output of every rank, in good time of those that are not lost."""

    def run(slots, fault, lost):
        cluster = emulate(hosts=len(slots), slots=slots, rate="none")
        size, hosts = sum(slots), [host for host, count in enumerate(slots) for _ in range(count)]
        more = [str(size), fault, ",".join(map(str, lost))]
        words = [[sys.executable, str(PARTING), str(tmp_path), str(rank), *more] for rank in range(size)]
        ranks = [
            launch(cluster, host, each, env={"UCCH_TIMEOUT": str(DEADLINE)})
            for host, each in zip(hosts, words, strict=True)
        ]
        if fault in OUTSIDE:
            appear([tmp_path / "ready"], ranks)
            (tmp_path / "fault").write_text(repr(time.monotonic()))
            OUTSIDE[fault](cluster, hosts[lost[0]])
        return ["" if rank in lost else ranks[rank].communicate(timeout=60 * room)[0] for rank in range(size)]

    return run


@pytest.mark.parametrize("fault", ["kill", "stop", "exit", "hold", "outside"])
def test_survivors_know_and_go_on(hosts, pythons, request, room, fault):
    """To them a host that is off, cut or behind a hole is one that says nothing more: one of these, drawn. A rank that
    holds the interpreter is alive."""
    slots, seed = (1, 2), random.randrange(10**6)
    if fault == "outside":
        fault, slots = random.choice([*OUTSIDE]), random.choice([(2, 2), (1, 1, 1)])
    last = sum(slots) - 1
    trial = Trial(seed, "store", slots, f"host:{last + 1}", False, fault, "collective", (last,), 9, 0.0, DEADLINE)
    verdict = judge.run(trial, {}, room, pythons.of(request.path, {}))
    assert not verdict.failures and verdict.right == last + 1 - len(trial.lost), f"{trial}\n{verdict}"


class End(NamedTuple):
    """How the last rank ends, by one of some words for parting_job.py, and what the others say, if anything."""

    slots: tuple[int, ...]
    hows: str
    others: str
    lost: bool = True
    last: str = "^$"


ENDS = {
    # The first communicator has no older one beside it whose board would show that.
    "while teams are made, on one host": End((2,), "dead", "rank {0} knows: PeerError"),
    "while teams are made": End((1, 2), "kill exit error", "rank {0} knows: PeerError"),
    # The others know at once, and end: a rank that looks a little later sees that the first of them has, too.
    "while contexts are made": End(
        (1, 2), "early", r"rank {0} knows: PeerError rank {0}: rank\(s\) \[({1}, )?2\] of ucch/0"
    ),
    # They give up after the seconds of the store's exchange, or as the first of them does, and end.
    "stops while contexts are made": End((1, 2), "stop", "rank {0} knows: CollectiveTimeout|has given ucch/0"),
    # They hear of it at once, and do not wait for it at their end.
    "gives up what others have made": End((1, 2), "late", "rank {0} knows: PeerError.*has given ucch/0", lost=False,
                                          last=""),
    # They see that it has ended, though it had left, and do not wait for it at their end.
    "once all is abandoned": End((1, 2), "after", "^$"),
    # Ranks without communicators do not wait for it at their end.
    "its host, once all is freed": End((2, 1), "cut", "^$"),
    # Its rank ends, by a farewell, and they do not wait for a word of it that never comes.
    "its store, once all is freed": End((2, 1), "storeless", "^$", lost=False),
    # It ends without a farewell, and is taken for dead, though the store has no word of it.
    "its store, and then by an error": End(
        (2, 1), "failed", "rank {0} knows: PeerError", lost=False, last="RuntimeError"
    ),
    "is interrupted at its end": End((1, 2), "interrupt", "^$", lost=False, last="KeyboardInterrupt"),
    "never, and revokes another communicator": End((1, 2), "revoked", "rank {0} right", lost=False, last="right"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_ends(outputs, name):
    end, last = ENDS[name], sum(ENDS[name].slots) - 1
    how = random.choice(end.hows.split())
    out = outputs(end.slots, how, [last] * end.lost)
    for rank in range(last):
        assert re.search(end.others.format(rank, 1 - rank), out[rank]), (how, out)
    assert re.search(end.last, out[last]), (how, out)


#: What ranks of two hosts wait in, by host memory, when a link is cut. The first rank of a transfer that goes one way
#: sees that the other one does not acknowledge it, and tells it; also if it has sent and waits for nothing (``once``).
ONE_LINK = """
import os, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
from ucc_hetero import CollectiveError, Communicator, rma

def right(comm, n):
    x, y = np.full(n, comm.rank + 1.0), np.full(n, -1.0)
    comm.Allreduce(x, y)
    assert (y == 3).all()

def send(comm, n):
    x = np.full(n, comm.rank + 1.0)
    (comm.Recv if comm.rank else comm.Send)(x, 1 - comm.rank)
    assert (x == 1).all()

def any(comm, n):
    x = np.full(n, comm.rank + 1.0)
    comm.Recv(x, MPI.ANY_SOURCE) if comm.rank else comm.Send(x, 1)
    assert (x == 1).all()

def probe(comm, n):
    if comm.rank:
        comm.Probe(MPI.ANY_SOURCE)
    send(comm, n)

def once(comm, n):
    (comm.Recv if comm.rank else comm.Send)(np.ones(3), 1 - comm.rank)
    if comm.rank == 0 and (folder / "cut").exists():
        while not (folder / "down1").exists():
            time.sleep(0.01)
        raise CollectiveError("it has not waited")

def put(comm, n):
    if not at:
        worker = rma.Worker()
        mine = worker.register(np.ones(n))
        peer, theirs = rma.connect_all(worker, comm)[1 - comm.rank], comm.allgather(mine.descriptor)[1 - comm.rank]
        at.extend((peer, mine, peer.open(theirs)))
    at[0].put(*at[1:]).Wait()

at = []
folder, n, call = Path(os.environ["FOLDER"]), int(os.environ["LENGTH"]), globals()[os.environ["CALL"]]
comm = Communicator()
if "FIRST" not in os.environ:
    call(comm, n)
(folder / f"up{comm.rank}").touch()
while not (folder / "cut").exists():
    time.sleep(0.01)
try:
    while True:
        call(comm, n)
except CollectiveError as error:
    print("cut:", error, flush=True)
(folder / f"down{comm.rank}").touch()
while not (folder / "back").exists():
    time.sleep(0.01)
other = None
while other is None:
    try:
        other = Communicator()
    except CollectiveError:
        pass  # the kernel has just refused to connect, as it still takes the other host for unreachable
with other:
    right(other, n)
    send(other, n)
    assert other._runner.members.job is not comm._runner.members.job, "its connections may have been given up"
print("right", flush=True)
"""


@pytest.mark.parametrize("call", ["right", "send", "once", "any", "probe", "put", "send FIRST", "send FIRST GIVEN"])
def test_the_link_of_the_data_is_cut(emulate, appear, tmp_path, call):
    """And not that of the heartbeats. Both ranks name it, long before their deadline; also where they begin to connect
    over it with the first call, and nobody answers: libucp often gives up after 14 seconds, or we find it before."""

    def cut():
        appear([tmp_path / f"up{rank}" for rank in (0, 1)], [])
        hole(cluster, 1, 1) if first else cluster.set_link(1, up=False, link=1)
        (tmp_path / "cut").touch()
        appear([tmp_path / f"down{rank}" for rank in (0, 1)], [])
        hole(cluster, 1, 1, "master br1") if first else cluster.set_link(1, up=True, link=1)
        (tmp_path / "back").touch()

    call, *first = call.split()
    cluster = emulate(hosts=2, slots=1, links=2, rate="none")
    threading.Thread(target=cut, daemon=True).start()
    about = {
        "FOLDER": str(tmp_path),
        "CALL": call,
        "LENGTH": random.choice(["3", "300000"]),
        **dict.fromkeys(first, "y"),
        "UCCH_HEARTBEAT": "4" if "GIVEN" in first else "1",
    }
    env = {"UCCH_TIMEOUT": str(DEADLINE), "UCX_NET_DEVICES": "eth1", "OMPI_MCA_btl_tcp_if_include": "eth0", **about}
    done = cluster.mpirun([sys.executable, "-c", ONE_LINK], env=env, timeout=120)
    given_up = "|libucp has given up the connection" if "GIVEN" in first else ""
    said = re.findall(f"cut: .*(not answer over the link 10.11.0.[12] - 10.11.0.[12], {given_up})", done.stdout)
    waiting = 1 if call == "once" else 2
    assert (len(said), done.stdout.count("right")) == (waiting, 2), (about, done.stdout, done.stderr)


STOPPED = """
import os, signal
import numpy as np
from ucc_hetero import Communicator, PeerError

comm, x, y = Communicator(), np.ones(3), np.empty(3)
comm.Allreduce(x, y)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
for call in (lambda: comm.Probe(1), lambda: comm.Recv(y, 1), lambda: comm.Allreduce(x, y)):
    try:
        call()
    except PeerError as error:
        print(error, flush=True)
os._exit(3)  # mpirun ends the other one
"""


def test_a_rank_that_is_stopped(emulate):
    """No call takes it for one that has left."""
    done = emulate(hosts=2, slots=1).mpirun([sys.executable, "-c", STOPPED], env={"UCCH_HEARTBEAT": "1"}, timeout=60)
    assert done.stdout.count("rank 1 was stopped, or its host is overloaded") == 3, (done.stdout, done.stderr)


FAILS = """
from mpi4py import MPI
from ucc_hetero import CollectiveError, Communicator
from ucc_hetero.bootstrap.teams import Teams

def fails(*_):
    raise CollectiveError("mine alone")

if MPI.COMM_WORLD.rank == 1:
    Teams._canary = fails
try:
    Communicator()
except CollectiveError as error:
    print(f"rank {MPI.COMM_WORLD.rank}:", error, flush=True)
"""


def test_a_team_that_fails_on_one_rank(emulate):
    """As a connection is refused there, say. Others used to wait for it until the deadline."""
    done = emulate(hosts=2, slots=1).mpirun(
        [sys.executable, "-c", FAILS], env={"UCCH_TIMEOUT": str(DEADLINE)}, timeout=60
    )
    assert "rank 1: mine alone" in done.stdout and "rank 1 could not create its teams" in done.stdout, done.stderr


#: A receive from any rank, of whom one is behind a link that is cut, and sends, and one is beside it and does not.
OF_ANY = """
import os, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
from ucc_hetero import CollectiveError, Communicator

folder, comm, x = Path(os.environ["FOLDER"]), Communicator(), np.ones(300_000)
comm.Allreduce(np.ones(3), np.empty(3))
(folder / f"up{comm.rank}").touch()
while not (folder / "cut").exists():
    time.sleep(0.01)
try:
    if comm.rank == 0:
        comm.Recv(x, MPI.ANY_SOURCE)
    elif comm.rank == 2:
        comm.Send(x, 0)
except CollectiveError as error:
    print(f"rank {comm.rank}:", error, flush=True)
(folder / f"down{comm.rank}").touch()
while comm.rank and not (folder / "down0").exists():
    time.sleep(0.01)
os._exit(0)  # no rank comes to the end of MPI
"""


def test_a_receive_from_any_rank_names_those_behind_a_cut(emulate, appear, tmp_path):
    """At its deadline: a rank beside it could have sent."""

    def cut():
        appear([tmp_path / f"up{rank}" for rank in range(3)], [])
        cluster.set_link(1, up=False, link=1)
        (tmp_path / "cut").touch()

    cluster = emulate(hosts=2, slots=(2, 1), links=2, rate="none")
    threading.Thread(target=cut, daemon=True).start()
    env = {"UCCH_TIMEOUT": "15", "UCX_NET_DEVICES": "eth1", "OMPI_MCA_btl_tcp_if_include": "eth0"}
    done = cluster.mpirun([sys.executable, "-c", OF_ANY], env={**env, "FOLDER": str(tmp_path)}, timeout=120)
    said = r"rank 0: .* timeout, .*; rank\(s\) \[2\] cannot be heard: "
    why = "(.*not answer over the link 10.11.0|libucp has given up the connection)"
    assert re.search(said + why, done.stdout), (done.stdout, done.stderr)
