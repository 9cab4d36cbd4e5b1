"""Reductions whose operation MPI computes: the user's own, MINLOC and MAXLOC.

The data of all ranks moves as bytes by a call of this package, and ``Reduce_local`` of MPI combines it on the ranks
that get the result. No collective of MPI's is begun: if one rank refused it, it would stay under way on the others, and
match the next one.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from ..buffers import Entries, as_entries, is_in_place
from ..errors import MismatchError
from ..types import op_of
from .arguments import CallSpec, counts_of, number_of, root_of

#: A rank's part of the data begins at a multiple of so many bytes, as allocated memory does.
_ALIGNED = 16
#: Bytes from which on each rank reduces a block, in place of the whole vector.
_LONG = 1 << 17


def _free(datatype: Any) -> None:
    """Free a datatype, unless MPI has ended before."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        datatype.Free()


def block_calls(call: CallSpec, size: int, rank: int) -> list[CallSpec]:
    """The calls that an allreduce of a long vector becomes, in which each rank reduces a block; none for other calls.

    Operations that do not commute get whole vectors, as with Open MPI.
    """
    from mpi4py import MPI

    name, send, recv, op = call[:4]
    short = type(recv) is np.ndarray and recv.nbytes < _LONG
    if short or name != "allreduce" or not (op_of(op) or op.Is_commutative()):
        return []
    into = as_entries(recv, writable=True, argument=f"{name}: recvbuf", rank=rank)
    outof = into if is_in_place(send) else as_entries(send, writable=False, argument=f"{name}: sendbuf", rank=rank)
    datatype, each = into.datatype, into.count // size
    if outof.count != into.count or into.count * datatype.size < _LONG or not datatype.is_predefined:
        return []

    def some(entries: Entries, first: int, count: int) -> list[Any]:
        return [MPI.memory.fromaddress(entries.address + first * datatype.extent, 0), count, datatype]

    blocks, rest = each * size, into.count - each * size
    calls = [CallSpec("reduce_scatter_block", some(outof, 0, blocks), some(into, rank * each, each), op)]
    calls.append(CallSpec("allgather", None, [some(into, 0, 0)[0], each * datatype.extent, MPI.BYTE]))
    if rest:
        calls.append(CallSpec(name, some(outof, blocks, rest), some(into, blocks, rest), op))
    return calls


