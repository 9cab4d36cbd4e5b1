"""Torch's own backend of a vendor, rehearsed on the host: for emulated vendors it is Gloo, on host memory.

Imported before a group is made; the rest is the code that makes NCCL's groups.
"""

from dataclasses import replace

from ucc_hetero.machine.vendors import VENDORS

for _name in ("nvidia", "amd"):
    VENDORS[_name] = replace(VENDORS[_name], torch=("cpu", "cuda"), torch_build="", torch_backend="gloo")
