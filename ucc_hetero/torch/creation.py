"""Choice of the backend of a new process group: torch's own for GPUs of one vendor on one fabric, else ours.

torch makes every group (``init_process_group``, ``new_group``, meshes) in one function. It is wrapped here: the wrapper
changes the names of the backends that are passed to it. All else of a one-vendor group is torch's: options, splitting,
the watchdog, the flight recorder, TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from _ucc_hetero_autoload import stock_group

from .. import env, log
from ..bootstrap import exit, process
from ..device import Place, runtime_of
from ..errors import UCCHError, ranks_text
from ..machine.discover import host_identity
from ..machine.fabric import fabric_of
from ..machine.launchers import number
from ..machine.vendors import VENDORS, Vendor, leave_alone
from ..planner.topology import ranks_by
from . import rendezvous
from .work import NO_LIMIT, limit_of, torch_error

NAME = "ucch"

#: Names of backends that ``ucch`` replaces in scripts.
replaced: set[str] = set()


class RankFacts(NamedTuple):
    """What all ranks know of a rank. From equal facts they choose equal backends without communicating."""

    #: Name of torch's backend for the rank's device; empty without a device, or with UCCH_TORCH_VENDOR=n.
    backend: str = ""
    #: Equal for ranks of one vendor on one fabric.
    fabric: str = ""
    #: Host and PCI address of the device; empty if unknown.
    device: str = ""


#: Rank of the default group -> its facts, for the ranks that have been in a group of ours.
_known: dict[int, RankFacts] = {}
#: Names of groups that the script made without a backend for host tensors: barriers and objects use the device.
_device_only: set[str] = set()
#: Names of groups that the script made with one backend per device type: collectives on host and on device tensors have
#: separate orders.
by_device: set[str] = set()


def install() -> None:
    """Wrap the function in which torch makes groups. May be called again. ``ValueError``: bad UCCH_TORCH_VENDOR."""
    env.get("TORCH_VENDOR")  # read it now: later the other ranks would wait for this one
    wrap(c10d, "_new_process_group_helper", _new_group)
    wrap(c10d, "_get_object_coll_device", _object_device)


def _new_group(stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
    given = inspect.signature(stock).bind(*args, **more)
    values = given.arguments
    if not values["global_ranks_in_group"]:
        _known.clear()
        _device_only.clear()
        by_device.clear()
    asked = values["backend"]
    wanted = c10d.BackendConfig(asked).get_device_backend_map()
    note = by_device.add if asked in ("undefined", None) or ":" in asked else by_device.discard
    note(values["group_name"])
    renamed = {device: NAME if name in replaced else str(name) for device, name in wanted.items()}
    ranks = values["global_ranks_in_group"]
    absent = bool(ranks) and c10d._get_default_group().rank() not in ranks
    if absent or NAME not in renamed.values():
        if not absent:  # what serves other ranks' group is not known here
            _say_what_serves(wanted, wanted)
        log.warn_unknown()  # no communicator is made that would warn of a misspelt UCCH_TORCH_REPLACE
        _warn_of_vendors(wanted, values)
        return stock_group(stock, *args, **more)
    backends = _vendors_own(renamed, values) or renamed
    _say_what_serves(wanted, backends)
    if backends != wanted:
        values["backend"] = c10d.Backend(",".join(f"{device}:{name}" for device, name in backends.items()))
    group, store = stock(*given.args, **given.kwargs)
    c10d._world.pg_map[group] = asked, store  # get_backend() returns the name that the script asked for
    note = _device_only.add if "cpu" in backends and "cpu" not in wanted else _device_only.discard
    note(values["group_name"])
    return group, store


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let ``function(stock, ...)`` take the place of torch's function ``owner.name``, which is ``stock``; once."""
    stock = getattr(owner, name)
    if getattr(stock, "ucch", False):
        return
    stock = getattr(stock, "stock", stock)  # unwrap what the entry point has installed

    @functools.wraps(stock)
    def wrapper(*args: Any, **more: Any) -> Any:
        return function(stock, *args, **more)

    wrapper.ucch = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapper) if isinstance(owner, type) else wrapper)


def _say_what_serves(asked: Mapping[str, str], backends: Mapping[str, str]) -> None:
    """Print on rank 0 which backend serves which device type, once per choice: scripts cannot see a replacement."""
    if not replaced or number("RANK", os.environ, 0):
        return
    words = [
        f"{device} by {name}" + (f" in place of {asked[device]}" if asked.get(device, name) != name else "")
        for device, name in backends.items()
    ]
    text = f"torch's process group: {', '.join(words)} (backends replaced: {','.join(sorted(replaced))})"
    if text not in _said:
        _said.add(text)
        print(f"ucc_hetero: {text}", file=sys.stderr, flush=True)


