"""One trial: starts its job on emulated hosts, applies faults from outside, and judges the result."""

import contextlib
import fcntl
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ucc_hetero.launch import emulated_host
from ucc_hetero.launch.emulate import Cluster

from .menu import TIMEOUT, Trial

HERE = Path(__file__).parent
JOB = HERE / "job.py"
#: Seconds after which an operation is late: its deadline, and time for busy cores; recovery has several deadlines.
PATIENCE = 2 * TIMEOUT
RECOVERY = 5 * TIMEOUT
#: Seconds that the two regions of a put together wait for a peer that does not answer (`Region.close`).
REGIONS = min(10, TIMEOUT)
#: Seconds for the whole trial, after which the ranks' stacks are printed and the ranks are ended.
WHOLE = 75.0
#: Seconds for mpirun to end after its ranks.
AFTERMATH = 15.0

#: Maximum seconds for which all victims together are stopped, so that no call is late because of it.
STOPPED = 4.0

#: Prints the stacks of ranks: Python's, and native ones if gdb is installed.
WHERE = """
for p in $(pgrep -f '[j]ob.py'); do kill -USR1 $p; done
for p in $(pgrep -f '[j]ob.py'); do gdb -batch -p $p -ex 'thread apply all bt 14' 2>/dev/null | grep -v '^.New'; done
"""


#: MPI alone, without this package: some ranks leave; tests whether mpirun lets the others live.
CONTROL = """
import os, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
MPI.COMM_WORLD.Barrier()
if str(MPI.COMM_WORLD.rank) in sys.argv[1:]:
    os._exit(3)
time.sleep(2)
print("lives", flush=True)
os._exit(0)
"""


@dataclass
class Verdict:
    """The result of a trial."""

    trial: Trial
    #: The moment in which the fault really happened.
    moment: str = ""
    seconds: float = 0.0
    ends: dict[int, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    #: Findings that are mpirun's fault and not this package's.
    launcher: list[str] = field(default_factory=list)
    #: Ranks that survived and finished, and ranks that got an error and stopped.
    right: int = 0
    answered: int = 0
    output: str = ""

    def fail(self, kind, text):
        self.failures.setdefault(kind, []).append(text)


class Ranks:
    """The log files of the ranks, which are locked while the ranks live."""

    def __init__(self, folder, size):
        self._paths = [folder / f"rank{rank}" for rank in range(size)]

    def lines(self, rank):
        with contextlib.suppress(FileNotFoundError):
            return self._paths[rank].read_text(errors="replace").splitlines()
        return []

    def gone(self, rank):
        with contextlib.suppress(FileNotFoundError), self._paths[rank].open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return bool(file.read())
        return False


class Outside:
    """Faults that are applied to victims and their hosts once they reach the moment."""

    def __init__(self, trial, cluster, folder):
        self._trial, self._cluster, self._folder = trial, cluster, folder
        self._done = set()
        self._running = []
        self._host = trial.host(trial.victims[-1])
        self._flaps = 0
        self._next = 0.0

    def apply_due(self, ranks):
        """Apply the faults that are due."""
        trial = self._trial
        if self._flaps > 0 and time.monotonic() > self._next:
            self._flap()
        for rank in set(trial.victims) - self._done:
            for line in ranks.lines(rank):
                words = line.split()
                if words[1:2] == ["fault"] and words[-1].isdigit():
                    self._done.add(rank)
                    time.sleep(trial.delay)
                    self._befall(rank, words[-1])

    def _befall(self, rank, pid):
        fault, cluster, host = self._trial.fault, self._cluster, self._host
        if fault == "slow":
            words = ["sh", "-c", _stops(self._trial, rank), pid]
            self._running.append(cluster.hosts[self._trial.host(rank)].popen(words, stderr=subprocess.DEVNULL))
            return
        if len(self._done) > 1:
            return
        if fault in ("cut", "hole", "off"):
            (self._folder / "store" / f"cut{host}").touch()
        if fault == "cut":
            cluster.set_link(host, up=False)
        elif fault == "hole":
            self._port("nomaster")
        elif fault == "off":
            cluster.power_off(host)
        elif fault == "lossy":
            self._flaps = 16
        else:
            cluster.set_rate(host, "20mbit")

    def _flap(self):
        """Start or stop losing all frames on a link."""
        self._port("nomaster" if self._flaps % 2 == 0 else "master br0")
        self._next = time.monotonic() + (0.05 if self._flaps % 2 == 0 else 0.15)
        self._flaps -= 1

    def _port(self, what):
        port = self._cluster.layout[self._host].links[0].port
        emulated_host.configure(self._cluster._switch_pid(), f"link set dev {port} {what}\n", "")

    def end(self):
        for each in self._running:
            each.kill()
            each.wait()


def _stops(trial, rank):
    """A script that stops and continues a process several times."""
    rng, left, words = random.Random(f"{trial.seed} {rank}"), STOPPED / len(trial.victims), []
    while left > 0:
        seconds = min(left, rng.choice([0.01, 0.1, 0.8, 1.6]) * rng.random())
        words += ["kill -STOP $0", f"sleep {seconds:.4f}", "kill -CONT $0", f"sleep {0.1 * rng.random() ** 2:.4f}"]
        left -= seconds + 0.02
    return "; ".join(words)


def _environment(trial, fakes):
    env = {
        "UCCH_TIMEOUT": str(trial.timeout), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1", "OMPI_MCA_btl": "^ofi",
        "PYTHONPATH": f"{HERE.parent}/mpi:{HERE.parent}/fakegpu:{HERE.parents[1]}",
    }  # fmt: skip
    if not trial.gpu:
        return env | {"UCCH_EMULATE": trial.vendors}
    libraries = {f"FAKEGPU_{vendor.upper()}": str(path) for vendor, path in fakes.items()}
    more = {"FAKEGPU_DELAY_US": "20", "HIP_ENABLE_DEFERRED_LOADING": "0", "UCCH_HOLD": "y", "FAKEGPU_CONNECTIONS": "4"}
    return env | libraries | more | {"FAKEGPU_LAYOUT": trial.vendors, "HSA_ENABLE_SDMA": "0"}


def _start(trial, cluster, folder, env, python):
    words = [*python, str(JOB), str(folder)]
    with (folder / "output").open("ab") as out:
        pipe = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "env": env}
        if trial.exchange == "store":
            ranks = range(trial.size)
            return [cluster.hosts[trial.host(rank)].popen([*words, str(rank)], **pipe) for rank in ranks]
        exports = [word for name in env for word in ("-x", name)]
        more = ["--with-ft", "ulfm"] if trial.exchange == "ulfm" else []
        return [cluster.hosts[0].popen(["mpirun", "-np", str(trial.size), *exports, *more, *words], **pipe)]


