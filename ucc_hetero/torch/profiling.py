"""Ranges of calls in ``torch.profiler`` traces: the host's part and, for asynchronous calls, the time to completion.

For a C++ backend torch's dispatcher records the first (``c10d::allreduce_``), and the backend the second
(``gloo:all_reduce``). Here they are ``c10d::allreduce_`` and ``ucch:all_reduce``. Without an active profiler nothing
is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._profiler import ActiveProfilerType, _RecordFunctionFast

from ..native.threaded import ThreadedCall
from .futures import complete_later
from .not_compiled import not_compiled
from .work import CombinedWork, Work

#: The engine's names of collectives -> the dispatcher's. Calls with several forms pass their dispatcher name.
_OPERATIONS = {
    "allreduce": "allreduce_", "bcast": "broadcast_", "reduce": "reduce_", "barrier": "barrier",
    "allgather": "allgather_", "allgatherv": "allgather_", "gather": "gather_", "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_", "reduce_scatter_block": "reduce_scatter_",
    "alltoall": "alltoall_", "alltoallv": "alltoall_",
}  # fmt: skip

#: The dispatcher's names -> the names that Gloo and NCCL show in traces after their own.
_TITLES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "broadcast_": "broadcast", "reduce_": "reduce",
    "barrier": "barrier", "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather", "gather_": "gather",
    "scatter_": "scatter", "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "alltoall_": "all_to_all", "alltoall_base_": "all_to_all",
    "send": "send", "recv_": "recv", "recv_any_source_": "recvAnySource",
}  # fmt: skip

#: Profilers in which a range may end in another thread than it began in. NVTX does not allow that.
_SPANNING = (ActiveProfilerType.LEGACY, ActiveProfilerType.KINETO)

#: Seconds to wait for the thread that ends a range. At process exit there may be none.
_PATIENCE = 10.0
#: Ranges that did not end in time. They never end: a profiler that has stopped would write into memory it has freed.
_given_up: list[Any] = []


class _Span:
    """The range of a call from start to completion. It ends in another thread: torch then treats it as asynchronous,
    and only asynchronous ranges of a thread may overlap without nesting."""

    def __init__(self, title: str, tensors: list[Any]) -> None:
        self._home = threading.get_ident()
        self._end: Any = torch.futures.Future()
        self._ended = False
        self._lock = threading.Lock()
        begun = torch._C._autograd._record_function_with_args_enter(title, *tensors)
        # Unlike the range's own exit, this works in whichever thread completes the future.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(begun, self._end)

    def end(self) -> None:
        """End the range, once, from another thread than the one that began it."""
        if threading.get_ident() == self._home:
            return
        with self._lock:
            if not self._ended:
                self._end.set_result(None)
                self._ended = True

    def close(self) -> None:
        """End the range before this returns: the profiler may be about to stop. The thread that completes futures may
        be waiting for the engine, which a library's set-up can hold for seconds."""
        if self._ended:
            return
        ThreadedCall(self.end).ended(_PATIENCE)
        with self._lock:
            if not self._ended:
                self._ended = True
                _given_up.append(self)


@not_compiled
class _ProfiledWork(CombinedWork):
    """A call with its range; the thread that completes futures ends the range."""

    def __init__(self, group: Any, work: Work, span: _Span) -> None:
        super().__init__(group, [work])
        self._span = span

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call, and until its range has ended."""
        try:
            return super().wait(timeout)
        finally:
            if self._parts[0].is_over():
                self._span.close()

    def publish(self, failure: Exception | None = None) -> None:
        """Complete the future, and end the range."""
        self._span.end()
        super().publish(failure)

    def source_rank(self) -> int:
        """The group rank of a received message's sender."""
        return self._parts[0].source_rank()


def profiled(group: Any, name: str, inputs: Any, start: Callable[[], Work]) -> Work:
    """Start a call within its ranges. ``name`` is the engine's or the dispatcher's; ``inputs`` are one or more tensors.

    On device memory the range ends once the call is queued in its stream, as NCCL's does. The device's profiler shows
    the rest.
    """
    operation = _OPERATIONS.get(name, name)
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    host = _RecordFunctionFast(f"c10d::{operation}", tensors)
    if torch._C._autograd._profiler_type() not in _SPANNING:
        with host:
            return start()
    span, late = _Span(f"ucch:{_TITLES[operation]}", tensors), False
    try:
        with host:
            work = start()
        late = not work.is_over() and all(tensor.is_cpu for tensor in tensors)
    finally:
        if not late:  # it has failed, has ended, or is in a stream
            span.close()
    if not late:
        return work
    followed = _ProfiledWork(group, work, span)
    complete_later(followed)
    return followed
