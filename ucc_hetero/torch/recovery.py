"""The default group made anew of the ranks that live, after deaths."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import UCCHError
from . import backend, rendezvous
from .group import ProcessGroupUCCH
from .work import torch_error

#: How often this process's default group was made anew.
_rebuilt = 0


def rebuild() -> None:
    """Give up all groups, and make the default group anew of the ranks that live; collective among these.

    To be called when a call has failed; ranks that wait in a call of the default group are called back (their calls
    fail). Ranks are numbered anew, in the same order. Groups, meshes and ``DistributedDataParallel`` are to be made
    again. It needs ``mpirun --with-ft ulfm``, or a store that does not die with a rank (docs/faults.md).
    """
    global _rebuilt
    group = c10d.GroupMember.WORLD
    if group is None:
        raise TypeError('rebuild() is for a default group of the backend "ucch"; this process has none')
    if not isinstance(group, ProcessGroupUCCH):
        raise TypeError(
            f"rebuild() cannot tell which ranks of a default group live that is torch's own "
            f"({c10d._world.pg_backend_config[group]}): set UCCH_TORCH_VENDOR=n, with which the backend ucch serves it"
        )
    name, store = c10d._world.pg_map[group]
    timeout = timedelta(seconds=group.seconds) if group.seconds else None
    try:
        comm = group.communicator.Shrink()
        _rebuilt = 1 + max(comm.mpi.allgather(_rebuilt))
    except UCCHError as failure:
        raise torch_error(failure) from failure
    c10d._abort_process_group()
    if rendezvous.launched_by_mpi():  # the store may have been that of a rank which has died
        store = rendezvous.store_over(comm.mpi, timeout or dist.default_pg_timeout)[0]
    backend.adopt_next(comm)
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(
        name, store=dist.PrefixStore(f"ucch-rebuilt/{_rebuilt}", store), rank=comm.rank, world_size=comm.size, **more
    )
