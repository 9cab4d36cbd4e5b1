"""Entry point that torch calls at the end of its own import (group ``torch.backends``): registers the backend.

This module is outside the package, so that programs in whose environment ucc_hetero is installed, but which do not use
it, load neither the package nor UCX. For them it must not fail: an error here breaks ``import torch``. With
UCCH_TORCH_REPLACE it raises errors, because otherwise another backend would silently serve the script.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any


def register() -> None:
    """Register the backend ``ucch``; the package is imported when a group is created, or by UCCH_TORCH_REPLACE."""
    if os.environ.get("UCCH_TORCH_REPLACE", "").strip():
        import ucc_hetero.torch  # noqa: F401  registers

        return
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, "UCCH"):
            dist.Backend.register_backend("ucch", _create, extended_api=True, devices=["cpu", "cuda"])
            wrap_env()
            _wrap_creation()
    except Exception as failure:
        warnings.warn(f"the torch backend ucch could not be registered: {failure!r}", stacklevel=2)


def _create(opts: Any, backend_options: Any = None) -> Any:
    from ucc_hetero.torch.backend import create

    return create(opts, backend_options)


def wrap_env() -> None:
    """Wrap ``env://`` under mpirun: ucc_hetero.torch installs its own handler when the scheme is first used."""
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    stock = handlers["env"]

    def handler(*args: Any, **kwargs: Any) -> Any:
        if not any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")):
            return with_way_out(stock(*args, **kwargs))
        handlers["env"] = stock
        import ucc_hetero.torch  # noqa: F401  wraps it

        return handlers["env"](*args, **kwargs)

    handler.stock = stock  # type: ignore[attr-defined]
    handlers["env"] = handler


def with_way_out(found: Iterator[Any]) -> Iterator[Any]:
    """Wrap torch's own handler of ``env://``: its error says what is missing, but not how to start a job."""
    try:
        yield from found
    except ValueError as error:
        raise ValueError(f"{error}: start the script by `ucch-run -np N python SCRIPT`, mpirun or torchrun") from None


def _wrap_creation() -> None:
    """Wrap the function in which torch creates groups; ucc_hetero.torch replaces it when a ucch group is requested."""
    from torch.distributed import distributed_c10d as c10d

    stock = c10d._new_process_group_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, str) and "ucch" in each for each in (*args, *kwargs.values())):
            return stock_group(stock, *args, **kwargs)
        c10d._new_process_group_helper = stock
        import ucc_hetero.torch  # noqa: F401  wraps it

        return c10d._new_process_group_helper(*args, **kwargs)

    helper.stock = stock  # type: ignore[attr-defined]
    c10d._new_process_group_helper = helper


def stock_group(stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a group of torch's own. If torch lacks the backend, the error also says how the script can use ucch."""
    try:
        return stock(*args, **kwargs)
    except (AssertionError, RuntimeError, ValueError) as error:
        known = ("built in", "Unknown", "no GPUs found", "requires at least one CUDA device")
        if not any(words in str(error) for words in known):
            raise
        rank = os.environ.get("RANK", "?")
        text = f"{error} (rank {rank}; the backend of ucc_hetero is 'ucch': UCCH_TORCH_REPLACE=nccl,gloo gives it to "
        raise type(error)(text + "a script that asks for these)") from error
