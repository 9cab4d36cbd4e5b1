"""Binding of a call's arguments to memory. Every mistake of the caller raises here, before a byte is sent.

A call that was made before is recognized by its signature (:func:`look_up`). Other calls are bound by one binder per
shape of argument list; ``planner/collectives.py`` has the shape of each collective, and everything else that
distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..buffers import Buffer, VBuffer, as_blocks, as_buffer, as_vbuffer, is_in_place
from ..buffers.exporters import describe_fast
from ..device import pointer_vendor
from ..errors import NotSupported
from ..native.libraries import ffi
from ..planner.collectives import ROWS, Call, Shape, extents
from ..types import DTYPES, OPS, DType, Op, Reduction, op_of, reduction


class CallSpec(NamedTuple):
    """One call as its caller made it: a collective by its name in ``planner.collectives``, and mpi4py's arguments."""

    name: str
    send: Any
    recv: Any
    op: Any = None
    root: Any = -1
    counts: Any = None


class Completion(Enum):
    """What waits for the end of a call: its ``STREAM``, or the host in the request's wait (``ON_WAIT``), or the host
    already when the call has begun (``HOST``)."""

    HOST = "the host, as soon as it has begun"
    STREAM = "the stream"
    ON_WAIT = "the wait for its request"


class Copy(NamedTuple):
    """Memory that a program uses in place of the caller's ``original``, which the call reads, writes, or both."""

    copy: Buffer
    original: Buffer
    read: bool
    written: bool


class Bound(NamedTuple):
    """A call with its memory. ``local``: ``call.counts`` holds only the counts that this rank knows; the others are 0.

    ``copies``: packed copies of blocks that are not contiguous; ``send`` and ``recv`` are then such copies.
    """

    call: Call
    dtype: DType | None
    in_place: bool
    send: Buffer | None
    recv: Buffer | None
    send_displs: tuple[int, ...] | None = None
    recv_displs: tuple[int, ...] | None = None
    local: bool = False
    copies: tuple[Copy, ...] = ()


