"""Fixtures that run scripts under the real mpirun, with a time limit, and that build fake GPU libraries."""

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "crew"))
from crews import RANK, CaseFailed, Crew, MPIResult, chosen, in_crew, program, vendors  # noqa: E402

WARM = RANK.with_name("warm.py")

# A shell starts background jobs with SIGINT ignored, and all their processes inherit that: tests of Ctrl-C would wait
# for ever. A handler, unlike SIG_IGN, is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _terminated(number, frame):
    """End a run on SIGTERM as on Ctrl-C: jobs have sessions of their own, which nothing else would end."""
    signal.signal(number, signal.SIG_IGN)  # timeout(1) sends two
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, _terminated)

# Thousands of Pythons are started here, above all ranks. They must write bytecode, which some shells disable: else each
# would compile the package again, a third of the cost of a small job.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Jobs run side by side: MPI's busy waiting would take the cores from the ranks that it waits for.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
# MPI's libfabric component, which no test needs, sleeps for a second at its start.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

#: Factor for the time limits of jobs before they count as hanging: other jobs may use the cores. Only failures take
#: that long.
ROOM = 4


#: With this variable a test draws the same random data again, as `.ci/lanes.py` does when it repeats a failed test.
DRAWN = os.environ.setdefault("TESTS_DRAW", str(secrets.randbelow(1 << 30)))


def pytest_report_header():
    return f"TESTS_DRAW={DRAWN}"


#: Each test has a folder of its own for the files of its mpiruns. Open MPI names them by mpirun's process id alone: a
#: killed mpirun leaves them behind, and a later one with that id does not start ("The PMIx server's listener thread
#: failed to start").
_FOLDERS, _NUMBER = tempfile.TemporaryDirectory(prefix="mpirun"), itertools.count()


def pytest_runtest_setup(item):
    random.seed(f"{DRAWN} {item.nodeid}")
    os.environ["PRTE_MCA_prte_tmpdir_base"] = f"{_FOLDERS.name}/{next(_NUMBER)}"  # noqa: SIM112


def pytest_configure():
    """Disable UCX's memory hooks in test jobs, as on hosts that need none; the fixture `hooked` keeps them."""
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")


def pytest_collection_finish():
    """Exclude thousands of collected tests from garbage collections, of which some tests force hundreds."""
    gc.collect()
    gc.freeze()


#: Makes ranks print line by line.
LINES = ROOT / "tests" / "lines"
FAKEGPU = ROOT / "tests" / "fakegpu"
sys.path.insert(0, str(FAKEGPU))  # the ranks' scripts import `arrays` from there

#: Depends on the machine and not on the test: the places of libraries.
INHERITED = ("UCCH_UCC_LIB", "UCCH_UCX_DIR", "PMIX_MCA_gds")


def find_mpirun():
    """``$MPIRUN``, else the mpirun installed next to this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return os.environ.get("MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))


def need_mpirun():
    """The mpirun; without one the test is skipped."""
    return find_mpirun() or pytest.skip("no mpirun: install the extra 'mpi', or an MPI")


@cache
def mpi_flavour(mpirun):
    """("openmpi" | "hydra", major version) of an mpirun; ("unknown", 0) for others."""
    banner = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=240, check=False).stdout
    if found := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)", banner):
        return "openmpi", int(found[1])
    if "HYDRA" in banner or "Intel(R) MPI" in banner:
        found = re.search(r"Version:?\s+(\d+)", banner)
        return "hydra", int(found[1]) if found else 0
    return "unknown", 0


def mpi_command(mpirun, n, mpi_args=()):
    """The mpirun command line for ``n`` ranks on this machine, however many cores it has."""
    flavour, _ = mpi_flavour(mpirun)
    # Hydra oversubscribes unasked.
    more = ["--oversubscribe"] if flavour == "openmpi" else []
    return [mpirun, *more, "-n", str(n), *mpi_args]


def mpi_environment(mpirun):
    """This process's environment without settings that change results, made suitable for containers and root."""
    env = {k: v for k, v in os.environ.items() if k in INHERITED or not k.startswith(("UCCH_", "PMIX_", "PMI_"))}
    if mpi_flavour(mpirun)[0] == "openmpi":
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # For scripts that start mpirun themselves: names of Open MPI 5 and 4.
        env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    # With two cores and several ranks, BLAS threads would only slow the ranks down.
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **env, "PYTHONUNBUFFERED": "1"}


