"""The operator of torch's functional collectives whose own kernel needs a backend in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ..machine import vendors

_library: Any = None


def install() -> None:
    """Serve ``_c10d_functional.all_gather_into_tensor_out``, into which Inductor packs all-gathers; once.

    torch's kernel for it calls a method that a group written in Python cannot override. This one serves every group.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("_c10d_functional", "IMPL")
        for kind in ("cpu", *vendors.TORCH):
            key = torch._C._dispatch_key_for_device(kind)
            _library.impl("all_gather_into_tensor_out", _all_gather_out, key)


def _all_gather_out(input: Any, group_size: int, group: Any, *, out: Any) -> Any:
    found: Any = c10d._resolve_process_group(group) if isinstance(group, str) else group
    name = "all_gather_single" if hasattr(found, "all_gather_single") else "_allgather_base"  # torch up to 2.12
    torch._C._distributed_c10d._register_work(out, getattr(found, name)(out, input))
    return out
