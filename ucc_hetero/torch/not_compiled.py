"""Excludes methods from torch.compile, which cannot translate them."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type)


def not_compiled(kind: T) -> T:
    """Class decorator: torch.compile skips the class's methods. ``torch.compiler.disable`` would wrap each call."""
    for member in vars(kind).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            _run_as_it_is(function.__code__)
    return kind


def _run_as_it_is(code: Any) -> None:
    try:
        native: Any = torch._C._dynamo.eval_frame
        skip = native._FrameAction.SKIP
        native.set_code_exec_strategy(code, native._FrameExecStrategy(skip, skip))
    except AttributeError:  # names of another version of torch: nothing is skipped
        return