class MPIReduction:
    """A reduction on this ``rank``: ``transfer`` is the call that moves the data, which :meth:`finish` reduces by MPI.

    A rank's part of the data is the memory of its entries with the gaps between them, as the operation needs it. Behind
    it stands how many entries of a reduce_scatter's result are the rank's. The next call of the same signature can use
    all of this with other addresses and another operation (:meth:`use_again`).
    """

    def __init__(self, call: CallSpec, size: int, rank: int) -> None:
        from mpi4py import MPI

        name, send, recv, op, _, counts = call
        self._name, self._size, self._rank = name, size, rank
        found, root = op_of(op), root_of(call, size, rank)
        self._op = getattr(MPI, found.name) if found else op
        into = self._entries("recvbuf", recv, writable=True) if root in (-1, rank) else None
        in_place = into is not None and is_in_place(send)
        outof = into if into and in_place else self._entries("sendbuf", send, writable=False)
        #: Entries of this rank's data, and those of the result that come to it.
        self._count, self._due = outof.count, self._entries_due(outof, into, counts, in_place=in_place)
        #: Where the caller's data is and where the result goes, and what keeps that memory.
        self._outof, self._into = outof.address, None if into is None else into.address
        self._keep: Any = outof, into
        self._datatype = datatype = outof.datatype
        if not datatype.is_predefined:  # its caller may free it before the call ends
            self._datatype = datatype = datatype.Dup()
            weakref.finalize(self, _free, datatype)
        self._span, self._given = outof.span(outof.count), outof.span(self._due)
        nbytes = max(self._span[1] - self._span[0], outof.count * datatype.extent)  # operations are shown that much
        #: True if ranks get a block of each other's entries; where entries overlap the last one ends behind its block.
        self._by_blocks = name == "reduce_scatter_block" and nbytes == outof.count * datatype.extent
        if self._by_blocks:
            self._parts = np.empty((size, self._due * datatype.extent), np.uint8)
            self._own = np.empty(self._parts.size, np.uint8)
            self.transfer = CallSpec("alltoall", self._own, self._parts)
        else:
            part = -(-nbytes // _ALIGNED) * _ALIGNED
            self._parts = np.empty((1 if into is None else size, part + _ALIGNED), np.uint8)
            self._own = self._parts[0 if into is None else rank]
            to_root = CallSpec("gather", self._own if into is None else None, into and self._parts, None, root)
            self.transfer = CallSpec("allgather", None, self._parts) if root < 0 else to_root
        #: What is reduced, by the first entry that is needed.
        self._operands: tuple[int, list[list[Any]]] = -1, []
        self._fills = self._own.ctypes.data
        self.fill()
        shown = found.name if found else "own operation"
        self.label = f"{name} {shown} {outof.count} x {self._datatype.size} B" + f" root={root}" * (root >= 0)

    def _entries(self, argument: str, spec: Any, *, writable: bool) -> Entries:
        return as_entries(spec, writable=writable, argument=f"{self._name}: {argument}", rank=self._rank)

    def _entries_due(self, outof: Entries, into: Entries | None, counts: Any, *, in_place: bool) -> int:
        where, due = f"{self._name} on rank {self._rank}", outof.count
        if self._name == "reduce_scatter_block":
            due, rest = divmod(outof.count, self._size)
            if rest:
                raise ValueError(
                    f"{where}: {outof.count} elements, which the communicator's {self._size} ranks do not divide"
                )
        elif self._name == "reduce_scatter" and counts is not None:
            listed = counts_of(counts, self._size, self._rank)
            if sum(listed) != outof.count:
                raise ValueError(f"{where}: {outof.count} elements, and the sum of recvcounts is {sum(listed)}")
            due = listed[self._rank]
        elif self._name == "reduce_scatter" and into is not None:
            if in_place:
                raise ValueError(f"{where}: recvcounts is needed with an in-place sendbuf")
            due = into.count
        if into is not None and into.count != due and not in_place:
            raise ValueError(f"{where}: recvbuf has {into.count} elements, {due} are due")
        if into is not None and into.datatype != outof.datatype:
            raise TypeError(f"{where}: sendbuf and recvbuf differ in their datatypes")
        return due

    def fits(self, outof: Any, into: Any) -> bool:
        """True if it can be used again: it is short, and its data begins at these addresses of the signature."""
        at = self._outof, self._into or number_of(into)
        return self._parts.nbytes < _LONG and at == (number_of(outof or into), number_of(into))

    def use_again(self, outof: Any, into: Any, op: Any) -> None:
        """Use it for a call with other addresses, and with another operation if that is the user's own."""
        self._outof, self._into = number_of(outof or into), self._into and number_of(into)
        self._keep, self._op = (outof, into), self._op if op_of(op) else op
        self.fill()

    def release(self) -> None:
        """Drop the caller's memory."""
        self._keep = None

    def fill(self) -> None:
        """Copy the caller's data, before each start of a persistent call."""
        start, end = self._span
        ctypes.memmove(self._fills, self._outof + start, end - start)
        if self._name == "reduce_scatter":
            self._own[-8:].view(np.int64)[0] = self._due

    def finish(self) -> None:
        """Reduce what has come, in the order of the ranks."""
        ranks = {"scan": self._rank + 1, "exscan": self._rank}.get(self._name, self._size)
        if self._into is None or not ranks:
            return
        first = self._first_due()
        if not self._due:
            return
        if first != self._operands[0]:
            self._operands = first, [self._part(rank, first) for rank in reversed(range(ranks))]
        result, *others = self._operands[1]
        for each in others:
            self._op.Reduce_local(each, result)
        self._give(self._into, result[0].address)

    def _first_due(self) -> int:
        """The first entry of the result that comes to this rank."""
        if self._name == "reduce_scatter_block" and not self._by_blocks:
            return self._rank * self._due
        if self._name != "reduce_scatter":
            return 0
        counts = self._parts[:, -8:].copy().view(np.int64)[:, 0]
        if counts.sum() != self._count:
            raise MismatchError(
                f"reduce_scatter on rank {self._rank}: {self._count} elements are sent, and the ranks' recvbufs "
                f"hold {counts.tolist()}"
            )
        return int(counts[: self._rank].sum())

    def _part(self, rank: int, first: int) -> list[Any]:
        """The entries of a rank from the first that is needed on, as MPI takes them."""
        from mpi4py import MPI

        parts, datatype = self._parts, self._datatype
        address = parts.ctypes.data + rank * parts.strides[0] - self._span[0] + first * datatype.extent
        return [MPI.memory.fromaddress(address, 0), self._due, datatype]

    def _give(self, into: int, result: int) -> None:
        """Copy the result to the caller's memory, whose gaps between entries stay as they are."""
        from mpi4py import MPI

        datatype, (start, end) = self._datatype, self._given
        if datatype.is_predefined or datatype.size == datatype.extent:
            ctypes.memmove(into + start, result + start, end - start)
            return
        packed = bytearray(datatype.Pack_size(self._due, MPI.COMM_SELF))
        whole = self._due * datatype.extent
        datatype.Pack(MPI.memory.fromaddress(result, whole), packed, 0, MPI.COMM_SELF)
        datatype.Unpack(packed, 0, MPI.memory.fromaddress(into, whole), MPI.COMM_SELF)
