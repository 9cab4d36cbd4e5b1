"""Checksums of a call's data: hashes of data that is moved, sums of data that is reduced, and the search for a wrong
element.

A rank describes a range of elements, cut into pieces, by a row of words (:meth:`MovedData.words`,
:meth:`ReducedData.words`). From the rows of all ranks every rank finds the same first wrong piece, and the next round
covers that piece alone: a few rounds find the element in data of any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..planner.collectives import ROWS, Call, Shape, operands
from ..planner.topology import ranks_by
from ..types import DTYPES, DType, Reduction

#: Pieces of a range in one round, and of a reduction's vector in the first round.
PIECES, FIRST = 64, 512

#: Operations for which reducing the operands' pieces gives the result's pieces: exactly, except for rounded sums.
_UFUNCS = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "BAND": np.bitwise_and,
    "BOR": np.bitwise_or, "BXOR": np.bitwise_xor, "LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor,
}  # fmt: skip
#: Unit roundoff, largest and smallest normal number.
_FLOATS = {
    "float16": (2.0**-11, 65504.0, 2.0**-14),
    "bfloat16": (2.0**-8, 3.38e38, 2.0**-126),
    "float32": (2.0**-24, 3.4e38, 2.0**-126),
    "float64": (2.0**-53, 1.7e308, 2.0**-1022),
}


class Span(NamedTuple):
    """Elements ``start`` to ``stop``, in ``pieces``.

    ``about``: (sender, receiver) of a moved block. For a reduction: (rank,) whose share it is, (0,) for the whole
    vector, and () for a vector that should be equal on all ranks and is not.
    """

    start: int
    stop: int
    pieces: int
    about: tuple[int, ...]

    def edges(self) -> Any:
        """Where each piece begins, and where the last one ends."""
        return self.start + np.arange(self.pieces + 1) * (self.stop - self.start) // self.pieces

    def piece(self, number: int) -> Span:
        """Piece ``number`` as a span, with as many pieces as elements, at most ``PIECES``."""
        begin, end = (int(at) for at in self.edges()[number : number + 2])
        return Span(begin, end, max(1, min(PIECES, end - begin)), self.about)


class Fault(NamedTuple):
    """Wrong data as text, and the ranks that have it; no ranks if it is not known which are right."""

    ranks: tuple[int, ...]
    text: str


def length(name: str, ranks: int) -> int:
    """Words of a rank's first row: the same for all arguments of a collective."""
    row = ROWS["alltoallv" if name == "alltoallw" else name]
    return 1 + 3 * max(FIRST, ranks) if row.reduces else 2 * ranks


def _hash(data: Any) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True) or 1


