"""Ranks that die, and survivors that go on (``Revoke``, ``Agree``, ``Shrink``): never wrong data, never a hang."""

import random
import re
from pathlib import Path

import pytest

from .scripts import HEAD, NEVER, Job

CLUSTER = Path(__file__).parents[1] / "cluster"

HEAD += """
def right(comm):
    comm.Allreduce(x, y)
    assert (y == comm.size).all()
    print("right", flush=True)
"""


def going_on(script, ranks, right, layout="", **said):
    """A job in which this many ranks print that their results are correct, and its other output."""
    return Job(script, ranks, {"^right$": right, **said}, 0, {"UCCH_TIMEOUT": "200", "UCCH_EMULATE": layout}, HEAD)


JOBS = {
    # Blocking, non-blocking and persistent calls and messages; later ones raise.
    "revocation ends what others wait for": going_on("""
other = comm.Dup()
if rank == 0:
    while {1, 2} & {*comm._runner.board.missing(2)}:  # they have called
        time.sleep(0.01)
    comm.Revoke()
elif rank == 1:
    caught(u.RevokedError, lambda: comm.Allreduce(x, y))
elif rank == 2:
    caught(u.RevokedError, lambda: comm.Iallreduce(x, y).Wait())
else:
    caught(u.RevokedError, lambda: comm.Recv(y, 0))
assert comm.Is_revoked()
caught(u.RevokedError, lambda: comm.Barrier())
caught(u.RevokedError, lambda: comm.Isend(x, (rank + 1) % size))
assert not other.Is_revoked()
other.Allreduce(x, y)
assert (y == size).all()
assert comm.Agree(0b111 if rank else 0b101) == 0b101
again = comm.Shrink()  # nobody has died
assert (again.rank, again.size) == (rank, size) and again.Get_failed().Get_size() == 0
right(again)
comm.Free()

# A death while a communicator has no page yet: its error is raised all the same, and the next communicator is made.
from ucc_hetero.bootstrap import membership

def dies(*_):
    raise u.PeerError("rank 1 died before there was a page")

board, membership.Board = membership.Board, dies
assert "before there was a page" in caught(u.PeerError, again.Dup)
membership.Board = board
with again.Dup() as part:
    right(part)
""", 4, 8, "nvidia:2,amd:2"),
    # ``Agree`` raises on all until all have acknowledged; communicators without dead ranks are not affected.
    "deaths are acknowledged": going_on("""
part = comm.Split(rank == 1)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
said = caught(u.CollectiveError, lambda: comm.Allreduce(x, y))
assert "rank 1" in said or "revoked" in said, said
while comm.Get_failed().Get_size() == 0:
    time.sleep(0.01)
assert "[1]" in caught(u.PeerError, lambda: comm.Agree(1))
assert comm.Ack_failed() == 1
assert comm.Agree(3) == 3
right(part)
""", 3, 2),
    # An exception ends its process only: the others go on. A rank in Shrink interrupts the others' calls.
    "a rank that fails does not end the others": going_on("""
if rank == 1:
    raise RuntimeError("of no use any more")
elif rank == 0:
    caught(u.CollectiveError, lambda: comm.Allreduce(x, y))
else:
    caught(u.RevokedError, lambda: comm.Recv(y, 0))
right(comm := comm.Shrink())
""", 3, 2, **{"of no use any more": None}),
    # MPI's own calls would wait for ever.
    "a rank that does not come ends the making of communicators": going_on("""
if rank == 0:
    comm._runner.timeout = 1.0
    said = caught(u.CollectiveTimeout, np.random.default_rng().choice([comm.Dup, comm.Split]))
    assert "rank 0: " in said and "the limit was 1 s" in said and "rank(s) [1] have not" in said, said
    print("right", flush=True)
    MPI.COMM_WORLD.send(None, 1)
else:
    MPI.COMM_WORLD.recv(source=0)
os._exit(0)
""", 2, 1),
    # The error names the dead rank; MPI's own does not.
    "deaths end the making of communicators": going_on("""
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for make in (comm.MAKE, lambda: u.Communicator(comm.mpi)):
    said = caught((u.PeerError, u.RevokedError), make)  # the latter once the other one shrinks
    told = "rank(s) [1] died", "rank 1 has left", "given this communicator up", "a rank has revoked"
    assert any(text in said for text in told), said
comm = comm.Shrink()
with comm.Dup() as part:
    right(part)
""".replace("MAKE", random.choice(["Dup", "Split"])), 3, 2),
    # In libucc, which exchanges addresses by MPI calls whose errors name no rank.
    "a death while contexts are made": going_on("""
from ucc_hetero.bindings import ucc
from ucc_hetero.bootstrap import process

comm.Barrier()  # all have made it
for job in process.all_jobs():
    job.team_abandoned = True
if rank == 1:
    ucc.Lib.context = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
assert "died" in caught(u.PeerError, comm.Dup)
right(comm := comm.Shrink())
""", 3, 2, random.choice(["nvidia:3", "nvidia:2,amd:1"])),
}  # fmt: skip


#: Jobs of three ranks in which one dies and the others succeed; run as one job.
DEATHS = [name for name, job in JOBS.items() if "death" in name]


@pytest.mark.parametrize("name", [name for name in JOBS if name not in DEATHS])
def test_survivors(mpirun, ulfm, name):
    JOBS[name].run(mpirun, mpi_args=ulfm, check=False)