def kill_session(sid):
    """SIGKILL all processes of a session. Each rank of Open MPI has a process group of its own, so killpg is no use."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == sid and fields[0] != "Z":
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, IndexError, ValueError):
            continue  # the process has ended, or belongs to another user


def run_limited(command, env, cwd, timeout):
    """Run a command in a session of its own. Returns (its result, True if it had to be killed).

    Output goes to files: a pipe would stay open as long as any stray descendant holds it.
    """
    out, err = cwd / "mpirun.out", cwd / "mpirun.err"
    with out.open("wb") as fo, err.open("wb") as fe:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=fo, stderr=fe, env=dict(env), cwd=cwd, start_new_session=True
        )
        late = False
        try:
            job.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            job.terminate()  # mpirun then ends its ranks and prints what it knows
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(5)
        finally:
            kill_session(job.pid)
            job.wait(10)
    texts = [path.read_text(errors="replace") for path in (out, err)]
    return MPIResult(job.returncode, *texts), late


#: Variables that are read when a process starts, or imports torch: ranks with them are new Pythons.
COLD = ("LD_PRELOAD", "SANITIZER", "UCCH_TORCH_REPLACE")
#: Test files -> slow imports of ranks. Files of one lane share them, and the crews with these.
NEEDED = {
    "torch|vllm": ["torch", "torch._dynamo", "torch.distributed.fsdp", "sklearn.datasets"],
    "mpi/test_(?!torch)": ["sklearn.datasets"],
}


@contextlib.contextmanager
def warmed(*modules):
    """Command words that start a Python program with these modules already imported; see tests/crew/warm.py."""
    program = find_mpirun()
    env = mpi_environment(program) if program else dict(os.environ)
    env["PYTHONPATH"] = str(LINES)
    with contextlib.ExitStack() as ended:
        doors = ended.enter_context(tempfile.TemporaryDirectory(prefix="warm"))
        for number in range(2):
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(f"{doors}/{number}")
                door.listen(64)
                words = [sys.executable, str(WARM), str(door.fileno()), *modules]
                job = subprocess.Popen(
                    words, env=env, stdin=subprocess.DEVNULL, pass_fds=[door.fileno()], start_new_session=True
                )
            ended.callback(job.wait)
            ended.callback(job.kill)
        yield [sys.executable, "-I", "-S", str(RANK.with_name("warm_rank.py")), doors]


class Pythons:
    """Command words that start Python for ranks."""

    def __init__(self, ended):
        self._ended, self._warm = ended, {}

    def of(self, test, env):
        """Those for ranks of a test in this file with these variables. With a sanitizer ranks are new Pythons."""
        if any(name in os.environ or name in env for name in COLD):
            return [sys.executable]
        file = f"{test.parent.name}/{test.name}"
        modules = ("pytest", *(name for files, names in NEEDED.items() if re.search(files, file) for name in names))
        if modules not in self._warm:
            self._warm[modules] = self._ended.enter_context(warmed(*modules))
        return self._warm[modules]


@pytest.fixture(scope="session")
def pythons():
    """Processes with the ranks' imports done, which fork ranks; they end with the tests."""
    with contextlib.ExitStack() as ended:
        yield Pythons(ended)


