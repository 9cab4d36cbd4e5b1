"""Ends of calls and jobs after failures: an error that names rank and cause, within the deadline, and no hang."""

import random
from pathlib import Path

import pytest

from .scripts import HEAD, NEVER, Job

#: Cases on ranks that have run other scripts before.
ON_A_CREW = {
    # The libraries are not unloaded at the end: they used to be closed during the failed call.
    f"freed after a failure, {layout or 'one vendor'}": Job("""
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
""", 3, {"^right$": 3}, more={"layout": layout})
    for layout in ("", "nvidia:2,amd:1")
} | {
    # Memory of a failed call is kept, whatever exception its caller handles meanwhile.
    f"interrupted as it fails, {known} calls before": Job(f"known = {known}" + """
import gc
from ucc_hetero.bindings import quarantine
from ucc_hetero.native.libraries import lib

other, x, y = u.Communicator(world), np.ones(1000), np.empty(1000)
for _ in range(known):
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
""", 2, {"^KeyboardInterrupt$": 1, "^MismatchError$": 1, "^broken$": 2})
    for known in (0, 2)
}  # fmt: skip

CALLS = "Recv(one)", "Probe()", "recv()", "Allreduce(x, y)"
#: A call that one rank does not make in time -> the other ranks' errors.
ALONE = {
    "comm.Split(0)": r"Split \(call 1 .*",
    "comm.bcast(1, root=1)": r"bcast of objects root=1 \(call 1 .*",
    "comm.Create_group(comm.Get_group())": "Create_group",
}


def does_not_come(call):
    """The others name the rank in time, and the job ends even if they go on: MPI_Finalize would wait for the rank."""
    return f"""
world.Barrier()  # no rank's time begins before all are there
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    {call}
except u.CollectiveTimeout as error:
    print(error, flush=True)
"""


#: The head of scripts, with ``comm`` as mpi4py's communicator.
NO_COMM = HEAD.replace("comm = u.Communicator(world)", "comm = world")


def looks_for_messages(call):
    """A rank that does not join a call of the other ranks receives the messages that they send, and nothing else."""
    return f"""
turn, early = world.Dup(), comm.irecv() if rank == 1 else None
turn.Barrier()
if rank == 1:
    said = [turn.recv(source=other) for other in (0, 2)]  # once they have waited in vain
    assert all("rank(s) [1] did not come" in text for text in said), said
    looks = [comm.Iprobe(), comm.iprobe(), comm.improbe(), getattr(comm, "mpi", comm).Iprobe(), world.Iprobe()]
    assert not (any(looks) or early.test()[0]), looks
    turn.Barrier()
    assert (early.wait(), comm.recv(), comm.mprobe().recv()) == (7, 7, 7)
else:
    try:
        {call}
    except u.CollectiveTimeout as error:
        turn.send(str(error), 1)
    turn.Barrier()
    for _ in range(3 * (rank == 0)):
        comm.send(7, 1)
turn.Barrier()
print("right", flush=True)
"""


def makes_none(how):
    """If a rank's first communicator fails before the others have met it, they do not wait for the deadline."""
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
    said = {r"rank 1 has failed \(status 1\) and ends the job": None}
    return Job(script, 2, said, status=None, env=NEVER, head="")


def fails(how):
    """The rank fails while the others wait, in this package's calls or MPI's; plain mpi4py mostly waits for ever."""
    return f"""
if rank == 1:
    {how}
try:
    {random.choice(["comm.Allreduce(np.ones(4), np.empty(4))", "world.Barrier()"])}
except u.PeerError:
    time.sleep(100)  # the job ends all the same
"""


BOTH = "rank 1 has failed {} and ends the job".format(r"\(status 3\)")
#: How a rank fails, the job's status, and the output.
FAILS = [
    ("sys.exit(3)", 3, BOTH), ("sys.stderr.close(); sys.exit(3)", 3, ""), ("sys.exit('out of flour')", 1, "of flour"),
    ("raise RuntimeError('this rank is out of its mind')", 1, "out of its mind"), ("os._exit(3)", 3, ""),
    ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)", 128 + 15, ""),
]  # fmt: skip

