"""Tests under AddressSanitizer and UndefinedBehaviorSanitizer: ``make sanitize``, or this file with pytest's arguments.
``--threads`` before these: under ThreadSanitizer.

Builds the native engine with them (in build/sanitize; the ordinary build stays as it is), and runs the tests of the
engine and of all calls on host memory, or of the network threads, with the sanitizer's library loaded first in every
Python (sitecustomize.py). libucc and libucp are as they are. A finding is an error here even where a
test expects that its process ends.
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
#: Of this run: there may be several at a time.
FINDINGS = OUT / "findings" / str(os.getpid())
FILES = f"log_path={FINDINGS / 'of'}:suppressions={HERE / 'suppressions.txt'}"

#: What programs with known faults begin with.
USED = """
import threading
import numpy as np
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.types import DTYPES, OPS
"""

#: Two threads write to the same memory, without the interpreter's lock; little of it, as what races is slow to watch.
RACE = (
    USED
    + """
data = np.zeros(1 << 12)
at, what = ffi.cast("void *", data.ctypes.data), (OPS["SUM"].code, DTYPES["float64"].code)
threads = [threading.Thread(target=lambda: [lib.ucch_combine(*what, at, at, data.size) for _ in range(50)])
           for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
)

#: Known faults, which have to be found: (words of the finding, program). Short blocks of memory, as numpy would keep
#: those for itself; undefined behaviour ends in an illegal instruction.
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


#: What a file of findings has at least one of. AddressSanitizer also warns of stacks that it does not know, which are
#: those of the fake devices' streams.
FAULT = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer")


class Way(NamedTuple):
    """Sanitizers, their library and its settings, known faults, and the tests that are run."""

    sanitizers: str
    library: str
    settings: dict[str, str]
    known: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    @property
    def folder(self):
        return OUT / self.sanitizers.partition(",")[0]


#: The tests of the engine, on fake devices too, and of jobs of one host, but PyTorch's.
MEMORY = Way(
    "address,undefined", "libasan.so",
    # CPython and everything else keep to the end of the process what they need: leaks would be all of that.
    # Pytest and UCX handle signals, too; what is undefined is none of theirs. Objects of Python's, too, are blocks of
    # malloc's.
    {"ASAN_OPTIONS": f"detect_leaks=0:handle_sigill=2:{FILES}", "PYTHONMALLOC": "malloc"},
    KNOWN,
    ("tests/native", "tests/mpi", "--ignore-glob=tests/mpi/test_torch*",
     # Faults on purpose, which are findings; and bounds on memory, of which the sanitizer keeps what is freed.
     "--deselect=tests/native/test_flight.py::test_a_fault_while_stacks_are_written",
     "--deselect=tests/mpi/test_launch.py::test_statuses",
     "--deselect=tests/mpi/test_safety.py::test_nothing_grows"),
)  # fmt: skip
#: The network threads', and those of one-sided transfers. Libraries that are not instrumented synchronise, and what
#: they access is not seen. PMIx maps memory at an address of its choice, which the sanitizer has for itself.
THREADS = Way(
    "thread", "libtsan.so",
    {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:die_after_fork=0:exitcode=0:history_size=4:{FILES}",
     "PMIX_MCA_gds": "hash"},
    (("data race", RACE),),
    ("tests/cluster/test_wires.py", "tests/unit/test_rma.py", "tests/unit/test_rma_processes.py"),
)  # fmt: skip


def runtime(way):
    """The compiler's library of the sanitizer, which a process has to load before anything else."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        return None
    command = [compiler, f"-print-file-name={way.library}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() else None


def build(way):
    """The extension with sanitizers, and the memory of numpy's arrays; by one run at a time."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folders = ["--build-lib", str(way.folder), "--build-temp", str(way.folder / "temp")]
        command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"UCCH_SANITIZE": way.sanitizers}, check=True)
        compiler = os.environ.get("CC", "gcc")
        made = OUT / "blocks.so.new"  # a run beside this one may be loading the old one
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, HERE / "blocks.c"], check=True)
        made.replace(OUT / "blocks.so")


def environment(way, library):
    """Environment in which every Python of the tests is a sanitized one, and its findings are files."""
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
