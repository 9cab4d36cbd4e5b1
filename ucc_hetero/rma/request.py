"""Requests of transfers and counters, with Wait, Test and await."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..bindings import quarantine
from ..bindings.ucx import status_name
from ..device import bind, place_of, uncaptured
from ..docstrings import forms
from ..errors import CollectiveTimeout, DeviceError, PeerError, RefusedError, UCCHError
from ..native.completion import CompletionThread
from ..native.libraries import c_text, ffi, lib, owned
from ..native.waiting import wait_in_slices
from ..transport import wires

_REASONS = {
    lib.UCCH_FAIL_TIMEOUT: (CollectiveTimeout, "is not done after {seconds:.3g} s"),
    lib.UCCH_FAIL_PEER: (PeerError, "failed: the peer has ended or cannot be reached"),
    lib.UCCH_FAIL_CONNECTION: (PeerError, "failed: the peer has ended or cannot be reached"),
    lib.UCCH_FAIL_STALE: (RefusedError, "was refused by its owner: the region is no longer registered"),
    lib.UCCH_FAIL_RANGE: (RefusedError, "was refused by its owner: it goes outside of the region"),
    lib.UCCH_FAIL_MEMORY: (UCCHError, "failed: out of memory"),
    lib.UCCH_FAIL_PATH: (UCCHError, "failed: the two processes see no common memory, and no wires join them"),
    lib.UCCH_FAIL_CANCELLED: (UCCHError, "was given up, as its worker or counter was closed"),
}


def failure(what: str, status: int, seconds: float = 0.0, link: str = "") -> UCCHError:
    """The exception for a failed transfer; ``link`` describes a link that was cut."""
    if status == lib.UCCH_FAIL_DEVICE:
        return DeviceError(f"{what} failed: {c_text(lib.ucch_device_last_error())}")
    # The other statuses are libucp's own, of broken connections.
    unreachable = PeerError, f"failed: the peer has ended or cannot be reached ({status_name(status)})"
    kind, text = _REASONS.get(status, unreachable)
    why = f": {wires.cut_text(link)}" if link else ""
    return kind(f"{what} {text.format(seconds=seconds)}{why}")


def stream_argument(stream: Any) -> tuple[bool, Any]:
    """(True if there is a stream, its handle) for the engine."""
    return stream is not None, ffi.cast("void *", 0 if stream is None else uncaptured(stream))


def held(native: Any) -> bool:
    """True while libucp or a stream still uses a transfer and its memory."""
    return bool(lib.ucch_transfer_held(native))


@forms
class Request:
    """A transfer, or a wait for a counter, under way; returned by :meth:`Endpoint.put` and the like. Can be awaited.

    If the request is dropped, the transfer goes on, and its memory is kept alive.
    """

    _native: Any = None  # a constructor may be interrupted before it sets this

    def __init__(self, native: Any, op: Any, what: str, keep: object) -> None:
        self._native, self._op, self._what, self._keep = native, op, what, keep
        quarantine.release(Request)

    def __del__(self) -> None:
        if self._native is not None and held(self._native):
            native = self._native
            quarantine.keep((native, self._keep), lambda: not held(native), Request)

    def Test(self) -> bool:
        """Make progress, and test for completion.

        Returns:
            bool: True if it is complete.

        Raises:
            PeerError: The peer has ended.
            RefusedError: The peer has closed the region.
            CollectiveTimeout: The timeout is over.
            UCCHError: Another failure.
        """
        return self._done(lib.ucch_test(self._op))

    def Wait(self, stream: Any = None) -> None:
        """Wait for completion. Errors are those of :meth:`Test`.

        Data that was put is then in the peer's memory, data that was got in this process's.

        Args:
            stream: Stream that waits instead of the host (the host waits if streams cannot). If the transfer fails,
                the stream goes on, and :meth:`Test` raises.
        """
        if stream is not None and lib.ucch_transfer_hold(self._native, stream_argument(stream)[1]):
            return
        self._done(wait_in_slices(partial(lib.ucch_wait, self._op)))

    def _done(self, state: int) -> bool:
        if state == 2:
            error, cut = self._op.error, self._native.link
            link = c_text(cut) if cut else ""
            raise failure(self._what, error.status, error.elapsed, link)
        return state == 1

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        _complete_at_end(self._op, self._native, loop, future)
        yield from future.__await__()
        self.Wait()


def begin(
    worker: Any, peer: Any, order: dict[str, Any], what: str, keep: object, stream: Any, seconds: float
) -> Request:
    """Start the operation of an ``ucch_order`` on a peer, or on this worker alone."""
    after = stream_argument(stream)
    if stream is not None and bind(place_of()) is None:
        raise DeviceError(f"{what}: stream: this process has no device, so there is no stream to wait for")
    native = owned(lib.ucch_transfer_new(worker, peer, [order]), lib.ucch_transfer_free)
    request = Request(native, lib.ucch_transfer_op(native), what, keep)
    status = lib.ucch_transfer_begin(native, seconds, *after)
    if status < 0:
        raise failure(what, status)
    return request


class _Ended(Request):
    """A transfer that was complete when it started."""

    def __init__(self) -> None:
        pass

    def Test(self) -> bool:
        return True

    def Wait(self, stream: Any = None) -> None:
        if stream is not None:
            stream_argument(stream)

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


#: The only instance, as it has no state.
ENDED = _Ended()


class Requests:
    """Several requests as one; it fails with the first that fails. Can be awaited.

    Returned by :meth:`PageTarget.send_pages`.
    """

    def __init__(self, each: Sequence[Request]) -> None:
        self.each = each

    def Test(self) -> bool:
        """Make progress, and test for completion.

        Returns:
            bool: True if all are complete.

        Raises:
            UCCHError: The error of the first request that failed.
        """
        return [request.Test() for request in self.each].count(False) == 0

    def Wait(self, stream: Any = None) -> None:
        """Wait for all of them.

        Args:
            stream: Stream that waits instead of the host.

        Raises:
            UCCHError: The error of the first request that failed.
        """
        for request in self.each:
            request.Wait(stream)

    def __await__(self) -> Generator[Any, None, None]:
        for request in self.each:
            yield from request.__await__()


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_watcher = CompletionThread("ucch-rma-await")


def _complete_at_end(op: Any, native: Any, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Complete ``future`` when ``op`` has ended. ``native`` keeps ``op`` alive: a cancelled task may drop it."""

    def is_over(_: Any = native) -> bool:
        over = bool(future.cancelled() or lib.ucch_peek(op))
        if over:
            with suppress(RuntimeError):  # the loop was closed, so no task waits in it
                loop.call_soon_threadsafe(_complete, future)
        return over

    lib.ucch_listen(op)
    _watcher.add(is_over)
