"""One row per collective: its buffers, counts rule, step, in-place rule, pre- and postcondition.

Everything that distinguishes one collective from another is a row of ``ROWS``; all other code uses the table. Offsets
and counts are in elements and *dense*: a buffer of several blocks is addressed as if the blocks were adjacent, in rank
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar


class Call(NamedTuple):
    """One collective call as every rank sees it (a tuple, because it is a cache key of the hot path).

    Attributes:
        collective: Name of the collective: a row of ``ROWS``.
        ranks: Number of ranks.
        counts: Elements, not bytes. ``(n,)`` for bcast, reduce, allreduce, scan and exscan; ``(n,)`` *per block* for
            gather, scatter, allgather, alltoall and reduce_scatter_block; one count per rank for gatherv, scatterv,
            allgatherv and reduce_scatter; for alltoallv the P*P matrix, row-major, row = sender; empty for barrier.
        root: The root; -1 for collectives without one.
    """

    collective: str
    ranks: int
    counts: tuple[int, ...]
    root: int = -1


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a dense buffer.

    Attributes:
        offset: Its first element, from the buffer's beginning.
        count: Number of elements.
    """

    offset: int
    count: int


class Alias(NamedTuple):
    """In place: the buffer ``inner`` is the part of ``outer`` that begins at element ``offset``."""

    inner: str
    outer: str
    offset: int


@dataclass(frozen=True, slots=True)
class Expect:
    """Postcondition: ``recv[offset:offset+count]`` holds the reduction over ``ranks`` of their ``send[source:...]``.

    One rank means a plain copy of that rank's data.
    """

    offset: int
    count: int
    source: int
    ranks: range


# --- counts ----------------------------------------------------------------------------------------------------------


class Shape:
    """The dense buffers of one call: the block of each pair of ranks. Cached."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.layout = ROWS[call.collective].layout
        self._prefix = tuple(accumulate(call.counts, initial=0)) if self.layout == "ranks" else ()
        self._rows: dict[int, tuple[int, ...]] = {}
        self._columns: dict[int, tuple[int, ...]] = {}

    def send(self, rank: int, peer: int) -> Block:
        """The block of ``rank``'s send buffer for ``peer`` (alltoall, scatter, reduce_scatter and similar)."""
        call = self.call
        if self.layout == "equal":
            return Block(peer * call.counts[0], call.counts[0])
        if self.layout == "ranks":
            return Block(self._prefix[peer], call.counts[peer])
        if self.layout == "matrix":
            return Block(self._row(rank)[peer], call.counts[rank * call.ranks + peer])
        raise ValueError(f"{call.collective} has no blocks")

    def recv(self, rank: int, peer: int) -> Block:
        """The block of ``rank``'s receive buffer from ``peer`` (alltoall, gather, allgather and similar)."""
        if self.layout == "matrix":
            return Block(self._column(rank)[peer], self.call.counts[peer * self.call.ranks + rank])
        return self.send(rank, peer)

    def own(self, rank: int) -> Block:
        """The block of ``rank`` itself, in collectives with one block per rank."""
        return self.send(rank, rank)

    @property
    def total(self) -> int:
        """Length of the vector, or of all blocks together; for a matrix, of all blocks of the rank with most
        elements."""
        call = self.call
        if self.layout == "none":
            return 0
        if self.layout == "vector":
            return call.counts[0]
        if self.layout == "equal":
            return call.counts[0] * call.ranks
        if self.layout == "ranks":
            return self._prefix[-1]
        return max(max(self.sent(rank), self.received(rank)) for rank in range(call.ranks))

    def sent(self, rank: int) -> int:
        return self._row(rank)[-1]

    def received(self, rank: int) -> int:
        return self._column(rank)[-1]

    def _row(self, rank: int) -> tuple[int, ...]:
        if rank not in self._rows:
            p = self.call.ranks
            self._rows[rank] = tuple(accumulate(self.call.counts[rank * p : (rank + 1) * p], initial=0))
        return self._rows[rank]

    def _column(self, rank: int) -> tuple[int, ...]:
        if rank not in self._columns:
            self._columns[rank] = tuple(accumulate(self.call.counts[rank :: self.call.ranks], initial=0))
        return self._columns[rank]


def elements(call: Call) -> int:
    """Number of elements by which algorithms are chosen (``Shape.total``): equal on every rank."""
    return Shape(call).total


def lengths(call: Call) -> list[tuple[int, int]]:
    """Elements of each rank's dense (send, recv) buffers; 0 if it has none."""
    shape, row = Shape(call), ROWS[call.collective]
    return [(row.send(shape, rank), row.recv(shape, rank)) for rank in range(call.ranks)]


