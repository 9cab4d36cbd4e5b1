"""The backend ``ucch``: its registration with torch, the creation of its groups, and the exit of the process."""

from __future__ import annotations

import atexit
import os
import zlib
from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from .. import env, log
from ..api.comm import Communicator, adopted, runner_of
from ..bindings.handle import Kept
from ..bootstrap import exit
from ..bootstrap.process import refuse_without_mpi
from ..bootstrap.storecomm import Deaths, StoreComm, begin_without_mpi
from ..bootstrap.timely import timely
from ..device import local_rank
from ..errors import UCCHError
from ..machine import discover, vendors
from ..native.libraries import load
from . import creation, futures, operators, rendezvous, streams
from .creation import NAME
from .fabric_messages import fabric_messages_of
from .group import ProcessGroupUCCH, end_all
from .work import limit_of, notify_join_context, seconds_of, torch_error

_groups: Kept[ProcessGroupUCCH] = Kept()


class _DefaultGroup:
    """State of the default group that later groups need: all of them are subsets of its ranks."""

    #: The communicator that the next default group takes over; set by :func:`adopt_next`.
    comm_to_come: Communicator | None = None
    #: MPI communicator of the default group's ranks, if :func:`rebuild` has made a new one.
    mpi: Any = None
    #: Records which ranks have died, if the ranks have met in a store.
    deaths: Deaths | None = None


_default_group = _DefaultGroup()


def register() -> None:
    """Register ``ucch`` with torch, and make ``env://`` work under mpirun. May be called again."""
    # Now: scripts choose their device before they make a group, and then the driver has read its variables
    # (docs/gpu.md).
    late = ("load", "start") if any(streams.started()) else ("load",)
    for row in vendors.VENDORS.values():
        if row.torch_build and getattr(torch.version, row.torch_build, None) is not None:
            vendors.prepare(row.name, os.environ, late)
    plugin = c10d.Backend._plugins.get(NAME.upper())
    if plugin is None or plugin.creator_fn is not create:
        c10d.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", *vendors.TORCH])
    rendezvous.install()
    creation.install()
    creation.wrap(Join, "notify_join_context", notify_join_context)
    creation.wrap(c10d, "_set_pg_timeout", _set_timeout)
    for module in (dist, c10d):
        creation.wrap(module, "split_group", _split_group)
        creation.wrap(module, "monitored_barrier", _monitored_barrier)
    if hasattr(c10d, "_maybe_attach_flight_recorder"):  # from torch 2.15 on
        creation.wrap(c10d, "_maybe_attach_flight_recorder", _attach_flight_recorder)
    replace(env.get("TORCH_REPLACE"))


def _attach_flight_recorder(stock: Any, group: Any, *more: Any) -> None:
    """Wrap torch's function, which fails at groups that name their devices and have no C++ backend."""
    if not isinstance(group, ProcessGroupUCCH):
        stock(group, *more)


def _set_timeout(stock: Any, timeout: timedelta, group: Any = None) -> None:
    """Wrap torch's function for the timeout of a group: it serves groups of ours, too."""
    group = group or c10d._get_default_group()
    if isinstance(group, ProcessGroupUCCH):
        group.set_timeout(timeout)
    else:
        stock(timeout, group)