class _Args:
    def __init__(self, call: CallSpec, size: int, rank: int) -> None:
        self.name, self.send, self.recv = call.name, call.send, call.recv
        self.size, self.rank, self.root = size, rank, root_of(call, size, rank)
        self.at_root = self.root < 0 or rank == self.root
        self.copies: list[Copy] = []

    def spec(self, which: str) -> Any:
        return self.send if which == "sendbuf" else self.recv

    def _expected(self, which: str) -> dict[str, Any]:
        writable = which != "sendbuf" and not (which == "buf" and self.at_root)
        return {"writable": writable, "argument": which, "rank": self.rank, "pointer_vendor": pointer_vendor}

    def buffer(self, which: str, blocks: int = 1) -> Buffer:
        found = as_buffer(self.spec(which), blocks=blocks, **self._expected(which))
        self._refuse_gaps(found, which)
        return found

    def vbuffer(self, which: str) -> VBuffer:
        found = as_vbuffer(self.spec(which), self.size, **self._expected(which))
        self._refuse_gaps(found.buffer, which)
        if found.blocks:
            found = replace(found, buffer=self.gathered(found.blocks, found.buffer.dtype, which))
        return found

    def blocks(self, which: str, apart: Buffer | None = None) -> tuple[Buffer, list[int], tuple[int, ...] | None]:
        """The blocks of a call with a datatype per rank as bytes: the memory from the first to the last, their lengths
        and displacements. Packed if they have gaps inside, or if the memory overlaps with ``apart``."""
        found, dtype = as_blocks(self.spec(which), self.size, **self._expected(which)), DTYPES["uint8"]
        lengths = [block.nbytes for block in found]
        start = min((block.ptr for block in found if block.count), default=0)
        end = max((block.ptr + block.nbytes for block in found if block.count), default=0)
        overlap = apart is not None and start < apart.ptr + apart.nbytes and apart.ptr < end
        if overlap or not all(block.contiguous and block.vendor == "host" for block in found):
            return self.gathered(found, dtype, which), lengths, None
        whole = Buffer(start, end - start, dtype, "host", 0, found[0].owner, found[0].readonly)
        return whole, lengths, tuple([block.ptr - start if block.count else 0 for block in found])

    def gathered(self, blocks: Sequence[Buffer], dtype: DType, which: str) -> Buffer:
        """New memory for the blocks, one behind the other."""
        nbytes = sum(block.nbytes for block in blocks)
        memory = np.empty(max(nbytes, 1), np.uint8)
        start = at = memory.ctypes.data
        for block in blocks:
            copy = Buffer(at, block.count, block.dtype, "host", 0, memory, False)
            self.copies.append(Copy(copy, block, read=True, written=which == "recvbuf"))
            at += block.nbytes
        return Buffer(start, nbytes // dtype.itemsize, dtype, "host", 0, memory, False)

    def _refuse_gaps(self, buffer: Buffer, which: str) -> None:
        """Refuse an array with gaps, as mpi4py does. A derived MPI datatype asks for packing, and is accepted."""
        if buffer.layout is not None and not isinstance(self.spec(which), (list, tuple)):
            raise BufferError(
                f"{which} on rank {self.rank}: the array is not contiguous; pass numpy.ascontiguousarray(array) "
                "(and copy the result back), or describe the gaps with an MPI vector datatype"
            )

    def common_dtype(self, one: Buffer, two: Buffer) -> DType:
        if one.dtype is not two.dtype:
            raise TypeError(
                f"{self.name} on rank {self.rank}: sendbuf is {one.dtype} and recvbuf is {two.dtype}, "
                "and they must be equal"
            )
        return one.dtype

    def check_count(self, what: str, got: int, want: int, why: str) -> None:
        if got != want:
            raise ValueError(
                f"{self.name} on rank {self.rank}: {what} has {got} elements, "
                f"{want} {'is' if want == 1 else 'are'} due ({why})"
            )

    def per_rank(self, buffer: Buffer, which: str) -> int:
        count, rest = divmod(buffer.count, self.size)
        if rest:
            raise ValueError(
                f"{self.name} on rank {self.rank}: {which} has {buffer.count} elements, which the communicator's "
                f"{self.size} ranks do not divide"
            )
        return count

    def call(self, *counts: int) -> Call:
        return Call(self.name, self.size, counts, self.root)


def _barrier(args: _Args) -> Bound:
    return Bound(args.call(), None, False, None, None)


def _bcast(args: _Args) -> Bound:
    buffer = args.buffer("buf")
    return Bound(args.call(buffer.count), buffer.dtype, False, None, buffer)


def _equal(args: _Args, send_blocks: str, recv_blocks: str) -> Bound:
    """Bind blocks of equal length: sendbuf and recvbuf hold ``one`` block, or one of ``each`` rank."""
    rooted = ROWS[args.name].rooted and not args.at_root
    if rooted and send_blocks == "one":  # only the root receives (gather) or sends (scatter)
        send = args.buffer("sendbuf")
        return Bound(args.call(send.count), send.dtype, False, send, None)
    if rooted:
        recv = args.buffer("recvbuf")
        return Bound(args.call(recv.count), recv.dtype, False, None, recv)
    scatters = args.name == "scatter"
    if is_in_place(args.recv if scatters else args.send):
        which, many = "sendbuf" if scatters else "recvbuf", "each" in (send_blocks, recv_blocks)
        buffer = args.buffer(which, args.size if many else 1)
        call = args.call(args.per_rank(buffer, which) if many else buffer.count)
        return Bound(call, buffer.dtype, True, *((buffer, None) if scatters else (None, buffer)))
    blocks = {"one": 1, "each": args.size}
    send, recv = args.buffer("sendbuf", blocks[send_blocks]), args.buffer("recvbuf", blocks[recv_blocks])
    dtype, count = args.common_dtype(send, recv), recv.count
    if send_blocks == recv_blocks:
        args.check_count("recvbuf", recv.count, send.count, "as in sendbuf")
        count = args.per_rank(recv, "recvbuf") if recv_blocks == "each" else count
    elif recv_blocks == "each":
        count = send.count
        args.check_count("recvbuf", recv.count, count * args.size, f"{args.size} times sendbuf's {count}")
    else:
        args.check_count("sendbuf", send.count, count * args.size, f"{args.size} times recvbuf's {count}")
    return Bound(args.call(count), dtype, False, send, recv)


def _aliased(args: _Args, bound: Bound) -> Bound:
    """Treat the same address for both buffers as in place, as mpi4py does, where both mean the same."""
    send, recv = bound.send, bound.recv
    if send is None or recv is None:
        return bound
    empty = not (send.count and recv.count)
    if send.ptr != recv.ptr:
        if not empty:
            _check_apart(args, bound, send, recv)
        return bound
    displs = bound.send_displs or bound.recv_displs
    if args.name in _ALIKE:
        same = send.layout == recv.layout
    else:
        own = Shape(bound.call).own(args.rank).offset if displs is None else displs[args.rank]
        same = args.name in _OWN_BLOCK and own == 0
    if not same:
        if empty:
            return bound
        raise ValueError(
            f"{args.name} on rank {args.rank}: sendbuf and recvbuf begin at the same address; "
            "pass MPI.IN_PLACE where the input lies in the other buffer"
        )
    if args.name in ("scatter", "scatterv"):
        return bound._replace(in_place=True, recv=None)
    return bound._replace(in_place=True, send=None)


def _check_apart(args: _Args, bound: Bound, send: Buffer, recv: Buffer) -> None:
    """Raise ``ValueError`` if the buffers overlap, except a rank's own block that stays in place."""
    if bound.send_displs or bound.recv_displs or send.layout or recv.layout:
        return
    sent, received, own = extents(bound.call, args.rank)
    if args.name == "reduce_scatter":
        sent = send.count  # the counts of other ranks may not be known yet
    ahead, size = recv.ptr - send.ptr, send.dtype.itemsize
    if -received * size < ahead < sent * size and (ahead != own * size or not own):
        raise ValueError(
            f"{args.name} on rank {args.rank}: sendbuf and recvbuf overlap; pass memory of its own for each"
        )


#: In place both buffers are the same memory (_ALIKE), or the rank's own block is part of the other buffer (_OWN_BLOCK).
_ALIKE = frozenset(name for name, row in ROWS.items() if row.reduces and row.layout == "vector") | {"alltoall"}
_OWN_BLOCK = frozenset({"gather", "gatherv", "scatter", "scatterv", "allgather", "allgatherv"})


def _allgatherv(args: _Args) -> Bound:
    v = args.vbuffer("recvbuf")
    displs = None if v.dense else v.displs
    if is_in_place(args.send):
        return Bound(args.call(*v.counts), v.buffer.dtype, True, None, v.buffer, None, displs)
    send = args.buffer("sendbuf")
    dtype = args.common_dtype(send, v.buffer)
    args.check_count("sendbuf", send.count, v.counts[args.rank], f"recvbuf's counts[{args.rank}]")
    return Bound(args.call(*v.counts), dtype, False, send, v.buffer, None, displs)


def _own_count(args: _Args, count: int) -> Call:
    """The call with uneven blocks as a rank other than the root knows it: its own count alone."""
    return args.call(*(count if r == args.rank else 0 for r in range(args.size)))


def _gatherv(args: _Args) -> Bound:
    if args.at_root:
        return _allgatherv(args)._replace(local=True)
    send = args.buffer("sendbuf")
    return Bound(_own_count(args, send.count), send.dtype, False, send, None, local=True)


def _scatterv(args: _Args) -> Bound:
    if not args.at_root:
        recv = args.buffer("recvbuf")
        return Bound(_own_count(args, recv.count), recv.dtype, False, None, recv, local=True)
    v = args.vbuffer("sendbuf")
    displs = None if v.dense else v.displs
    if is_in_place(args.recv):
        return Bound(args.call(*v.counts), v.buffer.dtype, True, v.buffer, None, displs, local=True)
    recv = args.buffer("recvbuf")
    dtype = args.common_dtype(v.buffer, recv)
    args.check_count("recvbuf", recv.count, v.counts[args.rank], f"sendbuf's counts[{args.rank}]")
    return Bound(args.call(*v.counts), dtype, False, v.buffer, recv, displs, local=True)


def _alltoallv(args: _Args) -> Bound:
    recv = args.vbuffer("recvbuf")
    recv_displs = None if recv.dense else recv.displs
    p, me = args.size, args.rank
    counts = [0] * (p * p)
    counts[me::p] = recv.counts
    if is_in_place(args.send):
        # In place a rank sends from where it receives: the matrix is symmetric.
        counts[me * p : (me + 1) * p] = recv.counts
        return Bound(
            args.call(*counts), recv.buffer.dtype, True, None, recv.buffer, recv_displs, recv_displs, local=True
        )
    send = args.vbuffer("sendbuf")
    dtype = args.common_dtype(send.buffer, recv.buffer)
    args.check_count("recvbuf", recv.counts[me], send.counts[me], f"sendbuf's counts[{me}], this rank's own block")
    counts[me * p : (me + 1) * p] = send.counts
    send_displs = None if send.dense else send.displs
    return Bound(args.call(*counts), dtype, False, send.buffer, recv.buffer, send_displs, recv_displs, local=True)


def _alltoallw(args: _Args) -> Bound:
    """Bind a datatype per rank: blocks are bytes, and move as in an alltoallv."""
    p, me = args.size, args.rank
    recv, incoming, recv_displs = args.blocks("recvbuf")
    send, outgoing, send_displs = None, incoming, recv_displs
    if not is_in_place(args.send):
        send, outgoing, send_displs = args.blocks("sendbuf", recv)
        args.check_count("recvbuf", incoming[me], outgoing[me], "bytes of this rank's own block")
    counts = [0] * (p * p)
    counts[me::p] = incoming
    counts[me * p : (me + 1) * p] = outgoing
    call = Call("alltoallv", p, tuple(counts))
    return Bound(call, DTYPES["uint8"], send is None, send, recv, send_displs, recv_displs, local=True)


#: Binder of each collective. reduce_scatter has an argument of its own (``recvcounts``): see ``bind``.
BINDERS: dict[str, Callable[[_Args], Bound]] = {
    **dict.fromkeys(_ALIKE, partial(_equal, send_blocks="one", recv_blocks="one")),
    "barrier": _barrier,
    "bcast": _bcast,
    **dict.fromkeys(("allgather", "gather"), partial(_equal, send_blocks="one", recv_blocks="each")),
    **dict.fromkeys(("scatter", "reduce_scatter_block"), partial(_equal, send_blocks="each", recv_blocks="one")),
    "alltoall": partial(_equal, send_blocks="each", recv_blocks="each"),
    "gatherv": _gatherv,
    "scatterv": _scatterv,
    "allgatherv": _allgatherv,
    "alltoallv": _alltoallv,
    "alltoallw": _alltoallw,
}


def _reduce_scatter(args: _Args, recvcounts: Any) -> Bound:
    recv = args.buffer("recvbuf")
    if recvcounts is None:
        if is_in_place(args.send):
            raise ValueError(f"reduce_scatter on rank {args.rank}: recvcounts is needed with an in-place sendbuf")
        send = args.buffer("sendbuf")
        return Bound(_own_count(args, recv.count), args.common_dtype(send, recv), False, send, recv, local=True)
    counts = counts_of(recvcounts, args.size, args.rank)
    total = sum(counts)
    if is_in_place(args.send):
        args.check_count("recvbuf", recv.count, total, "the sum of recvcounts, in place")
        return Bound(args.call(*counts), recv.dtype, True, None, recv)
    send = args.buffer("sendbuf")
    dtype = args.common_dtype(send, recv)
    args.check_count("sendbuf", send.count, total, "the sum of recvcounts")
    args.check_count("recvbuf", recv.count, counts[args.rank], f"recvcounts[{args.rank}]")
    return Bound(args.call(*counts), dtype, False, send, recv)


def counts_of(recvcounts: Any, size: int, rank: int) -> list[int]:
    try:
        counts = [index(count) for count in recvcounts]
    except TypeError:
        raise TypeError(f"reduce_scatter on rank {rank}: recvcounts {recvcounts!r} are not integers") from None
    if len(counts) != size or min(counts) < 0:
        raise ValueError(
            f"reduce_scatter on rank {rank}: recvcounts {counts} must hold {size} counts of 0 or more, one per rank"
        )
    return counts


def bind(call: CallSpec, size: int, rank: int) -> Bound:
    """Bind the arguments of a call on ``rank`` of ``size``. Errors name the argument, the rank and what is expected."""
    args = _Args(call, size, rank)
    bound = _reduce_scatter(args, call.counts) if call.name == "reduce_scatter" else BINDERS[call.name](args)
    bound = _aliased(args, bound)
    return bound._replace(copies=tuple(args.copies)) if args.copies else bound


def whole(number: Any) -> int:
    """An integer, or a float with an integer value, which mpi4py accepts; ``TypeError`` for anything else."""
    return int(number) if isinstance(number, float) and number.is_integer() else index(number)


def root_of(call: CallSpec, size: int, rank: int) -> int:
    """The root of a call as an integer; -1: none."""
    name, root = call.name, call.root
    try:
        number = whole(root)
    except TypeError:
        raise TypeError(f"{name} on rank {rank}: root {root!r} is not an integer") from None
    if not (0 <= number < size or (number == -1 and not (name in ROWS and ROWS[name].rooted))):
        raise ValueError(f"{name} on rank {rank}: root {root} is not a rank of this communicator of {size}")
    return number


def reduced_by_mpi(call: CallSpec, rank: int) -> bool:
    """True if MPI computes the operation: a user-defined one, MINLOC or MAXLOC. ``TypeError`` if it is no operation."""
    if call.op is None:
        return False
    try:
        op = op_of(call.op)
    except (TypeError, ValueError) as mistake:
        raise type(mistake)(f"{call.name} on rank {rank}: {mistake}") from None
    return op is None or op.name in ("MAXLOC", "MINLOC")


def reduction_of(name: str, dtype: DType | None, op: Any, rank: int) -> tuple[Reduction | None, Op | None]:
    """The reduction of a call and its operation; (None, None) if the collective does not reduce."""
    if name not in ROWS or not ROWS[name].reduces:
        return None, None
    assert dtype is not None
    known = op_of(OPS["SUM"] if op is None else op)
    found = reduction(dtype, known) if known is not None else None
    if found is None:
        wide = "cast long double to float64, " if dtype.kind == "opaque" else ""
        raise NotSupported(
            f"{name} on rank {rank}: {known or op} on {dtype} is not supported on host memory; "
            f"{wide}docs/support.md lists what is"
        )
    return found, known


def label_of(name: str, bound: Bound, op: Op | None) -> str:
    """The call's label on the arrival board, equal on all ranks if they make the same call."""
    call = bound.call
    count = ""
    if not bound.local and ROWS[call.collective].layout != "matrix":
        count = f"[{','.join(map(str, call.counts))}]"
    parts = [name, f"{bound.dtype}{count}" if bound.dtype else "", str(op or "")]
    if call.root >= 0:
        parts.append(f"root={call.root}")
    return " ".join(p for p in parts if p)


# --- calls that were made before -------------------------------------------------------------------------------------

_NULL = ffi.NULL
_from_buffer = ffi.from_buffer
_ndarray = np.ndarray
_Known = TypeVar("_Known")

#: Result of :func:`look_up` for a call without a signature.
_UNKNOWN = None, None, _NULL, _NULL


def look_up(
    known: Mapping[Hashable, _Known], in_place: Any, name: str, send: Any, recv: Any, op: Any, root: Any, counts: Any
) -> tuple[Hashable, _Known | None, Any, Any]:
    """Look up a call by its signature.

    The signature is everything in the arguments but addresses. A call with a known signature is neither bound nor
    planned, which takes longer than a short call itself. Read-only, strided or unusual arrays have no signature: such
    calls are bound each time.

    Returns:
        (signature, entry of ``known``, address to send from, address to receive at). Addresses of numpy arrays are cffi
        pointers that keep the memory alive; those of torch and CuPy are integers.
    """
    sent: Any = None
    received: Any = None
    send_at: Any = _NULL
    recv_at: Any = _NULL
    try:
        if op is not None and type(op) is not Op:
            op = op_of(op)  # MPI's operations cannot be hashed
            if op is None:
                return _UNKNOWN
        if type(root) is not int:
            root = index(root)
        if type(send) is _ndarray:
            sent, send_at = (send.dtype, send.size), _from_buffer(send)
        elif send is not None and send is not in_place:
            sent, send_at = describe_fast(send) or _described(send, writable=False)
        if type(recv) is _ndarray:
            received, recv_at = (recv.dtype, recv.size), _from_buffer(recv, require_writable=True)
        elif recv is not None and recv is not in_place:
            received, recv_at = describe_fast(recv) or _described(recv, writable=True)
        key = name, sent, received, op, root, counts if counts is None else _numbers(counts)
        return key, known.get(key), send_at, recv_at
    except (BufferError, TypeError, ValueError):
        return _UNKNOWN


def number_of(address: Any) -> int:
    """An address found by :func:`look_up`, as an integer."""
    return address if type(address) is int else int(ffi.cast("uintptr_t", address))


def _described(spec: Any, *, writable: bool) -> tuple[Any, Any]:
    """(description without the address, address) of an array with counts; ``TypeError`` if it is not simple."""
    if type(spec) not in (list, tuple) or len(spec) < 2:
        raise TypeError("not an array with counts")
    array, words = spec[0], map(_word, spec[1:])
    if type(array) is _ndarray:
        return (array.dtype, array.size, *words), _from_buffer(array, require_writable=writable)
    seen = describe_fast(array)
    if seen is None:
        raise TypeError("not an array with a fast description")
    return (seen[0], *words), seen[1]


def _word(word: Any) -> Any:
    """One element of a buffer specification in hashable form."""
    if word is None or type(word) in (int, str):
        return word
    if isinstance(word, np.integer):
        return int(word)
    if type(word) is tuple:
        return tuple, _numbers(word)  # (counts, displs), where a list is counts alone
    if type(word) in (list, _ndarray):
        return _numbers(word)
    if isinstance(word, np.dtype):
        return word
    if getattr(word, "is_predefined", False):  # handles of predefined MPI datatypes do not change
        return "MPI", word.handle
    raise TypeError("not a simple description")


_INTEGERS = frozenset({int})


def _numbers(values: Any) -> tuple[Any, ...]:
    if type(values) is _ndarray:
        return tuple(values.tolist())
    if _INTEGERS.issuperset(map(type, values)):
        return tuple(values)
    return tuple([v if type(v) is int else _word(v) for v in values])