def test_survivors_of_deaths(mpirun, ulfm):
    scripts = [HEAD.replace("= MPI.COMM_WORLD", "= MPI.COMM_WORLD.Split(job)") + JOBS[name].script for name in DEATHS]
    script = f"from mpi4py import MPI\njob = MPI.COMM_WORLD.rank // 3\nexec({scripts!r}[job])\n"
    layouts = (JOBS[name].env["UCCH_EMULATE"] or "host:3" for name in DEATHS)
    env = {"UCCH_TIMEOUT": "200", "UCCH_EMULATE": ",".join(layouts)}
    done = mpirun(script, 3 * len(scripts), env=env, mpi_args=ulfm)
    assert done.said("right") == 2 * len(scripts), done.output


def test_a_rank_without_memory_for_its_peers_segments(mpirun, ulfm):
    """libucc gives a collective up with a status that is not an error: the call must raise, or have correct data.

    libucs may abort the rank without memory, in its logging, which cannot allocate, or on purpose.
    """
    more = random.choice([1 << 16, 1 << 20])
    script = """
import resource, sys
from pathlib import Path

right = np.arange(200_000.0) * 3
x = right.copy() if comm.rank == 1 else np.full_like(right, np.nan)
comm.Barrier()
comm._runner.timeout = 4.0
limits = resource.getrlimit(resource.RLIMIT_AS)
if comm.rank == 3:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + MORE, limits[1]))
try:
    comm.Bcast(x, 1)
    said = "done" if np.array_equal(x, right) else "wrong"
except (u.UCCHError, MemoryError):
    said = "raises"
resource.setrlimit(resource.RLIMIT_AS, limits)
print(f"{said}.", flush=True)
os._exit(0)
"""
    env = {"UCCH_EMULATE": "nvidia:1,amd:3"}
    job = mpirun(HEAD + f"MORE = {more}\n" + script, 4, env=env, mpi_args=ulfm, check=False)
    said = re.findall(r"^(\w+)\.$", job.stdout, re.M)
    ended = re.search("ucs_log_dispatch|Fatal: failed to", job.stderr) is not None
    assert "wrong" not in said and len(said) == 4 - ended, f"{more} bytes\n{job.output}"


def test_what_was_not_received_is_not_passed_on(mpirun, ulfm, tmp_path, compiled):
    """After a failed read from a dead peer libucc's ring passes on garbage, and the next rank's part succeeds.

    No rank dies here, but survivors make the failed connections again.
    """
    library = compiled(tmp_path / "broken.so", "-O1", "-shared", "-fPIC", CLUSTER / "broken_read.c", "-ldl")
    env = {"UCCH_EMULATE": "nvidia:2,amd:2", "LD_PRELOAD": str(library), "UCCH_TIMEOUT": "100"}
    args = [str(library), str(random.randrange(10**6)), "50000", "6", "100"]
    job = mpirun(CLUSTER / "broken_read_job.py", 4, args=args, env=env, mpi_args=ulfm)
    assert job.said("right: rank") == 4, (args, job.output)


@pytest.mark.parametrize(("prefix", "when"), [("UCCHN", "at first"), ("UCCHB", "shrink")])
def test_a_rank_without_connections_is_refused(mpirun, ulfm, prefix, when):
    """libucc makes its context anyway, and the others' next team reads the address that the rank lacks."""
    script = """
import os, sys
from mpi4py import MPI
import ucc_hetero as u
from ucc_hetero.bootstrap import process

if WHEN == "shrink":
    comm = u.Communicator()
    comm.Barrier()  # all have made it
    for job in process.all_jobs():
        job.team_abandoned = True  # as after a team that came to nothing
if MPI.COMM_WORLD.rank == 2:
    os.environ[PREFIX + "_UCC_UCX_TLS"] = "nosuch"
try:
    comm.Shrink() if WHEN == "shrink" else u.Communicator()
except u.AgreementError as error:
    assert "rank 2: libucc has made" in str(error) and "ulimit" in str(error), error
    print("right", flush=True)
os._exit(0)
"""
    env = {"UCCH_EMULATE": "nvidia:1,amd:3", **NEVER}
    job = mpirun(f"PREFIX, WHEN = {prefix!r}, {when!r}\n" + script, 4, env=env, mpi_args=ulfm, check=False)
    assert len(re.findall("^right$", job.stdout, re.M)) == 4, job.output


def test_a_rank_that_dies_at_its_very_end_keeps_nobody(mpirun, ulfm):
    """Others are in ``MPI_Finalize`` then, where Open MPI waits for dead ranks."""
    first = """
import atexit, os
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    atexit.register(os.kill, os.getpid(), 9)
"""
    job = mpirun(first + HEAD + "print('right', flush=True)\n", 3, mpi_args=ulfm, check=False)
    assert job.stdout.split() == ["right"] * 3, job.output


def test_refused_where_mpirun_ends_the_job(crew, ulfm):
    """The error has the way out; nothing else has changed."""
    script = """
for call in (comm.Revoke, comm.Shrink, lambda: comm.Agree(1)):
    assert "mpirun --with-ft ulfm" in caught(u.NotSupported, call)
assert not comm.Is_revoked() and comm.Get_failed().Get_size() == 0
comm.Allreduce(x, y)
print("right", flush=True)
"""
    assert crew(HEAD + script, 2).said("right") == 2
