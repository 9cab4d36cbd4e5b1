"""Reductions whose operation MPI computes: user-defined ones, MINLOC and MAXLOC.

A call of this package moves the data of all ranks as bytes, and MPI's ``Reduce_local`` combines it on the ranks that
get the result. No collective of MPI is started: if one rank refused it, it would stay active on the others and match
the next one.
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

#: Alignment of each rank's data, as of allocated memory.
_ALIGNED = 16
#: Size from which each rank reduces a block instead of the whole vector.
_LONG = 1 << 17


def _free(datatype: Any) -> None:
    """Free a datatype, unless MPI has been finalized."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        datatype.Free()


def block_calls(call: CallSpec, size: int, rank: int) -> list[CallSpec]:
    """The calls of a long allreduce in which each rank reduces a block, if the operation commutes; else empty."""
    from mpi4py import MPI

    name, send, recv, op = call[:4]
    short = type(recv) is np.ndarray and recv.nbytes < _LONG
    if short or name != "allreduce" or not (op_of(op) or op.Is_commutative()):
        return []
    target = as_entries(recv, writable=True, argument=f"{name}: recvbuf", rank=rank)
    source = target if is_in_place(send) else as_entries(send, writable=False, argument=f"{name}: sendbuf", rank=rank)
    datatype, each = target.datatype, target.count // size
    if source.count != target.count or target.count * datatype.size < _LONG or not datatype.is_predefined:
        return []

    def some(entries: Entries, first: int, count: int) -> list[Any]:
        return [MPI.memory.fromaddress(entries.address + first * datatype.extent, 0), count, datatype]

    blocks, rest = each * size, target.count - each * size
    calls = [CallSpec("reduce_scatter_block", some(source, 0, blocks), some(target, rank * each, each), op)]
    calls.append(CallSpec("allgather", None, [some(target, 0, 0)[0], each * datatype.extent, MPI.BYTE]))
    if rest:
        calls.append(CallSpec(name, some(source, blocks, rest), some(target, blocks, rest), op))
    return calls


