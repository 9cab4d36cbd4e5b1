"""Cases of test_ends.py and test_safety.py: ranks that fail or stay away, ends of processes, forks, and limits."""

import ctypes
import gc
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress

import numpy as np
from world import DICE, LEFT, RANK, RIGHT, SIZE, WORLD, arrays, caught, meet

import ucc_hetero as u
from ucc_hetero import rma
from ucc_hetero.api import comm as api_comm
from ucc_hetero.bindings import quarantine
from ucc_hetero.bootstrap import exit as at_exit
from ucc_hetero.bootstrap.teams import Teams
from ucc_hetero.bootstrap.timely import Timely
from ucc_hetero.native.libraries import lib

from mpi4py import MPI  # isort: skip

#: What a script has at its end: it lives as long as the modules.
KEPT = []


def interrupted(*_, **how):
    raise KeyboardInterrupt("out of flour")


# --- on a crew


def freed_after_a_failure():
    """The libraries are not unloaded at the end: they used to be closed during the failed call."""
    comm, other, (x, y) = u.Communicator(), u.Communicator(), arrays()
    other.Allreduce(x, y)
    request = other.Iallreduce(x, y) if RANK else None
    WORLD.Barrier()
    caught(u.MismatchError, request.Wait if RANK else lambda: other.Allreduce(x[:900], y[:900]))
    other.Free()
    comm.Allreduce(x, y)
    assert (y == SIZE).all()


def interrupted_as_it_fails(known):
    """Memory of a failed call is kept, whatever exception its caller handles meanwhile; ``known``: calls before."""
    comm, (x, y) = u.Communicator(), arrays()
    for _ in range(known):
        comm.Allreduce(x, y)

    def failed(op):
        WORLD.send(None, 1)
        while not lib.ucch_wait(op, 0.05):
            pass
        raise KeyboardInterrupt

    before = len(quarantine._for_ever)
    if RANK == 0:
        comm._runner.wait = failed
    else:
        WORLD.recv(source=0)
    caught((KeyboardInterrupt, u.MismatchError)[RANK], lambda: comm.Allreduce(x[RANK:], y[RANK:]))
    assert RANK or len(quarantine._for_ever) == before + 1
    gc.collect()
    caught(u.CollectiveError, lambda: comm.Allreduce(x, y), "can no longer be used")


def not_made_ready():
    """A communicator that lacks memory on rank 0 at its first call; rank 1 makes another call of it."""
    comm = u.Communicator()
    other = comm.Dup()

    def full(*_):
        raise MemoryError("no memory is left")

    if RANK == 0:
        runner, api_comm.Runner = api_comm.Runner, full
        caught(MemoryError, lambda: other.Allreduce(*arrays()), "no memory is left")
        caught(u.CollectiveError, lambda: other.Allreduce(*arrays()), "no memory is left")
        api_comm.Runner = runner
    elif RANK == 1:
        other.bcast(1, root=1)
    comm.Allreduce(*arrays())


# --- ranks that fail


def a_rank_fails_at_first(how):
    """Before the others have met it in the making of the first communicator; they do not wait for the deadline."""
    if RANK == 1 and how == "exit":
        sys.exit(3)
    if RANK == 1 and how == "argument":
        u.Communicator("no communicator")
    if RANK == 1 and how == "interrupt":
        api_comm.load = interrupted
    u.Communicator()


def a_rank_fails(how):
    """While the others wait, in this package's calls or MPI's; plain mpi4py mostly waits for ever."""
    comm = u.Communicator()
    if RANK == 1 and how == "raise":
        raise RuntimeError("out of flour")
    if RANK == 1 and how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    if RANK == 1 and how == "handler":  # its exception comes out of a call
        signal.signal(signal.SIGTERM, interrupted)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        comm.Recv(np.zeros(4), 0)
    if RANK == 1:
        if how == "exit without a stream":
            sys.stderr.close()
        (os._exit if how == "end at once" else sys.exit)("out of flour" if how == "exit with a text" else 3)
    with suppress(u.PeerError):
        DICE.choice([lambda: comm.Allreduce(*arrays()), WORLD.Barrier])()
    time.sleep(100)  # the job ends all the same


