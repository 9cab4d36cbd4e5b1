"""Arguments of a call -> what to run on which memory. Every mistake of the caller's raises here, before a byte is sent.

One binder per shape of argument list; which collective has which shape, and everything else that tells them apart, is
in ``collectives.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..buffers import Buffer, VBuffer, as_buffer, as_vbuffer, is_in_place, view_of
from ..device import pointer_vendor
from ..planner.collectives import Call
from ..types import DTYPES, DType

__all__ = ["BINDERS", "Bound", "bind"]


class Bound(NamedTuple):
    """A call with its memory. ``local`` means that ``call.counts`` holds only what this rank knows (the rest is 0).

    ``parts``: (where it lies in ``send`` or ``recv``, the caller's memory, whether results go there) of calls whose
    blocks lie all over the place, so that ``send`` and ``recv`` are copies made for the call.
    """

    call: Call
    dtype: DType | None
    in_place: bool
    send: Buffer | None
    recv: Buffer | None
    send_displs: tuple[int, ...] | None = None
    recv_displs: tuple[int, ...] | None = None
    local: bool = False
    parts: tuple[tuple[Buffer, Buffer, bool], ...] = ()


class _Args:
    """The arguments of one call and where it is made, for messages."""

    def __init__(self, name: str, size: int, rank: int, send: Any, recv: Any, root: int) -> None:
        self.name, self.size, self.rank, self.send, self.recv, self.root = name, size, rank, send, recv, root
        self.at_root = root < 0 or rank == root

    def buffer(self, which: str, blocks: int = 1) -> Buffer:
        spec = self.send if which == "sendbuf" else self.recv
        writable = which != "sendbuf" and not (which == "buf" and self.at_root)
        found = as_buffer(
            spec, writable=writable, argument=which, rank=self.rank, blocks=blocks, pointer_vendor=pointer_vendor
        )
        self._plain(found, spec, which)
        return found

    def vbuffer(self, which: str) -> VBuffer:
        spec = self.send if which == "sendbuf" else self.recv
        found = as_vbuffer(
            spec,
            self.size,
            writable=which != "sendbuf",
            argument=which,
            rank=self.rank,
            pointer_vendor=pointer_vendor,
        )
        self._plain(found.buffer, spec, which)
        return found

    def _plain(self, buffer: Buffer, spec: Any, which: str) -> None:
        """Arrays with gaps are refused, as mpi4py does; a derived MPI datatype asks for packing."""
        if buffer.layout is not None and not isinstance(spec, (list, tuple)):
            raise BufferError(
                f"{which} on rank {self.rank}: the array is not contiguous; pass numpy.ascontiguousarray(array) "
                "(and copy the result back), or describe the gaps with an MPI vector datatype"
            )

    def same_dtype(self, one: Buffer, two: Buffer) -> DType:
        if one.dtype is not two.dtype:
            raise TypeError(
                f"{self.name} on rank {self.rank}: sendbuf is {one.dtype} and recvbuf is {two.dtype}, "
                "and they must be equal"
            )
        return one.dtype

    def same_count(self, what: str, got: int, want: int, why: str) -> None:
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


def _barrier(a: _Args) -> Bound:
    return Bound(a.call(), None, False, None, None)


def _bcast(a: _Args) -> Bound:
    buffer = a.buffer("buf")
    return Bound(a.call(buffer.count), buffer.dtype, False, None, buffer)


def _alike(a: _Args, blocks: int = 1) -> Bound:
    """allreduce, scan, exscan: the same vector in and out; alltoall: as many blocks on both sides."""
    recv = a.buffer("recvbuf", blocks)
    count = a.per_rank(recv, "recvbuf") if blocks > 1 else recv.count
    if is_in_place(a.send):
        return Bound(a.call(count), recv.dtype, True, None, recv)
    send = a.buffer("sendbuf", blocks)
    dtype = a.same_dtype(send, recv)
    a.same_count("recvbuf", recv.count, send.count, "as in sendbuf")
    return _aliased(Bound(a.call(count), dtype, False, send, recv))


def _reduce(a: _Args) -> Bound:
    if a.at_root:
        return _alike(a)
    send = a.buffer("sendbuf")
    return Bound(a.call(send.count), send.dtype, False, send, None)


def _allgather(a: _Args) -> Bound:
    recv = a.buffer("recvbuf", a.size)
    count = a.per_rank(recv, "recvbuf")
    if is_in_place(a.send):
        return Bound(a.call(count), recv.dtype, True, None, recv)
    send = a.buffer("sendbuf")
    dtype = a.same_dtype(send, recv)
    a.same_count("recvbuf", recv.count, send.count * a.size, f"{a.size} times sendbuf's {send.count}")
    return Bound(a.call(send.count), dtype, False, send, recv)


def _gather(a: _Args) -> Bound:
    if a.at_root:
        return _allgather(a)
    send = a.buffer("sendbuf")
    return Bound(a.call(send.count), send.dtype, False, send, None)


def _scatter(a: _Args) -> Bound:
    if not a.at_root:
        recv = a.buffer("recvbuf")
        return Bound(a.call(recv.count), recv.dtype, False, None, recv)
    send = a.buffer("sendbuf", a.size)
    count = a.per_rank(send, "sendbuf")
    if is_in_place(a.recv):
        return Bound(a.call(count), send.dtype, True, send, None)
    recv = a.buffer("recvbuf")
    dtype = a.same_dtype(send, recv)
    a.same_count("sendbuf", send.count, recv.count * a.size, f"{a.size} times recvbuf's {recv.count}")
    return Bound(a.call(recv.count), dtype, False, send, recv)


def _alltoall(a: _Args) -> Bound:
    return _alike(a, a.size)


def _reduce_scatter_block(a: _Args) -> Bound:
    if is_in_place(a.send):
        whole = a.buffer("recvbuf", a.size)
        return Bound(a.call(a.per_rank(whole, "recvbuf")), whole.dtype, True, None, whole)
    send, recv = a.buffer("sendbuf", a.size), a.buffer("recvbuf")
    dtype = a.same_dtype(send, recv)
    a.same_count("sendbuf", send.count, recv.count * a.size, f"{a.size} times recvbuf's {recv.count}")
    return Bound(a.call(recv.count), dtype, False, send, recv)


def _aliased(bound: Bound) -> Bound:
    """The same memory given twice means in place, as in mpi4py."""
    if bound.send is not None and bound.recv is not None and bound.send.ptr == bound.recv.ptr and bound.send.count:
        return bound._replace(in_place=True, send=None)
    return bound


def _allgatherv(a: _Args) -> Bound:
    v = a.vbuffer("recvbuf")
    displs = None if v.dense else v.displs
    if is_in_place(a.send):
        return Bound(a.call(*v.counts), v.buffer.dtype, True, None, v.buffer, None, displs)
    send = a.buffer("sendbuf")
    dtype = a.same_dtype(send, v.buffer)
    a.same_count("sendbuf", send.count, v.counts[a.rank], f"recvbuf's counts[{a.rank}]")
    return Bound(a.call(*v.counts), dtype, False, send, v.buffer, None, displs)


def _own_count(a: _Args, count: int) -> Call:
    """What a rank other than the root knows of an uneven call."""
    return a.call(*(count if r == a.rank else 0 for r in range(a.size)))


def _gatherv(a: _Args) -> Bound:
    if a.at_root:
        return _allgatherv(a)._replace(local=True)
    send = a.buffer("sendbuf")
    return Bound(_own_count(a, send.count), send.dtype, False, send, None, local=True)


def _scatterv(a: _Args) -> Bound:
    if not a.at_root:
        recv = a.buffer("recvbuf")
        return Bound(_own_count(a, recv.count), recv.dtype, False, None, recv, local=True)
    v = a.vbuffer("sendbuf")
    displs = None if v.dense else v.displs
    if is_in_place(a.recv):
        return Bound(a.call(*v.counts), v.buffer.dtype, True, v.buffer, None, displs, local=True)
    recv = a.buffer("recvbuf")
    dtype = a.same_dtype(v.buffer, recv)
    a.same_count("recvbuf", recv.count, v.counts[a.rank], f"sendbuf's counts[{a.rank}]")
    return Bound(a.call(*v.counts), dtype, False, v.buffer, recv, displs, local=True)


def _alltoallv(a: _Args) -> Bound:
    recv = a.vbuffer("recvbuf")
    into = None if recv.dense else recv.displs
    p, me = a.size, a.rank
    counts = [0] * (p * p)
    counts[me::p] = recv.counts
    if is_in_place(a.send):
        # In place a rank sends where it receives: the matrix is symmetric.
        counts[me * p : (me + 1) * p] = recv.counts
        return Bound(a.call(*counts), recv.buffer.dtype, True, None, recv.buffer, into, into, local=True)
    send = a.vbuffer("sendbuf")
    dtype = a.same_dtype(send.buffer, recv.buffer)
    a.same_count("recvbuf", recv.counts[me], send.counts[me], f"sendbuf's counts[{me}], this rank's own block")
    counts[me * p : (me + 1) * p] = send.counts
    outof = None if send.dense else send.displs
    return Bound(a.call(*counts), dtype, False, send.buffer, recv.buffer, outof, into, local=True)


def _alltoallw(a: _Args) -> Bound:
    """A datatype per rank: bytes, gathered into one block per rank and spread out again, move as an alltoallv."""
    p, me = a.size, a.rank
    recv, parts = _staged(_typed_blocks(a, "recvbuf"), receives=True)
    counts = [0] * (p * p)
    counts[me::p] = [copy.nbytes for copy, _, _ in parts]
    send: Buffer | None = None
    if is_in_place(a.send):
        counts[me * p : (me + 1) * p] = counts[me::p]
    else:
        send, outgoing = _staged(_typed_blocks(a, "sendbuf"), receives=False)
        counts[me * p : (me + 1) * p] = [copy.nbytes for copy, _, _ in outgoing]
        a.same_count("recvbuf", parts[me][0].nbytes, outgoing[me][0].nbytes, "bytes of this rank's own block")
        parts += outgoing
    call = Call("alltoallv", p, tuple(counts))
    return Bound(call, DTYPES["uint8"], send is None, send, recv, local=True, parts=tuple(parts))


def _typed_blocks(a: _Args, which: str) -> list[Buffer]:
    """The blocks of ``[buf, types]`` (one entry each from the start) or ``[buf, (counts, displs), types]``.

    Displacements are in bytes, as in MPI.
    """
    spec = a.send if which == "sendbuf" else a.recv
    where = f"{a.name} on rank {a.rank}: {which}"
    counts, displs = [1] * a.size, [0] * a.size
    if isinstance(spec, (list, tuple)) and len(spec) == 2:
        buf, types = spec
    elif isinstance(spec, (list, tuple)) and len(spec) == 3:
        buf, (counts, displs), types = spec
    elif isinstance(spec, (list, tuple)) and len(spec) == 4:
        buf, counts, displs, types = spec
    else:
        raise TypeError(f"{where} must be [buf, types] or [buf, (counts, displs), types], with a datatype per rank")
    for what, values in (("counts", counts), ("displacements", displs), ("datatypes", types)):
        if len(values) != a.size:
            raise ValueError(f"{where} has {len(values)} {what} for a communicator of {a.size}")
    writable = which == "recvbuf"
    whole = as_buffer([buf, "uint8"], writable=writable, argument=which, rank=a.rank, pointer_vendor=pointer_vendor)
    raw, out = view_of(whole) if whole.count and whole.vendor == "host" else np.empty(whole.count, np.uint8), []
    for peer, (count, displ, dtype) in enumerate(zip(counts, displs, types, strict=True)):
        if not 0 <= displ <= whole.count:
            raise ValueError(f"{where}: displacement {displ} of rank {peer} lies outside the {whole.count} bytes")
        block = as_buffer([raw[displ:], count, dtype], writable=False, argument=f"{which} for rank {peer}", rank=a.rank)
        at = whole.vendor, whole.device, whole.owner, whole.readonly
        out.append(Buffer(block.ptr, block.count, block.dtype, *at, block.layout))
    return out


def _staged(blocks: list[Buffer], *, receives: bool) -> tuple[Buffer, list[tuple[Buffer, Buffer, bool]]]:
    """New memory for all blocks, one after the other, and which part of it belongs to each."""
    memory = np.empty(max(sum(b.nbytes for b in blocks), 1), np.uint8)
    at, parts = memory.ctypes.data, []
    for block in blocks:
        parts.append((Buffer(at, block.count, block.dtype, "host", 0, memory, False), block, receives))
        at += block.nbytes
    start = memory.ctypes.data
    return Buffer(start, at - start, DTYPES["uint8"], "host", 0, memory, False), parts


#: collective -> binder. reduce_scatter has an argument of its own (``recvcounts``) and is bound by ``bind``.
BINDERS: dict[str, Callable[[_Args], Bound]] = {
    "barrier": _barrier,
    "bcast": _bcast,
    "reduce": _reduce,
    "allreduce": _alike,
    "scan": _alike,
    "exscan": _alike,
    "reduce_scatter_block": _reduce_scatter_block,
    "gather": _gather,
    "scatter": _scatter,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "gatherv": _gatherv,
    "scatterv": _scatterv,
    "allgatherv": _allgatherv,
    "alltoallv": _alltoallv,
    "alltoallw": _alltoallw,
}


def _reduce_scatter(a: _Args, recvcounts: Any) -> Bound:
    recv = a.buffer("recvbuf")
    if recvcounts is None:
        if is_in_place(a.send):
            raise ValueError(f"reduce_scatter on rank {a.rank}: recvcounts is needed with an in-place sendbuf")
        recvcounts = [recv.count] * a.size  # as in mpi4py: blocks are equal unless they are said not to be
    counts = [int(c) for c in recvcounts]
    if len(counts) != a.size or min(counts) < 0:
        raise ValueError(
            f"reduce_scatter on rank {a.rank}: recvcounts {counts} must hold {a.size} counts of 0 or more, one per rank"
        )
    total = sum(counts)
    if is_in_place(a.send):
        a.same_count("recvbuf", recv.count, total, "the sum of recvcounts, in place")
        return Bound(a.call(*counts), recv.dtype, True, None, recv)
    send = a.buffer("sendbuf")
    dtype = a.same_dtype(send, recv)
    a.same_count("sendbuf", send.count, total, "the sum of recvcounts")
    a.same_count("recvbuf", recv.count, counts[a.rank], f"recvcounts[{a.rank}]")
    return Bound(a.call(*counts), dtype, False, send, recv)


def bind(name: str, size: int, rank: int, send: Any, recv: Any, root: int = -1, recvcounts: Any = None) -> Bound:
    """Bind the arguments of collective ``name`` on ``rank`` of ``size``.

    Raises ``TypeError``, ``ValueError`` or ``BufferError`` that name the argument, the rank and what was expected.
    """
    if root != -1 and not (isinstance(root, int) and 0 <= root < size):
        raise ValueError(f"{name} on rank {rank}: root {root} is not a rank of this communicator of {size}")
    args = _Args(name, size, rank, send, recv, root)
    if name == "reduce_scatter":
        return _reduce_scatter(args, recvcounts)
    return BINDERS[name](args)
