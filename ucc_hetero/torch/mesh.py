"""Meshes for jobs of several vendors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .creation import fabrics


def hybrid_mesh(device_type: str = "") -> DeviceMesh:
    """A mesh for hybrid sharding (HSDP): shards inside one vendor's fabric, replicas across.

    A step moves each parameter three times between the ranks that share it, and its gradient once, by a shard, between
    replicas: the many bytes stay on the vendor's own fabric and library, and the few cross.

    Args:
        device_type: that of the mesh; by default torch's accelerator, or ``cpu`` without one.

    Returns:
        A mesh of the dimensions ``replicate`` and ``shard`` over all ranks of the default group. The ``shard`` groups
        are as large as they can be with one size for all: where vendors have 8 and 4 ranks, three groups of 4.

    Raises:
        RuntimeError: the default group was not asked of the backend ``ucch``.
    """
    found: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = device_type or ("cpu" if found is None else str(found.type))
    return DeviceMesh(kind, torch.tensor(shards(fabrics())), mesh_dim_names=("replicate", "shard"))


def shards(names: list[str]) -> list[list[int]]:
    """Ranks in groups of one size, each of ranks with one name."""
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        members.setdefault(name, []).append(rank)
    size = math.gcd(*map(len, members.values()))
    return [ranks[at : at + size] for ranks in members.values() for at in range(0, len(ranks), size)]
