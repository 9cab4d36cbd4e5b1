"""A program for NCCL that knows nothing of this package: ``plain_job.py [chosen]`` selects its GPU, or leaves it to
torch."""

import os
import sys

import torch
import torch.distributed as dist

local = int(os.environ["LOCAL_RANK"])
if sys.argv[1:] == ["chosen"]:
    torch.cuda.set_device(local)
first = torch.ones(1 << 16, device="cuda")
dist.init_process_group("nccl")
assert first.device.index == torch.cuda.current_device() == local, (first.device, local)
assert torch.cuda.device_count() > 1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[local])
model(torch.randn(8, 64, device="cuda")).sum().backward()
dist.all_reduce(first)
assert (first == 2).all(), first
print("fine", flush=True)
dist.destroy_process_group()
