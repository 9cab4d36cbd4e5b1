"""``ucch-doctor hang``: reads the flight records of a job's ranks, from files or from memory of live processes."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ...trace import flight_files
from ...trace.flight import FILES, usual_folder
from ...trace.flight_files import Dump
from . import findings, hang
from .findings import Finding, finding

#: Seconds that a process gets to write its stack.
_PATIENCE = 2.0


def from_files(paths: Sequence[Path]) -> tuple[list[Dump], list[Finding]]:
    """(records in files, and in ``*.flight`` of folders; findings about files that could not be read)."""
    found: list[Dump] = []
    bad = []
    for path in paths:
        inside = sorted(path.glob("*.flight")) if path.is_dir() else [path]
        if not inside:
            bad.append(finding("hang-file", f"{path}: no rank has left records here (*.flight)"))
        for each in inside:
            bad += _parsed(str(each), each.read_bytes, found)
    return found, bad


def _parsed(name: str, read: Callable[[], bytes], found: list[Dump]) -> list[Finding]:
    """Append the records that ``read`` returns to ``found``. Returns the finding if they cannot be read."""
    try:
        found.append(flight_files.parse(read()))
    except (OSError, ValueError) as error:
        return [finding("hang-file", f"{name}: {getattr(error, 'strerror', error)}")]
    return []


def processes() -> list[int]:
    """Processes on this host that have a flight recorder and that this user may read."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _files(int(name))]


def _files(pid: int) -> dict[str, Path]:
    """Name -> memory file of a process's recorder."""
    found: dict[str, Path] = {}
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(each).removeprefix("/memfd:").removesuffix(" (deleted)")
                if name in FILES:
                    found[name] = each
    return found if len(found) == len(FILES) else {}


def _status(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def from_processes(pids: Sequence[int]) -> tuple[list[Dump], list[Finding]]:
    """(records of processes on this host, with a stack if they respond; findings about those that could not be
    read)."""
    found: list[Dump] = []
    asked = {pid: files for pid in pids if (files := _files(pid))}
    why = "does not exist, belongs to another user, or has no communicator"
    bad = [finding("hang-file", f"process {pid}: {why}") for pid in sorted(set(pids) - set(asked))]
    before = {pid: _ask(pid, files) for pid, files in asked.items()}
    for pid, files in asked.items():
        bad += _parsed(f"process {pid}", partial(_memory, pid, files, before[pid]), found)
    return found, bad


def _ask(pid: int, files: dict[str, Path]) -> int:
    """Ask a process to write its stack. Returns how often it had done so before, or -1 if it does not handle the
    signal."""
    with suppress(OSError, ValueError):
        written, number, _ = flight_files.header_of(_head(files))
        status = _status(pid)
        caught = int(status["SigCgt"], 16) >> number - 1 & 1 if number else 0
        if caught and status["State"][0] in "RSD":
            os.kill(pid, number)
            return written
    return -1


def _head(files: dict[str, Path]) -> bytes:
    with files[FILES[0]].open("rb") as ring:
        return ring.read(flight_files.HEADER)


def _memory(pid: int, files: dict[str, Path], before: int) -> bytes:
    """The record file that a process would write now. ``before``: result of :func:`_ask`."""
    until, fresh = time.monotonic() + _PATIENCE, False
    while before >= 0 and not fresh and time.monotonic() < until:
        time.sleep(0.01)
        fresh = flight_files.header_of(_head(files))[0] > before
    ring, about, stack = (files[name].read_bytes() for name in FILES)
    stack = stack[: flight_files.header_of(ring)[2]] if fresh else b""
    state = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "inside the kernel"}
    return flight_files.assemble(ring, about, stack, state.get(_status(pid)["State"][0], ""))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucch-doctor hang",
        description="Find the rank of a job that was the first to differ, and where, from the ranks' last calls.",
        epilog="Under mpirun (one rank a host: mpirun -H a,b --map-by ppr:1:node ucch-doctor hang) the processes of "
        "all these hosts. Without arguments the processes of this host that run, else the files in UCCH_FLIGHT.",
    )
    parser.add_argument("where", nargs="*", metavar="FILE|FOLDER|PID", help="records that ranks left, or processes")
    parser.add_argument("--job", metavar="ID", help="of several jobs this one; by default the latest")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    return parser


def _gather(where: Sequence[str]) -> tuple[list[Dump], list[Finding]]:
    pids = [int(word) for word in where if word.isdigit() and not Path(word).exists()]
    paths = [Path(word) for word in where if not word.isdigit() or Path(word).exists()]
    if not where:
        pids = processes()
        folder = usual_folder()
        if not pids and (folder is None or not any(folder.glob("*.flight"))):
            text = f"no job of this user runs on this host, and {folder or 'UCCH_FLIGHT=none'} has no records"
            return [], [finding("hang-file", text)]
        paths = [] if pids or folder is None else [folder]
    live, bad = from_processes(pids)
    left, worse = from_files(paths)
    return [*live, *left], [*bad, *worse]


def main(arguments: Sequence[str], *, in_job: bool) -> int:
    """Run the command line. Returns 1 if a rank blocks others, or nothing could be read."""
    options = _parser().parse_args(arguments)
    found, said = _gather(options.where)
    if in_job:
        from mpi4py import MPI

        everyone = MPI.COMM_WORLD.gather((found, said))
        if everyone is None:  # rank 0 has the records of all hosts
            return 0
        found, said = [dump for each, _ in everyone for dump in each], [bad for _, each in everyone for bad in each]
    if options.job:
        found = [dump for dump in found if dump.job == options.job]
    if found:
        kept, note = hang.job_of(found)
        said += [findings.ok("jobs", note)] if note else []
        said += hang.diagnose(kept)
    elif options.job or not said:
        said.append(finding("hang-file", "no records" + (f" of job {options.job}" if options.job else "")))
    print(findings.as_json(said) if options.json else findings.as_text(said))
    return findings.status(said) if found else 1
