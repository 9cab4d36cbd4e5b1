"""Cases of test_faults.py: ranks that die, and survivors that go on. Ranks whose results are correct print it."""

import atexit
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
from world import DICE, RANK, WORLD, arrays, caught

import ucc_hetero as u
from ucc_hetero.bindings import ucc
from ucc_hetero.bootstrap import exit as at_exit
from ucc_hetero.bootstrap import membership, process


def right(comm):
    x, y = arrays()
    comm.Allreduce(x, y)
    assert (y == comm.size).all()
    print("right", flush=True)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def abandon_teams():
    """As after a team that came to nothing: the next one gets a new context."""
    for job in process.all_jobs():
        job.team_abandoned = True


def revocation():
    """It ends what others wait for: blocking, non-blocking and persistent calls and messages; later ones raise."""
    comm, (x, y) = u.Communicator(), arrays()
    other = comm.Dup()
    if RANK == 0:
        while {1, 2} & {*comm._runner.board.missing(2)}:  # they have called
            time.sleep(0.01)
        comm.Revoke()
    elif RANK == 1:
        caught(u.RevokedError, lambda: comm.Allreduce(x, y))
    elif RANK == 2:
        caught(u.RevokedError, lambda: comm.Iallreduce(x, y).Wait())
    else:
        caught(u.RevokedError, lambda: comm.Recv(y, 0))
    assert comm.Is_revoked()
    caught(u.RevokedError, comm.Barrier)
    caught(u.RevokedError, lambda: comm.Isend(x, (RANK + 1) % 4))
    assert not other.Is_revoked()
    right(other)
    assert comm.Agree(0b111 if RANK else 0b101) == 0b101
    again = comm.Shrink()  # nobody has died
    assert (again.rank, again.size) == (RANK, 4) and again.Get_failed().Get_size() == 0
    right(again)
    comm.Free()

    # A death while a communicator has no page yet: its error is raised all the same, and the next communicator is made.
    def dies(*_):
        raise u.PeerError("rank 1 died before there was a page")

    board, membership.Board = membership.Board, dies
    caught(u.PeerError, again.Dup, "before there was a page")
    membership.Board = board
    with again.Dup() as part:
        right(part)


def fails_alone():
    """An exception ends its process only: the others go on. A rank in Shrink interrupts the others' calls."""
    comm, (x, y) = u.Communicator(), arrays()
    if RANK == 1:
        raise RuntimeError("of no use any more")
    if RANK == 0:
        caught(u.CollectiveError, lambda: comm.Allreduce(x, y))
    else:
        caught(u.RevokedError, lambda: comm.Recv(y, 0))
    right(comm.Shrink())


def does_not_come():
    """A rank that does not come ends the making of communicators. MPI's own calls would wait for ever."""
    comm = u.Communicator()
    if RANK == 0:
        comm._runner.timeout = 1.0
        words = "rank 0: ", "the limit was 1 s", "rank(s) [1] have not"
        caught(u.CollectiveTimeout, DICE.choice([comm.Dup, comm.Split]), *words)
        print("right", flush=True)
        WORLD.send(None, 1)
    else:
        WORLD.recv(source=0)
    os._exit(0)


# --- deaths of rank 1 of three, the others of which go on


def in_threes(*cases):
    """Run cases, each on three ranks of the job."""
    part = RANK // 3
    globals()[cases[part]](u.Communicator(WORLD.Split(part)))


def deaths_are_acknowledged(comm):
    """``Agree`` raises on all until all have acknowledged; communicators without dead ranks are not affected."""
    part = comm.Split(comm.rank == 1)
    if comm.rank == 1:
        die()
    said = caught(u.CollectiveError, lambda: comm.Allreduce(*arrays()))
    assert "rank 1" in said or "revoked" in said, said
    while comm.Get_failed().Get_size() == 0:
        time.sleep(0.01)
    caught(u.PeerError, lambda: comm.Agree(1), "[1]")
    assert comm.Ack_failed() == 1
    assert comm.Agree(3) == 3
    right(part)


def deaths_end_the_making(comm):
    """Of communicators. The error names the dead rank; MPI's own does not."""
    if comm.rank == 1:
        die()
    for make in (getattr(comm, DICE.choice(["Dup", "Split"])), lambda: u.Communicator(comm.mpi)):
        said = caught((u.PeerError, u.RevokedError), make)  # the latter once the other one shrinks
        told = "rank(s) [1] died", "rank 1 has left", "given this communicator up", "a rank has revoked"
        assert any(text in said for text in told), said
    with comm.Shrink().Dup() as part:
        right(part)


def a_death_while_contexts_are_made(comm):
    """In libucc, which exchanges addresses by MPI calls whose errors name no rank."""
    comm.Barrier()  # all have made it
    abandon_teams()
    if comm.rank == 1:
        ucc.Lib.context = die
    caught(u.PeerError, comm.Dup, "died")
    right(comm.Shrink())


# --- ranks that lack something, and the end


def without_memory(more):
    """For its peers' segments: rank 3 has these bytes more than it uses."""
    comm, whole = u.Communicator(), np.arange(200_000.0) * 3
    x = whole.copy() if RANK == 1 else np.full_like(whole, np.nan)
    comm.Barrier()
    comm._runner.timeout = 4.0
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if RANK == 3:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + more, limits[1]))
    try:
        comm.Bcast(x, 1)
        said = "done" if np.array_equal(x, whole) else "wrong"
    except (u.UCCHError, MemoryError):
        said = "raises"
    resource.setrlimit(resource.RLIMIT_AS, limits)
    print(f"{said}.", flush=True)
    os._exit(0)


def without_connections(prefix, when):
    """Rank 2: libucc makes its context anyway, and the others' next team reads the address that the rank lacks."""
    make = u.Communicator
    if when == "shrink":
        comm = u.Communicator()
        comm.Barrier()  # all have made it
        abandon_teams()
        make = comm.Shrink
    if RANK == 2:
        os.environ[prefix + "_UCC_UCX_TLS"] = "nosuch"
    caught(u.AgreementError, make, "rank 2: libucc has made", "ulimit")
    print("right", flush=True)
    os._exit(0)


def dies_at_its_very_end():
    """Others are in ``MPI_Finalize`` then, where Open MPI waits for dead ranks."""
    comm = u.Communicator()
    if RANK == 1:
        atexit.unregister(at_exit._at_exit)
        atexit.register(die)  # runs after the next one
        atexit.register(at_exit._at_exit)
    right(comm)


def refused_where_mpirun_ends_the_job(comm):
    """The error has the way out; nothing else has changed."""
    for call in (comm.Revoke, comm.Shrink, lambda: comm.Agree(1)):
        caught(u.NotSupported, call, "mpirun --with-ft ulfm")
    assert not comm.Is_revoked() and comm.Get_failed().Get_size() == 0
    right(comm)