def an_exception_in_an_operation():
    """MPI calls the operation, and mpi4py ends the job with its traceback: no rank gets a wrong sum, or waits."""

    def add(a, b, datatype):
        raise KeyError("mine alone")

    comm, op, (x, y) = u.Communicator(), MPI.Op.Create(add, commute=True), arrays(5)
    DICE.choice([comm.Allreduce, lambda *call: comm.Iallreduce(*call).Wait()])(x, y, op)
    print("a result", flush=True)


def interrupted_at_its_end():
    """Ctrl-C on rank 1 while it waits for the others, which are there."""
    KEPT.append(u.Communicator())
    together = at_exit._together

    def waits(*given):
        if RANK != 1:
            WORLD.send(None, 1)
            return together(*given)
        for other in (0, 2):
            WORLD.recv(source=other)
        raise KeyboardInterrupt

    at_exit._together = waits


# --- ranks that stay away

#: Calls that one rank does not make in time, and how errors name them.
AWAY = {
    "Split (call 1 ": lambda comm: comm.Split(0),
    "bcast of objects root=1 (call 1 ": lambda comm: comm.bcast(1, root=1),
    "Create_group": lambda comm: comm.Create_group(comm.Get_group()),
}


def does_not_come(to):
    """The others name the rank in time, and the job ends even if they go on: MPI_Finalize would wait for the rank.

    ``to``: the first communicator, the next one after one that all have failed to make, or a call.
    """
    if to == "next":
        if RANK == 1:
            os.environ["UCCH_CHANNELS"] = "perhaps"
        caught(ValueError, u.Communicator)
        os.environ.pop("UCCH_CHANNELS", None)
    name, call = DICE.choice([*AWAY.items()]) if to == "call" else ("the making of a communicator", u.Communicator)
    given = [u.Communicator()] if to == "call" else []
    WORLD.Barrier()  # no rank's time begins before all are there
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    said = caught(u.CollectiveTimeout, lambda: call(*given), name)
    assert any(f"rank(s) [1] {did} not c" in said for did in ("did", "have")), said
    print("named", flush=True)


def looks_for_messages(first):
    """A rank that does not join the making of a communicator receives the messages that the others send it, and nothing
    of what they ask each other."""
    comm = WORLD if first else u.Communicator()
    turn, early = WORLD.Dup(), comm.irecv() if RANK == 1 else None
    turn.Barrier()
    if RANK == 1:
        said = [turn.recv(source=other) for other in (0, 2)]  # once they have waited in vain
        assert all("rank(s) [1] did not come" in text for text in said), said
        looks = [comm.Iprobe(), comm.iprobe(), comm.improbe(), getattr(comm, "mpi", comm).Iprobe(), WORLD.Iprobe()]
        assert not (any(looks) or early.test()[0]), looks
        turn.Barrier()
        assert (early.wait(), comm.recv(), comm.mprobe().recv()) == (7, 7, 7)
    else:
        of = DICE.choice([WORLD, comm])
        turn.send(caught(u.CollectiveTimeout, lambda: u.Communicator(of)), 1)
        turn.Barrier()
        for _ in range(3 * (RANK == 0)):
            comm.send(7, 1)
    turn.Barrier()
    print("right", flush=True)


def stopped_within_mpi():
    """If the others cannot leave MPI's call, the job ends at the deadline and prints why."""
    comm = u.Communicator()
    if RANK == 1:
        Timely.at_once = lambda *_, **more: os.kill(os.getpid(), signal.SIGSTOP)
    comm.Dup()


# --- ends of processes


