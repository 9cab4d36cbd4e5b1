"""Cases of test_safety.py: forked and started processes, limits, signals, and jobs that are killed."""

import os
import resource
import signal
import subprocess
import sys
import traceback

import numpy as np
from world import RANK, SIZE, WORLD, arrays, caught, meet

import ucc_hetero as u
from ucc_hetero.native.libraries import lib


def forked_child_is_refused(comm):
    """The child used to take part in its parent's calls. The parent continues."""
    (x, y), z, other = arrays(10), np.empty(10), 1 - RANK
    comm.Allreduce(x, y)
    again = comm.Allreduce_init(x, y)
    receive = comm.Irecv(z, other)  # is matched when the child has gone
    calls = [
        lambda: comm.Allreduce(x, y), lambda: comm.Iallreduce(x, y), lambda: comm.Isend(x, other), again.Start,
        lambda: comm.Bcast(x), comm.Barrier, u.Communicator, lambda: comm.bcast(RANK), lambda: comm.mpi.Barrier(),
        receive.Wait, receive.Test, lambda: u.Request.Waitall([receive]),
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


# --- processes


def starts_processes(comm):
    """They used to join MPI as the same rank again, which crashed the rank. Variables with ranks and sizes stay. Forked
    ones that end as Python does used to wait in MPI_Finalize."""
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
