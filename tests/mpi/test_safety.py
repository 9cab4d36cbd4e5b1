"""Resources that calls leave behind, forked processes, killed jobs, threads, and signals."""

import random
from pathlib import Path

import pytest

from .scripts import HEAD, Job

#: Raises a signal handler's exception out of a call on rank 0, in which the other ranks do not take part.
SIGNALLED = """
def handler(*_):
    raise InterruptedError("asked to end")

def made():
    "A communicator whose calls have been made before, which is another way for short ones."
    own = u.Communicator(comm)
    for n in (1000, 1):
        own.Allreduce(x[:n], y[:n])
    return own

def waits(call, number):
    own, before = made(), signal.signal(number, handler)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()  # most likely in the call
    try:
        call(own)
        raise SystemExit("the call has ended")
    finally:
        signal.signal(number, before)

def persistent(comm):
    request = comm.Allreduce_init(x, y)
    request.Start()
    request.Wait()

WAYS = {
    "blocking": lambda comm: comm.Allreduce(x, y),
    "started": lambda comm: comm.Iallreduce(x, y).Wait(),
    "persistent": persistent,
    "message": lambda comm: comm.Recv(y, 1),
    "short": lambda comm: comm.Allreduce(x[:1], y[:1]),
}
"""

WAYS = ("blocking", "started", "persistent", "message", "short")
LAYOUTS = ("", "nvidia:1,amd:1")

#: For ranks that have run other scripts before.
ON_A_CREW = {
    # The child used to take part in its parent's calls. The parent continues.
    "a forked child is refused": Job("""
x, y = np.ones(10), np.empty(10)
comm.Allreduce(x, y)
again = comm.Allreduce_init(x, y)
z = np.empty(10)
receive = comm.Irecv(z, 1 - rank)  # is matched when the child has gone
calls = [lambda: comm.Allreduce(x, y), lambda: comm.Iallreduce(x, y), lambda: comm.Isend(x, 1 - rank), again.Start,
         lambda: comm.Bcast(x), comm.Barrier, lambda: u.Communicator(),
         lambda: comm.bcast(rank), lambda: comm.mpi.Barrier(),
         receive.Wait, receive.Test, lambda: u.Request.Waitall([receive])]
child = os.fork()
if not child:
    signal.alarm(100)
    for call in calls:
        try:
            call()
        except u.UCCHError as error:
            assert "fork" in str(error), error
        else:
            os._exit(1)
    comm.Free()  # nothing is done, and no rank is waited for
    os._exit(7)
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 7, status
again.Start()
again.Wait()
comm.Allreduce(x, y)
assert (y == size).all()
comm.Send(x, 1 - rank)
receive.Wait()
assert (z == 1).all()
print("right", flush=True)
""", 2, {"^right$": 2}),
    # Handlers run during the call, and their exceptions come out of it.
    "a signal in a call": Job("""
for name, call in WAYS.items():
    if rank == 0:
        try:
            waits(call, signal.SIGINT)
        except InterruptedError as error:
            print(name, error, flush=True)
    else:
        kept = made()  # has not left it
    comm.mpi.Barrier()
""", 2, {rf"^{way} asked to end": 1 for way in WAYS}, env={}, head=HEAD + SIGNALLED),
}  # fmt: skip

JOBS = {
    # Children used to join MPI as the same rank again, which crashed the rank. Variables with ranks and sizes stay.
    # Forked ones that end as Python does used to wait in MPI_Finalize.
    "processes that a rank starts are alone": Job("""
import subprocess, sys
child = '''
import os
import numpy as np, ucc_hetero as u
comm = u.Communicator()
y = np.empty(3)
comm.Allreduce(np.full(3, 4.0), y)
print(comm.size, *y, os.environ["OMPI_COMM_WORLD_SIZE"])
'''
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout, flush=True)
for status in 0, 3:
    if not (forked := os.fork()):
        signal.alarm(100)
        raise SystemExit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == status
x, y = np.ones(10), np.empty(10)
comm.Allreduce(x, y)
assert (y == size).all()
""", 2, {"^1 4.0 4.0 4.0 2$": 2}),
    # Its sender used to be told that it had been received, and the parent received wrong data. What came while a child
    # made progress was lost.
    "a message that a forked child drops": Job("""
from ucc_hetero.native.libraries import lib
x, y = np.random.default_rng(7).random((2, 1_000_000)), np.empty(1_000_000)
if rank == 1:
    first = comm.Isend(x[0], 0)
    comm.mpi.Barrier()
    short = comm.Isend(x[1][:9], 0, 3)
    comm.mpi.Barrier()
    first.Wait()
    short.Wait()
    x[0][:] = np.nan
    comm.Send(x[1], 0)
else:
    message = comm.Mprobe(1)
    comm.mpi.Barrier()
    comm.mpi.Barrier()
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
print("right", flush=True)
""", 2, {"^right$": 2}, env={"UCX_TLS": "tcp,self"}),
    # Each step failed with another message, from a timeout to an abort, and none named the limit.
    "a rank may open few files": Job("""
import os, resource
from mpi4py import MPI
import ucc_hetero as u
used, (_, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
left = [0, 20][MPI.COMM_WORLD.rank]
resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + left, hard))
try:
    u.Communicator()
except ValueError as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert f"ulimit -n is {used - 1 + left}" in str(error) and "rank 0: only 0 more" in str(error), error
    print("right", flush=True)
""", 2, {"^right$": 2}, head=""),
    "a signal in a call ends the job": Job("""
if rank == 0:
    waits(WAYS["blocking"], signal.SIGTERM)
kept = made()
time.sleep(1000)
""", 2, {"InterruptedError: asked to end": None}, status=1, head=HEAD + SIGNALLED),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_A_CREW)
def test_calls(crew, name):
    ON_A_CREW[name].run(crew)


@pytest.mark.parametrize("name", JOBS)
def test_jobs(mpirun, name):
    JOBS[name].run(mpirun, check=False)


def test_nothing_grows(crew):
    """A sample of the figures in docs/native.md (tools/soak.py); groups of torch: test_torch_ends.py."""
    args = ["--collectives", "10000", "--communicators", "100", "--refusals", "40", "--failures", "20"]
    args += ["--transfers", "20", "--groups", "0"]
    layout, env = random.choice(LAYOUTS), {"UCCH_TIMEOUT": "100"}
    job = crew("tools/soak.py", 2, args=args, layout=layout, env=env, timeout=120)
    assert job.stdout.count("more rounds") == 5 and "grown" not in job.stdout, job.output


def test_nothing_is_left_of_a_job_that_is_killed(mpirun, tmp_path):
    """Open MPI's own segments are not checked; UCX's are in a folder of this job alone."""
    script = """
x, y = np.ones(1 << 18), np.empty(1 << 18)
comm.Allreduce(x, y)
comm.Iallreduce(x, y)
print(f"pid {os.getpid()}", flush=True)
comm.mpi.Barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    (segments := tmp_path / "segments").mkdir()
    env = {"UCCH_EMULATE": "nvidia:2,amd:1", "UCX_POSIX_DIR": str(segments)}
    job = mpirun(HEAD + script, 3, env=env, check=False)
    assert job.said("pid") == 3, job.output
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if "ucch" in name] and not list(segments.iterdir()), left