def interrupted_as_it_is_freed():
    """The communicator has ended, and the others go on; the end of the process used to fail."""
    comm, other, (x, y) = u.Communicator(), u.Communicator(), arrays()
    other.Allreduce(x, y)
    close = Teams.close
    if RANK == 1:
        Teams.close = interrupted
        caught(KeyboardInterrupt, other.Free)
        Teams.close = close
    else:
        other.Free()
    assert not other
    other.Free()
    comm.Allreduce(x, y)
    assert (y == SIZE).all()
    KEPT.append(comm)


def frees_nothing():
    """Requests and messages in any state, held and dropped. Exits that are caught, or in a thread, end nothing."""

    def leave():
        sys.exit(3)

    try:
        leave()
    except SystemExit as exit:
        assert exit.code == 3
        del exit
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    comm, (x, y), one, long = u.Communicator(), arrays(), np.zeros(4), np.zeros(1 << 20)
    request, persistent = comm.Iallreduce(x, y), comm.Allreduce_init(x, y)
    request.Wait()
    for _ in range(3):
        persistent.Start()
        persistent.Wait()
    other = u.Communicator(WORLD.Split(RANK % 2, RANK))
    other.Barrier()
    receive = comm.Recv_init(one, LEFT, 6)
    KEPT.extend([x, y, persistent, other, comm.Irecv(one, LEFT, 4), comm.Isend(long, RIGHT, 5), receive])
    receive.Start()
    comm.Irecv(one, LEFT, 4)
    comm.Isend(long, RIGHT, 5)
    comm.Send(one, RIGHT, 6)
    comm.Send(one, RIGHT, 6)
    comm._messages.timeout = 0.3
    caught(u.CollectiveTimeout, lambda: comm.Send(long, RIGHT, 7))
    caught(u.CollectiveTimeout, lambda: comm.Ssend(one, RIGHT, 8))
    KEPT.append(comm)
    print("end", flush=True)
    sys.exit(0)


def ends_with_calls_under_way():
    """Requests without a wait, in another thread too."""
    comm, (x, y) = u.Communicator(), arrays(300_000)
    other = comm.Dup()
    KEPT.extend([comm, other, *(comm.Iallreduce(x, y) for _ in range(5)), comm.Irecv(np.empty(5), 1 - RANK, 9)])
    thread = threading.Thread(target=lambda: [other.Iallreduce(x, np.empty(300_000)) for _ in range(3)])
    thread.start()
    thread.join()
    print("at the end", flush=True)
    comm.Iallreduce(x, y)


def within(thread):
    """True if a thread is in a call of the package, or has ended."""
    stack = traceback.walk_stack(sys._current_frames().get(thread.ident))
    return not thread.is_alive() or any("ucc_hetero" in frame.f_code.co_filename for frame, _ in stack)