JOBS = {
    # The others raise at once, long before the deadline.
    "a rank leaves": Job("""
if rank == 1:
    sys.exit(0)
caught(u.PeerError, lambda: comm.Allreduce(x, y))
""", 3, {"rank 1 has left the job or died": 2}, env=NEVER),
    # The rank's call fails and its process exits without an error; a rank in the call raises.
    "a rank fails and ends well": Job("""
if rank == 2:
    world.recv(source=0)
else:
    request = comm.Iallreduce(np.ones(1 << 15), np.empty(1 << 15))
    if rank == 1:
        request._timeout = 1.0
    caught(u.CollectiveError, request.Wait)
    if rank == 0:
        world.send(None, 2)
""", 3, {"have not called it": 1, "rank 1 has given up, as call 1 has failed there": 1}, env=NEVER),
    **{f"a rank makes no communicator: {how}": makes_none(how) for how in ("argument", "interrupt")},
    # The child has an exit of its own, as if its parent had not imported the package.
    "a rank that was forked before MPI was begun": Job("""
import os, sys
import ucc_hetero as u
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
comm = u.Communicator()
comm.Barrier()
sys.exit(3 * comm.rank)
""", 2, {BOTH: None}, status=None, env=NEVER, head="", more={"cold": True}),
    "a communicator that cannot be made ready on one rank": Job("""
from ucc_hetero.api import comm as of

def full(*_):
    raise MemoryError("no memory is left")

other = comm.Dup()
if rank == 0:
    made, of.Runner = of.Runner, full
    caught(MemoryError, lambda: other.Allreduce(x, y))
    caught(u.CollectiveError, lambda: other.Allreduce(x, y))
    of.Runner = made
elif rank == 1:
    other.bcast(1, root=1)
comm.Allreduce(x, y)
""", 3, {"caught .*no memory is left": 2}),
    # The program does not wait for a daemon thread such as a listener: its objects used to be released while in use.
    "a thread goes with the interpreter": Job(f"""
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
""", 2 * len(CALLS), {"^fine$": 2 * len(CALLS), "Traceback": 0},
        head=HEAD.replace("= MPI.COMM_WORLD", "= MPI.COMM_WORLD.Split(pair := MPI.COMM_WORLD.rank // 2)")),
    # The communicator has ended, and the others go on; the end of the process used to fail.
    "interrupted as it is freed": Job("""
from ucc_hetero.bootstrap.teams import Teams
other, x, y = u.Communicator(world), np.ones(1000), np.empty(1000)
other.Allreduce(x, y)

def interrupted(*_, **how):
    raise KeyboardInterrupt

close, Teams.close = Teams.close, interrupted if rank == 1 else Teams.close
try:
    other.Free()
except KeyboardInterrupt:
    assert rank == 1
Teams.close = close
assert not other
other.Free()
comm.Allreduce(x, y)
assert (y == size).all()
print("right", flush=True)
""", 2, {"^right$": 2, "Traceback": 0}),
    "a rank exits before its first communicator": Job("", 2, {BOTH: None}, status=3, env=NEVER,
        head=HEAD.replace("comm = u", "if world.rank == 1:\n    sys.exit(3)\ncomm = u")),
    "a rank does not come to the first communicator": Job(does_not_come("u.Communicator()"), 3,
        {r"the making of a communicator[:;] rank\(s\) \[1\] (did|have) not c": None}, status=None,
        env={"UCCH_TIMEOUT": "2"}, head=NO_COMM),
    "a rank does not come to the next communicator": Job("""
if rank == 1:
    os.environ["UCCH_CHANNELS"] = "perhaps"
caught(ValueError, u.Communicator)
os.environ.pop("UCCH_CHANNELS", None)
""" + does_not_come("u.Communicator()"), 3, {r"the making of a communicator: rank\(s\) \[1\] did not come": None},
        status=None, env={"UCCH_TIMEOUT": "2"}, head=NO_COMM),
    "a rank does not come": Job(lambda: does_not_come(random.choice([*ALONE])), 3,
        {rf"({'|'.join(ALONE.values())})[:;] rank\(s\) \[1\] (did|have) not c": None}, status=None,
        env={"UCCH_TIMEOUT": "2"}),
    # Questions that the others ask each other must not affect the rank that was away, whatever it receives.
    "a rank does not come, and looks for messages": Job(
        lambda: looks_for_messages(random.choice(["u.Communicator(world)", "u.Communicator(comm)"])), 3,
        {"^right$": 3}, status=None, env={"UCCH_TIMEOUT": "2"}),
    "a rank looks for messages before its first communicator": Job(looks_for_messages("u.Communicator()"), 3,
        {"^right$": 3}, status=None, env={"UCCH_TIMEOUT": "2"}, head=NO_COMM),
    # If the others cannot leave MPI's call, the job ends at the deadline and prints why.
    "a rank is stopped within a call of MPI's": Job("""
from ucc_hetero.bootstrap.timely import Timely

if rank == 1:
    Timely.at_once = lambda *_, **more: os.kill(os.getpid(), signal.SIGSTOP)
comm.Dup()
""", 3, {"rank [02]: Dup: not all ranks got through in time": None}, status=None, env={"UCCH_TIMEOUT": "2"}),
    # Requests in any state, messages too, held and dropped; exits that are caught, or of another thread, end nothing.
    "a script frees nothing": Job("""
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
""", 4, {"^end$": 4, "WARN|ERROR|failed|Traceback": 0}),
    # Requests without a wait, in another thread too.
    "the interpreter ends with calls under way": Job("""
x, y = np.ones(300_000), np.empty(300_000)
kept = [comm.Iallreduce(x, y) for _ in range(5)] + [comm.Irecv(np.empty(5), 1 - rank, 9)]
other = comm.Dup()
thread = threading.Thread(target=lambda: [other.Iallreduce(x, np.empty(300_000)) for _ in range(3)])
thread.start()
thread.join()
print("at the end", flush=True)
comm.Iallreduce(x, y)
""", 2, {"^at the end": 2, "Traceback": 0}),
    # MPI calls the operation, and mpi4py ends the job with its traceback: no rank gets a wrong sum, or waits.
    "an exception in an operation of the user's": Job(lambda: f"""
def add(a, b, datatype):
    raise KeyError("mine alone")
op = MPI.Op.Create(add, commute=True)
x, y = np.ones(5), np.empty(5)
{random.choice(["comm.Allreduce(x, y, op)", "comm.Iallreduce(x, y, op).Wait()"])}
print("a result", flush=True)
""", 2, {"KeyError": None, "'mine alone'": None, "a result": 0}, status=None),
    **{f"a rank fails: {how}": Job(lambda how=how: fails(how), 2, {said: None}, status) for how, status, said in FAILS},
}  # fmt: skip