def send_length(call: Call, rank: int) -> int:
    """Elements of ``rank``'s dense send buffer; 0 if it has none."""
    return ROWS[call.collective].send(Shape(call), rank)


def recv_length(call: Call, rank: int) -> int:
    """Elements of ``rank``'s dense receive buffer; 0 if it has none."""
    return ROWS[call.collective].recv(Shape(call), rank)


_T = TypeVar("_T")


def _at_root(find: Callable[[Shape, int], _T], elsewhere: _T) -> Callable[[Shape, int], _T]:
    """A function with ``find``'s result at the root, and ``elsewhere`` on other ranks."""
    return lambda s, rank: find(s, rank) if rank == s.call.root else elsewhere


def _nothing(s: Shape, rank: int) -> int:
    return 0


def _vector(s: Shape, rank: int) -> int:
    return s.call.counts[0]


def _vector_elsewhere(s: Shape, rank: int) -> int:
    return 0 if rank == s.call.root else s.call.counts[0]


def _own(s: Shape, rank: int) -> int:
    return s.own(rank).count


def _all(s: Shape, rank: int) -> int:
    return s.total


# --- in place ---------------------------------------------------------------------------------------------------------


def _same(s: Shape, rank: int) -> Alias | None:
    return Alias("send", "recv", 0)


def _own_in_recv(s: Shape, rank: int) -> Alias | None:
    return Alias("send", "recv", s.own(rank).offset)


def _own_in_send(s: Shape, rank: int) -> Alias | None:
    return Alias("recv", "send", s.own(rank).offset)


def _never(s: Shape, rank: int) -> Alias | None:
    return None


# --- postconditions ---------------------------------------------------------------------------------------------------


def _post_vector(among: Callable[[Call, int], range]) -> Callable[[Shape, int], list[Expect]]:
    """A rank gets the reduction of these ranks' vectors; nothing if there are no such ranks."""
    return lambda s, rank: [Expect(0, s.call.counts[0], 0, ranks)] if (ranks := among(s.call, rank)) else []


def _post_share(s: Shape, rank: int) -> list[Expect]:
    own = s.own(rank)
    return [Expect(0, own.count, own.offset, range(s.call.ranks))]


def _post_allgather(s: Shape, rank: int) -> list[Expect]:
    blocks = (s.recv(rank, peer) for peer in range(s.call.ranks))
    return [Expect(b.offset, b.count, 0, range(peer, peer + 1)) for peer, b in enumerate(blocks)]


def _post_scatter(s: Shape, rank: int) -> list[Expect]:
    own = s.own(rank)
    return [Expect(0, own.count, own.offset, range(s.call.root, s.call.root + 1))]


def _post_alltoall(s: Shape, rank: int) -> list[Expect]:
    out = []
    for peer in range(s.call.ranks):
        block = s.recv(rank, peer)
        out.append(Expect(block.offset, block.count, s.send(peer, rank).offset, range(peer, peer + 1)))
    return out


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """Properties of one collective.

    ``layout`` is the counts rule: ``none``, ``vector`` ``(n,)``, ``equal`` ``(n,)`` per block, ``ranks`` (one count per
    rank) or ``matrix`` (P*P). ``step`` is the kind of step that does the whole collective; empty if there is none.
    ``send`` and ``recv`` give the lengths of a rank's dense buffers; a bcast's data is ``send`` at the root and
    ``recv`` elsewhere. ``in_place`` tells which of a rank's buffers lies in the other; None means that the rank has
    only one buffer or, with ``staged``, that the caller's data must first be copied to scratch, which is then ``send``.
    Before the call ``send`` is defined on every rank that has one and ``recv`` is not; ``post`` must hold after it.
    """

    name: str
    rooted: bool
    reduces: bool
    layout: str
    step: str
    send: Callable[[Shape, int], int]
    recv: Callable[[Shape, int], int]
    in_place: Callable[[Shape, int], Alias | None]
    post: Callable[[Shape, int], list[Expect]]
    staged: bool = False
    #: A rank's result is over the ranks up to it, not over all.
    prefix: bool = False

    @property
    def shares(self) -> bool:
        """True if each rank gets a share of the reduction."""
        return self.reduces and self.layout in ("equal", "ranks")


