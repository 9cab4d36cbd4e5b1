"""Ends of calls and jobs where something goes wrong: an error that says who and what, within the deadline; no hang."""

import random
import re

import pytest
from processes import python

from .scripts import HEAD, NEVER


@pytest.mark.parametrize("layout", ["", "nvidia:2,amd:1"])
def test_freed_after_a_failure(crew, layout: str) -> None:
    """The libraries are left alone at the end: they used to be closed with the failed call in them."""
    script = """
x, y = np.ones(1000, "f4"), np.empty(1000, "f4")
other = u.Communicator(world)
other.Allreduce(x, y)
try:
    request = other.Iallreduce(x, y) if rank else None
    world.Barrier()
    if rank:
        request.Wait()
    else:
        other.Allreduce(np.ones(900), np.empty(900))
except u.MismatchError:
    other.Free()
    comm.Allreduce(x, y)
    print("right" if (y == size).all() else y, flush=True)
"""
    job = crew(HEAD + script, 3, layout=layout, env={"UCCH_TIMEOUT": "200"})
    assert job.stdout.split() == ["right"] * 3, job.output


def test_a_rank_that_leaves(mpirun) -> None:
    """The others learn of it at once, long before the deadline."""
    script = """
if rank == 1:
    sys.exit(0)
caught(u.PeerError, lambda: comm.Allreduce(x, y))
"""
    job = mpirun(HEAD + script, 3, env=NEVER)
    assert job.stdout.count("rank 1 has left the job or died") == 2, job.output


def test_a_rank_that_fails_and_ends_well(mpirun) -> None:
    """Its call has failed, and its process comes to its end without an error; one that is in the call learns of it."""
    script = """
if rank == 2:
    world.recv(source=0)
else:
    request = comm.Iallreduce(np.ones(1 << 15), np.empty(1 << 15))
    if rank == 1:
        request._timeout = 1.0
    caught(u.CollectiveError, request.Wait)
    if rank == 0:
        world.send(None, 2)
"""
    job = mpirun(HEAD + script, 3, env=NEVER)
    assert job.stdout.count("have not called it") == 1, job.output
    assert job.stdout.count("rank 1 has given up, as call 1 has failed there") == 1, job.output


@pytest.mark.parametrize("how", ["argument", "interrupt"])
def test_a_rank_that_makes_no_communicator(mpirun, how: str) -> None:
    """Its first one fails before the others have met it: the job ends, and they do not wait for the deadline."""
    script = f"""
from mpi4py import MPI
import ucc_hetero as u
from ucc_hetero.api import comm
def interrupted():
    raise KeyboardInterrupt
if MPI.COMM_WORLD.rank == 1:
    if "{how}" == "argument":
        u.Communicator("no communicator")
    comm.load = interrupted
u.Communicator()
"""
    job = mpirun(script, 2, env=NEVER, check=False)
    assert "rank 1 has failed (status 1) and ends the job" in job.stderr, job.output


@pytest.mark.parametrize(("before", "said"), [
    ("mpi4py.rc.initialize = False", "MPI has not begun: call MPI.Init_thread()"),
    ("from mpi4py import MPI; MPI.Finalize()", "MPI has been finalised"),
], ids=["not begun", "over"])  # fmt: skip
def test_a_communicator_without_mpi(before: str, said: str) -> None:
    """Is refused; MPI would end the process."""
    script = f"""
import mpi4py
{before}
import ucc_hetero as u
try:
    u.Communicator()
except u.NotSupported as error:
    print(error, flush=True)
"""
    assert said in python(script, env=NEVER).stdout


def test_a_rank_that_was_forked_before_mpi_was_begun(mpirun) -> None:
    """It has an end of its own, as where its parent had not imported the package."""
    script = """
import os, sys
import ucc_hetero as u
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
comm = u.Communicator()
comm.Barrier()
sys.exit(3 * comm.rank)
"""
    job = mpirun(script, 2, env=NEVER, check=False, cold=True)
    assert "rank 1 has failed (status 3) and ends the job" in job.stderr, job.output


CALLS = "Recv(one)", "Probe()", "recv()", "Allreduce(x, y)"


