"""Rules for programs in streams, by their steps: wait there for its end, or be a part of the work there."""

from __future__ import annotations

from collections.abc import Sequence

from ..planner.plan import KINDS, Step
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
