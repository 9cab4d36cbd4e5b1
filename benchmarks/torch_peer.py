"""torch.distributed's Gloo and NCCL behind mpi4py's method names."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .peers import NotOffered, World

__all__ = ["TorchComm", "open_torch"]


class _InPlace:
    """Stands for the send buffer of a call in place."""


@dataclass(slots=True)
class _View:
    """An array as torch sees it, and where the backend reads and writes: itself, or a copy in host memory."""

    array: Any
    tensor: Any
    used: Any

    @property
    def copied(self) -> bool:
        return self.used is not self.tensor


class _Work:
    """A torch.distributed Work with an mpi4py Request's methods."""

    def __init__(self, comm: TorchComm, work: Any, written: _View | None) -> None:
        self._comm, self._work, self._written = comm, work, written

    def Wait(self) -> None:
        self._work.wait()
        if self._written is not None and self._written.copied:
            self._written.tensor.copy_(self._written.used)
        self._comm.synchronize()

    def Test(self) -> bool:
        return bool(self._work.is_completed())


class _Message(_Work):
    """A message that starts when the first of those beside it is waited for: NCCL wants to know all of them at once."""

    def __init__(self, comm: TorchComm, operation: Any, written: _View | None) -> None:
        super().__init__(comm, None, written)
        self.operation = operation

    def begun(self, work: Any) -> None:
        self._work = work

    def Wait(self) -> None:
        self._comm.begin()
        super().Wait()

    def Test(self) -> bool:
        self._comm.begin()
        return super().Test()

    @staticmethod
    def Waitall(messages: Sequence[_Message]) -> None:
        for message in messages:
            message.Wait()