def test_a_thread_that_goes_with_the_interpreter(mpirun) -> None:
    """The program does not wait for a daemon, a listener say: what it waits for used to be released under it."""
    head = HEAD.replace("= MPI.COMM_WORLD", "= MPI.COMM_WORLD.Split(pair := MPI.COMM_WORLD.rank // 2)")
    script = f"""
import contextlib, traceback
comm.Allreduce(x, y)

def wait():
    with contextlib.suppress(u.errors.PeerError):  # the other rank may leave first
        [{", ".join(f"lambda: comm.{call}" for call in CALLS)}][pair]()

thread = threading.Thread(target=wait, daemon=True)

def calls():
    stack = traceback.walk_stack(sys._current_frames().get(thread.ident))
    return any("ucc_hetero/api" in frame.f_code.co_filename for frame, _ in stack)

if rank == 0:
    thread.start()
    while not calls():
        time.sleep(0)
print("fine", flush=True)
"""
    job = mpirun(head + script, 2 * len(CALLS))
    assert job.stdout.split() == ["fine"] * 2 * len(CALLS) and "Traceback" not in job.stderr, job.output


def test_a_rank_that_exits_before_its_first_communicator(mpirun) -> None:
    script = HEAD.replace("comm = u", "if world.rank == 1:\n    sys.exit(3)\ncomm = u")
    job = mpirun(script, 2, env={"UCCH_TIMEOUT": "1000"}, check=False)
    assert job.returncode == 3, job.output
    assert "rank 1 has failed (status 3) and ends the job" in job.stderr


ALONE = {
    "Communicator": ("u.Communicator()", "the making of a communicator"),
    "Split": ("comm.Split(0)", r"Split \(call 1 .*"),
    "bcast": ("comm.bcast(1, root=1)", r"bcast of objects root=1 \(call 1 .*"),
    "Create_group": ("comm.Create_group(comm.Get_group())", "Create_group"),
}


@pytest.mark.parametrize("calls", ["Communicator", "bcast Split Create_group"])
def test_a_rank_that_does_not_come(mpirun, calls: str) -> None:
    """The others name it in time, and the job ends, also where they go on: MPI_Finalize would wait for it."""
    call = random.choice(calls.split())
    head = HEAD if "comm." in ALONE[call][0] else HEAD.replace("comm = u.Communicator(world)", "comm = world")
    script = f"""
world.Barrier()  # no rank's time begins before all are there
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    {ALONE[call][0]}
except u.CollectiveTimeout as error:
    print(error, flush=True)
"""
    job = mpirun(head + script, 3, env={"UCCH_TIMEOUT": "2"}, check=False)
    who = r"rank\(s\) \[1\] (did|have) not c"
    assert re.search(f"{ALONE[call][1]}[:;] {who}", job.stdout) and job.returncode != 0, job.output


def test_a_rank_that_is_stopped_within_mpis_call(mpirun) -> None:
    """Where the others cannot leave that, the job ends at the deadline, and says why."""
    script = """
from ucc_hetero.bootstrap.timely import Timely

if rank == 1:
    Timely.at_once = lambda *_, **more: os.kill(os.getpid(), signal.SIGSTOP)
comm.Dup()
"""
    job = mpirun(HEAD + script, 3, env={"UCCH_TIMEOUT": "2"}, check=False)
    assert re.search("rank [02]: Dup: not all ranks got through in time", job.stderr) and job.returncode, job.output


def test_a_script_that_frees_nothing_ends_well(mpirun) -> None:
    """Requests in any state, messages too, held and given up; communicators; exits that are caught, or of another
    thread, end nothing."""
    script = """
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
keep = [np.ones(1000), np.empty(1000)]
request = comm.Iallreduce(*keep)
request.Wait()
persistent = comm.Allreduce_init(*keep)
for _ in range(3):
    persistent.Start()
    persistent.Wait()
other = u.Communicator(world.Split(rank % 2, rank))
other.Barrier()
keep += comm.Irecv(one, left, 4), comm.Isend(np.zeros(1 << 20), right, 5), comm.Recv_init(one, left, 6)
keep[-1].Start()
comm.Irecv(one, left, 4)
comm.Isend(np.zeros(1 << 20), right, 5)
comm.Send(one, right, 6)
comm.Send(one, right, 6)
comm._messages.timeout = 0.3
caught(u.CollectiveTimeout, lambda: comm.Send(np.zeros(1 << 20), right, 7))
caught(u.CollectiveTimeout, lambda: comm.Ssend(one, right, 8))
print("end", flush=True)
sys.exit(0)
"""
    job = mpirun(HEAD + script, 4, env={"UCCH_TIMEOUT": "200"})
    assert job.said("end") == 4
    assert not re.search("WARN|ERROR|failed|Traceback", job.stderr), job.output