class MovedData:
    """Checksums of a collective that moves data, on ``rank``.

    ``before`` and ``after`` are the bytes of its buffers before and after the call, or None. ``displs`` are the
    displacements of the blocks in them, in elements, or None if the blocks are dense.
    """

    def __init__(self, call: Call, dtype: DType, rank: int, displs: Sequence[Sequence[int] | None]) -> None:
        self.call, self._size, self._rank, self._displs = call, dtype.itemsize, rank, displs
        self._shape, self._dtype = Shape(call), dtype
        self.before: Any = None
        self.after: Any = None

    def _sent(self, dest: int) -> Any:
        """The bytes sent to rank ``dest``; None if there are none."""
        call, row = self.call, ROWS[self.call.collective]
        if self.before is None or (row.rooted and call.root not in (self._rank, dest)):
            return None
        if call.collective == "bcast":
            start, count = 0, call.counts[0]
        elif row.step == "allgather" or row.step == "gather":
            start, count = 0, self._shape.own(self._rank).count
        else:
            block, displs = self._shape.send(self._rank, dest), self._displs[0]
            start, count = displs[dest] if displs else block.offset, block.count
        return self._bytes(self.before, start, count)

    def _got(self) -> Iterator[tuple[int, Any]]:
        if self.after is None:
            return
        for each in ROWS[self.call.collective].post(self._shape, self._rank):
            source, displs = each.ranks[0], self._displs[1]
            yield source, self._bytes(self.after, displs[source] if displs else each.offset, each.count)

    def _bytes(self, memory: Any, start: int, count: int) -> Any:
        return memory[start * self._size : (start + count) * self._size]

    def first(self) -> Any:
        """Hashes of the data sent to each rank, and of the data received from each; 0: none."""
        words = np.zeros(2 * self.call.ranks, np.int64)
        known: dict[tuple[int, int], int] = {}
        for dest in range(self.call.ranks):
            data = self._sent(dest)
            if data is not None:
                place = data.ctypes.data, data.size
                words[dest] = known.get(place) or known.setdefault(place, _hash(data))
        for source, data in self._got():
            words[self.call.ranks + source] = _hash(data)
        return words

    def suspect(self, rows: Any) -> tuple[Span | None, list[int]]:
        """The first block whose received data differs from the sent data, and the ranks with wrong data."""
        sent, got = rows[:, : self.call.ranks], rows[:, self.call.ranks :].T
        wrong = np.argwhere((sent != got) & (sent != 0) & (got != 0))
        if not len(wrong):
            return None, []
        source, dest = (int(number) for number in wrong[0])
        return Span(0, -1, PIECES, (source, dest)), [int(d) for s, d in wrong if s == source]

    def _block(self, about: tuple[int, ...]) -> tuple[Any, Any]:
        source, dest = about
        sent = self._sent(dest) if self._rank == source else None
        got = dict(self._got()).get(source) if self._rank == dest else None
        return sent, got

    def count(self, span: Span) -> int:
        """Number of elements in the block, as far as this rank knows; -1: unknown."""
        return max((part.size // self._size for part in self._block(span.about) if part is not None), default=-1)

    def words(self, span: Span) -> Any:
        """Hashes of the block's pieces, as sent and as received; for a single element its bytes."""
        words = np.zeros((2, PIECES), np.int64)
        for side, data in enumerate(self._block(span.about)):
            if data is None:
                continue
            edges = span.edges()
            for i in range(span.pieces):
                words[side, i] = _hash(self._bytes(data, edges[i], edges[i + 1] - edges[i]))
            if span.stop - span.start == 1:
                words[side, :2].view(np.uint8)[: self._size] = self._bytes(data, span.start, 1)
        return words.ravel()

    def worse(self, rows: Any, span: Span) -> int:
        """Index of the first piece that differs; -1: none."""
        sent, got = rows[span.about[0], :PIECES], rows[span.about[1], PIECES:]
        return int(np.argmax(sent[: span.pieces] != got[: span.pieces])) if (sent != got).any() else -1

    def describe(self, rows: Any, span: Span, ranks: Sequence[int]) -> Fault:
        source, dest = span.about
        shown = (self._show(row) for row in (rows[source, :PIECES], rows[dest, PIECES:]))
        what = "element {} of the data from rank {} to rank {} was sent as {} and has arrived as {}"
        return Fault(tuple(ranks), what.format(span.start, source, dest, *shown))

    def vague(self, span: Span, ranks: Sequence[int]) -> Fault:
        return Fault(tuple(ranks), "data from rank {} to rank {} has not arrived as it was sent".format(*span.about))

    def _show(self, words: Any) -> str:
        data = words[:2].view(np.uint8)[: self._size]
        try:
            return str(values_of(data.copy(), self._dtype)[0])
        except KeyError:
            return f"0x{data[::-1].tobytes().hex()}"


class ReducedData:
    """Checksums of a reduction, on ``rank``; ``before`` and ``after`` as in :class:`MovedData`."""

    def __init__(self, call: Call, how: Reduction, dtype: DType, rank: int) -> None:
        self.call, self._how, self._dtype, self._rank = call, how, dtype, rank
        self._row, self._shape = ROWS[call.collective], Shape(call)
        self.before: Any = None
        self.after: Any = None
        self._exact = dtype.kind not in ("float", "complex")
        #: How to compare pieces; None if that tells nothing: rounding errors of products, and truncated means, have no
        #: bound.
        vague = how.divide if self._exact else how.op.name == "PROD"
        self._ufunc = None if vague else _UFUNCS[how.op.name]
        self._of = np.float64 if not self._exact else np.uint64 if dtype.kind == "uint" else np.int64
        #: Numbers per element.
        self._each = 2 if dtype.kind == "complex" else 1

    def _segments(self) -> list[Span]:
        """The vector, or each rank's share of it."""
        p, row = self.call.ranks, self._row
        if not row.shares:
            total = self.call.counts[0]
            return [Span(0, total, min(FIRST, total), (0,))] if total else []
        blocks = [(r, self._shape.own(r)) for r in range(p)]
        most = max(1, FIRST // p)
        return [Span(b.offset, b.offset + b.count, min(most, b.count), (r,)) for r, b in blocks if b.count]

    def _expects(self, rank: int, span: Span) -> range:
        """The ranks whose operands are in ``rank``'s part of a segment; empty if it has no part."""
        found = self._row.post(self._shape, rank)
        if not found or (self._row.shares and span.about[0] != rank):
            return range(0)
        return found[0].ranks

    def first(self) -> Any:
        """Per piece: checksum of the operand, of its absolute values, and of the result; and a hash of the result."""
        size = max(FIRST, self.call.ranks)
        words = np.zeros(1 + 3 * size, np.int64)
        for span, at in zip(self._segments(), self._places(), strict=True):
            parts = self._pieces(span)
            for i, part in enumerate(parts[:3]):
                words[1 + i * size + at :][: span.pieces] = part
        words[0] = _hash(self.after) if self.after is not None and self._replicated else 0
        return words

    @property
    def _replicated(self) -> bool:
        return self.call.collective == "allreduce"

    def _places(self) -> list[int]:
        step = max(1, FIRST // self.call.ranks) if self._row.shares else 0
        return [span.about[0] * step for span in self._segments()]

    def suspect(self, rows: Any) -> tuple[Span | None, list[int]]:
        """The first segment that is not the reduction of the operands, or differs between ranks; and the ranks with
        wrong data."""
        size = max(FIRST, self.call.ranks)
        for span, at in zip(self._segments(), self._places(), strict=True):
            # Copies at their places in the row, in the form that _judge gets in later rounds.
            cut = np.stack([rows[:, 1 + i * size + at :][:, : span.pieces] for i in range(3)], axis=1)
            same = len(set(rows[:, 0].tolist())) == 1 or not self._replicated
            number, ranks = self._judge(cut, span)
            if not same:
                return Span(span.start, span.stop, min(PIECES, span.stop - span.start), ()), ranks
            if number >= 0:
                return span.piece(number), ranks
        return None, []

    def count(self, span: Span) -> int:
        """As in :class:`MovedData`; every rank knows it."""
        return span.stop

    def _pieces(self, span: Span) -> list[Any]:
        """Words of a span: operand, absolute values, result, hashes of the result."""
        found = [np.zeros(span.pieces, np.int64) for _ in range(4)]
        edges = span.edges()
        if self.before is not None:
            part = self._values(self.before, span.start, span.stop)
            found[0] = self._reduce(part, edges - span.start)
            found[1] = self._reduce(np.abs(part), edges - span.start) if not self._exact else found[0]
        if self.after is not None and self._expects(self._rank, span):
            offset, size = self._row.post(self._shape, self._rank)[0].source, self._dtype.itemsize
            found[2] = self._reduce(
                self._values(self.after, span.start - offset, span.stop - offset), edges - span.start
            )
            cuts = (edges - offset) * size
            found[3] = np.array([_hash(self.after[a:b]) for a, b in pairwise(cuts)], np.int64)
        return found

    def _values(self, data: Any, start: int, stop: int) -> Any:
        size = self._dtype.itemsize
        return values_of(data[start * size : stop * size], self._dtype)

    def _reduce(self, values: Any, edges: Any) -> Any:
        if self._ufunc is None:
            return np.zeros(len(edges) - 1, np.int64)
        starts = edges[:-1] * self._each
        with np.errstate(all="ignore"):
            values = values if self._exact else values.astype(np.float64)
            same = {} if self._ufunc.__name__.startswith("logical") else {"dtype": values.dtype}
            found = self._ufunc.reduceat(values, starts, **same)
        return found.astype(self._of).view(np.int64)

    def _judge(self, rows: Any, span: Span) -> tuple[int, list[int]]:
        """The first wrong piece, and the ranks that have it; -1 if there is none. ``rows``: [rank, kind, piece]."""
        if self._ufunc is None:
            return -1, []
        of, worst = rows.view(self._of), {}
        for rank in range(self.call.ranks):
            among = self._expects(rank, span)
            if not among:
                continue
            with np.errstate(all="ignore"):
                wrong = self._wrong(of[among.start : among.stop], of[rank, 2], span, rank)
            if wrong.any():
                worst[rank] = int(np.argmax(wrong))
        first = min(worst.values(), default=-1)
        return first, [rank for rank, number in worst.items() if number == first]

    def _wrong(self, operands_: Any, result: Any, span: Span, rank: int) -> Any:
        """For each piece: True if the rank's result is not the reduction of the operands."""
        assert self._ufunc is not None
        if self._exact:
            due = self._ufunc.reduce(operands_[:, 0]).astype(self._of)
            narrow = np.dtype(self._dtype.name if self._dtype.kind != "bool" else "uint8")
            return due.astype(narrow) != result.astype(narrow)
        roundoff, most, least = _FLOATS[_part_of(self._dtype).name]
        due, counts = self._ufunc.reduce(operands_[:, 0]), np.diff(span.edges()) * self._each
        if self._how.op.name != "SUM":
            return np.isfinite(due) & (due != result)
        total, n = operands_[:, 1].sum(axis=0), len(operands_)
        divisor = operands(self.call, rank) if self._how.divide else 1
        bound = ((n + 1) * roundoff + (counts + n) * 2.0**-51) * total + counts * n * divisor * least
        return np.isfinite(due) & (total < most) & ~(np.abs(result * divisor - due) <= bound)

    def words(self, span: Span) -> Any:
        """As :meth:`first`, for a span's pieces, each with a hash of the result."""
        words = np.zeros((4, PIECES), np.int64)
        for i, part in enumerate(self._pieces(span)):
            words[i, : span.pieces] = part
        return words.ravel()

    def _cut(self, rows: Any, span: Span) -> Any:
        return rows.reshape(len(rows), 4, PIECES)[:, :, : span.pieces].copy()

    def worse(self, rows: Any, span: Span) -> int:
        """Index of the first wrong piece; -1: none."""
        cut = self._cut(rows, span)
        if not span.about:  # replicas
            differ = (cut[:, 3] != cut[0, 3]).any(axis=0)
            return int(np.argmax(differ)) if differ.any() else -1
        return self._judge(cut, span)[0]

    def describe(self, rows: Any, span: Span, ranks: Sequence[int]) -> Fault:
        cut = self._cut(rows, span)
        have = [rank for rank in range(self.call.ranks) if self._expects(rank, span)]
        if self._ufunc is None:
            first, *others = ranks_by((int(cut[rank, 3, 0]) for rank in have), have).values()
            text = " and ".join(f"another on rank(s) {group}" for group in others)
            return Fault((), f"element {span.start} is one thing on rank(s) {first}, {text}")
        _, wrong = self._judge(cut, span)
        of = cut.view(self._of)[:, :, 0]
        shown = ranks_by((str(of[rank, 2]) for rank in have), have)
        if not wrong and len(shown) > 1:  # all are within the bound of rounding
            wrong = min(shown.values(), key=len)
        of_what = " (real and imaginary part added)" if self._each == 2 else ""
        is_what = ", ".join(f"{value} on rank(s) {group}" for value, group in shown.items())
        among = self._expects(wrong[0] if wrong else have[0], span)
        with np.errstate(all="ignore"):
            due = self._ufunc.reduce(of[among.start : among.stop, 0])
        due = due / operands(self.call, wrong[0] if wrong else have[0]) if self._how.divide else due
        text = f"element {span.start} is {is_what}, and the ranks' operands make {due}{of_what}"
        return Fault(tuple(wrong or ranks), text)

    def vague(self, span: Span, ranks: Sequence[int]) -> Fault:
        text = f"elements {span.start} to {span.stop} are not the reduction of the ranks' operands, or not on all alike"
        return Fault(tuple(ranks), text)


def _part_of(dtype: DType) -> DType:
    return DTYPES[{"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype.name)]


def values_of(data: Any, dtype: DType) -> Any:
    """Bytes as numbers, a complex element as two. ``KeyError`` for types that numpy lacks."""
    if dtype.name == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.kind in ("fp8", "opaque"):
        raise KeyError(dtype.name)
    name = "uint8" if dtype.kind == "bool" else _part_of(dtype).name
    return data.view(np.dtype(name))