def _warn_of_vendors(wanted: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Warn on rank 0 if the script asks for a vendor's library in a job of several vendors, which it cannot connect."""
    asked = {row.torch_backend for row in VENDORS.values() if row.torch_backend}.intersection(wanted.values())
    rank, size = values["group_rank"], values["group_size"]
    if not asked or values["global_ranks_in_group"] or size < 2 or not rendezvous.launched_by_mpi():
        return
    _, mine = _here(rank, size, values.get("device_id"))
    seconds = limit_of(values.get("timeout")) or NO_LIMIT
    ranks: dict[str, list[int]] = {}
    for at, each in enumerate(_rank_facts(range(size), mine, rank, values["store"], seconds)):
        ranks.setdefault(each.fabric.partition(" ")[0], []).append(at)
    if "cpu" in wanted:  # ranks without a GPU may be in the job on purpose
        ranks.pop("host", None)
    if len(ranks) > 1 and rank == 0:
        log.log("torch").warning(
            "the script asks for nccl, which connects GPUs of one vendor only, but this job has %s: set "
            "UCCH_TORCH_REPLACE=nccl, so that the backend ucch serves it",
            " and ".join(f"{vendor} on {ranks_text(some)}" for vendor, some in ranks.items()),
        )


#: Lines about groups that were printed before.
_said: set[str] = set()


def _object_device(stock: Any, group: Any = None) -> str:
    """As NCCL does, use the device for barriers and objects if the script named no backend for host tensors.

    Also in groups of ours that replace NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then hashes objects on the GPU.
    """
    group = group or c10d._get_default_group()
    if getattr(group, "group_name", "") in _device_only:
        return next(str(each.type) for each in group._device_types if each.type != "cpu")
    kind = str(stock(group))
    detailed = kind == "cpu" and dist.get_debug_level() is dist.DebugLevel.DETAIL
    by_name = detailed and c10d.get_backend(group) == c10d.Backend.NCCL
    return str(group._device_types[-1].type) if by_name else kind


def _vendors_own(wanted: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
    """Device type -> torch's own backend for the group; empty if the group is to be ours."""
    ranks, rank, size = values["global_ranks_in_group"], values["group_rank"], values["group_size"]
    if size < 1:  # torch's backend mpi, which asks MPI for the size
        return {}
    if ranks:
        world = c10d._get_default_group()
        rank, size = world.rank(), world.size()
    row, mine = _here(rank, size, values.get("device_id"))
    seconds = limit_of(values.get("timeout")) or NO_LIMIT
    members = _rank_facts(ranks or range(size), mine, rank, values["store"], seconds)
    if not ranks:
        _known.update(enumerate(members))
    if not share_fabric(members) or not any(wanted.get(kind) == NAME for kind in row.torch):
        return {}
    own = dict.fromkeys(row.torch, row.torch_backend)
    if dist.is_gloo_available():
        own.setdefault("cpu", "gloo")
    backends = {kind: own.get(kind, "") if name == NAME else name for kind, name in wanted.items()}
    backends.setdefault("cpu", own.get("cpu", ""))
    _note(row, len(members), values["group_name"])
    if not ranks:  # undo settings that only our calls need: they cost memory and start-up time
        leave_alone(row.name, os.environ)
    return {kind: name for kind, name in backends.items() if name}


def share_fabric(members: Sequence[RankFacts]) -> bool:
    """True if torch has a backend for these ranks' devices: one vendor, one fabric, no two ranks on a device."""
    if len({(each.backend, each.fabric) for each in members}) != 1 or not members[0].backend:
        return False
    devices = [each.device for each in members if each.device]  # NCCL refuses two ranks on one device
    return len(set(devices)) == len(devices)


def fabric_peers(ranks: Sequence[int], at: int) -> tuple[str, frozenset[int]]:
    """torch's backend for the vendor of rank ``at``, and the ranks that share its fabric. Both ranks of a pair compute
    the same."""
    mine = _known.get(ranks[at])
    if mine is None or not mine.backend:
        return "", frozenset()
    others = ((place, _known.get(rank)) for place, rank in enumerate(ranks) if place != at)
    return mine.backend, frozenset(place for place, each in others if each and share_fabric([mine, each]))


def _here(rank: int, size: int, device_id: Any) -> tuple[Vendor, RankFacts]:
    """This rank's vendor, and the facts that it publishes. ``device_id`` is that of torch's group."""
    try:
        place = process.place_here(rank, size)
        row, board = VENDORS[place.vendor], _board(place, device_id)
    except (UCCHError, ValueError):  # raised on all ranks when they make a group of ours
        return VENDORS["host"], RankFacts()
    fabric = f"{row.name} {fabric_of(row.name, env.get('FABRIC')).kind or _node()}"
    return row, RankFacts(_backend_here(row), fabric, board)


def _node() -> str:
    return "/".join(host_identity().node)


def _board(place: Place, device_id: Any) -> str:
    """Host and PCI address of this rank's device; empty if the script may not have chosen the device yet."""
    runtime = runtime_of(place.vendor)
    device = place.device if device_id is None else device_id.index
    if runtime is None or (device == 0 and device_id is None and runtime.count() > 1):
        return ""
    return f"{_node()} {runtime.bus(device)}"


def _backend_here(row: Vendor) -> str:
    """The vendor's torch backend, if this torch was built with it and sees the vendor's devices."""
    if not (env.get("TORCH_VENDOR") and row.torch_backend and dist.is_backend_available(row.torch_backend)):
        return ""
    if row.torch_build and getattr(torch.version, row.torch_build, None) is None:
        return ""
    return row.torch_backend if any(getattr(torch, kind).is_available() for kind in row.torch) else ""


def fabrics() -> list[str]:
    """One name per rank of the default group, equal for one vendor on one fabric. ``RuntimeError`` if unknown."""
    size = dist.get_world_size() if dist.is_initialized() else 0
    if not size or len(_known) < size:
        raise RuntimeError('the vendors of the ranks are not known yet: call init_process_group("ucch") first')
    return [_known[rank].fabric for rank in range(size)]


def _rank_facts(ranks: Sequence[int], mine: RankFacts, rank: int, store: Any, seconds: float) -> list[RankFacts]:
    """Facts of a group's ranks. Unknown ones are exchanged through the store, in the first group that needs them."""
    if rank not in _known:
        _known[rank] = mine
        store.set(_key(rank), json.dumps(mine))
    missing = [each for each in ranks if each not in _known]
    if missing:
        keys = [_key(each) for each in missing]
        _await(keys, missing, rank, store, seconds)
        texts = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        _known.update((each, _read(text)) for each, text in zip(missing, texts, strict=True))
    return [_known[each] for each in ranks]


def _read(text: str | bytes) -> RankFacts:
    return RankFacts(*json.loads(text))


def _key(rank: int) -> str:
    # Ranks that torchrun restarts may use the store of the previous attempt.
    return f"ucch/standing/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _await(keys: list[str], ranks: list[int], rank: int, store: Any, seconds: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as failure:
        absent = [each for each, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise torch_error(rendezvous.not_come(rank, absent, seconds)) from failure


def _note(row: Vendor, size: int, name: str) -> None:
    """Log which library serves a group. Register this MPI rank, so that its failure ends the job."""
    log.log("torch").info("group %s: %d ranks of %s on one fabric: torch's %s", name, size, row.name, row.torch_backend)
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        exit.register()  # a rank that fails ends the job


def hybrid_mesh(device_type: str = "") -> DeviceMesh:
    """Make a mesh for hybrid sharding (HSDP): shards inside one vendor's fabric, replicas across fabrics.

    Each step moves every parameter three times between the ranks of a shard group, but between replicas only one shard
    of the gradient: most bytes stay on the vendor's fabric and library.

    Args:
        device_type: Type of the mesh; by default torch's accelerator, or ``cpu`` without one.

    Returns:
        A mesh with dimensions ``replicate`` and ``shard`` over all ranks of the default group. All ``shard`` groups
        have the same size, the largest possible: vendors with 8 and 4 ranks give three groups of 4.

    Raises:
        RuntimeError: the default group was not asked of the backend ``ucch``.
    """
    found: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = device_type or ("cpu" if found is None else str(found.type))
    return DeviceMesh(kind, torch.tensor(shards(fabrics())), mesh_dim_names=("replicate", "shard"))


def shards(names: list[str]) -> list[list[int]]:
    """Divide ranks into groups of one size, each of ranks with the same name."""
    members = ranks_by(names)
    size = math.gcd(*map(len, members.values()))
    return [ranks[at : at + size] for ranks in members.values() for at in range(0, len(ranks), size)]
