"""Timeline of a job (``UCCH_TRACE``): recorded by the native engine, stored in files, merged by rank 0 at the end.

Each rank has two files beside the trace: ``<trace>.<rank>.ring``, the events, which the native engine writes through a
mapping; and ``<trace>.<rank>.meta``, lines that describe their numbers. If the job ends well, rank 0 merges all over
MPI, and they are removed. Otherwise they stay, and ``python -m ucc_hetero trace`` merges them.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from .. import env, log
from ..native.libraries import ffi, lib
from ..planner.plan import Plan
from ..planner.topology import numbered
from . import flight
from .chrome import clock_offsets, document, parse_part, used

#: Rounds in which the clocks are compared.
_ROUNDS = 40


class Note(NamedTuple):
    """Description of a native step. ``link`` and ``kind`` as in a plan; -1: outside all fragments."""

    link: str
    kind: str
    fragment: int
    stage: int
    ranks: tuple[int, ...]
    nbytes: int


class _Job(NamedTuple):
    """A recorded job: its communicator, the trace that rank 0 writes, and the number of each rank's clock."""

    comm: Any
    path: Path
    clocks: list[int]


class TimelineRecorder:
    """This process's files. ``world``: its rank."""

    def __init__(self, trace: Path, world: int, job: str, about: dict[str, Any]) -> None:
        self.trace, self.world, self.job = trace, world, job
        self.jobs: list[_Job] = []
        self._lines: list[str] = []
        self._numbers: dict[str, int] = {}
        self._fresh = count(1)
        ring, meta = parts_of(trace, world)
        try:
            if trace.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(trace))
            trace.parent.mkdir(parents=True, exist_ok=True)
            self._meta: Any = meta.open("w", encoding="utf-8")
            failed = int(lib.ucch_trace_open(os.fsencode(ring), env.get("TRACE_EVENTS")))
        except OSError as error:
            self._meta, failed = None, error.errno or 0
        if failed:
            # The job goes on; the events in memory still get into the trace if it ends well.
            why = os.strerror(failed)
            log.log("init").warning("UCCH_TRACE: %s cannot be written (%s); recording in memory only", ring, why)
            lib.ucch_trace_open(ffi.NULL, env.get("TRACE_EVENTS"))
        self.line({"rank": world, "job": job, **about})
        for each in flight.comms():
            self.line(each)

    def line(self, data: dict[str, Any]) -> None:
        """Append a line to the file, unbuffered."""
        text = json.dumps(data) + "\n"
        self._lines.append(text)
        if self._meta is not None:
            with contextlib.suppress(OSError):
                self._meta.write(text)
                self._meta.flush()

    def _number(self, data: dict[str, Any]) -> int:
        """The number of a program; equal programs share a number."""
        text = json.dumps(data)
        number = self._numbers.get(text)
        if number is None:
            fresh = next(self._fresh)  # unique among threads
            number = self._numbers.setdefault(text, fresh)
            if number == fresh:
                self.line({"program": number, **data})
        return number

    def describe(self, label: str, plan: Plan, of: int, notes: Sequence[Note]) -> int:
        """Describe the events of a native program of communicator ``of``. Returns the number of these events."""
        steps = [(*note, i) for i, note in enumerate(notes)]
        data = {"of": of, "label": label, "algorithm": plan.algorithm, "fragments": len(plan.fragments), "steps": steps}
        return self._number(data)

    def part(self) -> tuple[list[str], bytes]:
        size = ffi.new("uint64_t *")
        lib.ucch_lock()
        try:
            memory = lib.ucch_trace_memory(size)
            ring = bytes(ffi.buffer(memory, size[0]))
        finally:
            lib.ucch_unlock()
        return list(self._lines), used(ring) if ring else b""  # without memory nothing was recorded

    def remove(self) -> None:
        """Remove the files, after they were merged."""
        if self._meta is not None:
            self._meta.close()
        for path in parts_of(self.trace, self.world):
            path.unlink(missing_ok=True)


#: This process's recorder; None if it does not record.
recorder: TimelineRecorder | None = None


def parts_of(trace: Path, rank: int) -> tuple[Path, Path]:
    """A rank's files beside the trace: (ring, meta)."""
    return trace.with_name(f"{trace.name}.{rank}.ring"), trace.with_name(f"{trace.name}.{rank}.meta")


