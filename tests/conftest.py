"""The ``mpirun`` fixture: run a script under the real mpirun, with a time limit of its own; and GPUs that are none."""

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
import textwrap
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "crew"))
from crews import RANK, CaseFailed, Crew, MPIResult, chosen, vendors  # noqa: E402

WARM = RANK.with_name("warm.py")

# A shell starts background jobs with SIGINT ignored, and every process of theirs inherits that: tests of Ctrl-C would
# wait for ever. A handler, unlike SIG_IGN, is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _terminated(number, frame):
    """End a run that is terminated as Ctrl-C does: jobs are sessions of their own, which nobody else would end."""
    signal.signal(number, signal.SIG_IGN)  # timeout(1) sends two
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, _terminated)

# Thousands of Pythons are started here, ranks above all. Were none of them to leave its bytecode behind, as some shells
# ask for, each would compile the package again: a third of what a small job costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Jobs run beside each other: MPI's own waiting would take the cores from those that are waited for.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
# MPI's component for libfabric, which no test has a network for, sleeps for a second before it says so.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

#: How many times longer than it is given a job may take before it counts as hanging: the cores may be busy with other
#: things, and then ranks that wait for each other wait for their turns, too. Only what fails takes that long.
ROOM = 4


#: What a test draws, it draws again where it runs once more with this in its environment, as `.ci/lanes.py` does.
DRAWN = os.environ.setdefault("TESTS_DRAW", str(secrets.randbelow(1 << 30)))


def pytest_report_header():
    return f"TESTS_DRAW={DRAWN}"


#: What the mpiruns of each test keep while they run lies in a folder of its own. Open MPI names it by mpirun's process
#: alone: one that was killed leaves it behind, and a later mpirun of that number does not start ("The PMIx server's
#: listener thread failed to start").
_FOLDERS, _NUMBER = tempfile.TemporaryDirectory(prefix="mpirun"), itertools.count()


def pytest_runtest_setup(item):
    random.seed(f"{DRAWN} {item.nodeid}")
    os.environ["PRTE_MCA_prte_tmpdir_base"] = f"{_FOLDERS.name}/{next(_NUMBER)}"  # noqa: SIM112


def pytest_configure():
    """Spare processes what UCX does to learn of memory that comes and goes; `hooked` has it as users do.

    It patches some 80 functions and spins for 5 ms each. Only networks that register memory need that.
    """
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")


def pytest_collection_finish():
    """Leave thousands of collected tests out of every search for garbage, of which some tests ask for hundreds."""
    gc.collect()
    gc.freeze()


#: Has what ranks print go out by the line.
LINES = ROOT / "tests" / "lines"
FAKEGPU = ROOT / "tests" / "fakegpu"
sys.path.insert(0, str(FAKEGPU))  # the scripts that ranks run on such devices

#: Where the libraries are is a fact of the machine, not of a test.
INHERITED = ("UCCH_UCC_LIB", "UCCH_UCX_DIR", "PMIX_MCA_gds")


def find_mpirun():
    """``$MPIRUN``, else the mpirun installed next to this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return os.environ.get("MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))


def need_mpirun():
    """The same; without one the test is skipped."""
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
    """This process's environment, free of settings that change results, made fit for containers and root."""
    env = {k: v for k, v in os.environ.items() if k in INHERITED or not k.startswith(("UCCH_", "PMIX_", "PMI_"))}
    if mpi_flavour(mpirun)[0] == "openmpi":
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # For scripts that start an mpirun of their own: Open MPI 5's and 4's spelling.
        env |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    # Two cores and several single-threaded ranks: BLAS threads would only make the ranks wait for each other.
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **env, "PYTHONUNBUFFERED": "1"}


def kill_session(sid):
    """SIGKILL every process of a session: each rank of Open MPI has a process group of its own, so killpg won't do."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == sid and fields[0] != "Z":
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, IndexError, ValueError):
            continue  # it ended while we looked, or is not ours to read


def run_limited(command, env, cwd, timeout):
    """Run a command in a session of its own; returns (what it left, whether it had to be killed).

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
            job.terminate()  # mpirun then ends its ranks and says what it knows
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(5)
        finally:
            kill_session(job.pid)
            job.wait(10)
    texts = [path.read_text(errors="replace") for path in (out, err)]
    return MPIResult(job.returncode, *texts), late


