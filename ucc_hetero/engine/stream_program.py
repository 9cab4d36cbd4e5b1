"""Programs in streams: which calls a stream may wait for, launch or queue whole, and how the native engine is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..device import kernels
from ..native.libraries import lib
from ..planner.plan import KINDS, Plan, Step, regions
from ..trace.timeline import Note
from ..transport.channels import Channels
from ..types import DTYPES, OPS
from .placement import Placement

#: Datatypes that the vendors' own collective libraries lack.
_NOT_VENDORS = frozenset({"int16", "uint16", "complex64", "complex128"})
#: The reductions that they have (codes of ``ucc_reduction_op_t``): SUM, PROD, MAX, MIN.
_VENDORS_OPS = range(4)


def vendors_know(at: Placement, steps: Sequence[Step]) -> bool:
    """True if the vendors' libraries have the collectives, the datatype and the operation."""
    if any(step.kind == "reduce_scatter" and not at.equal(step) for step in steps):
        return False  # libucc has no uneven one over them, and takes TL/UCP
    reduces = any(KINDS[step.kind].reduces and KINDS[step.kind].ucc for step in steps)
    return at.what.compute.name not in _NOT_VENDORS and (not reduces or at.what.op in _VENDORS_OPS)


def of_vendors(at: Placement, steps: Sequence[Step]) -> bool:
    """True if vendors' libraries do all of these steps."""
    return all(step.link == "native" and step.kind != "message" for step in steps) and vendors_know(at, steps)


def may_hold(at: Placement, steps: Sequence[Step]) -> bool:
    """True if a stream may be held for as long as such steps take.

    It may where nothing can wait for it. libucp's and TL/UCP's work on device memory can: it copies in the default
    stream, and allocates and frees, which waits for the whole device. So can arithmetic of our own that is done on the
    host, which allocates. What one vendor's library does does not, nor do our copies and kernels, nor anything on host
    memory.
    """
    return vendors_know(at, steps) and not any(step.kind == "message" for step in steps)


def queues(channels: Channels, plan: Plan, at: Placement) -> bool:
    """True if a call is queued whole; alike on every rank, as ``plan`` is that of all ranks."""
    steps = [step for f in plan.fragments for stage in f.stages for step in stage]
    if any(step.link == "bridge" and step.kind != "message" for step in steps):
        return False
    native = [step for step in steps if step.link == "native" and len(step.ranks) > 1]
    # libucc answers calls that move nothing by itself, and not in a stream.
    full = all(r.count for step in native for side in (*step.src, *step.dst) for r in regions(side))
    if not full or (native and not (channels.native_in_stream and vendors_know(at, native))):
        return False
    return _computes(steps, at, channels.computes)


def queued(channels: Channels, notes: Sequence[Note], at: Placement, bounce: int, in_graph: bool) -> dict[str, Any]:
    """What the ``ucch_spec`` of a program has that is queued whole, ``in_graph`` where streams are captured. ``notes``
    of its steps.

    ``bounce``: bytes of the longest copy within overlapping memory; it makes a stop in scratch.
    """
    end = -(-at.tmp_bytes // 64) * 64
    combines = any(note.kind == "combine" for note in notes)
    key = (at.what.op, at.code) if combines else (OPS["SUM"].code, DTYPES["uint8"].code)
    kernels.ready(lib.UCCH_FUSED, *key, 0)  # also for long calls, which take it in graphs
    where = {"channels": channels.handle, "in_graph": in_graph, "tmp_bytes": end + bounce, "bounce": end}
    return {**where, "op": key[0], "dtype": key[1]}


def _computes(steps: Sequence[Step], at: Placement, compiles: bool) -> bool:
    """True if devices do the arithmetic themselves: every rank asks for all steps, also for those of other ranks.

    ``compiles``: all of them have a compiler.
    """
    what, wanted = at.what, []
    if any(step.kind == "combine" for step in steps):
        wanted.append((lib.UCCH_COMBINE, what.op, at.code, 0))
    if what.divisor or at.row.prefix:
        wanted.append((lib.UCCH_SCALE, 0, at.code, 0))
    if what.compute is not what.dtype:
        wanted += [(lib.UCCH_CAST, 0, what.dtype.code, at.code), (lib.UCCH_CAST, 0, at.code, what.dtype.code)]
    return not wanted or (compiles and kernels.all_ready(wanted))