def join(comm: Any, facts: Sequence[Any], mine: Any) -> None:
    """Start recording for this job: always the flight recorder, and a timeline if rank 0 has ``UCCH_TRACE``.
    Collective. ``facts``: of all ranks; ``mine``: of this rank.

    A process in several jobs has one recording, which appears in each job's trace.
    """
    global recorder
    from mpi4py import MPI

    world = int(getattr(comm, "world", MPI.COMM_WORLD).Get_rank())
    flight.begin(world, facts[0].process, mine.vendor)
    told = comm.allgather((str(env.get("TRACE")), world))
    name = told[0][0]
    if not name:
        return
    if recorder is None:
        about = {"host": os.uname().nodename, "pid": os.getpid(), "vendor": mine.vendor}
        recorder = TimelineRecorder(Path(name).absolute(), world, facts[0].process, about)
    places = {fact.process: place for fact, (_, place) in zip(facts, told, strict=True)}
    recorder.line({"places": places})
    clocks = list(numbered(fact.host.node for fact in facts))
    path = _file_of(recorder.trace, len(recorder.jobs), told[0][1])
    recorder.jobs.append(_Job(comm, path, clocks))
    if comm.Get_rank() == 0:
        with contextlib.suppress(OSError):
            path.unlink()  # a file of an earlier job must not be merged if this job ends badly
    _compare_clocks(recorder, comm, clocks)


def _file_of(trace: Path, index: int, first: int) -> Path:
    """The trace file of a job: the given name, with a suffix for later jobs and those without world rank 0."""
    extra = (f"-rank{first}" if first else "") + (f"-{index + 1}" if index else "")
    return trace.with_name(f"{trace.stem}{extra}{trace.suffix}")


def _compare_clocks(of: TimelineRecorder, comm: Any, clocks: list[int]) -> None:
    """Measure the offset of this rank's clock to that of the job's first rank."""
    offset = error = 0
    if max(clocks):
        sent, done = [], []
        mine, everyone = bytearray(1), bytearray(len(clocks))
        for _ in range(_ROUNDS):
            sent.append(time.monotonic_ns())
            heard = comm.Iallgather(mine, everyone)
            while not heard.Test():  # no naps and no progress between: the faster, the smaller the uncertainty
                os.sched_yield()
            done.append(time.monotonic_ns())
        rows = comm.allgather((sent, done))
        offset, error = clock_offsets([r[0] for r in rows], [r[1] for r in rows], clocks)[clocks[comm.Get_rank()]]
    of.line({"clock": [time.monotonic_ns(), offset, error]})


def communicator(board: Any, number: int, time: int, ranks: Sequence[int], mine: int) -> int:
    """Record a communicator (:func:`.flight.comm`). Returns its number in records."""
    found = flight.comm(board, number, time, ranks, mine)
    if recorder is not None:
        recorder.line(next(each for each in reversed(flight.comms()) if each["comm"] == found))  # or another thread's
    return found


def finish() -> None:
    """Merge the recordings of all ranks. Collective among the ranks of each job, if none has failed."""
    global recorder
    if recorder is None:
        return
    lib.ucch_trace_stop()
    written = True
    for comm, path, clocks in recorder.jobs:
        _compare_clocks(recorder, comm, clocks)
        parts = comm.gather(recorder.part())
        failure = ""
        if parts is not None:
            try:
                write(path, document([parse_part(*part) for part in parts]))
            except OSError as error:
                kept = parts_of(recorder.trace, recorder.world)[1].exists()
                where = "the ranks' own files are in the same folder" if kept else "the timeline is lost"
                failure = f"UCCH_TRACE: {path} could not be written ({error}); {where}"
                print(failure, file=sys.stderr, flush=True)
        written &= not any(comm.allgather(failure))
    if written:
        recorder.remove()
    recorder = None


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write a Chrome trace; compressed if the name ends in ``.gz``."""
    text = json.dumps(trace, separators=(",", ":"))
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(gzip.compress(text.encode(), 6) if path.suffix == ".gz" else text.encode())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def merge(trace: Path) -> dict[str, Any]:
    """Make the Chrome trace of a job that ended badly, from the files that its ranks left beside ``trace``.

    ``ValueError`` if there are none. Files of an earlier job with the same name are ignored.
    """
    metas = sorted(trace.parent.glob(f"{trace.name}.*.meta"), key=lambda p: p.stat().st_mtime)
    parts = []
    for meta in metas:
        # A rank may have been killed as it began its files.
        with meta.open(encoding="utf-8") as lines, contextlib.suppress(OSError, ValueError):
            parts.append(parse_part(lines, used(meta.with_suffix(".ring").read_bytes())))
    if not parts:
        raise ValueError(f"{trace}: neither a trace nor files that ranks left ({trace.name}.0.ring and so on)")
    latest = parts[-1].job
    return document([part for part in parts if part.job == latest])


def _after_fork() -> None:
    """Stop recording in a forked child: its calls do not belong to the parent's recording."""
    global recorder
    lib.ucch_trace_stop()
    recorder = None


os.register_at_fork(after_in_child=_after_fork)
