"""The PyTorch backend ``ucch``: process groups over devices of all vendors::

    import torch.distributed as dist
    import ucc_hetero.torch

    dist.init_process_group("ucch")

Importing this module registers the backend, and lets ``env://`` take rank and size from MPI under mpirun. With an
installed package the import is not needed: torch finds the backend by its entry point. MPI is not initialized before a
group is made, and under torchrun not at all.
"""

from __future__ import annotations

from .backend import groups, process_group, rebuild, register, replace
from .creation import hybrid_mesh
from .group import ProcessGroupUCCH

__all__ = ["ProcessGroupUCCH", "groups", "hybrid_mesh", "process_group", "rebuild", "register", "replace"]

register()
