"""What a call returns: torch's Work, over our requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import CollectiveTimeout, UCCHError
from ..native import lib
from ..request import SLICE, Request
from .futures import Future, complete_later
from .layout import Finish
from .streams import Ready
from .uncompiled import uncompiled

if TYPE_CHECKING:
    from .group import ProcessGroupUCCH

__all__ = ["Source", "Work", "Works", "seconds_of", "torch_error"]


def seconds_of(timeout: timedelta | None) -> float:
    """Seconds of a timeout as torch passes it; 0 where none is meant (zero, unset, or not given)."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return max(seconds, 0.0)


def torch_error(failure: BaseException) -> Exception:
    """The exception that torch's users expect, with our detail in it."""
    text = str(failure)
    if isinstance(failure, CollectiveTimeout):
        text = f"Timeout expired. Timed out: {text}"  # what scripts look for
    error: Exception = dist.DistBackendError(text)
    return error


class Source:
    """Takes what a receive reports of its message; stands in for ``MPI.Status``."""

    source, tag, error = -1, -1, 0

    def Set_elements(self, datatype: Any, count: int) -> None:
        """The length: of no interest here."""

    def Set_cancelled(self, cancelled: bool) -> None:
        """Likewise."""


@uncompiled
class Work(dist.Work):
    """One asynchronous call, or several that finish together.

    ``outputs`` are the tensors that hold the result. ``finish`` runs once, after the last request, in whichever thread
    notices. ``keep`` stays alive until then. ``ready`` is the device side of a call on a stream (:mod:`.streams`).
    """

    def __init__(
        self,
        group: ProcessGroupUCCH,
        outputs: Sequence[Any],
        requests: Sequence[Request] = (),
        finish: Finish = None,
        keep: object = None,
        source: Source | None = None,
        ready: Any = None,
    ) -> None:
        super().__init__()
        self._group, self._outputs, self._requests = group, outputs, requests
        self._finish, self._keep, self._source, self._ready = finish, keep, source, ready
        self._error: Exception | None = None
        self._future: Future | None = None
        self._published = False
        self._done = not requests
        self._lock = threading.Lock()
        if requests:
            group.in_flight.add(self)

    # --- the end of the call ------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take the results of requests that have all finished; once."""
        with self._lock:
            if self._done:
                return
            error: BaseException | None = None
            for request in self._requests:
                try:
                    request.Wait(self._source)
                except UCCHError as failure:
                    error = error or failure
            if error is None and self._finish is not None:
                self._finish()
                if devices := self.devices:
                    self._ready = Ready(torch.cuda.current_stream(devices[0]))  # whoever waits may use another stream
            self._error = None if error is None else torch_error(error)
            self._done = True
            self._requests, self._finish, self._keep = (), None, None
        self._group.in_flight.discard(self)

    def unfinished(self) -> list[Request]:
        """The requests that this call waits for."""
        return [request for request in self._requests if not request.finished]

    def pending(self) -> list[Any]:
        """Their native operations."""
        return [request._op for request in self.unfinished()]

    def poll(self, seconds: float) -> None:
        """Give the call a moment, in which short ones finish."""
        for op in self.pending():
            if not lib.ucch_wait(op, seconds):
                return
        self._collect()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is there; raises the call's error.

        For tensors of a device the current stream waits, and the host does not. ``timeout`` is this wait's own; the
        call has that of its group.
        """
        if not self._done:
            if self._ready is None:
                self._await(seconds_of(timeout))
            elif all(lib.ucch_test(op) for op in self.pending()):
                self._collect()  # an error that is known by now
        if self._ready is not None:
            self._ready.order()
        if self._error is not None:
            raise self._error
        return True

    def _await(self, limit: float) -> None:
        end = time.monotonic() + limit if limit else 0.0
        for request in self.unfinished():
            request._arm()
        for op in self.pending():
            while not lib.ucch_wait(op, min(SLICE, limit) if limit else SLICE):
                self._group.check_aborted()
                if end and time.monotonic() > end:
                    raise dist.DistBackendError(
                        f"Timeout expired, Timed out waiting {limit:g} s for an operation of group "
                        f"{self._group.group_name!r} on rank {self._group.rank()}; it is still under way"
                    )
        self._collect()

    # --- what torch asks ----------------------------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """Whether the call has finished, well or not; makes some progress."""
        if not self._done and all(lib.ucch_test(op) for op in self.pending()):
            self._collect()
        return self._done and (self._ready is None or bool(self._ready.query()))

    def is_success(self) -> bool:
        """Whether the call has finished well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The error of a call that failed."""
        return self._error

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> list[Any]:
        """The tensors that hold the result."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """The group rank that a received message came from."""
        return self._source.source if self._source is not None else -1

    _source_rank = source_rank

    # --- futures ------------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[Any] | None:
        """The devices of the results, as torch's futures want them."""
        found = {t.device for t in self._outputs if t.device.type != "cpu"}
        return list(found) or None

    def get_future(self) -> Future:
        """A future of the list of result tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = Future(self._group.callbacks, self)
        if self._done or self._ready is not None:
            self.publish()
        else:
            complete_later(self)
        return self._future

    def publish(self) -> None:
        """Set the result of the future, if there is one; once."""
        with self._lock:
            future = self._future
            if future is None or self._published:
                return
            self._published = True
        if self._error is not None:
            future.set_exception(self._error)
        elif self._ready is not None:
            self._ready.publish(future, list(self._outputs))
        else:
            future.set_result(list(self._outputs))


@uncompiled
class Works(Work):
    """Several calls that are waited for together."""

    def __init__(self, group: ProcessGroupUCCH, parts: Sequence[Work]) -> None:
        super().__init__(group, [tensor for part in parts for tensor in part._outputs])
        self._parts = parts
        self._done = all(part._done for part in parts)

    def _collect(self) -> None:
        with self._lock:
            for part in self._parts:
                part._collect()
            self._error = next((part._error for part in self._parts if part._error is not None), None)
            self._done = True

    def unfinished(self) -> list[Request]:
        """The requests that these calls wait for."""
        return [request for part in self._parts for request in part.unfinished()]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raises the first error."""
        for part in self._parts:
            part.wait(timeout)
        return True