ENDS = {
    "sys.exit(3)": (3, "rank 1 has failed (status 3) and ends the job"),
    "sys.stderr.close(); sys.exit(3)": (3, ""),
    "sys.exit('out of flour')": (1, "out of flour"),
    "raise RuntimeError('this rank is out of its mind')": (1, "out of its mind"),
    "os._exit(3)": (3, ""),
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)": (128 + 15, ""),
}


CALL, MPIS = "comm.Allreduce(np.ones(4), np.empty(4))", "world.Barrier()"


@pytest.mark.parametrize("how", ENDS)
def test_a_failed_rank_ends_the_job(mpirun, how: str) -> None:
    """Also while the others wait, in our calls or in MPI's; plain mpi4py would wait for ever after the first three."""
    script = f"""
if rank == 1:
    {how}
try:
    {random.choice([CALL, MPIS])}
except u.PeerError:
    time.sleep(100)  # the job ends all the same
"""
    job = mpirun(HEAD + script, 2, env={"UCCH_TIMEOUT": "200"}, check=False)
    status, message = ENDS[how]
    assert job.returncode == status, job.output
    assert message in job.stderr


@pytest.mark.parametrize("more", [(), ("--with-ft", "ulfm")], ids=["plain", "ulfm"])
def test_a_rank_that_is_interrupted_at_its_end(mpirun, flavour: tuple[str, int], more: tuple[str, ...]) -> None:
    """The others do not wait for it; the job has failed where they cannot go on without it."""
    if more and (flavour[0] != "openmpi" or flavour[1] < 5):
        pytest.skip("needs Open MPI 5")
    script = """
from ucc_hetero.bootstrap import exit as at_exit

def interrupted(*_):
    for other in (0, 2):
        world.recv(source=other)
    raise KeyboardInterrupt

def waits(*given):
    world.send(None, 1)
    return together(*given)

together, at_exit._together = at_exit._together, interrupted if rank == 1 else waits
"""
    job = mpirun(HEAD + script, 3, mpi_args=more, check=False)
    assert job.returncode == (not more) and "KeyboardInterrupt" in job.stderr, job.output


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_interrupted_as_it_fails(crew, known: bool) -> None:
    """Memory of a call that failed is kept, whatever its caller has raised meanwhile."""
    script = """
import gc
from ucc_hetero.bindings import quarantine
from ucc_hetero.native.libraries import lib

other, x, y = u.Communicator(world), np.ones(1000), np.empty(1000)
for _ in range(2 * known):
    other.Allreduce(x, y)

def interrupted(op):
    world.send(None, 1)
    while not lib.ucch_wait(op, 0.05):
        pass
    raise KeyboardInterrupt

if rank == 0:
    other._runner.wait, before = interrupted, len(quarantine._for_ever)
else:
    world.recv(source=0)
try:
    other.Allreduce(x[rank:], y[rank:])
except (KeyboardInterrupt, u.MismatchError) as error:
    print(type(error).__name__, flush=True)
assert rank or len(quarantine._for_ever) == before + 1
gc.collect()
try:
    other.Allreduce(x, y)
except u.CollectiveError as error:
    print("broken" if "can no longer be used" in str(error) else error, flush=True)
"""
    job = crew(HEAD + f"known = {known}\n" + script, 2, env={"UCCH_TIMEOUT": "100"})
    assert sorted(job.stdout.split()) == ["KeyboardInterrupt", "MismatchError", "broken", "broken"], job.output