def _rows() -> tuple[Row, ...]:
    # MPI wants the result of an in-place reduce_scatter at the start of the buffer; the lowering moves it there.
    no, yes, share, exchange = False, True, _post_share, _post_alltoall
    own_root, all_root, send_root = _at_root(_own_in_recv, None), _at_root(_all, 0), _at_root(_own_in_send, None)
    root, nothing = _at_root(_vector, 0), list[Expect]()

    def up_to(more: int) -> Callable[[Shape, int], list[Expect]]:
        return _post_vector(lambda call, rank: range(rank + more))

    all_ranks = _post_vector(lambda call, rank: range(call.ranks))
    from_root = _post_vector(lambda call, rank: range(call.root, call.root + (rank != call.root)))
    gathered, reduced = _at_root(_post_allgather, nothing), _at_root(all_ranks, nothing)
    return (
        # name, rooted, reduces, layout, step, send, recv, in place, post, staged
        Row("barrier", no, no, "none", "barrier", _nothing, _nothing, _never, lambda s, rank: []),
        Row("bcast", yes, no, "vector", "bcast", root, _vector_elsewhere, _never, from_root),
        Row("reduce", yes, yes, "vector", "reduce", _vector, root, _at_root(_same, None), reduced),
        Row("allreduce", no, yes, "vector", "allreduce", _vector, _vector, _same, all_ranks),
        Row("reduce_scatter_block", no, yes, "equal", "reduce_scatter", _all, _own, _own_in_send, share),
        Row("reduce_scatter", no, yes, "ranks", "reduce_scatter", _all, _own, _own_in_send, share),
        Row("gather", yes, no, "equal", "gather", _own, all_root, own_root, gathered),
        Row("gatherv", yes, no, "ranks", "gather", _own, all_root, own_root, gathered),
        Row("scatter", yes, no, "equal", "scatter", all_root, _own, send_root, _post_scatter),
        Row("scatterv", yes, no, "ranks", "scatter", all_root, _own, send_root, _post_scatter),
        Row("allgather", no, no, "equal", "allgather", _own, _all, _own_in_recv, _post_allgather),
        Row("allgatherv", no, no, "ranks", "allgather", _own, _all, _own_in_recv, _post_allgather),
        Row("alltoall", no, no, "equal", "alltoall", _all, _all, _never, exchange, yes),
        Row("alltoallv", no, no, "matrix", "alltoall", Shape.sent, Shape.received, _never, exchange, yes),
        Row("scan", no, yes, "vector", "", _vector, _vector, _same, up_to(1), prefix=yes),
        Row("exscan", no, yes, "vector", "", _vector, _vector, _same, up_to(0), prefix=yes),
    )


#: Every collective, by name.
ROWS: dict[str, Row] = {row.name: row for row in _rows()}


def operands(call: Call, rank: int) -> int:
    """Number of vectors that ``rank``'s result is the reduction of."""
    row = ROWS[call.collective]
    return sum(len(part.ranks) for part in row.post(Shape(call), rank)) if row.prefix else call.ranks


def alias(call: Call, rank: int) -> Alias | None:
    """Which of ``rank``'s buffers lies in the other if the call is in place (``Row.in_place``)."""
    return ROWS[call.collective].in_place(Shape(call), rank)


def extents(call: Call, rank: int) -> tuple[int, int, int]:
    """(elements of ``rank``'s dense send buffer, elements of its dense receive buffer, own). If ``own`` is not 0 the
    receive buffer may begin that many elements behind the send buffer although they overlap: the rank's own block then
    stays where it is.
    """
    row, own = ROWS[call.collective], alias(call, rank)
    at = 0 if own is None or row.reduces else own.offset * (1 if own.inner == "recv" else -1)
    return send_length(call, rank), recv_length(call, rank), at


def check(call: Call) -> None:
    """Refuse a call that cannot be planned: ``ValueError`` names the argument and what it should be."""
    row = ROWS.get(call.collective)
    if row is None:
        raise ValueError(f"collective {call.collective!r} is not one of {', '.join(ROWS)}")
    if call.ranks < 1:
        raise ValueError(f"{call.collective}: {call.ranks} ranks; at least one is needed")
    sizes = {"none": 0, "vector": 1, "equal": 1, "ranks": call.ranks, "matrix": call.ranks**2}
    if len(call.counts) != sizes[row.layout]:
        raise ValueError(
            f"{call.collective} over {call.ranks} ranks takes {sizes[row.layout]} counts, got {len(call.counts)}"
        )
    if call.counts and min(call.counts) < 0:
        at = next(i for i, n in enumerate(call.counts) if n < 0)
        raise ValueError(f"{call.collective}: counts[{at}] is {call.counts[at]}; counts cannot be negative")
    if row.rooted and not 0 <= call.root < call.ranks:
        raise ValueError(f"{call.collective}: root {call.root} is not a rank of a communicator of {call.ranks}")
    if not row.rooted and call.root != -1:
        raise ValueError(f"{call.collective} has no root, got root={call.root}")