def _monitored_barrier(stock: Any, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Wrap torch's function, which before 2.14 refuses all backends but gloo."""
    ours = group or c10d._get_default_group()
    if isinstance(ours, ProcessGroupUCCH):
        timeout = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        if not isinstance(timeout, timedelta | None):
            raise TypeError(f"timeout must be a datetime.timedelta, not {timeout!r}")
        ours.monitored_barrier(timeout, wait_all_ranks)
    else:
        stock(group, timeout, wait_all_ranks)


def _split_group(
    stock: Any,
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **more: Any,
) -> Any:
    """Wrap torch's function, which needs a parent in C++. Each part is a new group that only its ranks make."""
    parent = parent_pg or c10d._get_default_group()
    if not isinstance(parent, ProcessGroupUCCH):
        return stock(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
    parts, members = list(split_ranks or ()), dist.get_process_group_ranks(parent)
    named = [rank for part in parts for rank in part]
    once = len(set(named)) == len(named) and all(0 <= rank < len(members) for rank in named)
    if not (parts and all(parts) and once):
        raise ValueError(
            f"split_ranks must be lists of ranks from 0 to {len(members) - 1} of the parent group, each rank at most "
            f"once; got {split_ranks}"
        )
    ordered = torch.__version__ >= (2, 14)  # earlier ones sort each part's ranks, and give ranks in no part None
    mine = next(([members[rank] for rank in part] for part in parts if parent.rank() in part), None)
    if mine is None:
        c10d._process_group_name([], use_hashed_name=True)  # counts the group, as new_group does on the other ranks
        return c10d.GroupMember.NON_GROUP_MEMBER if ordered else None
    return dist.new_group(
        mine if ordered else sorted(mine),
        timeout,
        use_local_synchronization=True,
        group_desc=group_desc,
        **({"sort_ranks": False} if ordered else {}),
    )


def replace(names: Sequence[str]) -> None:
    """Make this backend serve scripts that ask for one of the named backends (``nccl``, ``gloo``, ...).

    ``get_backend`` still returns the name that the script asked for, so that its own tests of the name pass. The
    environment variable UCCH_TORCH_REPLACE does the same without a change of the script.

    Args:
        names: Names of torch's backends.
    """
    if names:
        if not creation.replaced:
            streams.start_with(local_rank())
        creation.replaced.update(name.lower() for name in names)
        rendezvous.export_ranks()


def create(opts: Any, backend_options: Any = None) -> ProcessGroupUCCH:
    """Create a group. torch calls this on each member; ``opts`` are its ``_DistributedBackendOptions``."""
    if getattr(opts, "enable_reconfigure", False):
        raise NotImplementedError(
            "ucch does not reconfigure groups: leave out enable_reconfigure; ucc_hetero.torch.rebuild() makes the "
            "default group again of the ranks that are alive"
        )
    ranks = _global_ranks(opts)
    # Groups of different ranks that are made at the same time have one name: new_group([dist.get_rank()]).
    opts.store = dist.PrefixStore(f"from {ranks[0]}", opts.store)
    comm, _default_group.comm_to_come = _default_group.comm_to_come, None
    if comm is not None and _default_group.deaths is not None:
        _default_group.deaths = Deaths(opts.store, opts.group_rank)
    try:
        if comm is None:
            comm = _agreed(opts)
        apart = opts.group_id in creation.by_device and runner_of(comm).members.device.everywhere
        # A rank without a device cannot know whether the call is on host or device tensors: one limit for both.
        seconds = runner_of(comm).timeout
        hosts = adopted(timely(comm.mpi, seconds, "a new group").Dup(), queues=False) if apart else None
    except UCCHError as failure:
        raise torch_error(failure) from failure
    if opts.group_rank == 0 and not dist.is_initialized():
        _warn_of_binding(comm.topology.hosts.count(0))  # only the ranks on this host
    fabric = fabric_messages_of(ranks, opts.group_rank, opts.store, opts.timeout)
    return _register(ProcessGroupUCCH(comm, opts.group_id, opts.timeout, opts.store, fabric, hosts))


def _global_ranks(opts: Any) -> list[int]:
    """Ranks of a group's members in the default group, in the group's order."""
    return list(opts.global_ranks_in_group) or list(range(opts.group_size))


def _warn_of_binding(ranks_here: int) -> None:
    """Warn if rank 0 is bound to one core while the host has more for each rank, unless OMP_NUM_THREADS is 1."""
    share = len(discover.host_cores()) // ranks_here
    if discover.cores() == 1 < share and os.environ.get("OMP_NUM_THREADS") != "1":
        log.log("torch").warning(
            "rank 0 and all of torch's threads in it are bound to one core, but the host has %d for each rank: start "
            "with mpirun --bind-to none, or with ucch-run; if one core is enough, set OMP_NUM_THREADS=1",
            share,
        )


def _agreed(opts: Any) -> Communicator:
    ranks = _global_ranks(opts)
    rendezvous.await_all(opts.store, opts.group_rank, ranks, limit_of(opts.timeout))
    return _over_mpi(opts) if rendezvous.launched_by_mpi() else _over_store(opts)


def _register(group: ProcessGroupUCCH) -> ProcessGroupUCCH:
    if not _groups:
        operators.install()
        # After Communicator has imported MPI and registered its own end: exit functions run in reverse order.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        if _at_exit not in exit.before_finalize:
            exit.before_finalize.append(_at_exit)
    _groups.sweep(_is_usable)  # groups that have ended still hold their communicators
    _groups.add(group)
    log.log("torch").info("group %s: rank %d of %d", group.group_name, group.rank(), group.size())
    return group


def adopt_next(comm: Communicator) -> None:
    """Make the next default group use this communicator, and all later groups subsets of its ranks."""
    _default_group.comm_to_come, _default_group.mpi = comm, comm.mpi


def process_group(store: Any, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout) -> ProcessGroupUCCH:
    """Make a process group of the ranks that meet in ``store``, beside torch's default group or without one.

    For jobs in which ranks leave and join.

    Args:
        store: A torch store with a prefix that was not used before (``dist.PrefixStore``), not even by ranks that
            were started again since.
        rank: This process's rank in the group.
        size: Number of ranks.
        timeout: Limit of each call, and of the creation of the group.

    Returns:
        The group.

    Raises:
        DistBackendError: A rank did not come within the timeout, or the ranks' versions or settings do not fit.
    """
    try:
        comm = _meet(store, rank, list(range(size)), size, Deaths(store, rank), seconds_of(timeout))
    except UCCHError as failure:
        raise torch_error(failure) from failure
    return _register(ProcessGroupUCCH(comm, "", timeout, store))


def groups() -> list[ProcessGroupUCCH]:
    """List this process's groups of the backend ``ucch``.

    Returns:
        The groups in use, in order of creation.
    """
    return [*filter(_is_usable, _groups.all())]


_is_usable = attrgetter("usable")


def _over_store(opts: Any) -> Communicator:
    """Make a communicator whose ranks find each other through torch's store: under torchrun or ``mp.spawn``."""
    ranks = _global_ranks(opts)
    size, store = opts.group_size, opts.store
    if dist.is_initialized():
        size, store = dist.get_world_size(), c10d._get_default_store()
    deaths = _default_group.deaths
    if deaths is None or not dist.is_initialized():
        deaths = _default_group.deaths = Deaths(store, ranks[opts.group_rank])
    return _meet(opts.store, opts.group_rank, ranks, size, deaths, seconds_of(opts.timeout))


def _meet(store: Any, rank: int, ranks: list[int], size: int, deaths: Deaths, seconds: float) -> Communicator:
    begin_without_mpi()
    return adopted(StoreComm.first(store, rank, ranks, size, seconds, deaths))


def _over_mpi(opts: Any) -> Communicator:
    """Make a communicator of a group's ranks, in the group's order, whose ranks find each other through MPI."""
    load()
    from mpi4py import MPI

    refuse_without_mpi()
    world = MPI.COMM_WORLD if _default_group.mpi is None else _default_group.mpi
    ranks = _global_ranks(opts)
    if max(ranks) >= world.Get_size():
        raise dist.DistBackendError(
            f"torch's job has at least {max(ranks) + 1} ranks, but MPI's has {world.Get_size()}: start all ranks with "
            "mpirun -np N, or with torchrun"
        )
    mine = ranks[opts.group_rank]
    if mine != world.Get_rank():
        raise dist.DistBackendError(
            f"torch's rank {mine} is MPI's rank {world.Get_rank()}, but they must be equal: unset RANK and WORLD_SIZE "
            "under mpirun, or set them to OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE"
        )
    if ranks == list(range(world.Get_size())):
        return Communicator(world)
    members = world.group.Incl(ranks)
    try:
        # Collective among the members only; the tag keeps groups that are made at the same time apart.
        comm = world.Create_group(members, zlib.crc32(opts.group_id.encode()) & 0x7FFF)
        return adopted(comm)
    finally:
        members.Free()


def _at_exit() -> None:
    """Leave all groups before communicators are freed: no thread may be inside torch by then, and peers may wait."""
    if not exit.failed():
        end_all(_groups.all())
    futures.stop()
    _groups.clear()


def _after_fork() -> None:
    """Forget the groups in a forked child: the parent uses and ends them."""
    atexit.unregister(_at_exit)
    _groups.clear()


os.register_at_fork(after_in_child=_after_fork)


#: How often this process's default group was made anew.
_rebuilt = 0


def rebuild() -> None:
    """Abort all groups, and make the default group again of the ranks that are alive. Collective among these.

    Call it after a call has failed. Ranks that still wait in a call of the default group are interrupted: their calls
    fail. Ranks keep their order and get new numbers. Groups, meshes and ``DistributedDataParallel`` have to be made
    again. Needs ``mpirun --with-ft ulfm``, or a store that outlives the ranks (docs/faults.md).

    Raises:
        TypeError: The default group is not served by ``ucch``.
        DistBackendError: The survivors did not agree in time.
    """
    global _rebuilt
    group = c10d.GroupMember.WORLD
    if group is None:
        raise TypeError('rebuild() is for a default group of the backend "ucch"; this process has none')
    if not isinstance(group, ProcessGroupUCCH):
        raise TypeError(
            f"rebuild() cannot tell which ranks are alive: the default group is torch's own "
            f"({c10d._world.pg_backend_config[group]}); set UCCH_TORCH_VENDOR=n, so that the backend ucch serves it"
        )
    name, store = c10d._world.pg_map[group]
    timeout = timedelta(seconds=group.seconds) if group.seconds else None
    try:
        comm = group.communicator.Shrink()
        _rebuilt = 1 + max(comm.mpi.allgather(_rebuilt))
    except UCCHError as failure:
        raise torch_error(failure) from failure
    c10d._abort_process_group()
    if rendezvous.launched_by_mpi():  # the store may have been in a rank that has died
        store = rendezvous.store_over(comm.mpi, timeout or dist.default_pg_timeout)[0]
    adopt_next(comm)
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(
        name, store=dist.PrefixStore(f"ucch-rebuilt/{_rebuilt}", store), rank=comm.rank, world_size=comm.size, **more
    )
