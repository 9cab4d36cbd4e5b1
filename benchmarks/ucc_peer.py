"""Plain UCC with mpi4py's method names: no plans, checks or locks, the shortest way from Python to libucc.

The baseline for the overhead of this package's layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ucc_hetero.bindings.oob import MPIExchange
from ucc_hetero.bindings.ucc import Coll, CollFlag, Lib, MemType, Request, check
from ucc_hetero.native.libraries import lib
from ucc_hetero.types import DTYPES, OPS, DType

from .world import NotOffered, World

#: Polls before the core is yielded.
_SPINS = 1000


class RawRequest:
    """A UCC request with the methods of an mpi4py Request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._handle = request.handle
        self._context = request.team.context.handle

    def Start(self) -> None:
        check("ucc_collective_post", lib.ucc_collective_post(self._handle))

    def Test(self) -> bool:
        lib.ucc_context_progress(self._context)
        return bool(self._handle.status == 0)

    def Wait(self) -> None:
        handle, context, progress = self._handle, self._context, lib.ucc_context_progress
        spins = 0
        while handle.status == 1:
            progress(context)
            spins += 1
            if spins > _SPINS:
                os.sched_yield()
        check("collective", handle.status)

    def Free(self) -> None:
        self._request.close()


class _Once(RawRequest):
    """A request that is released once it is complete."""

    def Wait(self) -> None:
        super().Wait()
        self.Free()


class RawComm:
    """A UCC team over all ranks. It has ``X``, ``Ix`` and ``X_init`` for all collectives in the table."""

    IN_PLACE = object()
    SUM = OPS["SUM"]

    def __init__(self, world: World) -> None:
        self.size = world.size
        self._oob = world.comm.Dup()
        self._lib = Lib("UCC")
        self._context = self._lib.context(MPIExchange(self._oob))
        self._team = self._context.team(range(world.size))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith("_init") and name[:-5] in _FORMS:
            return partial(self._persistent, _FORMS[name[:-5]])
        if name.startswith("I") and name[1:].capitalize() in _FORMS:
            return partial(self._start, _FORMS[name[1:].capitalize()])
        if name in _FORMS:
            return partial(self._blocking, _FORMS[name])
        raise AttributeError(name)

    def _request(self, form: Form, flags: int, arguments: tuple[Any, ...]) -> Request:
        coll, keywords = form(self, *arguments)
        flags |= keywords.pop("flags", 0)
        return self._team.collective(coll, flags=flags, **keywords)

    def _persistent(self, form: Form, *arguments: Any) -> RawRequest:
        return RawRequest(self._request(form, CollFlag.PERSISTENT, arguments))

    def _start(self, form: Form, *arguments: Any) -> RawRequest:
        request = _Once(self._request(form, 0, arguments))
        request.Start()
        return request

    def _blocking(self, form: Form, *arguments: Any) -> None:
        self._start(form, *arguments).Wait()

    def Free(self) -> None:
        self._team.close()
        self._context.close()
        self._lib.close()
        self._oob.Free()


Form = Callable[..., tuple[Coll, dict[str, Any]]]


def _seen(array: Any) -> tuple[Any, DType, MemType]:
    """(memory, datatype, memory type) of a numpy array or torch tensor."""
    if isinstance(array, np.ndarray):
        return array, DTYPES[array.dtype.name], MemType.HOST
    dtype = DTYPES[str(array.dtype).removeprefix("torch.")]
    # torch calls AMD devices "cuda" too; their DLPack device types (2 and 10) differ.
    kind = MemType.HOST if array.is_cpu else {2: MemType.CUDA, 10: MemType.ROCM}[int(array.__dlpack_device__()[0])]
    return (array.data_ptr(), array.nbytes), dtype, kind


def _sides(send: Any, recv: Any) -> dict[str, Any]:
    """src, dst, dtype and flags of a call with two buffers, either of which may be missing or in place."""
    sides = {"src": send, "dst": recv}
    out: dict[str, Any] = {}
    for side, given in sides.items():
        if given is RawComm.IN_PLACE:
            out["flags"] = CollFlag.IN_PLACE
            continue
        if isinstance(given, list):
            given, (out[f"{side}_counts"], out[f"{side}_displs"]) = given
        if given is not None:
            out[side], out["dtype"], out["mem_type"] = _seen(given)
    if out.get("src") is None and out.get("dst") is None:
        raise NotOffered("peer 'ucc': a call without any buffer")
    return out


def _form(coll: Coll, *names: str, in_place: bool = True) -> Form:
    """A call with two buffers, followed by arguments of these names.

    ``in_place=False``: UCC has no in-place form with MPI's meaning. Its alltoall has none on host memory, and its
    reduce_scatter puts the result elsewhere than MPI.
    """

    def form(comm: RawComm, send: Any, recv: Any, *rest: Any) -> tuple[Coll, dict[str, Any]]:
        if send is RawComm.IN_PLACE and not in_place:
            raise NotOffered("peer 'ucc': UCC has no in-place form of this collective with MPI's meaning; leave -l out")
        return coll, {**_sides(send, recv), **dict(zip(names, rest, strict=True))}

    return form


def _bcast(comm: RawComm, buffer: Any, root: int) -> tuple[Coll, dict[str, Any]]:
    return Coll.BCAST, {**_sides(buffer, None), "root": root}


def _scatter(comm: RawComm, send: Any, recv: Any, root: int) -> tuple[Coll, dict[str, Any]]:
    """As SCATTERV, since UCC's TL/UCP has no SCATTER."""
    sides = _sides(send, recv)
    if send is not None and send is not RawComm.IN_PLACE:
        each = send.nbytes // sides["dtype"].itemsize // comm.size
        sides |= {"src_counts": [each] * comm.size, "src_displs": [each * r for r in range(comm.size)]}
    return Coll.SCATTERV, {**sides, "root": root}


_FORMS: dict[str, Form] = {
    "Allgather": _form(Coll.ALLGATHER),
    "Allgatherv": _form(Coll.ALLGATHERV),
    "Allreduce": _form(Coll.ALLREDUCE, "op"),
    "Alltoall": _form(Coll.ALLTOALL, in_place=False),
    "Alltoallv": _form(Coll.ALLTOALLV, in_place=False),
    "Barrier": lambda comm: (Coll.BARRIER, {}),
    "Bcast": _bcast,
    "Gather": _form(Coll.GATHER, "root"),
    "Gatherv": _form(Coll.GATHERV, "root"),
    "Reduce": _form(Coll.REDUCE, "op", "root"),
    "Reduce_scatter": _form(Coll.REDUCE_SCATTERV, "dst_counts", "op", in_place=False),
    "Reduce_scatter_block": _form(Coll.REDUCE_SCATTER, "op", in_place=False),
    "Scatter": _scatter,
    "Scatterv": _form(Coll.SCATTERV, "root"),
}
