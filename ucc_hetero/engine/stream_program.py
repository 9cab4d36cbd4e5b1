"""Programs that are queued in streams whole: which calls may be, and how the native engine is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bindings.ucc import status_name
from ..device import kernels
from ..errors import LibraryError
from ..native.libraries import lib
from ..planner.plan import Plan, Step, regions
from ..trace.record import Note
from ..transport.rings import Channels
from ..types import DTYPES, OPS
from .placement import Placement
from .stream_rules import vendors_know


def queues(channels: Channels, plan: Plan, at: Placement) -> bool:
    """True if a call is queued whole; alike on every rank, as ``plan`` is that of all ranks."""
    steps = [step for f in plan.fragments for stage in f.stages for step in stage]
    if any(step.link == "bridge" and step.kind != "message" for step in steps):
        return False
    native = [step for step in steps if step.link == "native" and len(step.ranks) > 1]
    # libucc answers calls that move nothing by itself, and not in a stream.
    full = all(r.count for step in native for side in (*step.src, *step.dst) for r in regions(side))
    if not full or (native and not (channels.able and vendors_know(at, native))):
        return False
    return _computes(steps, at, channels.computes)


def queue(
    channels: Channels, program: Any, rank: int, notes: Sequence[Note], at: Placement, bounce: int, in_graph: bool
) -> None:
    """Let a native program be queued whole, ``in_graph`` where streams are captured. ``notes`` of its steps.

    ``bounce``: bytes of the longest copy within overlapping memory; it makes a stop in scratch.
    """
    end = -(-at.tmp_bytes // 64) * 64
    _check(lib.ucch_program_tmp(program, end + bounce))
    stages: dict[tuple[int, int], int] = {}
    for i, note in enumerate(notes):
        stage = stages.setdefault((note.fragment, note.stage), len(stages))
        peers = [r for r in note.ranks if r != rank]
        _check(lib.ucch_program_stage(program, i, stage, peers[0] if note.kind == "message" else -1))
    combines = any(note.kind == "combine" for note in notes)
    key = (at.what.op, at.code) if combines else (OPS["SUM"].code, DTYPES["uint8"].code)
    kernels.ready(lib.UCCH_FUSED, *key, 0)  # also for long calls, which take it in graphs
    _check(lib.ucch_program_queued(program, channels.handle, end, *key, in_graph))


def _check(status: int) -> None:
    if status < 0:
        raise LibraryError("queueing a program", status, status_name(status))


def _computes(steps: Sequence[Step], at: Placement, able: bool) -> bool:
    """True if devices do the arithmetic themselves: every rank asks for all steps, also for those of other ranks.

    ``able``: all of them have a compiler.
    """
    what, wanted = at.what, []
    if any(step.kind == "combine" for step in steps):
        wanted.append((lib.UCCH_COMBINE, what.op, at.code, 0))
    if what.divisor or at.row.prefix:
        wanted.append((lib.UCCH_SCALE, 0, at.code, 0))
    if what.compute is not what.dtype:
        wanted += [(lib.UCCH_CAST, 0, what.dtype.code, at.code), (lib.UCCH_CAST, 0, at.code, what.dtype.code)]
    return not wanted or (able and kernels.all_ready(wanted))