@pytest.fixture
def mpirun(tmp_path, pythons, request):
    """Call as ``mpirun(script, n=2, *, args=(), env={}, timeout=60, check=True, mpi_args=(), cold=False)``
    -> MPIResult.

    ``script``: a Path, a path relative to the repository ending in ``.py``, source text, or a case ``module:function``
    (crew/case.py), whose module is beside the test or in another folder of tests. ``env`` is added to the ranks'
    environment; the caller's own ``UCCH_…`` variables are dropped, except those in INHERITED. ``timeout`` in seconds: a
    job that takes `ROOM` times longer is killed, and the test fails with the ranks' output. With ``check`` an exit
    status other than 0 fails the test. ``cold``: each rank is a new Python that imports the package itself; otherwise
    ranks are forked from a process that has done so. See `Pythons`.
    """
    launcher, numbers = need_mpirun(), itertools.count(1)

    def run(script, n=2, *, args=(), env=None, timeout=60, check=True, mpi_args=(), cold=False):
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        words = program(folder, script, args, request.path)
        python = [sys.executable] if cold else pythons.of(request.path, env or {})
        command = [*mpi_command(launcher, n, mpi_args), *python, *words]
        start, limit = time.monotonic(), timeout * ROOM
        environment = mpi_environment(launcher) | {"UCCH_FLIGHT": str(folder)} | dict(env or {})
        paths = [*filter(None, [environment.get("PYTHONPATH")]), str(LINES)]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        result, late = run_limited(command, environment, folder, limit)
        if late or (check and result.returncode != 0):
            how = "were killed" if late else f"ended with status {result.returncode}"
            took = time.monotonic() - start
            pytest.fail(f"{n} ranks of {' '.join(words)} {how} after {took:.1f} s\n{result.output}", pytrace=False)
        return replace(result, ranks=n)

    yield run


#: Sizes of crews; a case gets the first ranks of the smallest crew that is large enough.
SIZES = (2, 6)
#: UCX's default, on hosts that need memory hooks. They cost 0.4 s of a core per rank.
HOOKS = {"UCX_MEM_MMAP_HOOK_MODE": "bistro"}
#: Crews with at most this many ranks have these hooks.
MOST_HOOKED = 2


@contextlib.contextmanager
def failing(cases):
    """Fail the test if a case fails, with a list of the cases that its crew has run before."""
    try:
        yield
    except CaseFailed as error:
        pytest.fail(f"{error}\ncases of this crew: {', '.join(cases)}", pytrace=False)


class Crews:
    """Crews by their properties. Ranks that wait for cases use memory, but no core."""

    def __init__(self):
        self._crews = {}

    def run(self, key, start, world, path, case, args, env, limit):
        """Run a case on these ranks of the crew with this key; start the crew if there is none."""
        cases = []
        with failing(cases):
            crew, cases[:] = self._crews.pop(key, None) or (start(), [])
            cases.append(case)
            try:
                texts = crew.run(world, path, case, args, env, limit)
            except CaseFailed:
                raise
            except BaseException:
                crew.kill()
                raise
            if crew.is_large:
                crew.end(60 * ROOM)
            else:
                self._crews[key] = crew, cases
        return MPIResult(0, *texts, len(world))

    def close(self):
        """End all crews as programs end, at the same time."""
        for crew, _ in self._crews.values():
            crew.tell_end()
        try:
            while self._crews:
                _, (crew, cases) = self._crews.popitem()
                with failing(cases):
                    crew.end(60 * ROOM)
        finally:
            for crew, _ in self._crews.values():
                crew.kill()


def local_crew(ranks, job, python):
    """A crew on this machine. Its processes have ``job`` in their environment from the start."""
    program = need_mpirun()
    env = mpi_environment(program) | {"OMPI_MCA_osc": "^ucx"} | dict(job)
    if ranks <= MOST_HOOKED:
        env |= HOOKS
    command = [*mpi_command(program, ranks), *python]
    return Crew(subprocess.Popen, command, ranks, env, 60 * ROOM, kill_session)


@pytest.fixture(scope="session")
def crews(pythons):
    """Jobs that stay for all tests. They end before the processes that forked their ranks."""
    made = Crews()
    yield made
    made.close()


