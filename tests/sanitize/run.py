"""Tests under AddressSanitizer and UndefinedBehaviorSanitizer: ``make sanitize``, or this file with pytest's arguments.

Builds the native engine with both (in build/sanitize; the ordinary build stays as it is), and runs the tests of the
engine and of all calls on host memory with libasan loaded first in pytest's process and in the ranks, not in mpirun.
libucc and libucp are as they are. A finding ends its process, and is an error here even where a test expects that.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / "sanitize"
#: Of this run: there may be several at a time.
FINDINGS = OUT / "findings" / str(os.getpid())
SANITIZERS = "address,undefined"

#: The tests of the engine, on fake devices too, and of every kind of call on host memory.
TESTS = (
    "tests/native", "tests/mpi/test_bindings.py", "tests/mpi/test_collectives.py", "tests/mpi/test_communicators.py",
    "tests/mpi/test_p2p.py", "tests/mpi/test_requests.py",
)  # fmt: skip

#: Known faults, which have to be found: (words of the finding, program). Short blocks of memory, as numpy would keep
#: those for itself; undefined behaviour ends in an illegal instruction.
KNOWN = (
    (
        "heap-use-after-free",
        """
import numpy as np
from ucc_hetero.native.libraries import ffi
array = np.ones(8)
gone = ffi.cast("void *", array.ctypes.data)
del array
ffi.memmove(bytearray(64), gone, 64)
""",
    ),
    (
        "heap-buffer-overflow",
        """
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.types import DTYPES, OPS
data = ffi.new("double[]", 8)
lib.ucch_combine(OPS["SUM"].code, DTYPES["float64"].code, data, data, 9)
""",
    ),
    (
        "AddressSanitizer: ILL",
        """
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.types import DTYPES
lib.ucch_scale(DTYPES["int64"].code, ffi.new("int64_t[]", 8), 8, 0.0)
""",
    ),
)


def runtime() -> Path | None:
    """The compiler's libasan, which a process has to load before anything else."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        return None
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    path = Path(found.strip())
    return path.resolve() if path.is_absolute() else None


def build() -> None:
    """The extension with sanitizers, and the memory of numpy's arrays; by one run at a time."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folders = ["--build-lib", str(OUT), "--build-temp", str(OUT / "temp")]
        command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"UCCH_SANITIZE": SANITIZERS}, check=True)
        compiler = os.environ.get("CC", "gcc")
        made = OUT / "blocks.so.new"  # a run beside this one may be loading the old one
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, HERE / "blocks.c"], check=True)
        made.replace(OUT / "blocks.so")


def environment(libasan: Path) -> dict[str, str]:
    """Environment in which every Python of the tests is a sanitized one, and its findings are files."""
    shutil.rmtree(FINDINGS, ignore_errors=True)
    FINDINGS.mkdir(parents=True)
    files = f"log_path={FINDINGS / 'of'}:suppressions={HERE / 'suppressions.txt'}"
    return os.environ | {
        "LD_PRELOAD": str(libasan),
        # CPython and everything else keep to the end of the process what they need: leaks would be all of that.
        # Pytest and UCX handle signals, too; what is undefined is none of theirs.
        "ASAN_OPTIONS": f"detect_leaks=0:handle_sigill=2:{files}",
        # Objects of Python's, too, are blocks of malloc's.
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SANITIZED_EXTENSION": str(next((OUT / "ucc_hetero").glob("_native*.so"))),
        "SANITIZED_BLOCKS": str(OUT / "blocks.so"),
        "MPIRUN": str(HERE / "mpirun"),
        "SANITIZED_MPIRUN": os.environ.get("MPIRUN") or str(Path(sys.executable).parent / "mpirun"),
    }


def blind(sanitized: dict[str, str]) -> list[str]:
    """Known faults that were not found."""
    missed = []
    for words, program in KNOWN:
        command = [sys.executable, "-c", program]
        job = subprocess.run(command, cwd=ROOT, env=sanitized, capture_output=True, text=True, check=False)
        found = list(FINDINGS.iterdir())
        if not any(words in path.read_text(errors="replace") for path in found):
            missed.append(f"{words}: {program}{job.stderr}")
        for path in found:
            path.unlink()
    return missed


def main(arguments: list[str]) -> int:
    libasan = runtime()
    if libasan is None:
        print("no libasan: install gcc with its sanitizers (Debian: libasan8)", file=sys.stderr)
        return 2
    build()
    sanitized = environment(libasan)
    if missed := blind(sanitized):
        print("not found:", *missed, sep="\n", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or [*TESTS, "-m", "not slow"])]
    status = subprocess.run(command, cwd=ROOT, env=sanitized, check=False).returncode
    findings = sorted(FINDINGS.iterdir())
    for path in findings:
        print(f"--- {path}\n{path.read_text(errors='replace')}")
    if not findings:
        FINDINGS.rmdir()
    print(f"{len(findings)} processes with findings")
    return 1 if findings else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
