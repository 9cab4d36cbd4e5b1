"""Rehearses torch's own backend of a vendor on the host: for emulated vendors it is Gloo, on host memory.

Import this before a group is created; all other code is that for NCCL's groups.
"""

from dataclasses import replace

from ucc_hetero.machine.vendors import VENDORS

for _name in ("nvidia", "amd"):
    VENDORS[_name] = replace(VENDORS[_name], torch=("cpu", "cuda"), torch_build="", torch_backend="gloo")
