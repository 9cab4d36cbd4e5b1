"""Validation: every element of a result is compared with numpy's.

Inputs are new random data in each iteration, generated from counters, so that every rank can compute all ranks' inputs
without communication. Outputs are first filled with the complement of the expected values, so that a call that writes
nothing always fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .cases import Buffers, Call, Case, Pool, bind, shares
from .memory import Block
from .world import Peer, World

Host = npt.NDArray[Any]
Source = Callable[[int], Host]


class WrongResult(RuntimeError):
    """A call's result differs from numpy's."""


def draw(dtype: np.dtype[Any], count: int, seed: int, rank: int, iteration: int, summed: int | None = None) -> Host:
    """Random elements of ``rank``'s input in ``iteration``; all ranks compute the same.

    Integers use the whole range, unless ``summed`` ranks' data will be added: then no sum overflows, as some MPI
    libraries wrap around and others saturate. Floating-point data are small integers, so that sums of up to 2048 ranks
    are exact in float32 in any order; half precision has fewer.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, rank], counter=[0, 0, 0, iteration]))
    if dtype.kind in "iu" and summed is None:
        size = count * dtype.itemsize
        return np.frombuffer(rng.bytes(size), dtype) if size else np.empty(0, dtype)
    if dtype.kind in "iu":
        most = int(np.iinfo(dtype).max)
        # If there are more ranks than the type can count, only the first ones have nonzero data.
        limit = max(most // summed, 1) if summed and rank < most else 0
        return rng.integers(-limit if dtype.kind == "i" else 0, limit, count, dtype=dtype, endpoint=True)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(dtype)
    limit = 4096 if dtype.itemsize >= 4 else 4
    values = rng.integers(-limit, limit + 1, count)
    if dtype.kind == "c":
        return (values + 1j * rng.integers(-limit, limit + 1, count)).astype(dtype)
    return values.astype(dtype)


def expected(case: Case, source: Source) -> Host | None:
    """Expected contents of this rank's receive buffer (for bcast: its buffer); None if it receives nothing.

    ``source(r)`` is the whole input of rank r.
    """
    kind, rank, ranks, count = case.row.kind, case.rank, case.ranks, case.count
    if kind == "bcast":
        return source(case.root)
    if case.row.rooted and kind != "scatter_root" and rank != case.root:
        return None
    if kind == "scatter_root":
        return source(case.root)[rank * count : (rank + 1) * count]
    if kind in ("gather_all", "gather_root"):
        return np.concatenate([source(r) for r in range(ranks)])
    if kind == "exchange":
        return np.concatenate([source(r)[rank * count : (rank + 1) * count] for r in range(ranks)])
    if kind == "barrier":
        return None
    total = source(0).copy()
    for r in range(1, ranks):
        total += source(r)
    if kind == "reduce_scatter":
        parts = shares(count, ranks, case.row.vector)
        start = sum(parts[:rank])
        return total[start : start + parts[rank]]
    return total


def complement(data: Host) -> Host:
    """All bits flipped, so that no element equals the original."""
    return np.invert(np.ascontiguousarray(data).view(np.uint8)).view(data.dtype)


def differences(got: Host, want: Host) -> npt.NDArray[np.intp]:
    """Indices of elements whose bits differ; 0.0 and -0.0 count as equal."""
    if want.dtype.kind in "fc":
        return np.flatnonzero(~(got == want))
    size = want.dtype.itemsize
    raw = np.ascontiguousarray(got).view(np.uint8).reshape(-1, size) != np.ascontiguousarray(want).view(
        np.uint8
    ).reshape(-1, size)
    wrong = np.flatnonzero(raw.any(axis=1))
    if want.dtype.kind == "V" and wrong.size:  # ml_dtypes: compare as numbers
        wrong = wrong[~(got[wrong].astype(np.float64) == want[wrong].astype(np.float64))]
    return wrong


@dataclass(slots=True)
class Checker:
    """Fills and checks the buffers of a case, iteration by iteration."""

    case: Case
    dtype: np.dtype[Any]
    seed: int = 1

    def source(self, rank: int, iteration: int) -> Host:
        """The input of rank ``rank``."""
        case = self.case
        everything = case.row.kind in ("scatter_root", "exchange")
        count = case.count * (case.ranks if everything else 1)
        if case.row.kind == "reduce_scatter":
            count = sum(shares(case.count, case.ranks, case.row.vector))
        summed = case.ranks if case.row.reduces else None
        return draw(self.dtype, count, self.seed, rank, iteration, summed)

    def _expected(self, iteration: int) -> Host | None:
        return expected(self.case, lambda r: self.source(r, iteration))

    def load(self, buffers: Buffers, iteration: int) -> None:
        """Write this rank's input, and poison what the call should write."""
        case, want = self.case, self._expected(iteration)
        mine = self.source(case.rank, iteration) if buffers.send else None
        if case.row.kind == "bcast":
            assert buffers.send is not None and want is not None
            buffers.send.put(want if case.rank == case.root else complement(want))
            return
        if buffers.send is not None and mine is not None:
            buffers.send.put(mine)
        if buffers.recv is None or want is None:
            return
        poison = complement(want)
        if case.sends_in_place and mine is not None:
            if case.row.kind in ("gather_all", "gather_root"):
                poison[case.rank * case.count : (case.rank + 1) * case.count] = mine
            elif case.row.kind != "scatter_root":
                poison = mine
        buffers.recv.put(poison)

    def wrong(self, buffers: Buffers, iteration: int) -> int:
        """Number of wrong elements; an overrun counts as one."""
        case, errors = self.case, 0
        want = self._expected(iteration)
        if case.row.kind == "bcast":
            assert buffers.send is not None and want is not None
            errors += _compare(buffers.send, want)
        else:
            if want is not None and buffers.recv is not None and not self._stays_put:
                errors += _compare(buffers.recv, want)
            if buffers.send is not None:
                errors += _compare(buffers.send, self.source(case.rank, iteration))  # the call must not change it
        blocks = [block for block in (buffers.send, buffers.recv) if block is not None]
        return errors + sum(block.overrun() for block in blocks)

    @property
    def _stays_put(self) -> bool:
        """True for an in-place scatter, which leaves the root's part in the send buffer."""
        return self.case.row.kind == "scatter_root" and self.case.sends_in_place


def _compare(block: Block, want: Host) -> int:
    return int(differences(block.get()[: want.size], want).size)


def proven_call(
    peer: Peer, case: Case, dtype: np.dtype[Any], pool: Pool, world: World, family: str = "blocking"
) -> Call:
    """Bind a call, and compare its result with numpy's once, before it is timed. Collective.

    ``WrongResult`` on every rank if an element is wrong on any."""
    buffers, checker = pool.take(case), Checker(case, dtype)
    call = bind(peer, case, buffers, family)
    checker.load(buffers, 0)
    world.barrier()
    call.run()
    wrong = world.total(checker.wrong(buffers, 0))
    if wrong:
        raise WrongResult(f"{peer.name}: {wrong} wrong elements in {case.row.name} of {case.count} {dtype.name}")
    return call
