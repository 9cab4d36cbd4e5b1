"""Ranges of calls in ``torch.profiler`` traces.

For a C++ backend torch's dispatcher records one (``c10d::allreduce_``), and the backend another (``nccl:all_reduce``).
Here they are ``c10d::allreduce_`` and ``ucch:all_reduce``. Without an active profiler nothing is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import ActiveProfilerType, _RecordFunctionFast

from ..native.threaded import ThreadedCall
from .work import Work

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


class _Thread(threading.local):
    #: True inside a call that is recorded.
    inside = False


_thread = _Thread()


class _Span:
    """The range of a call. It ends in another thread: torch then shows it as asynchronous, like those of NCCL."""

    def __init__(self, title: str, tensors: list[Any]) -> None:
        self._end: Any = torch.futures.Future()
        self._over = False
        self._lock = threading.Lock()
        begun = torch._C._autograd._record_function_with_args_enter(title, *tensors)
        # Unlike the range's own exit, this works in whichever thread completes the future.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(begun, self._end)

    def _finish(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._end.set_result(None)

    def close(self) -> None:
        """End the range before this returns: the profiler may be about to stop."""
        if not ThreadedCall(self._finish).ended(_PATIENCE):
            with self._lock:
                self._over = True
            _given_up.append(self)


def profiled(operation: str, tensors: list[Any], start: Callable[[], Work]) -> Work:
    """Start a call within its ranges; ``operation`` is the dispatcher's name. Calls that this one makes have none.

    The ranges end once the call has started, as NCCL's do: it may complete after the profiler has stopped.
    """
    if _thread.inside:
        return start()
    host, spans = _RecordFunctionFast(f"c10d::{operation}", tensors), None
    if torch._C._autograd._profiler_type() in _SPANNING:
        spans = _Span(f"ucch:{_TITLES[operation]}", tensors)
    _thread.inside = True
    try:
        with host:
            return start()
    finally:
        _thread.inside = False
        if spans is not None:
            spans.close()
