"""torch.distributed's Gloo and NCCL behind mpi4py's method names."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from .peers import NotOffered, World

__all__ = ["TorchComm", "open_torch"]


class _InPlace:
    """Stands for the send buffer of a call in place."""


class _Work:
    """A torch.distributed Work with an mpi4py Request's methods."""

    def __init__(self, work: Any, torch: Any, device: bool) -> None:
        self._work, self._torch, self._device = work, torch, device

    def Wait(self) -> None:
        self._work.wait()
        if self._device:  # Work.wait only orders streams; MPI's Wait means that the data is there
            self._torch.cuda.current_stream().synchronize()

    def Test(self) -> bool:
        return bool(self._work.is_completed())


class TorchComm:
    """The collectives that torch.distributed has in the same form. Reductions work in place only."""

    IN_PLACE = _InPlace()

    def __init__(self, torch: Any, dist: Any, device: bool) -> None:
        self._torch, self._dist, self._device = torch, dist, device
        self.SUM = dist.ReduceOp.SUM
        self._tensors: dict[int, tuple[Any, Any]] = {}

    def _tensor(self, array: Any) -> Any:
        """The tensor over an array's memory; made once, because only the collective is to be timed."""
        known = self._tensors.get(id(array))
        if known is None:
            tensor = array if isinstance(array, self._torch.Tensor) else self._torch.from_numpy(array)
            known = self._tensors[id(array)] = (array, tensor)
        return known[1]

    def _start(self, work: Any) -> _Work:
        return _Work(work, self._torch, self._device)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> _Work:
        if sendbuf is not self.IN_PLACE:
            raise NotOffered("torch.distributed reduces in place only; add -l")
        return self._start(self._dist.all_reduce(self._tensor(recvbuf), op, async_op=True))

    def Ibcast(self, buf: Any, root: int) -> _Work:
        return self._start(self._dist.broadcast(self._tensor(buf), root, async_op=True))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> _Work:
        if sendbuf is self.IN_PLACE:
            raise NotOffered("torch.distributed gathers out of place only; leave -l out")
        send, recv = self._tensor(sendbuf), self._tensor(recvbuf)
        return self._start(self._dist.all_gather_into_tensor(recv, send, async_op=True))

    def Ialltoall(self, sendbuf: Any, recvbuf: Any) -> _Work:
        if sendbuf is self.IN_PLACE:
            raise NotOffered("torch.distributed exchanges out of place only; leave -l out")
        send, recv = self._tensor(sendbuf), self._tensor(recvbuf)
        return self._start(self._dist.all_to_all_single(recv, send, async_op=True))

    def Ibarrier(self) -> _Work:
        return self._start(self._dist.barrier(async_op=True))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> None:
        self.Iallreduce(sendbuf, recvbuf, op).Wait()

    def Bcast(self, buf: Any, root: int) -> None:
        self.Ibcast(buf, root).Wait()

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        self.Iallgather(sendbuf, recvbuf).Wait()

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        self.Ialltoall(sendbuf, recvbuf).Wait()

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    def Free(self) -> None:
        self._tensors.clear()
        self._dist.destroy_process_group()


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
    if dist.is_initialized():
        raise NotOffered("torch.distributed has one default group: ask for gloo and nccl in separate runs")
    address: tuple[str, int] | None = None
    if world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = (socket.gethostname(), probe.getsockname()[1])
    host, port = world.comm.bcast(address)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    dist.init_process_group(backend, rank=world.rank, world_size=world.size)
    return TorchComm(torch, dist, backend == "nccl")
