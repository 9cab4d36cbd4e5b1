"""Works of messages that nobody waits for, and of several calls at a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from .. import log
from ..request import Request
from .layout import Finish
from .uncompiled import uncompiled
from .work import Work

if TYPE_CHECKING:
    from .posting import Posting

__all__ = ["Sent", "Works"]


@uncompiled
class Sent(Work):
    """A message whose data has been copied: the tensor is free, and waiting for the message is nobody's business."""

    def __init__(self, group: Posting, requests: Sequence[Request], finish: Finish, keep: object) -> None:
        super().__init__(group, [], requests, finish, keep)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once; raises an error that is known by now."""
        self.is_over()
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> None:
        """Wait until the message has left."""
        super().wait()

    def _collect(self) -> None:
        super()._collect()
        if self._error is not None:  # nobody may ever ask what became of it
            log.log("torch").warning("a message to another rank failed: %s", self._error)


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