def write_script(folder, script):
    """The path of a script given as such or as source text."""
    if isinstance(script, Path):
        return script
    if "\n" not in script and script.endswith(".py"):
        return ROOT / script
    path = folder / "snippet.py"
    path.write_text(textwrap.dedent(script))
    return path


#: Variables that are read when a process starts, or imports torch: with them each rank is a new Python.
COLD = ("LD_PRELOAD", "SANITIZER", "UCCH_TORCH_REPLACE")
#: Test files -> what their ranks import that takes seconds.
NEEDED = {
    "torch|vllm": ["torch", "torch._dynamo", "torch.distributed.fsdp"],
    "torch|vllm|mpi/test_examples": ["sklearn.datasets"],
}


@contextlib.contextmanager
def warmed(*modules):
    """Words that start a program of Python where these modules have been imported before: see tests/crew/warm.py."""
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
    """Words that start Python for ranks."""

    def __init__(self, ended):
        self._ended, self._warm = ended, {}

    def of(self, test, env):
        """Those of ranks of a test in this file, with these variables; a sanitizer's are new Pythons, too."""
        if any(name in os.environ or name in env for name in COLD):
            return [sys.executable]
        file = f"{test.parent.name}/{test.name}"
        modules = ("pytest", *(name for files, names in NEEDED.items() if re.search(files, file) for name in names))
        if modules not in self._warm:
            self._warm[modules] = self._ended.enter_context(warmed(*modules))
        return self._warm[modules]


@pytest.fixture(scope="session")
def pythons():
    """Processes that have imported what ranks import, and fork them; they end with the tests."""
    with contextlib.ExitStack() as ended:
        yield Pythons(ended)


@pytest.fixture
def mpirun(tmp_path, pythons, request):
    """Call as ``mpirun(script, n=2, *, args=(), env={}, timeout=60, check=True, mpi_args=(), cold=False)``
    -> MPIResult.

    ``script``: a Path, a path relative to the repository ending in ``.py``, or source text. ``env`` is added to the
    ranks' environment; of the caller's own ``UCCH_…`` variables only those in INHERITED get through. ``timeout`` in
    seconds: a job that takes `ROOM` times longer is killed with all its ranks and the test fails, showing what the
    ranks printed. With ``check`` an exit status other than 0 fails the test likewise. ``cold``: each rank is a new
    Python, which imports the package itself; others are forked where that has been done. See `Pythons`.
    """
    program, numbers = need_mpirun(), itertools.count(1)

    def run(script, n=2, *, args=(), env=None, timeout=60, check=True, mpi_args=(), cold=False):
        folder = tmp_path / f"job{next(numbers)}"
        folder.mkdir()
        path = write_script(folder, script)
        python = [sys.executable] if cold else pythons.of(request.path, env or {})
        command = [*mpi_command(program, n, mpi_args), *python, str(path), *args]
        start, limit = time.monotonic(), timeout * ROOM
        environment = mpi_environment(program) | {"UCCH_FLIGHT": str(folder)} | dict(env or {})
        paths = [*filter(None, [environment.get("PYTHONPATH")]), str(LINES)]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        result, late = run_limited(command, environment, folder, limit)
        if late or (check and result.returncode != 0):
            how = "were killed" if late else f"ended with status {result.returncode}"
            took = time.monotonic() - start
            pytest.fail(f"{n} ranks of {path.name} {how} after {took:.1f} s\n{result.output}", pytrace=False)
        return replace(result, ranks=n)

    yield run


#: Ranks of crews: a case has the first ones of the smallest that is large enough.
SIZES = (2, 6)
#: Crews of at most so many ranks are as users have them, with UCX's patches: see `pytest_configure`.
MOST_HOOKED = 2


@contextlib.contextmanager
def failing(cases):
    """The test fails with a case; what its crew has run before is said, too."""
    try:
        yield
    except CaseFailed as error:
        pytest.fail(f"{error}\ncases of this crew: {', '.join(cases)}", pytrace=False)


class Crews:
    """Crews by what they are made of. Ranks that wait for cases take no core, but memory."""

    def __init__(self):
        self._crews = {}

    def run(self, key, start, world, path, case, args, env, limit):
        """Run a case on these ranks of the crew of this key, which is started where there is none."""
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
        """End all of them, as programs end."""
        try:
            while self._crews:
                _, (crew, cases) = self._crews.popitem()
                with failing(cases):
                    crew.end(60 * ROOM)
        finally:
            for crew, _ in self._crews.values():
                crew.kill()