def daemons_within_calls(seed, end):
    """Threads in calls that other ranks do not make, or that never end. ``end``: how the last rank's process ends."""
    dice = random.Random(seed)
    sys.setswitchinterval(dice.choice([5e-3, 1e-5]))
    comm, worker, always, one = u.Communicator(), rma.Worker(), itertools.count(), np.zeros(4)
    first, unused, (x, y), (long, into) = comm.Dup(), comm.Split(0, RANK), arrays(), arrays(300_000)
    KEPT.extend([comm, worker, first, unused])

    def persistent(make, *given):
        for _ in always:
            request = make(*given)
            request.Start()
            request.Wait()

    def partitioned():
        for _ in always:
            request = comm.Psend_init(long, 4, LEFT)
            request.Start()
            request.Pready_range(0, 3)
            request.Test()

    calls = [
        lambda: comm.Recv(one), comm.Probe, comm.recv, lambda: comm.Ssend(long, LEFT), lambda: comm.Allreduce(x, y),
        lambda: comm.bcast(1, root=RIGHT), lambda: first.Allreduce(long, into), comm.Dup, lambda: comm.Split(0),
        unused.Free, lambda: u.Communicator(WORLD), lambda: [(comm.Iprobe(), time.sleep(1e-3)) for _ in always],
        lambda: [comm.Dup().Free() for _ in always], lambda: [first.Allreduce(long, into) for _ in always],
        lambda: [comm.Sendrecv(long, RIGHT, 3, into, LEFT, 3) for _ in always],
        lambda: [(comm.Irecv(one), comm.Isend(one, LEFT), time.sleep(1e-4)) for _ in always],
        lambda: persistent(comm.Allreduce_init, x, y), lambda: persistent(comm.Send_init, one, LEFT),
        lambda: persistent(comm.Precv_init, one, 2, LEFT), partitioned, lambda: worker.wait_notification(1e3),
        lambda: [(rma.Worker().close(), worker.info()) for _ in always],
    ]  # fmt: skip

    def does(call):
        with suppress(Exception):
            call()

    for call in [dice.sample(calls, dice.randrange(4)) for _ in range(SIZE)][RANK]:
        thread = threading.Thread(target=does, args=(call,), daemon=True)
        thread.start()
        while not within(thread):
            time.sleep(0)
    print("at the end", flush=True)
    if RANK == SIZE - 1:
        if end == "raise":
            raise KeyError(3)
        if end:
            sys.exit(int(end))


# --- forks, limits and signals


def forked_child_is_refused(comm):
    """The child used to take part in its parent's calls. The parent continues, also with what it does in C."""
    (x, y), z, other = arrays(10), np.empty(10), 1 - RANK
    started = comm.Send_init(x, other, 2), comm.Recv_init(y, other, 2)

    def messages():
        for sent in comm.Isend(x, other, 1), comm.Isend(x, other, 1):
            comm.Recv(y, other, 1)
            sent.Wait()
        comm.Sendrecv(x, other, 1, y, other, 1)
        comm.Send(x, other, 1)
        assert comm.Probe(other, 1)
        taken = comm.Mprobe(other, 1)
        u.PersistentRequest.Startall(started)
        u.Request.Waitall(started)
        comm.Iprobe(other, 1)  # the other rank may be ahead
        return taken

    messages().Recv(y)
    taken = messages()
    comm.Allreduce(x, y)
    again = comm.Allreduce_init(x, y)
    receive = comm.Irecv(z, other, 0)  # is matched when the child has gone
    calls = [
        lambda: comm.Allreduce(x, y), lambda: comm.Iallreduce(x, y), lambda: comm.Isend(x, other), again.Start,
        lambda: comm.Bcast(x), comm.Barrier, u.Communicator, lambda: comm.bcast(RANK), lambda: comm.mpi.Barrier(),
        receive.Wait, receive.Test, lambda: u.Request.Waitall([receive]),
        lambda: comm.Send(x, other, 1), lambda: comm.Recv(y, other, 1), lambda: comm.Irecv(y, other, 1),
        lambda: comm.Sendrecv(x, other, 1, y, other, 1), lambda: comm.Probe(other, 1), lambda: comm.Iprobe(other, 1),
        lambda: comm.Mprobe(other, 1), lambda: taken.Recv(y), started[0].Start, started[1].Start,
    ]  # fmt: skip
    if not (child := os.fork()):
        signal.alarm(100)
        try:
            for call in calls:
                caught(u.UCCHError, call, "fork")
            comm.Free()  # nothing is done, and no rank is waited for
            os._exit(7)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 7, status
    taken.Recv(y)
    messages().Recv(y)
    again.Start()
    again.Wait()
    comm.Allreduce(x, y)
    assert (y == SIZE).all()
    comm.Send(x, other)
    receive.Wait()
    assert (z == 1).all()