@pytest.mark.parametrize("name", ON_A_CREW)
def test_calls(crew, name):
    ON_A_CREW[name].run(crew)


@pytest.mark.parametrize("name", JOBS)
def test_jobs(mpirun, name):
    JOBS[name].run(mpirun, check=False)


@pytest.mark.parametrize("more", [(), ("--with-ft", "ulfm")], ids=["plain", "ulfm"])
def test_a_rank_that_is_interrupted_at_its_end(mpirun, flavour, more):
    """The others do not wait for it; the job fails if they cannot go on without it."""
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
    Job(script, 3, {"KeyboardInterrupt": None}, status=int(not more)).run(mpirun, mpi_args=more, check=False)


#: Calls of daemon threads at process exit: some that other ranks do not make, and some that never end.
DAEMONS = (
    *("comm.Recv(one)", "comm.Probe()", "comm.recv()", "comm.Ssend(long, left)", "comm.Allreduce(x, y)"),
    *("comm.bcast(1, root=right)", "first.Allreduce(long, long * 0)", "comm.Dup()", "comm.Split(0)", "unused.Free()"),
    *("u.Communicator(world)", "[(comm.Iprobe(), time.sleep(1e-3)) for _ in always]"),
    *("[comm.Dup().Free() for _ in always]", "[first.Allreduce(long, long * 0) for _ in always]"),
    *("[comm.Sendrecv(long, right, 3, long * 0, left, 3) for _ in always]",),
    "[(comm.Irecv(one), comm.Isend(one, left), time.sleep(1e-4)) for _ in always]",
    *(
        f"[(p.Start(), p.Wait()) for _ in always for p in [{made}]]"
        for made in ("comm.Allreduce_init(x, y)", "comm.Send_init(one, left)", "comm.Precv_init(one, 2, left)")
    ),
    "[(p.Start(), p.Pready_range(0, 3), p.Test()) for _ in always for p in [comm.Psend_init(long, 4, left)]]",
    *("worker.wait_notification(1e3)", "[(rma.Worker().close(), worker.info()) for _ in always]"),
)
ENDS = {"": 0, "sys.exit(0)": 0, "sys.exit(3)": 3, "raise KeyError(3)": 1}


@pytest.mark.parametrize("turn", range(3))
def test_daemons_within_calls(mpirun, flavour, compiled, tmp_path, turn):
    """No thread is in MPI during its finalization, and none is waited for."""
    if flavour[0] != "openmpi":
        pytest.skip("needs Open MPI")
    end, ranks = random.choice([*ENDS]), random.choice([1, 2, 3])
    script = f"""
import itertools, traceback
sys.setswitchinterval({random.choice([5e-3, 1e-5])})
from ucc_hetero import rma
always, long, worker = itertools.count(), np.ones(300_000), rma.Worker()
first, unused = comm.Dup(), comm.Split(0, rank)

def within(thread):
    stack = traceback.walk_stack(sys._current_frames().get(thread.ident))
    return not thread.is_alive() or any("ucc_hetero" in frame.f_code.co_filename for frame, _ in stack)

def does(call):
    try:
        eval(call)
    except Exception:
        pass

for call in {[random.sample(DAEMONS, random.randrange(3)) for _ in range(ranks)]}[rank]:
    thread = threading.Thread(target=does, args=(call,), daemon=True)
    thread.start()
    while not within(thread):
        time.sleep(0)
print("at the end", flush=True)
if rank == size - 1:
    {end or "pass"}
"""
    library = compiled(tmp_path / "late.so", "-shared", "-fPIC", "-O2", Path(__file__).with_name("late.c"), "-ldl")
    env = {"LD_PRELOAD": str(library), "LATE_US": random.choice(["1000", "10000", "40000"])}
    said = {"signal 11|Segmentation": 0} | ({} if ENDS[end] else {"^at the end": ranks})
    Job(script, ranks, said, ENDS[end], {**NEVER, **env}).run(mpirun, check=False)
