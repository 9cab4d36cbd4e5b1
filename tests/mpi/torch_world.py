"""Shared by the torch jobs: the process group of all ranks."""

from datetime import timedelta

import torch.distributed as dist
import torch_cases  # noqa: F401  chooses the device, before anything else does

import ucc_hetero.torch  # noqa: F401  registers the backend

dist.init_process_group("ucch", timeout=timedelta(seconds=100))
R, N = dist.get_rank(), dist.get_world_size()
