"""Shared by the torch jobs: the process group of all ranks."""

import os
from datetime import timedelta

import torch.distributed as dist
import torch_cases  # noqa: F401  chooses the device, before anything else does

import ucc_hetero.torch  # noqa: F401  registers the backend

if os.environ.get("CASES_REHEARSE"):
    import torch_rehearsal  # noqa: F401  groups of one emulated vendor are torch's own

dist.init_process_group("ucch", timeout=timedelta(seconds=100))
R, N = dist.get_rank(), dist.get_world_size()