class MPIReduction:
    """A reduction on ``rank``: ``transfer`` is the call that moves the data, which :meth:`finish` reduces with MPI.

    A rank's data is the memory of its entries including gaps between them, as the operation needs it; for
    reduce_scatter the number of entries that the rank is to receive follows. The object can be reused for calls with
    the same signature, with other addresses and another operation (:meth:`use_again`).
    """

    def __init__(self, call: CallSpec, size: int, rank: int) -> None:
        from mpi4py import MPI

        name, send, recv, op, _, counts = call
        self._name, self._size, self._rank = name, size, rank
        found, root = op_of(op), root_of(call, size, rank)
        self._op = getattr(MPI, found.name) if found else op
        target = self._entries("recvbuf", recv, writable=True) if root in (-1, rank) else None
        in_place = target is not None and is_in_place(send)
        source = target if target and in_place else self._entries("sendbuf", send, writable=False)
        #: Entries of this rank's data, and entries of the result that it gets.
        self._count, self._due = source.count, self._entries_due(source, target, counts, in_place=in_place)
        #: Addresses of the caller's data and of the result, and the objects that keep this memory alive.
        self._source_at, self._target_at = source.address, None if target is None else target.address
        self._keep: Any = source, target
        self._datatype = datatype = source.datatype
        if not datatype.is_predefined:  # the caller may free it before the call ends
            self._datatype = datatype = datatype.Dup()
            weakref.finalize(self, _free, datatype)
        self._span, self._given = source.span(source.count), source.span(self._due)
        nbytes = max(self._span[1] - self._span[0], source.count * datatype.extent)  # operations read this many bytes
        #: True if each rank gets one block of every other rank's entries. Not if entries overlap: the last entry of a
        #: block then ends behind it.
        self._by_blocks = name == "reduce_scatter_block" and nbytes == source.count * datatype.extent
        if self._by_blocks:
            self._parts = np.empty((size, self._due * datatype.extent), np.uint8)
            self._own = np.empty(self._parts.size, np.uint8)
            self.transfer = CallSpec("alltoall", self._own, self._parts)
        else:
            part = -(-nbytes // _ALIGNED) * _ALIGNED
            self._parts = np.empty((1 if target is None else size, part + _ALIGNED), np.uint8)
            self._own = self._parts[0 if target is None else rank]
            to_root = CallSpec("gather", self._own if target is None else None, target and self._parts, None, root)
            self.transfer = CallSpec("allgather", None, self._parts) if root < 0 else to_root
        #: The first entry that is needed, and the operands of ``Reduce_local`` from there on.
        self._operands: tuple[int, list[list[Any]]] = -1, []
        self._fills = self._own.ctypes.data
        self.fill()
        shown = found.name if found else "own operation"
        self.label = f"{name} {shown} {source.count} x {self._datatype.size} B" + f" root={root}" * (root >= 0)

    def _entries(self, argument: str, spec: Any, *, writable: bool) -> Entries:
        return as_entries(spec, writable=writable, argument=f"{self._name}: {argument}", rank=self._rank)

    def _entries_due(self, source: Entries, target: Entries | None, counts: Any, *, in_place: bool) -> int:
        where, due = f"{self._name} on rank {self._rank}", source.count
        if self._name == "reduce_scatter_block":
            due, rest = divmod(source.count, self._size)
            if rest:
                raise ValueError(
                    f"{where}: {source.count} elements, which the communicator's {self._size} ranks do not divide"
                )
        elif self._name == "reduce_scatter" and counts is not None:
            listed = counts_of(counts, self._size, self._rank)
            if sum(listed) != source.count:
                raise ValueError(f"{where}: {source.count} elements, and the sum of recvcounts is {sum(listed)}")
            due = listed[self._rank]
        elif self._name == "reduce_scatter" and target is not None:
            if in_place:
                raise ValueError(f"{where}: recvcounts is needed with an in-place sendbuf")
            due = target.count
        if target is not None and target.count != due and not in_place:
            raise ValueError(f"{where}: recvbuf has {target.count} elements, {due} are due")
        if target is not None and target.datatype != source.datatype:
            raise TypeError(f"{where}: sendbuf and recvbuf differ in their datatypes")
        return due

    def fits(self, send_at: Any, recv_at: Any) -> bool:
        """True if it can be reused: it is short, and its data begins at the addresses of the signature."""
        at = self._source_at, self._target_at or number_of(recv_at)
        return self._parts.nbytes < _LONG and at == (number_of(send_at or recv_at), number_of(recv_at))

    def use_again(self, send_at: Any, recv_at: Any, op: Any) -> None:
        """Reuse it for a call with other addresses, and with another operation if that is user-defined."""
        self._source_at, self._target_at = number_of(send_at or recv_at), self._target_at and number_of(recv_at)
        self._keep, self._op = (send_at, recv_at), self._op if op_of(op) else op
        self.fill()

    def release(self) -> None:
        self._keep = None

    def fill(self) -> None:
        """Copy the caller's data; before each start of a persistent call."""
        start, end = self._span
        ctypes.memmove(self._fills, self._source_at + start, end - start)
        if self._name == "reduce_scatter":
            self._own[-8:].view(np.int64)[0] = self._due

    def finish(self) -> None:
        """Reduce the data that has arrived, in rank order."""
        ranks = {"scan": self._rank + 1, "exscan": self._rank}.get(self._name, self._size)
        if self._target_at is None or not ranks:
            return
        first = self._first_due()
        if not self._due:
            return
        if first != self._operands[0]:
            self._operands = first, [self._part(rank, first) for rank in reversed(range(ranks))]
        result, *others = self._operands[1]
        for each in others:
            self._op.Reduce_local(each, result)
        self._give(self._target_at, result[0].address)

    def _first_due(self) -> int:
        """Index of the first entry of the result that this rank gets."""
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
        """A rank's entries from the first needed one on, as an MPI buffer specification."""
        from mpi4py import MPI

        parts, datatype = self._parts, self._datatype
        address = parts.ctypes.data + rank * parts.strides[0] - self._span[0] + first * datatype.extent
        return [MPI.memory.fromaddress(address, 0), self._due, datatype]

    def _give(self, target: int, result: int) -> None:
        """Copy the result to the caller's memory, without touching gaps between entries."""
        from mpi4py import MPI

        datatype, (start, end) = self._datatype, self._given
        if datatype.is_predefined or datatype.size == datatype.extent:
            ctypes.memmove(target + start, result + start, end - start)
            return
        packed = bytearray(datatype.Pack_size(self._due, MPI.COMM_SELF))
        whole = self._due * datatype.extent
        datatype.Pack(MPI.memory.fromaddress(result, whole), packed, 0, MPI.COMM_SELF)
        datatype.Unpack(packed, 0, MPI.memory.fromaddress(target, whole), MPI.COMM_SELF)