def deaf():
    """A rank that does not handle the signal of the flight recorder is not asked for its records: the signal would end
    the process, and so any process that has the process id of an ended rank."""
    comm, number = u.Communicator(), 43
    comm.Allreduce(*arrays())
    if RANK:
        before = signal.signal(number, signal.SIG_DFL)
        meet()
        signal.signal(number, before)
    else:
        comm._runner.timeout = 1.0
        caught(u.CollectiveTimeout, lambda: comm.Allreduce(*arrays()))
        meet()


def starts_processes(comm):
    """They used to join MPI as the same rank again, which crashed the rank. Variables with ranks and sizes stay. Forked
    ones that end as Python does used to wait in MPI_Finalize, and a rank that calls it and one that ends for each
    other."""
    done = subprocess.run([sys.executable, *sys.argv[:2], "alone", "[]"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", *["4.0"] * 3, "2"], done.stdout
    for status in 0, 3:
        if not (forked := os.fork()):
            signal.alarm(100)
            raise SystemExit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == status
    x, y = arrays(10)
    comm.Allreduce(x, y)
    assert (y == SIZE).all()
    left = comm.Irecv(np.empty(10), RANK, 9), comm.Allreduce_init(x, y), comm.Isend(x, RANK, 3), comm.Mprobe(RANK, 3)
    unused = comm.Dup()
    if RANK:
        MPI.Finalize()
        after_mpi(comm, *left)
        after_mpi(unused, *left)


def after_mpi(comm, request, persistent, sent, message):
    """Uses of what was made before are refused; they used to end the process, at once or by SystemExit."""
    x, y = arrays(10)
    for use in (
        lambda: comm.Allreduce(x, y), lambda: comm.Isend(x, 0), lambda: comm.bcast(1), comm.Iprobe, comm.mprobe,
        comm.Dup, comm.Shrink, lambda: comm.mpi, lambda: comm.name, lambda: u.Communicator(comm), u.Communicator,
        request.Wait, request.Test, lambda: u.Request.Waitany([request]), lambda: request.Get_status(MPI.Status()),
        persistent.Start, lambda: message.Recv(y), lambda: message.Irecv(y),
    ):  # fmt: skip
        caught(u.NotSupported, use, "MPI has been finalized")
    comm.Free()
    sent.Wait()
    assert not comm


def alone():
    comm = u.Communicator()
    comm.Allreduce(np.full(3, 4.0), y := np.empty(3))
    print(comm.size, *y, os.environ["OMPI_COMM_WORLD_SIZE"])


def message_dropped_by_a_child(comm):
    """Its sender used to be told that it had been received, and the parent received wrong data. What came while a child
    made progress was lost."""
    x, y = np.random.default_rng(7).random((2, 1_000_000)), np.empty(1_000_000)
    if RANK == 1:
        first = comm.Isend(x[0], 0)
        meet()
        short = comm.Isend(x[1][:9], 0, 3)
        meet()
        first.Wait()
        short.Wait()
        x[0][:] = np.nan
        comm.Send(x[1], 0)
    else:
        message = comm.Mprobe(1)
        meet()
        meet()
        if not (child := os.fork()):
            for _ in range(100):
                lib.ucch_progress_once()
            del message
            os._exit(0)
        os.waitpid(child, 0)
        message.Recv(y)
        assert (y == x[0]).all()
        comm.Recv(y[:9], 1, 3)
        assert (y[:9] == x[1][:9]).all()
        comm.Recv(y, 1)
        assert (y == x[1]).all()


def few_files():
    """Each step used to fail with another message, from a timeout to an abort, and none named the limit."""
    used, (_, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    left = [0, 20][RANK]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + left, hard))
    caught(ValueError, u.Communicator, f"ulimit -n is {used - 1 + left}", "rank 0: only 0 more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def killed():
    comm, (x, y) = u.Communicator(), arrays(1 << 18)
    comm.Allreduce(x, y)
    comm.Iallreduce(x, y)
    print(f"pid {os.getpid()}", flush=True)
    WORLD.Barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_at_its_end():
    """After the package's exit functions, like MPI_Finalize."""
    u.Communicator()
    ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
