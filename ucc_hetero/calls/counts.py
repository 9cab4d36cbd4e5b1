"""Counts of uneven blocks: ranks tell each other theirs by a call of its own, before a call or along with it, as libucc
does not compare them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import MismatchError
from ..planner.collectives import Call
from .arguments import Bound
from .request import Request


class CountExchange(NamedTuple):
    """The exchange of counts before a call: this rank's are in ``mine``, those of all ranks arrive in ``rows``."""

    mine: Any
    rows: Any
    #: A `Prepared`.
    prepared: Any


@dataclass(slots=True, eq=False)
class CountsAlong:
    """Counts that go along with a non-blocking call, as a call of their own. They are compared at its end."""

    begin: Callable[[Any], Request]
    #: A `Prepared`.
    prepared: Any
    compare: Callable[[], None]
    _request: Request | None = None

    def start(self) -> bool:
        """Send them, again for a later call. False if all programs are in use."""
        if self._request is not None:
            program = self.prepared.pool.take()
            if program is None:
                return False
            self.prepared.program = program
        self._request = self.begin(self.prepared)
        return True

    def check(self) -> None:
        """Raise ``MismatchError`` if the ranks' counts do not match."""
        assert self._request is not None
        self._request.Wait()
        self.compare()


def told_counts(name: str, bound: Bound, rank: int) -> tuple[int, ...]:
    """What this rank tells the others: as many numbers on every rank."""
    call = bound.call
    if call.collective == "alltoallv":
        return *call.counts[rank * call.ranks : (rank + 1) * call.ranks], *call.counts[rank :: call.ranks]
    if name == "reduce_scatter":
        assert bound.send is not None
        return call.counts[rank], bound.send.count
    # Only the root knows what it expects; every rank compares a hash of that with the counts.
    return call.counts[rank], _fingerprint(call.counts) if rank == call.root else 0


def all_counts(name: str, call: Call, rank: int, rows: Any) -> tuple[int, ...] | None:
    """The call's counts, from what all ranks have told. ``MismatchError`` if they do not match; None if they are not
    those that the root expects."""
    if call.collective == "alltoallv":
        return _matrix(name, rank, rows)
    counts = tuple(rows[:, 0].tolist())
    if name == "reduce_scatter":
        for each, sent in enumerate(rows[:, 1]):
            if sent != sum(counts):
                raise MismatchError(
                    f"{name} on rank {rank}: rank {each} sends {sent} elements, and the ranks' recvbufs "
                    f"together hold {sum(counts)}"
                )
    elif rows[call.root, 1] != _fingerprint(counts):
        return None
    return counts


def _matrix(name: str, rank: int, rows: Any) -> tuple[int, ...]:
    """Number of elements from each rank to each. ``MismatchError`` if a receiver expects another number."""
    sent, expected = np.split(rows, 2, axis=1)
    for sender, receiver in np.argwhere(sent != expected.T):
        raise MismatchError(
            f"{name} on rank {rank}: rank {sender} sends {sent[sender, receiver]} elements to rank "
            f"{receiver}, which expects {expected[receiver, sender]}"
        )
    return tuple(sent.ravel().tolist())


def unequal_root(name: str, root: int, rank: int, rows: Any) -> MismatchError:
    """The error if the root expects other counts; ``rows``: the counts that each rank knows."""
    each = next(each for each, row in enumerate(rows) if row[each] != rows[root][each])
    return MismatchError(
        f"{name} on rank {rank}: root {root} counts {rows[root][each]} elements of rank {each}, "
        f"which has {rows[each][each]}"
    )


def _fingerprint(counts: Sequence[int]) -> int:
    data = np.array(counts, np.int64).tobytes()
    return zlib.crc32(data) | (zlib.adler32(data) & 0x7FFFFFFF) << 32