class TorchComm:
    """Calls of torch.distributed in the same form. Allreduce works in place only.

    Gloo gets device memory by way of copies in pinned host memory, which is how its users do it; the copies count.
    """

    IN_PLACE = _InPlace()

    def __init__(self, torch: Any, dist: Any, group: Any, backend: str) -> None:
        self._torch, self._dist, self._group, self._backend = torch, dist, group, backend
        self.SUM = dist.ReduceOp.SUM
        self._views: dict[int, _View] = {}
        self._waiting: list[_Message] = []

    def _view(self, array: Any) -> _View:
        """Made once for each array, because only the collective is to be timed."""
        known = self._views.get(id(array))
        if known is None:
            tensor = array if isinstance(array, self._torch.Tensor) else self._torch.from_numpy(array)
            used = tensor
            if self._backend == "gloo" and not tensor.is_cpu:
                used = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            known = self._views[id(array)] = _View(array, tensor, used)
        return known

    def _read(self, array: Any) -> Any:
        """The tensor from which the backend takes the array's data as it is now."""
        view = self._view(array)
        if view.copied:
            view.used.copy_(view.tensor)
        return view.used

    def _start(self, work: Any, written: Any = None) -> _Work:
        return _Work(self, work, None if written is None else self._view(written))

    def synchronize(self) -> None:
        """Wait for the device: a Work's own wait only orders streams, and MPI's Wait means that the data is there."""
        if self._backend == "nccl":
            self._torch.cuda.current_stream().synchronize()

    # --- collectives --------------------------------------------------------------------------------------------------

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> _Work:
        if sendbuf is not self.IN_PLACE:
            raise NotOffered("torch.distributed reduces in place only; add -l")
        work = self._dist.all_reduce(self._read(recvbuf), op, group=self._group, async_op=True)
        return self._start(work, recvbuf)

    def Ireduce_scatter(self, sendbuf: Any, recvbuf: Any, counts: Sequence[int], op: Any) -> _Work:
        if sendbuf is self.IN_PLACE or len(set(counts)) > 1:
            raise NotOffered("torch.distributed scatters equal parts out of place only; leave -l out, begin at -m 8:")
        recv, send = self._view(recvbuf).used, self._read(sendbuf)
        return self._start(self._dist.reduce_scatter_tensor(recv, send, op, group=self._group, async_op=True), recvbuf)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any) -> _Work:
        return self.Ireduce_scatter(sendbuf, recvbuf, (), op)

    def Ibcast(self, buf: Any, root: int) -> _Work:
        return self._start(self._dist.broadcast(self._read(buf), root, group=self._group, async_op=True), buf)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> _Work:
        if sendbuf is self.IN_PLACE:
            raise NotOffered("torch.distributed gathers out of place only; leave -l out")
        recv, send = self._view(recvbuf).used, self._read(sendbuf)
        return self._start(self._dist.all_gather_into_tensor(recv, send, group=self._group, async_op=True), recvbuf)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> _Work:
        if sendbuf is self.IN_PLACE:
            raise NotOffered("torch.distributed exchanges out of place only; leave -l out")
        recv, send = self._view(recvbuf).used, self._read(sendbuf)
        return self._start(self._dist.all_to_all_single(recv, send, group=self._group, async_op=True), recvbuf)

    def Ibarrier(self) -> _Work:
        return self._start(self._dist.barrier(group=self._group, async_op=True))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, counts: Sequence[int], op: Any) -> None:
        self.Ireduce_scatter(sendbuf, recvbuf, counts, op).Wait()

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any) -> None:
        self.Ireduce_scatter(sendbuf, recvbuf, (), op).Wait()

    def Bcast(self, buf: Any, root: int) -> None:
        self.Ibcast(buf, root).Wait()

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self.Iallgather(sendbuf, recvbuf).Wait()

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        self.Ialltoall(sendbuf, recvbuf).Wait()

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    # --- messages -----------------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> _Message:
        operation = self._dist.P2POp(self._dist.isend, self._read(buf), dest, self._group, tag)
        return self._later(_Message(self, operation, None))

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> _Message:
        view = self._view(buf)
        operation = self._dist.P2POp(self._dist.irecv, view.used, source, self._group, tag)
        return self._later(_Message(self, operation, view))

    def _later(self, message: _Message) -> _Message:
        self._waiting.append(message)
        return message

    def begin(self) -> None:
        """Start the messages that are not on their way yet."""
        messages, self._waiting = self._waiting, []
        if messages:
            works = self._dist.batch_isend_irecv([message.operation for message in messages])
            for i, message in enumerate(messages):
                message.begun(works[i if len(works) == len(messages) else 0])  # NCCL has one for all

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int, tag: int = 0) -> None:
        self.Irecv(buf, source, tag).Wait()

    def Free(self) -> None:
        """The last one ends torch.distributed, which ends the others' groups, too."""
        self._views.clear()
        _open.remove(self)
        if not _open:
            self._dist.destroy_process_group()


#: Those that are in use: torch.distributed has one default group, and others beside it.
_open: list[TorchComm] = []


def open_torch(backend: str, world: World) -> TorchComm:
    """A process group over all ranks, met through a TCP store at rank 0.

    Raises NotOffered where torch or the backend is missing, on every rank if on any.
    """
    missing: str | None = None
    torch = dist = None
    try:
        torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    except ImportError:
        missing = f"peer {backend!r}: torch is not installed on rank {world.rank} (extra 'torch')"
    if torch is not None and dist is not None and missing is None:
        if not getattr(dist, f"is_{backend}_available")():
            missing = f"peer {backend!r}: torch on rank {world.rank} was built without it"
        elif backend == "nccl" and not torch.cuda.is_available():
            missing = f"peer 'nccl': rank {world.rank} has no GPU"
    first = world.first_error(missing)
    if first is not None:
        raise NotOffered(first)
    assert torch is not None and dist is not None
    if dist.is_initialized() and not _open:
        raise NotOffered(f"peer {backend!r}: torch.distributed is in use already, by somebody else in this process")
    if not _open:
        _meet(world, dist, backend)
    group = dist.new_group(backend=backend) if _open else dist.group.WORLD
    comm = TorchComm(torch, dist, group, backend)
    _open.append(comm)
    return comm


def _meet(world: World, dist: Any, backend: str) -> None:
    """Make the default group."""
    address: tuple[str, int] | None = None
    if world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = (socket.gethostname(), probe.getsockname()[1])
    host, port = world.comm.bcast(address)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    dist.init_process_group(backend, rank=world.rank, world_size=world.size)
