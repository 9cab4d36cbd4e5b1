"""The timeline of a job (``UCCH_TRACE``): recorded by the native engine, kept in files, merged by rank 0 at the end.

Beside the trace each rank has two files: ``<trace>.<rank>.ring``, the events, which the native engine writes through a
mapping, and ``<trace>.<rank>.meta``, lines that say what the numbers in them mean. At a good end rank 0 merges all of
them over MPI and they are removed; after a bad one they stay, and ``python -m ucc_hetero trace`` merges them.
"""

from __future__ import annotations

import contextlib
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

#: Exchanges by which the clocks are compared.
_ROUNDS = 40


class Note(NamedTuple):
    """Timeline's description of a native step. ``link`` and ``kind`` as in a plan; -1: outside all fragments."""

    link: str
    kind: str
    fragment: int
    stage: int
    ranks: tuple[int, ...]
    nbytes: int


class _Job(NamedTuple):
    """A job that is recorded: its communicator, the trace that its rank 0 writes, the number of each rank's clock."""

    comm: Any
    path: Path
    clocks: list[int]


class TimelineRecorder:
    """This process's files. ``world`` is its rank, ``places`` the world rank of each process of the job."""

    def __init__(self, trace: Path, world: int, job: str, about: dict[str, Any]) -> None:
        self.trace, self.world, self.job = trace, world, job
        self.places: dict[str, int] = {}
        self.jobs: list[_Job] = []
        self._lines: list[str] = []
        self._numbers: dict[str, int] = {}
        self._fresh = count(1)
        ring, meta = parts_of(trace, world)
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            self._meta: Any = meta.open("w", encoding="utf-8")
            failed: int | OSError = lib.ucch_trace_open(os.fsencode(ring), env.get("TRACE_EVENTS"))
        except OSError as error:
            self._meta, failed = None, error
        if failed:
            # The job goes on, and what is in memory still gets into the trace at a good end.
            log.log("init").warning("UCCH_TRACE: %s cannot be written (%s); recording in memory only", ring, failed)
            lib.ucch_trace_open(ffi.NULL, env.get("TRACE_EVENTS"))
        self.line({"rank": world, "job": job, **about})
        for each in flight.comms():
            self.line(each)

    def line(self, data: dict[str, Any]) -> None:
        """One more line, in the file at once."""
        text = json.dumps(data) + "\n"
        self._lines.append(text)
        if self._meta is not None:
            with contextlib.suppress(OSError):
                self._meta.write(text)
                self._meta.flush()

    def _number(self, data: dict[str, Any]) -> int:
        """The number of a program; equal ones share it."""
        text = json.dumps(data)
        number = self._numbers.get(text)
        if number is None:
            fresh = next(self._fresh)  # no other thread's
            number = self._numbers.setdefault(text, fresh)
            if number == fresh:
                self.line({"program": number, **data})
        return number

    def describe(self, label: str, plan: Plan, of: int, notes: Sequence[Note]) -> int:
        """Tell what the events of a native program of communicator ``of`` will mean; returns its number in them."""
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
        return list(self._lines), used(ring)

    def remove(self) -> None:
        """The files have been merged."""
        if self._meta is not None:
            self._meta.close()
        for path in parts_of(self.trace, self.world):
            path.unlink(missing_ok=True)


#: This process's recording; None while it does not record.
recorder: TimelineRecorder | None = None


def parts_of(trace: Path, rank: int) -> tuple[Path, Path]:
    """A rank's files beside the trace: ring, meta."""
    return trace.with_name(f"{trace.name}.{rank}.ring"), trace.with_name(f"{trace.name}.{rank}.meta")


def join(comm: Any, facts: Sequence[Any], mine: Any) -> None:
    """Record what this job does: its last calls always, and a timeline if rank 0 has ``UCCH_TRACE``. Collective;
    ``facts`` of all ranks, ``mine`` of this one.

    A process that is in several jobs has one recording, which each job's trace shows.
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
    recorder.places |= places
    recorder.line({"places": places})
    clocks = list(numbered(fact.host.node for fact in facts))
    path = _file_of(recorder.trace, len(recorder.jobs), told[0][1])
    recorder.jobs.append(_Job(comm, path, clocks))
    if comm.Get_rank() == 0:
        with contextlib.suppress(OSError):
            path.unlink()  # an earlier job's must not be taken for this one's if this one ends badly
    _compare_clocks(recorder, comm, clocks)


def _file_of(trace: Path, index: int, first: int) -> Path:
    """The trace of a job: the name that was given, unless this is not the first job, or not that of world rank 0."""
    extra = (f"-rank{first}" if first else "") + (f"-{index + 1}" if index else "")
    return trace.with_name(f"{trace.stem}{extra}{trace.suffix}")


def _compare_clocks(of: TimelineRecorder, comm: Any, clocks: list[int]) -> None:
    """Record how far this rank's clock is from that of the job's first rank."""
    offset = error = 0
    if max(clocks):
        sent, done = [], []
        mine, everyone = bytearray(1), bytearray(len(clocks))
        for _ in range(_ROUNDS):
            sent.append(time.monotonic_ns())
            heard = comm.Iallgather(mine, everyone)
            while not heard.Test():  # without naps or progress between: the shorter, the less the clocks are off
                os.sched_yield()
            done.append(time.monotonic_ns())
        rows = comm.allgather((sent, done))
        offset, error = clock_offsets([r[0] for r in rows], [r[1] for r in rows], clocks)[clocks[comm.Get_rank()]]
    of.line({"clock": [time.monotonic_ns(), offset, error]})


def communicator(board: Any, number: int, time: int, ranks: Sequence[int], mine: int) -> int:
    """Record a communicator (:func:`.flight.comm`); returns its number in records."""
    found = flight.comm(board, number, time, ranks, mine)
    if recorder is not None:
        recorder.line(next(each for each in reversed(flight.comms()) if each["comm"] == found))  # or another thread's
    return found


def finish() -> None:
    """Merge what all ranks recorded. Collective among the ranks of each job, which are all in order."""
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
                failure = f"UCCH_TRACE: {path} could not be written ({error}); what the ranks recorded is beside it"
                print(failure, file=sys.stderr, flush=True)
        written &= not any(comm.allgather(failure))
    if written:
        recorder.remove()
    recorder = None


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write a Chrome trace, compressed where the name ends in ``.gz``."""
    text = json.dumps(trace, separators=(",", ":"))
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(gzip.compress(text.encode(), 6) if path.suffix == ".gz" else text.encode())
    part.replace(path)


def merge(trace: Path) -> dict[str, Any]:
    """The Chrome trace of a job that did not end well, from the files that its ranks left beside ``trace``.

    ``ValueError`` where there are none. Files of an earlier job under the same name are not taken.
    """
    metas = sorted(trace.parent.glob(f"{trace.name}.*.meta"), key=lambda p: p.stat().st_mtime)
    parts = []
    for meta in metas:
        with meta.open(encoding="utf-8") as lines, contextlib.suppress(OSError):
            parts.append(parse_part(lines, used(meta.with_suffix(".ring").read_bytes())))
    if not parts:
        raise ValueError(f"{trace}: neither a trace nor files that ranks left ({trace.name}.0.ring and so on)")
    latest = parts[-1].job
    return document([part for part in parts if part.job == latest])


def _after_fork() -> None:
    """Stop recording in a child: its calls are no part of the parent's recording."""
    global recorder
    lib.ucch_trace_stop()
    recorder = None


os.register_at_fork(after_in_child=_after_fork)
