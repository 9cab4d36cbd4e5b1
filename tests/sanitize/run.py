"""Tests under AddressSanitizer and UndefinedBehaviorSanitizer: ``make sanitize``, or this file with pytest's arguments.
With ``--threads`` before these: under ThreadSanitizer.

Builds the native engine with the sanitizers (in build/sanitize; the ordinary build is unchanged), and runs the tests of
the engine and of all calls on host memory, or of the network threads. Every Python loads the sanitizer's library first
(sitecustomize.py). libucc and libucp are not instrumented. A finding is an error here even if a test expects that its
process dies.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / "sanitize"
#: Folder of this run: several may run at a time.
FINDINGS = OUT / "findings" / str(os.getpid())
FILES = f"log_path={FINDINGS / 'of'}:suppressions={HERE / 'suppressions.txt'}"

#: The first lines of programs with known faults.
USED = """
import threading
import numpy as np
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.types import DTYPES, OPS
"""

#: Two threads write to the same memory without the interpreter's lock; only a little memory, as races are slow to
#: track.
RACE = (
    USED
    + """
data, met = np.zeros(1 << 12), threading.Barrier(2)
at, what = ffi.cast("void *", data.ctypes.data), (OPS["SUM"].code, DTYPES["float64"].code)
def add():
    met.wait()
    for _ in range(2000):  # on busy cores few of them overlap
        lib.ucch_combine(*what, at, at, data.size)
threads = [threading.Thread(target=add) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
)

#: Known faults that must be found: (words of the finding, program). They use long blocks of memory, as numpy caches
#: short ones; undefined behaviour ends in an illegal instruction.
KNOWN = tuple((words, USED + program) for words, program in (
    ("heap-use-after-free", """
array = np.ones(8)
gone = ffi.cast("void *", array.ctypes.data)
del array
ffi.memmove(bytearray(64), gone, 64)
"""),
    ("heap-buffer-overflow", """
data = ffi.new("double[]", 8)
lib.ucch_combine(OPS["SUM"].code, DTYPES["float64"].code, data, data, 9)
"""),
    ("AddressSanitizer: ILL", 'lib.ucch_scale(DTYPES["int64"].code, ffi.new("int64_t[]", 8), 8, 0.0)'),
))  # fmt: skip


#: A file of findings has at least one of these. AddressSanitizer also warns of unknown stacks, which are those of the
#: fake devices' streams.
FAULT = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer", "ERROR: ThreadSanitizer")


class Way(NamedTuple):
    """Sanitizers, their library and settings, known faults, and the tests to run."""

    sanitizers: str
    library: str
    settings: dict[str, str]
    known: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    @property
    def folder(self):
        return OUT / self.sanitizers.partition(",")[0]


#: Tests of one-sided transfers in one process.
RMA = [f"tests/unit/test_rma{part}.py" for part in ("", "_agents", "_processes")]
#: Tests of the engine, also on fake devices, of jobs of one host, without PyTorch's, and of one-sided transfers.
MEMORY = Way(
    "address,undefined", "libasan.so",
    # CPython and most libraries keep memory until the process ends: leak detection would report all of it.
    # Pytest and UCX handle signals, too, but not those of undefined behaviour. Python objects are also allocated by
    # malloc.
    {"ASAN_OPTIONS": f"detect_leaks=0:handle_sigill=2:{FILES}", "PYTHONMALLOC": "malloc"},
    KNOWN,
    ("tests/native", "tests/mpi", "--ignore-glob=tests/mpi/test_torch*", *RMA, "tests/cluster/test_rma.py",
     # Deliberate faults, which are findings; and limits on memory, as the sanitizer keeps freed memory.
     "--deselect=tests/native/test_flight.py::test_a_fault_while_stacks_are_written",
     "--deselect=tests/mpi/test_launch.py::test_statuses",
     "--deselect=tests/mpi/test_safety.py::test_nothing_grows"),
)  # fmt: skip
#: Tests of the network threads, one-sided transfers, control messages, locks, calls in streams, and random calls on
#: host memory. Libraries without instrumentation synchronise, but their accesses are not seen. PMIx maps memory at an
#: address that the sanitizer reserves. UCX's hooks of memory functions also run at the end of a thread, when the
#: sanitizer has forgotten it, and crash.
THREADS = Way(
    "thread", "libtsan.so",
    {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:die_after_fork=0:exitcode=0:history_size=4:{FILES}",
     "PMIX_MCA_gds": "hash", "UCX_MEM_EVENTS": "n"},
    (("data race", RACE),),
    ("tests/cluster/test_wires.py", *RMA, "tests/native/test_locking.py", "tests/native/test_lifetimes.py",
     "tests/native/test_host_exchange.py", "tests/native/test_channels.py", "tests/native/test_device_cases.py",
     "tests/mpi/test_collectives.py", "tests/mpi/test_cases.py", "tests/mpi/test_p2p.py"),
)  # fmt: skip


def runtime(way):
    """Return the compiler's sanitizer library, which a process must load first."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        return None
    command = [compiler, f"-print-file-name={way.library}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() else None


def build(way):
    """Build the extension with sanitizers, and the allocator for numpy's arrays; one run at a time."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folders = ["--build-lib", str(way.folder), "--build-temp", str(way.folder / "temp")]
        command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"UCCH_SANITIZE": way.sanitizers}, check=True)
        compiler = os.environ.get("CC", "gcc")
        made = OUT / "blocks.so.new"  # another run may be loading the old file
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, HERE / "blocks.c"], check=True)
        made.replace(OUT / "blocks.so")


def environment(way, library):
    """Return an environment in which every Python of the tests is sanitized, and writes its findings into files."""
    shutil.rmtree(FINDINGS, ignore_errors=True)
    FINDINGS.mkdir(parents=True)
    return {
        **os.environ,
        **way.settings,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SANITIZED_EXTENSION": str(next((way.folder / "ucc_hetero").glob("_native*.so"))),
        "SANITIZED_BLOCKS": str(OUT / "blocks.so"),
        "SANITIZER": str(library),
    }


def blind(way, sanitized):
    missed = []
    for words, program in way.known:
        command = [sys.executable, "-c", program]
        job = subprocess.run(command, cwd=ROOT, env=sanitized, capture_output=True, text=True, check=False)
        found = list(FINDINGS.iterdir())
        if not any(words in path.read_text(errors="replace") for path in found):
            missed.append(f"{words}: {program}{job.stderr}")
        for path in found:
            path.unlink()
    return missed


def main(arguments):
    way = THREADS if arguments[:1] == ["--threads"] else MEMORY
    arguments = arguments[way is THREADS :]
    library = runtime(way)
    if library is None:
        print(f"no {way.library}: install gcc with its sanitizers (Debian: libasan8, libtsan2)", file=sys.stderr)
        return 2
    build(way)
    sanitized = environment(way, library)
    if missed := blind(way, sanitized):
        print("not found:", *missed, sep="\n", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or [*way.tests, "-m", "not slow"])]
    status = subprocess.run(command, cwd=ROOT, env=sanitized, check=False).returncode
    texts = {path: path.read_text(errors="replace") for path in sorted(FINDINGS.iterdir())}
    findings = {path: text for path, text in texts.items() if any(words in text for words in FAULT)}
    for path, text in findings.items():
        print(f"--- {path}\n{text}")
    if not findings:
        shutil.rmtree(FINDINGS)
    print(f"{len(findings)} processes with findings")
    return 1 if findings else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
