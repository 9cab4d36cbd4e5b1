"""torch.distributed's Gloo and NCCL with mpi4py's method names."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .world import NotOffered, World


@dataclass(slots=True)
class _View:
    """An array as a torch tensor, and the memory that the backend uses: the array's, or a copy on the host."""

    array: Any
    tensor: Any
    used: Any

    @property
    def copied(self) -> bool:
        return self.used is not self.tensor


class _Work:
    """A torch.distributed Work with the methods of an mpi4py Request.

    Messages posted together start when the first of them is waited for: NCCL needs them in one group.
    """

    def __init__(self, comm: TorchComm, work: Any, written: _View | None, operation: Any = None) -> None:
        self._comm, self.work, self._written, self.operation = comm, work, written, operation

    def Wait(self) -> None:
        self._comm.begin()
        self.work.wait()
        if self._written is not None and self._written.copied:
            self._written.tensor.copy_(self._written.used)
        self._comm.synchronize()

    def Test(self) -> bool:
        self._comm.begin()
        return bool(self.work.is_completed())

    @staticmethod
    def Waitall(works: Sequence[_Work]) -> None:
        for work in works:
            work.Wait()


class TorchComm:
    """torch.distributed with mpi4py's methods. Allreduce works in place only.

    For Gloo device memory is copied to pinned host memory and back, as its users do; the copies are timed too.
    """

    IN_PLACE = object()

    def __init__(self, torch: Any, dist: Any, group: Any, backend: str) -> None:
        self._torch, self._dist, self._group, self._backend = torch, dist, group, backend
        self.SUM = dist.ReduceOp.SUM
        self._views: dict[int, _View] = {}
        self._waiting: list[_Work] = []

    def _view(self, array: Any) -> _View:
        """Make the view of an array, once: only the collective is to be timed."""
        known = self._views.get(id(array))
        if known is None:
            tensor = array if isinstance(array, self._torch.Tensor) else self._torch.from_numpy(array)
            used = tensor
            if self._backend == "gloo" and not tensor.is_cpu:
                used = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            known = self._views[id(array)] = _View(array, tensor, used)
        return known

    def _read(self, array: Any) -> Any:
        """The tensor that the backend reads, with the array's current data."""
        view = self._view(array)
        if view.copied:
            view.used.copy_(view.tensor)
        return view.used

    def _start(self, work: Any, written: Any = None) -> _Work:
        return _Work(self, work, None if written is None else self._view(written))

    def synchronize(self) -> None:
        """Wait for the device. A Work's wait only orders streams, while MPI's Wait means that the data is there."""
        if self._backend == "nccl":
            self._torch.cuda.current_stream().synchronize()

    # --- collectives --------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The blocking call for a non-blocking one."""
        start = getattr(type(self), f"I{name.lower()}", None)
        if start is None or not name[0].isupper():
            raise AttributeError(name)
        return lambda *arguments: start(self, *arguments).Wait()

    def _out_of_place(self, call: Any, sendbuf: Any, recvbuf: Any, does: str, *more: Any) -> _Work:
        if sendbuf is self.IN_PLACE:
            raise NotOffered(f"torch.distributed {does} out of place only; leave -l out")
        recv, send = self._view(recvbuf).used, self._read(sendbuf)
        return self._start(call(recv, send, *more, group=self._group, async_op=True), recvbuf)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> _Work:
        if sendbuf is not self.IN_PLACE:
            raise NotOffered("torch.distributed reduces in place only; add -l")
        return self._start(self._dist.all_reduce(self._read(recvbuf), op, group=self._group, async_op=True), recvbuf)

    def Ireduce_scatter(self, sendbuf: Any, recvbuf: Any, counts: Sequence[int], op: Any) -> _Work:
        if sendbuf is self.IN_PLACE or len(set(counts)) > 1:
            raise NotOffered("torch.distributed scatters equal parts out of place only; leave -l out, begin at -m 8:")
        return self._out_of_place(self._dist.reduce_scatter_tensor, sendbuf, recvbuf, "scatters", op)

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any) -> _Work:
        return self.Ireduce_scatter(sendbuf, recvbuf, (), op)

    def Ibcast(self, buf: Any, root: int) -> _Work:
        return self._start(self._dist.broadcast(self._read(buf), root, group=self._group, async_op=True), buf)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> _Work:
        return self._out_of_place(self._dist.all_gather_into_tensor, sendbuf, recvbuf, "gathers")

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> _Work:
        return self._out_of_place(self._dist.all_to_all_single, sendbuf, recvbuf, "exchanges")

    def Ibarrier(self) -> _Work:
        return self._start(self._dist.barrier(group=self._group, async_op=True))

    # --- messages -----------------------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> _Work:
        return self._later(self._dist.isend, self._read(buf), dest, tag)

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> _Work:
        view = self._view(buf)
        return self._later(self._dist.irecv, view.used, source, tag, view)

    def _later(self, call: Any, tensor: Any, other: int, tag: int, written: _View | None = None) -> _Work:
        message = _Work(self, None, written, self._dist.P2POp(call, tensor, other, self._group, tag))
        self._waiting.append(message)
        return message

    def begin(self) -> None:
        """Start the messages that have not started yet."""
        messages, self._waiting = self._waiting, []
        if messages:
            works = self._dist.batch_isend_irecv([message.operation for message in messages])
            for i, message in enumerate(messages):
                message.work = works[i if len(works) == len(messages) else 0]  # NCCL returns one Work for all

    def Free(self) -> None:
        """Free the group. The last one ends torch.distributed, which ends all groups."""
        self._views.clear()
        _open.remove(self)
        if not _open:
            self._dist.destroy_process_group()


#: Communicators in use: torch.distributed has one default group; others exist beside it.
_open: list[TorchComm] = []


def open_torch(backend: str, world: World) -> TorchComm:
    """Make a process group over all ranks, through a TCP store on rank 0.

    ``NotOffered`` on every rank if torch or the backend is missing on one.
    """

    def modules() -> tuple[Any, Any]:
        try:
            torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
        except ImportError:
            raise NotOffered(f"peer {backend!r}: torch is not installed on rank {world.rank} (extra 'torch')") from None
        if not getattr(dist, f"is_{backend}_available")():
            raise NotOffered(f"peer {backend!r}: torch on rank {world.rank} was built without it")
        if backend == "nccl" and not torch.cuda.is_available():
            raise NotOffered(f"peer 'nccl': rank {world.rank} has no GPU")
        return torch, dist

    torch, dist = world.agreed(modules, NotOffered)
    if dist.is_initialized() and not _open:
        raise NotOffered(f"peer {backend!r}: torch.distributed is in use already in this process")
    if not _open:
        _meet(world, dist, backend)
    group = dist.new_group(backend=backend) if _open else dist.group.WORLD
    comm = TorchComm(torch, dist, group, backend)
    _open.append(comm)
    return comm


def _meet(world: World, dist: Any, backend: str) -> None:
    address: tuple[str, int] | None = None
    if world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = (socket.gethostname(), probe.getsockname()[1])
    host, port = world.comm.bcast(address)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    dist.init_process_group(backend, rank=world.rank, world_size=world.size)
