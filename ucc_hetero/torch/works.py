"""Works of messages that nobody waits for, and of several calls at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from .. import log
from ..calls.p2p import Messages
from ..calls.request import Request
from ..device import stream_handle
from ..native.libraries import lib
from .streams import beside, current, used_in_current
from .uncompiled import uncompiled
from .work import Work, seconds_of

if TYPE_CHECKING:
    from .dispatch import Posting

__all__ = ["Received", "Sent", "Works"]

#: Seconds until a call fails that is not to go on; 0 would be no limit.
_AT_ONCE = 1e-6


@uncompiled
class Sent(Work):
    """A message whose data has been copied: the tensor is free, and waiting for the message is nobody's business."""

    _uses = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once; raises an error that is known by now."""
        self.is_over()
        if self._error is not None:
            raise self._error
        if self._group.streams_wait:
            self._group.check_data()
        return True

    def settle(self) -> None:
        """Wait until the message has left."""
        super().wait()

    def _collect(self) -> None:
        super()._collect()
        if self._error is not None:  # nobody may ever ask what became of it
            log.log("torch").warning("a message to another rank failed: %s", self._error)


@uncompiled
class Received(Work):
    """A message to a buffer of ours: whoever waits for it lets a stream wait, and the host does not.

    Where that cannot be before the message has come (:meth:`.p2p.Messages.take`), the host waits for that much.
    """

    _taken = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is there, or has come for the current stream to wait for; raises the call's error."""
        for each in () if self._taken else self.pending():
            each.request._arm()
        self._take(early=True)
        if not self._taken:
            limit = seconds_of(timeout)
            for each in self.pending():
                end = time.monotonic() + limit if limit else 0.0
                self._until(lambda seconds, it=each: lib.ucch_wait_matched(it.op, seconds), end)  # type: ignore[misc]
            self._take()
        return super().wait(timeout)

    def _take(self, *, early: bool = False) -> None:
        """Leave the rest to the current stream, if the message has come, or ``early``."""
        with self._lock:
            for request in self._requests:
                if self._taken or not (early or lib.ucch_wait_matched(request._op, -1.0) == 1):
                    continue
                if Messages.take(request, stream_handle(current(self._outputs[0].device)), early=early):
                    self._taken = self._group.streams_wait = True
                    if self._finish is not None:
                        self._finish()
                    self._finish = None  # if it failed, it is tried again once the data is there
                    self._ready = used_in_current(self._outputs)

    def advance(self) -> None:
        """As :meth:`Work.advance`: some stream is to wait for it."""
        if not self._taken:
            self._take()

    def let_go(self) -> None:
        """As :meth:`Work.let_go`: its time is over now, and then no stream waits for it."""
        for each in self.pending() if self._taken else ():
            lib.ucch_op_deadline(each.op, _AT_ONCE)

    def is_completed(self) -> bool:
        """Whether the message is there; makes some progress."""
        with beside(self.devices):
            self.advance()
        return super().is_completed()

    def settle(self) -> None:
        """Wait until nothing uses our memory any more."""
        self.wait()
        self._await(0.0)

    def _collect(self) -> None:
        super()._collect()
        if self._taken and self._error is not None:  # whoever waited for it has gone on with what is no data
            self._group.broke(self._error)


@uncompiled
class Works(Work):
    """Several calls that are waited for together."""

    def __init__(self, group: Posting, parts: Sequence[Work]) -> None:
        super().__init__(group, [tensor for part in parts for tensor in part._outputs])
        self._parts = parts
        self._done = all(part._done for part in parts)

    def _collect(self) -> None:
        """Note the first error of parts that have all been collected."""
        with self._lock:
            self._error = next((part._error for part in self._parts if part._error is not None), None)
            self._done = True

    def is_over(self) -> bool:
        """Whether all calls have ended, and then take their results; without making progress."""
        if not self._done and all(part.is_over() for part in self._parts):
            self._collect()
        return self._done

    def advance(self) -> None:
        """As :meth:`Work.advance`."""
        for part in self._parts:
            part.advance()

    def listen(self) -> None:
        """Let the bell ring when a request of these calls ends."""
        for part in self._parts:
            part.listen()

    def unfinished(self) -> list[Request]:
        """The requests that these calls wait for."""
        return [request for part in self._parts for request in part.unfinished()]

    def is_completed(self) -> bool:
        """Whether all have finished, well or not."""
        if all(part.is_completed() for part in self._parts):
            self._collect()
            return True
        return False

    def exception(self) -> Exception | None:
        """The error of the first call that failed."""
        return next((part._error for part in self._parts if part._error is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raises the first error."""
        for part in self._parts:
            part.wait(timeout)
        return True

    def publish(self, failure: Exception | None = None) -> None:
        """Set the result of the future; whoever takes it gets a stream that waits for every part."""
        for part in self._parts:
            if part._ready is not None:
                part._ready.order()
        super().publish(failure)
