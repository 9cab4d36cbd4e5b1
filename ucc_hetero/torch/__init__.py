"""The PyTorch backend ``ucch``: process groups over every vendor's devices at once::

    import torch.distributed as dist
    import ucc_hetero.torch

    dist.init_process_group("ucch")

Importing registers the backend, and lets ``env://`` find in MPI what mpirun does not put into the environment. With an
installed package the import is not needed: torch finds the backend by itself. MPI is not touched before a group is
made.
"""

from __future__ import annotations

from .backend import groups, process_group, rebuild, register, replace
from .creation import hybrid_mesh
from .group import ProcessGroupUCCH

__all__ = ["ProcessGroupUCCH", "groups", "hybrid_mesh", "process_group", "rebuild", "register", "replace"]

register()
