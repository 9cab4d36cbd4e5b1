"""Calls to time: makes buffers and mpi4py arguments from a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .memory import Block, Memory
from .table import Collective
from .world import Peer


@dataclass(frozen=True, slots=True)
class Case:
    """A collective of one size, on one rank. ``count``: OSU's number of elements for the size column."""

    row: Collective
    rank: int
    ranks: int
    count: int
    root: int
    in_place: bool

    @property
    def sends_in_place(self) -> bool:
        """True if MPI.IN_PLACE stands for the send buffer (for scatter: the receive buffer) on this rank."""
        if self.row.kind in ("bcast", "barrier"):
            return False
        return self.in_place and (not self.row.rooted or self.rank == self.root)


@dataclass(slots=True)
class Buffers:
    """The buffers of a case; None where this rank has none."""

    send: Block | None
    recv: Block | None


def shares(total: int, ranks: int, vector: bool) -> list[int]:
    """Elements per rank of a reduce_scatter. OSU gives the remainder to the first ranks; the block form drops it."""
    each, rest = divmod(total, ranks)
    return [each + (vector and r < rest) for r in range(ranks)]


def lengths(case: Case) -> tuple[int | None, int | None]:
    """(send, receive) elements of this rank; None for a buffer that it does not have."""
    count, everything, at_root = case.count, case.count * case.ranks, case.rank == case.root
    if case.row.kind == "reduce_scatter":
        parts = shares(count, case.ranks, case.row.vector)
        return sum(parts), sum(parts) if case.in_place else parts[case.rank]
    table: dict[str, tuple[int | None, int | None]] = {
        "reduce_all": (count, count),
        "reduce_root": (count, count if at_root else None),
        "gather_all": (count, everything),
        "gather_root": (count, everything if at_root else None),
        "scatter_root": (everything if at_root else None, count),
        "exchange": (everything, everything),
        "bcast": (count, None),
        "barrier": (None, None),
    }
    return table[case.row.kind]


def longest(row: Collective, count: int, ranks: int) -> int:
    """Elements of the longest buffer of any rank."""
    return count if row.whole else count * ranks


def in_place_only(peer: Peer, row: Collective) -> bool:
    """True if the peer only works in place, as torch.distributed's allreduce does; then that form is measured."""
    return peer.name in ("gloo", "nccl") and row.kind == "reduce_all"


class Pool:
    """Two long buffers whose beginnings serve all sizes, so that pages are touched once, as in OSU's programs."""

    def __init__(self, memory: Memory, dtype: np.dtype[Any], elements: int) -> None:
        self._send = memory.block(dtype, elements)
        self._recv = memory.block(dtype, elements)

    def take(self, case: Case) -> Buffers:
        send, recv = lengths(case)
        return Buffers(None if send is None else self._send.head(send), None if recv is None else self._recv.head(recv))


def arguments(peer: Peer, case: Case, buffers: Buffers) -> tuple[Any, ...]:
    """The positional arguments of the timed call."""
    row, kind = case.row, case.row.kind
    send = buffers.send.array if buffers.send else None
    recv = buffers.recv.array if buffers.recv else None
    if row.vector and kind != "reduce_scatter":
        counts = [case.count] * case.ranks
        layout = (counts, [case.count * r for r in range(case.ranks)])
        if kind == "exchange":
            send = [send, layout]
        if kind == "scatter_root":
            send = None if send is None else [send, layout]
        elif recv is not None:
            recv = [recv, layout]
    if case.sends_in_place:
        if kind == "scatter_root":
            recv = peer.in_place
        else:
            send = peer.in_place
    if kind == "barrier":
        return ()
    if kind == "bcast":
        return send, case.root
    if kind == "reduce_scatter" and row.vector:
        return send, recv, shares(case.count, case.ranks, True), peer.sum
    tail = ((peer.sum,) if row.reduces else ()) + ((case.root,) if row.rooted else ())
    return send, recv, *tail


@dataclass(frozen=True, slots=True)
class Call:
    """A call to time, its release, and its buffers, which mpi4py 4.1's ``Allgatherv_init`` does not keep alive."""

    run: Callable[[], Any]
    free: Callable[[], None] = lambda: None
    given: object = None


def bind(peer: Peer, case: Case, buffers: Buffers, family: str) -> Call:
    """Make the call to time: blocking; one that starts a request; or one that starts and waits for a persistent one."""
    method, given = case.row.method, arguments(peer, case, buffers)
    if family != "persistent":
        return Call(partial(peer.method(f"I{method.lower()}" if family == "nonblocking" else method), *given))
    request = peer.method(f"{method}_init")(*given)
    start, wait = request.Start, request.Wait

    def run() -> None:
        start()
        wait()

    return Call(run, request.Free, given)


def roots(row: Collective, root: int | None, ranks: int) -> Sequence[int]:
    if not row.rooted:
        return (0,)
    return range(ranks) if root is None else (root,)