@pytest.fixture
def crew(crews, pythons, request, tmp_path):
    """Call as ``crew("short_cases:known", n=2, *, args=(), layout="", env={}, job={}, timeout=60)`` -> MPIResult.

    Every rank of a job that has run others before runs a case or a program, given as for `mpirun`. ``env`` and a
    ``layout`` of emulated vendors are set for the case, ``job`` from the start of the processes (which may make another
    crew). Ranks of a ``pool`` of vendors have a fake GPU each, and the layout selects ranks of it. The test fails if a
    rank raises, or does not finish within ``timeout`` times `ROOM` seconds.
    """

    def run(case, n=2, *, args=(), layout="", env=None, job=None, of=0, pool="", timeout=60):
        whole, world, here = dict(job or {}), [*range(n)], {"UCCH_EMULATE": layout}
        size = of or next(size for size in (*SIZES, n) if size >= n)
        if pool:
            whole["FAKEGPU_LAYOUT"], here = pool, {"FAKEGPU_LAYOUT": layout}
            size, world = len(vendors(pool)), chosen(vendors(pool), vendors(layout))
        python = pythons.of(request.path, whole)
        key, start = (size, *python, *sorted(whole.items())), functools.partial(local_crew, size, whole, python)
        place = in_crew(tmp_path, case, args, request.path)
        return crews.run(key, start, world, *place, here | dict(env or {}), timeout * ROOM)

    return run


@pytest.fixture
def hooked(monkeypatch):
    """Jobs with UCX's memory hooks."""
    for name, value in HOOKS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def room():
    """Factor for the time limits of jobs."""
    return ROOM


@pytest.fixture
def flavour():
    """("openmpi" | "hydra" | "unknown", major version) of the mpirun that the tests use."""
    program = find_mpirun()
    return mpi_flavour(program) if program else ("unknown", 0)


@pytest.fixture
def recovery(flavour):
    """Options of an mpirun that lets other ranks go on when one dies; empty if it has none."""
    return ["--enable-recovery"] if flavour[0] == "openmpi" and flavour[1] >= 5 else []


@pytest.fixture
def ulfm(recovery):
    """Options of an mpirun whose MPI also goes on when a rank dies; without one the test is skipped."""
    if not recovery:
        pytest.skip("needs Open MPI 5")
    return ["--with-ft", "ulfm"]


@pytest.fixture
def with_torch():
    """Skip without torch. The ranks import it; importing it in the tests' own process would cost two seconds."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install '.[torch]'")


@pytest.fixture(scope="session")
def compiled():
    """Call as ``compiled(output, *words)`` with arguments of a C compiler; without a compiler the test is skipped."""

    def run(output, *words):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        subprocess.run([compiler, "-std=gnu11", *words, "-o", output], check=True, timeout=600)
        return output

    return run


@pytest.fixture(scope="session")
def fake_library():
    """Build a vendor's fake library (fakegpu/building.py); without compilers the test is skipped."""
    import building

    def build(vendor, *cases):
        try:
            return building.build(vendor, *cases)
        except building.NoCompiler as error:
            pytest.skip(str(error))

    return build


@pytest.fixture(scope="session")
def fakegpu(fake_library):
    """vendor -> its fake library."""
    return {vendor: fake_library(vendor) for vendor in ("nvidia", "amd")}


@pytest.fixture
def fake_environment(fakegpu):
    """Environment for a layout such as ``nvidia:2,amd:2``: a fake GPU per rank whose script imports ``arrays``."""
    libraries = {f"FAKEGPU_{vendor.upper()}": str(path) for vendor, path in fakegpu.items()}
    folders = [str(ROOT), str(FAKEGPU), str(ROOT / "tests" / "mpi"), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"FAKEGPU_DELAY_US": "200", "PYTHONPATH": os.pathsep.join(folders)}
    # Every rank sees all devices, while ucch-run would show it one and set the first variable. Streams share four
    # queues, as in HIP; a test that holds streams asks for more (OWN_QUEUES).
    more |= {"HIP_ENABLE_DEFERRED_LOADING": "0", "UCCH_HOLD": "y", "FAKEGPU_CONNECTIONS": "4", "HSA_ENABLE_SDMA": "0"}
    return lambda layout: libraries | more | {"FAKEGPU_LAYOUT": layout}
