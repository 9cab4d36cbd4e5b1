"""Entry point that torch calls at the end of its own import (group ``torch.backends``): makes the backend known.

A module of its own, outside the package, so that programs which only happen to have ucc_hetero installed load neither
it nor UCX. For those it never fails: an error here breaks ``import torch``. With UCCH_TORCH_REPLACE it does, as another
backend would serve the script in silence.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any


def register() -> None:
    """Register the backend ``ucch``; the package is imported when a group is made, or by UCCH_TORCH_REPLACE."""
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
    """``env://`` under mpirun: ucc_hetero.torch installs its own handler when the scheme is first used."""
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
    """What torch's own handler of ``env://`` gives; it says what is missing, and not how a job is started."""
    try:
        yield from found
    except ValueError as error:
        raise ValueError(f"{error}: start the script by `ucch-run -np N python SCRIPT`, mpirun or torchrun") from None


def _wrap_creation() -> None:
    """ucc_hetero.torch wraps the function in which torch makes groups when one of ours is asked for."""
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
    """A group of torch's own; where torch lacks the backend, the error also says how the script gets this one."""
    try:
        return stock(*args, **kwargs)
    except (AssertionError, RuntimeError, ValueError) as error:
        if not any(words in str(error) for words in ("built in", "Unknown", "no GPUs found")):
            raise
        rank = os.environ.get("RANK", "?")
        text = f"{error} (rank {rank}; the backend of ucc_hetero is 'ucch': UCCH_TORCH_REPLACE=nccl,gloo gives it to "
        raise type(error)(text + "a script that asks for these)") from error