def _until(seconds, done, meanwhile=bool):
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        meanwhile()
        time.sleep(0.01)
    return True


def run(trial, fakes, room=1, python=(sys.executable,)):
    """Run a trial and judge it. Time limits are multiplied by ``room``, as cores may be busy. ``python``: words that
    start the ranks' program."""
    verdict, began = Verdict(trial), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ucch-faults-"))
    try:
        (folder / "trial").write_text(trial.text())
        (folder / "store").mkdir()
        with Cluster(len(trial.slots), trial.slots, "none") as cluster:
            processes = _start(trial, cluster, folder, _environment(trial, fakes), python)
            _watch(trial, cluster, folder, processes, verdict, room)
        verdict.output += "".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in _written(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdict.seconds = time.monotonic() - began
    return verdict


def _written(folder):
    yield from sorted(folder.glob("rank*"))
    yield folder / "output"


def _watch(trial, cluster, folder, processes, verdict, room):
    whole = WHOLE * (1 if trial.fault == "stop" else room)  # ranks may wait all that time for a stopped one
    ranks, outside = Ranks(folder, trial.size), Outside(trial, cluster, folder)
    living = [rank for rank in range(trial.size) if rank not in trial.lost]

    def over():
        ended = all(each.poll() is not None for each in processes)  # mpirun may end before surviving ranks
        return all(ranks.gone(rank) or (ended and not ranks.lines(rank)) for rank in living)

    if not _until(whole, over, lambda: outside.apply_due(ranks)) and not _waits(trial, ranks):
        late = [rank for rank in living if not ranks.gone(rank)]
        verdict.fail("late", f"rank(s) {late} had not ended after {whole:g} s")
        for host in {trial.host(rank) for rank in late}:
            verdict.output += cluster.run(["sh", "-c", WHERE], host=host).stdout
    outside.end()
    ends = verdict.failures or trial.fault == "stop" or trial.exchange == "store"
    if not ends and not _until(AFTERMATH * room, lambda: processes[0].poll() is not None):
        _mpirun_stays(trial, cluster, verdict, AFTERMATH * room)
    patience = {"stop": 0.5, "off": 0.5, "cut": PATIENCE, "hole": PATIENCE}  # behind a cut: the deadline
    for each in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(patience.get(trial.fault, 3))
    _clean(trial, cluster, verdict)
    for each in processes:
        each.kill()
        each.wait()
    for rank in range(trial.size):
        _read(trial, rank, ranks.lines(rank), verdict, room)
    if trial.exchange == "ulfm" and list(verdict.failures) == ["silent"] and processes[0].poll():
        _mpirun_ends_ranks(trial, cluster, verdict)


def _mpirun_stays(trial, cluster, verdict, seconds):
    """mpirun outlives its ranks: its own fault if no process of the job is left."""
    hosts = range(len(trial.slots))
    there = [cluster.run(["ps", "axo", "pid,ppid,stat,wchan:20,args"], host=host).stdout for host in hosts]
    verdict.output += "".join(there)
    text = f"mpirun had not ended {seconds:g} s after its ranks"
    if any(f" {sys.executable} {JOB} " in line for line in "\n".join(there).splitlines() if " -np " not in line):
        verdict.fail("late", text)
    else:
        verdict.launcher.append(text)


def _mpirun_ends_ranks(trial, cluster, verdict):
    """Ranks were ended in the middle of their work: if mpirun does the same without this package, it is mpirun's fault.

    For example mpirun of Open MPI 5.0.11 ends two of four ranks once the others have exited with a status other than 0.
    """
    gone = [str(rank) for rank in trial.lost]
    words = ["mpirun", "--with-ft", "ulfm", "-np", str(trial.size), sys.executable, "-c", CONTROL, *gone]
    if cluster.run(words).stdout.count("lives") < trial.size - len(gone):
        verdict.launcher += verdict.failures.pop("silent")


def _waits(trial, ranks):
    """True if surviving ranks have finished and wait, as they should, for one that was stopped."""
    last = [ranks.lines(rank)[-1:] for rank in range(trial.size) if rank not in trial.lost]
    return trial.fault == "stop" and all("finalize" in line for lines in last for line in lines)


def _clean(trial, cluster, verdict):
    """End remaining processes, which may only be ranks that do not answer, and check what is left behind."""
    off = {trial.host(trial.victims[-1])} if trial.fault == "off" else set()
    for host in sorted(set(range(len(trial.slots))) - off):
        found = cluster.run(["sh", "-c", "ps -eo pid=,stat=,args= | grep -v ' Z' | grep '[j]ob.py'"], host=host)
        if found.stdout.strip() and trial.fault != "stop" and not (verdict.failures or verdict.launcher):
            verdict.fail("left", f"host {host}: {found.stdout.strip()}")
        cluster.hosts[host].kill_all()
        files = cluster.run(["ls", "/dev/shm"], host=host).stdout.split()
        if trial.exchange != "store":  # Open MPI leaves these files if a rank was killed
            files = [name for name in files if not name.startswith("sm_segment")]
        # A process that dies after it made a segment of libucp, and before it unlinked that, leaves the segment.
        made = [name for name in files if name.startswith("ucx_shm_posix")]
        if len(files) > len(made) or len(made) > len(trial.lost):
            verdict.fail("left", f"host {host}: /dev/shm has {files}")


def _read(trial, rank, lines, verdict, room):
    words = [line.split() for line in lines if line[:1].isdigit() and len(line.split()) > 2]
    verdict.ends[rank] = " ".join(words[-1][1:3]) if words else "nothing"
    for row in words:
        if row[1] == "fault" and rank == trial.victims[-1]:
            verdict.moment = verdict.moment or row[2]
        if row[1] == "WRONG":
            verdict.fail("wrong", f"rank {rank}: {' '.join(row)}")
        if row[1] == "took" and rank not in trial.lost:
            limit = RECOVERY if row[4] in ("shrink", "agree") else PATIENCE + 3 + REGIONS * (row[4] == "put")
            if float(row[3]) > limit * room:
                verdict.fail("late", f"rank {rank}: {' '.join(row)}")
    if rank in trial.lost:
        return
    said = {row[1] for row in words}
    verdict.right += "right" in said
    verdict.answered += "right" not in said and "raises" in said
    dies = trial.fault in ("segfault", "memory", "descriptors") and rank in trial.victims  # UCX aborts without memory
    if dies and not said & {"right", "raises"}:
        return
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
    if fatal and trial.exchange != "store" and _in_a_call_of_mpis(lines):
        verdict.launcher.append(f"rank {rank}: {fatal} in Open MPI, which hears of a death as it makes a communicator")
    elif fatal and not dies:
        verdict.fail("crashed", f"rank {rank}: {fatal}")
    elif not said & {"right", "raises"} and trial.exchange != "mpi":
        verdict.fail("silent", f"rank {rank} ended without a word after {verdict.ends[rank]}")
    for row in words:
        if row[1] in ("answer", "raises") and (trial.bears_it or not _good(row, trial, rank)):
            verdict.fail("odd", f"rank {rank}: {' '.join(row)}")


def _in_a_call_of_mpis(lines):
    """True if the crashed thread is in an MPI call such as Split, in which Open MPI 5.0.11 may crash
    (CONTRIBUTING.md)."""
    text = "\n".join(lines)
    return "native/threaded.py" in text.partition("Current thread ")[2].partition("\n\n")[0].splitlines()[1]


ANSWERS = (
    "PeerError", "RevokedError", "CollectiveTimeout", "CollectiveError", "RefusedError", "MismatchError", "DeviceError",
    "AgreementError",
)  # fmt: skip


def _good(row, trial, rank):
    """True if an exception names a rank. Victims without memory or descriptors may raise others.

    A rank with too few descriptors to start raises an error on all ranks, and one that lacks something for network
    threads, of which it warns, can be reached by no put of another host.
    """
    kind, text = row[3].rstrip(":"), " ".join(row[4:])
    known = kind in ANSWERS or (kind == "ValueError" and trial.fault == "descriptors" and "ulimit -n" in text)
    known |= kind == "UCCHError" and trial.fault in ("memory", "descriptors") and "no wires join them" in text
    return rank in trial.victims or (known and "rank" in text)