def local_crew(ranks, job, python):
    """A crew on this machine whose processes have ``job`` in their environment from the beginning."""
    program = need_mpirun()
    env = mpi_environment(program) | {"OMPI_MCA_osc": "^ucx"} | dict(job)
    if ranks <= MOST_HOOKED:
        env.pop("UCX_MEM_MMAP_HOOK_MODE", None)
    command = [*mpi_command(program, ranks), *python]
    return Crew(subprocess.Popen, command, ranks, env, 60 * ROOM, kill_session)


@pytest.fixture(scope="session")
def crews(pythons):
    """Jobs that stay for all tests, and end before what their ranks came from does."""
    made = Crews()
    yield made
    made.close()


@pytest.fixture
def crew(crews, pythons, request, tmp_path):
    """Call as ``crew("short_cases:known", n=2, *, args=(), layout="", env={}, job={}, timeout=60)`` -> MPIResult.

    A function of a module beside the test is called with ``args`` by every rank of a job that has run other cases
    before; or a program, given as `mpirun` has it, runs there. ``env`` and a ``layout`` of emulated vendors are set
    meanwhile, ``job`` from the start of the processes, ``of`` which there may be more. Those of a ``pool`` of vendors
    have a fake GPU each, and the layout says which of them take the case.
    The test fails where a rank raises, or does not come to the end in ``timeout`` times `ROOM` seconds.
    """

    def run(case, n=2, *, args=(), layout="", env=None, job=None, of=0, pool="", timeout=60):
        module, _, name = str(case).partition(":")
        if not name or "\n" in name:
            path, name, args = RANK, "script", [str(write_script(tmp_path, case)), *args]
        else:
            path = request.path.with_name(f"{module}.py")
        whole, world, here = dict(job or {}), [*range(n)], {"UCCH_EMULATE": layout}
        size = of or next(size for size in (*SIZES, n) if size >= n)
        if pool:
            whole["FAKEGPU_LAYOUT"], here = pool, {"FAKEGPU_LAYOUT": layout}
            size, world = len(vendors(pool)), chosen(vendors(pool), vendors(layout))
        python = pythons.of(request.path, whole)
        key, start = (size, *python, *sorted(whole.items())), functools.partial(local_crew, size, whole, python)
        return crews.run(key, start, world, path, name, args, here | dict(env or {}), timeout * ROOM)

    return run


@pytest.fixture
def hooked(monkeypatch):
    """Jobs in which UCX patches the functions by which memory comes and goes, as it does of its own accord."""
    monkeypatch.delenv("UCX_MEM_MMAP_HOOK_MODE")


@pytest.fixture
def room():
    """How many times longer a job may take than it is given."""
    return ROOM


@pytest.fixture
def flavour():
    """("openmpi" | "hydra" | "unknown", major version) of the mpirun that the tests use."""
    program = find_mpirun()
    return mpi_flavour(program) if program else ("unknown", 0)


@pytest.fixture
def recovery(flavour):
    """Options of an mpirun that lets the others go on when a rank dies; none of one that cannot."""
    return ["--enable-recovery"] if flavour[0] == "openmpi" and flavour[1] >= 5 else []


@pytest.fixture
def ulfm(recovery):
    """Options of an mpirun whose MPI goes on when a rank dies, as well; without one the test is skipped."""
    if not recovery:
        pytest.skip("needs Open MPI 5")
    return ["--with-ft", "ulfm"]


@pytest.fixture
def with_torch():
    """Skip without torch. Ranks import it; in the tests' own process that would cost two seconds for nothing."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install '.[torch]'")


@pytest.fixture(scope="session")
def compiled():
    """Call as ``compiled(output, *words)`` with words of a C compiler; without one the test is skipped."""

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
    folders = [str(ROOT), str(FAKEGPU), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"FAKEGPU_DELAY_US": "200", "PYTHONPATH": os.pathsep.join(folders)}
    # Every rank sees all devices, where ucch-run would show it one and set the first. Streams share four queues, as
    # HIP's do; a test that holds streams at will asks for more (OWN_QUEUES).
    more |= {"HIP_ENABLE_DEFERRED_LOADING": "0", "UCCH_HOLD": "y", "FAKEGPU_CONNECTIONS": "4", "HSA_ENABLE_SDMA": "0"}
    return lambda layout: libraries | more | {"FAKEGPU_LAYOUT": layout}
