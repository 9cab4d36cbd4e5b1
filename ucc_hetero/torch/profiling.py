"""Ranges of calls in traces of ``torch.profiler``: the host's part and, asynchronously, the call until its end.

A C++ backend gets the first from torch's dispatcher (``c10d::allreduce_``) and gives the second itself
(``gloo:all_reduce``, ``nccl:all_reduce``); here they are ``c10d::allreduce_`` and ``ucch:all_reduce``. Nothing is done
while no profiler is active.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._profiler import ActiveProfilerType, _RecordFunctionFast

from .futures import complete_later
from .not_compiled import not_compiled
from .work import CombinedWork, Work

#: The engine's names of calls -> the dispatcher's; calls that have several forms there name theirs.
_OPERATIONS = {
    "allreduce": "allreduce_", "bcast": "broadcast_", "reduce": "reduce_", "barrier": "barrier",
    "allgather": "allgather_", "allgatherv": "allgather_", "gather": "gather_", "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_", "reduce_scatter_block": "reduce_scatter_",
    "alltoall": "alltoall_", "alltoallv": "alltoall_",
}  # fmt: skip

#: The dispatcher's names -> how Gloo and NCCL call these in traces, after their own name and a colon.
_TITLES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast", "reduce_": "reduce",
    "barrier": "barrier", "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather", "gather_": "gather",
    "scatter_": "scatter", "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
    "send": "send", "recv_": "recv", "recv_any_source_": "recvAnySource",
}  # fmt: skip

#: Profilers whose ranges may end in another thread than the one in which they began; NVTX's may not.
_SPANNING = (ActiveProfilerType.LEGACY, ActiveProfilerType.KINETO)

#: Seconds to wait for the thread that ends ranges: at the end of a process it may be gone.
_PATIENCE = 1.0


class _Span:
    """The range of a call from its start to its end. Torch takes a range that ends in another thread for asynchronous,
    and only such ranges may overlap others of their thread without containing them."""

    def __init__(self, title: str, tensors: list[Any]) -> None:
        self._home = threading.get_ident()
        self._end: Any = torch.futures.Future()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        begun = torch._C._autograd._record_function_with_args_enter(title, *tensors)
        # Unlike its own exit function this ends a range in whichever thread completes the future.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(begun, self._end)

    def end(self) -> None:
        """End the range, in another thread than the one that began it; once."""
        if threading.get_ident() == self._home:
            return
        with self._lock:
            if not self._ended.is_set():
                self._end.set_result(None)
                self._ended.set()

    def close(self) -> None:
        """Wait until the range has ended: the profiler may be about to stop."""
        self.end()
        self._ended.wait(_PATIENCE)


@not_compiled
class _ProfiledWork(CombinedWork):
    """A call with its range, which the thread that completes futures ends."""

    def __init__(self, group: Any, work: Work, span: _Span) -> None:
        super().__init__(group, [work])
        self._span = span

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the call's own; its range has ended then, too."""
        try:
            return super().wait(timeout)
        finally:
            if self._parts[0].is_over():
                self._span.close()

    def publish(self, failure: Exception | None = None) -> None:
        """Set the result of the future, and end the range."""
        self._span.end()
        super().publish(failure)

    def source_rank(self) -> int:
        """The group rank that a received message came from."""
        return self._parts[0].source_rank()


def profiled(group: Any, name: str, inputs: Any, start: Callable[[], Work]) -> Work:
    """Start a call within its ranges; ``name`` is the engine's or the dispatcher's, ``inputs`` one tensor or several.

    The range of a call on device memory ends once it is part of its stream's work, as NCCL's do: the device's part is
    the device's profiler's business.
    """
    operation = _OPERATIONS.get(name, name)
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    host = _RecordFunctionFast(f"c10d::{operation}", tensors)
    if torch._C._autograd._profiler_type() not in _SPANNING:
        with host:
            return start()
    span = _Span(f"ucch:{_TITLES[operation]}", tensors)
    over = left = Work(group, [])  # what is left of a call that could not be started, has ended or is a stream's
    try:
        with host:
            work = start()
        if not work.is_over() and all(tensor.is_cpu for tensor in tensors):
            left = work
    finally:
        followed = _ProfiledWork(group, left, span)
        complete_later(followed)
        if left is over:
            span.close()
    return work if left is over else followed
