"""The backend ``ucch`` of torchcomms, torch's newer interface of communicators::

    import torchcomms

    comm = torchcomms.new_comm("ucch", torch.device("cuda"), name="all")
    comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=False)

torchcomms finds it by its entry point. A communicator is a process group of :mod:`.backend` underneath.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch.distributed as dist
import torchcomms

from . import rendezvous
from .backend import create, register
from .creation import NAME

_KINDS = {
    getattr(torchcomms.RedOpType, name): getattr(dist.ReduceOp, name)
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
}


def _reduction(op: Any) -> Any:
    if op.type not in _KINDS:
        raise NotImplementedError(f"{op.type}: torchcomms does not tell backends in Python its factor")
    return _KINDS[op.type]


@lru_cache(maxsize=1)
def _store() -> Any:
    """The store of this job's ranks, where the script gives none."""
    return next(iter(dist.rendezvous("env://")))[0]


def _place() -> tuple[int, int]:
    """(This process's rank, the number of ranks), by torchcomms' own variables or the launcher's."""
    rendezvous.export_ranks()
    found = [
        os.environ.get(f"TORCHCOMM_{name}") or os.environ.get(launched)
        for name, launched in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE"))
    ]
    if None in found:
        raise RuntimeError("RANK and WORLD_SIZE are not set: start the script with mpirun, ucch-run or torchrun")
    return int(found[0] or 0), int(found[1] or 0)


class _Pending:
    """A call under way. torchcomms 0.3 drops it without holding the GIL: a cycle leaves its end to the collector."""

    def __init__(self, work: Any) -> None:
        self._work, self._cycle = work, self

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _over(work: Any, async_op: bool) -> _Pending | None:
    if async_op:
        return _Pending(work)
    work.wait()
    return None


def _collective(name: str) -> Any:
    """torchcomms' method for one of the group, which has the same arguments but ``async_op``, the last one."""

    def call(self: Any, *args: Any) -> _Pending | None:
        return _over(getattr(self._group, name)(*args[:-1]), args[-1] and self._overlaps)

    return call


def _reducing(name: str) -> Any:
    """The same for a method whose argument before ``async_op`` is an operation of torchcomms."""
    method = _collective(name)

    def call(self: Any, *args: Any) -> _Pending | None:
        result: _Pending | None = method(self, *args[:-2], _reduction(args[-2]), args[-1])
        return result

    return call


class Backend(torchcomms.TorchCommBackend):
    """What ``torchcomms.new_comm("ucch", ...)`` and ``split`` make. Methods and their arguments are torchcomms'.

    They return None if the call is over, or, of device tensors, if the current stream waits for it; messages with
    ``async_op`` return an object with ``wait()``. Collectives do so only with the hint ``{"overlap": "y"}`` of
    ``new_comm``: torchcomms 0.3 takes such a call of a backend in Python for complete where ``torch.distributed`` or
    DDP use it.
    """

    #: How often each name was used: a store's keys are used once.
    _named: ClassVar[Counter[str]] = Counter()

    def init(self, device: Any, name: str, options: Any) -> None:
        """Meet the other ranks; collective."""
        register()
        rank, size = _place()
        self._named[name] += 1
        store = dist.PrefixStore(f"torchcomms/{name}/{self._named[name]}", options.store or _store())
        self._join(list(range(size)), rank, name, store, options)

    def _join(self, ranks: list[int], rank: int, name: str, store: Any, options: Any) -> None:
        """Make the group of these ranks of the job, of which this process has number ``rank``."""
        self._ranks, self._name, self._store = ranks, name, store
        self._overlaps = options.hints.get("overlap") == "y"
        #: How often each list of ranks was made a part.
        self._parts: Counter[tuple[int, ...]] = Counter()
        self._group = create(
            SimpleNamespace(
                group_id=name, group_rank=rank, group_size=len(ranks), global_ranks_in_group=ranks,
                timeout=options.timeout, store=store, enable_reconfigure=options.enable_reconfigure,
            )
        )  # fmt: skip

    def split(self, ranks: Sequence[int], name: str, options: Any) -> Backend | None:
        """Make a communicator of these ranks, each of which calls this with the same list; None for an empty list."""
        chosen, mine = tuple(ranks), self.get_rank()
        if not chosen:
            return None
        if mine not in chosen:
            raise RuntimeError(
                f"split on rank {mine}, which is not one of {list(chosen)}: ranks without a part give an empty list"
            )
        if len({*chosen}) < len(chosen) or not {*chosen} <= {*range(self.get_size())}:
            raise RuntimeError(f"split on rank {mine}: {list(chosen)} are not different ranks below {self.get_size()}")
        self._parts[chosen] += 1
        made, words = Backend(), " ".join(map(str, chosen))
        store = dist.PrefixStore(f"{name}/{words}/{self._parts[chosen]}", self._store)
        made._join([self._ranks[r] for r in chosen], chosen.index(mine), name, store, options)
        return made

    def finalize(self) -> None:
        self._group.shutdown()

    def get_rank(self) -> int:
        return int(self._group.rank())

    def get_size(self) -> int:
        return int(self._group.size())

    def get_backend_name(self) -> str:
        return NAME

    def get_comm_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def send(self, tensor: Any, dst: int, async_op: bool) -> _Pending | None:
        return _over(self._group.send([tensor], dst), async_op)

    def recv(self, tensor: Any, src: int, async_op: bool) -> _Pending | None:
        return _over(self._group.recv([tensor], src), async_op)

    broadcast, scatter, gather, barrier = map(_collective, ("broadcast", "scatter", "gather", "barrier"))
    all_reduce, reduce = map(_reducing, ("allreduce", "reduce"))
    all_gather = all_gather_v = _collective("allgather")
    all_gather_single = _collective("all_gather_single")
    reduce_scatter = reduce_scatter_v = _reducing("reduce_scatter")
    reduce_scatter_single = _reducing("reduce_scatter_single")
    all_to_all = _collective("alltoall")
    all_to_all_single = all_to_all_v_single = _collective("all_to_all_single")


torchcomms.register_backend(NAME, Backend)
