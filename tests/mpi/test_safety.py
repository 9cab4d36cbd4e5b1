"""Resources that calls leave behind, processes that fork, jobs that are killed, threads, signals, and early ends."""

import random
from pathlib import Path
from typing import Any

import pytest

from .scripts import HEAD


def test_nothing_grows(crew: Any) -> None:
    """A sample of what docs/native.md says of a million calls (tools/soak.py); groups of torch: test_torch_ends.py."""
    args = ["--collectives", "10000", "--communicators", "100", "--refusals", "40", "--failures", "20"]
    args += ["--transfers", "20", "--groups", "0"]
    layout, env = random.choice(["", "nvidia:1,amd:1"]), {"UCCH_TIMEOUT": "100"}
    job = crew("tools/soak.py", 2, args=args, layout=layout, env=env, timeout=120)
    assert job.stdout.count("more rounds") == 5 and "grown" not in job.stdout, job.output


def test_a_forked_child_is_refused(crew: Any) -> None:
    """It used to take part in its parent's calls. The parent goes on."""
    script = """
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
"""
    job = crew(HEAD + script, 2)
    assert job.stdout.split() == ["right"] * 2, job.output


def test_processes_that_a_rank_starts_are_alone(mpirun: Any) -> None:
    """They used to be that rank once more in MPI, and the rank itself crashed. What tells ranks and sizes stays."""
    script = """
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
x, y = np.ones(10), np.empty(10)
comm.Allreduce(x, y)
assert (y == size).all()
"""
    job = mpirun(HEAD + script, 2)
    assert job.stdout.split() == ["1", "4.0", "4.0", "4.0", "2"] * 2, job.output


def test_a_rank_that_may_open_few_files(mpirun: Any) -> None:
    """Each step failed in its own words, from a timeout to an abort, and none named the limit."""
    script = """
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
"""
    job = mpirun(script, 2)
    assert job.stdout.split() == ["right"] * 2, job.output


def test_nothing_is_left_of_a_job_that_is_killed(mpirun: Any, tmp_path: Path) -> None:
    """Open MPI's own segments are its business; those of UCX are in a folder where no other job has any."""
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


@pytest.mark.parametrize("layout", ["", "nvidia:1,amd:1"])
def test_threads_with_communicators_of_their_own(crew: Any, layout: str) -> None:
    """Each makes calls of all forms, in its own order; some make communicators meanwhile."""
    script = """
import sys
usual = sys.getswitchinterval()
sys.setswitchinterval(1e-5)
comms = [comm.Dup() for _ in range(4)]
wrong = []

def work(number, mine):
    try:
        rng = np.random.default_rng(number)  # alike on all ranks
        again = mine.Allreduce_init(a := np.full(50, number + 1.0), b := np.empty(50))
        for turn in range(150):
            n, kind = int(rng.choice([1, 60, 5000, 40000])), int(rng.integers(5))
            x, y = np.full(n, turn + number + 1.0), np.full(n, -7.0)
            if kind == 0:
                mine.Allreduce(x, y)
            elif kind == 1:
                mine.Iallreduce(x, y).Wait()
            elif kind == 2:
                again.Start()
                again.Wait()
                y[:] = b[0] / (number + 1) * x[0]
            elif kind == 3:
                mine.Sendrecv(x, 1 - rank, number, y, 1 - rank, number)
                y *= 2
            else:
                y[:] = x
                mine.Bcast(y, turn % 2)
                y *= 2
            assert (y == 2 * x[0]).all(), (number, turn, kind, n, y[:3])
        again.Free()
    except BaseException as error:
        wrong.append(error)
        raise

threads = [threading.Thread(target=work, args=each) for each in enumerate(comms)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.setswitchinterval(usual)
assert not wrong
print("right", flush=True)
"""
    job = crew(HEAD + script, 2, layout=layout, env={"UCCH_TIMEOUT": "200"}, timeout=100)
    assert job.stdout.split() == ["right"] * 2, job.output


#: Raises what a signal's handler has raised out of a call on rank 0, in which the others do not take part.
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


def test_a_signal_in_a_call(crew: Any) -> None:
    """Handlers run within the call, and what they raise comes out of it."""
    script = """
for name, call in WAYS.items():
    if rank == 0:
        try:
            waits(call, signal.SIGINT)
        except InterruptedError as error:
            print(name, error, flush=True)
    else:
        kept = made()  # has not left it
    comm.mpi.Barrier()
"""
    job = crew(HEAD + SIGNALLED + script, 2, timeout=60)
    ways = ("blocking", "started", "persistent", "message", "short")
    assert job.stdout.splitlines() == [f"{way} asked to end" for way in ways], job.output


def test_a_signal_in_a_call_ends_the_job(mpirun: Any) -> None:
    script = """
if rank == 0:
    waits(WAYS["blocking"], signal.SIGTERM)
kept = made()
time.sleep(1000)
"""
    job = mpirun(HEAD + SIGNALLED + script, 2, check=False, timeout=60)
    assert job.returncode == 1 and "InterruptedError: asked to end" in job.stderr, job.output


def test_the_interpreter_ends_with_calls_under_way(mpirun: Any) -> None:
    """Requests that are not waited for, in another thread, too."""
    script = """
x, y = np.ones(300_000), np.empty(300_000)
kept = [comm.Iallreduce(x, y) for _ in range(5)] + [comm.Irecv(np.empty(5), 1 - rank, 9)]
other = comm.Dup()
thread = threading.Thread(target=lambda: [other.Iallreduce(x, np.empty(300_000)) for _ in range(3)])
thread.start()
thread.join()
print("at the end", flush=True)
comm.Iallreduce(x, y)
"""
    job = mpirun(HEAD + script, 2, timeout=60)
    assert job.said("at the end") == 2 and "Traceback" not in job.stderr, job.output


@pytest.mark.parametrize("call", ["comm.Allreduce(x, y, op)", "comm.Iallreduce(x, y, op).Wait()"])
def test_an_exception_in_an_operation_of_the_users(mpirun: Any, call: str) -> None:
    """MPI calls it, and mpi4py ends the job with its traceback: no rank takes garbage for a sum, or waits."""
    script = f"""
from mpi4py import MPI
def add(a, b, datatype):
    raise KeyError("mine alone")
op = MPI.Op.Create(add, commute=True)
x, y = np.ones(5), np.empty(5)
{call}
print("a result", flush=True)
"""
    job = mpirun(HEAD + script, 2, check=False, timeout=60)
    assert job.returncode and "KeyError" in job.stderr and "a result" not in job.stdout, job.output
    assert "'mine alone'" in job.stderr, job.output  # mpirun's own words may come in between
