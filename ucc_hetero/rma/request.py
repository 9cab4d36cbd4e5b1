"""Requests of transfers and of counters: waited for, tested, or awaited in asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from ..bindings import quarantine
from ..bindings.ucx import status_name
from ..device import uncaptured
from ..docstrings import forms
from ..errors import CollectiveTimeout, DeviceError, PeerError, RefusedError, UCCHError
from ..native.libraries import ffi, lib, owned
from ..native.waiting import wait_in_slices
from ..transport import wires

_REASONS = {
    lib.UCCH_FAIL_TIMEOUT: (CollectiveTimeout, "is not done after {seconds:.3g} s"),
    lib.UCCH_FAIL_PEER: (PeerError, "failed: the peer has ended or cannot be reached"),
    lib.UCCH_FAIL_CONNECTION: (PeerError, "failed: the peer has ended or cannot be reached"),
    lib.UCCH_FAIL_STALE: (RefusedError, "was refused by its owner: there is no such region any more"),
    lib.UCCH_FAIL_RANGE: (RefusedError, "was refused by its owner: it goes outside of the region"),
    lib.UCCH_FAIL_MEMORY: (UCCHError, "failed: out of memory"),
    lib.UCCH_FAIL_PATH: (UCCHError, "failed: the two processes see no common memory, and no wires join them"),
    lib.UCCH_FAIL_CANCELLED: (UCCHError, "was given up, as its worker or counter was closed"),
}


def failure(what: str, status: int, seconds: float = 0.0, link: str = "") -> UCCHError:
    """The exception for a transfer that has failed, over a ``link`` that is cut."""
    if status == lib.UCCH_FAIL_DEVICE:
        return DeviceError(f"{what} failed: {ffi.string(lib.ucch_device_last_error()).decode(errors='replace')}")
    # libucp's own numbers are of connections that broke.
    unreachable = PeerError, f"failed: the peer has ended or cannot be reached ({status_name(status)})"
    kind, text = _REASONS.get(status, unreachable)
    why = f": {wires.cut_text(link)}" if link else ""
    return kind(f"{what} {text.format(seconds=seconds)}{why}")


def stream_argument(stream: Any) -> tuple[bool, Any]:
    """(whether there is one, its handle) for the native engine."""
    return stream is not None, ffi.cast("void *", 0 if stream is None else uncaptured(stream, "a transfer"))


def held(native: Any) -> bool:
    """True if libucp or a stream still uses a transfer and its memory."""
    return bool(lib.ucch_transfer_held(native))


@forms
class Request:
    """A transfer under way, or the wait for a counter: what :meth:`Endpoint.put` and the like return; can be awaited.

    A transfer whose request is dropped goes on, and its memory stays alive.
    """

    _native: Any = None  # of a request whose constructor was interrupted

    def __init__(self, native: Any, op: Any, what: str, keep: object) -> None:
        self._native, self._op, self._what, self._keep = native, op, what, keep
        quarantine.release(Request)

    def __del__(self) -> None:
        if self._native is not None and held(self._native):
            native = self._native
            quarantine.keep((native, self._keep), lambda: not held(native), Request)

    def Test(self) -> bool:
        """Make progress once.

        Returns:
            bool: True if it is done.

        Raises:
            PeerError: If the peer has ended.
            RefusedError: If the peer no longer has the region.
            CollectiveTimeout: At the deadline.
            UCCHError: For other failures.
        """
        return self._done(lib.ucch_test(self._op))

    def Wait(self, stream: Any = None) -> None:
        """Wait until it is done, as :meth:`Test`, with its arguments and errors.

        Data put is then in the peer's memory, data got in this process's.

        Args:
            stream: A stream that waits instead of the host, which waits where streams cannot. A transfer that fails
                lets its stream go on: :meth:`Test` then raises.
        """
        if stream is not None and lib.ucch_transfer_hold(self._native, stream_argument(stream)[1]):
            return
        self._done(wait_in_slices(partial(lib.ucch_wait, self._op)))

    def _done(self, state: int) -> bool:
        if state == 2:
            error, cut = self._op.error, self._native.link
            link = ffi.string(cut).decode() if cut else ""
            raise failure(self._what, error.status, error.elapsed, link)
        return state == 1

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        _watcher.add(self._op, self._native, loop, future)
        yield from future.__await__()
        self.Wait()


def begin(
    worker: Any, peer: Any, order: dict[str, Any], what: str, keep: object, stream: Any, seconds: float
) -> Request:
    """Begin what an ``ucch_order`` says, with the native side of a peer, or of our worker alone."""
    native = owned(lib.ucch_transfer_new(worker, peer, [order]), lib.ucch_transfer_free)
    request = Request(native, lib.ucch_transfer_op(native), what, keep)
    status = lib.ucch_transfer_begin(native, seconds, *stream_argument(stream))
    if status < 0:
        raise failure(what, status)
    return request


class _Ended(Request):
    """A transfer that was done when it began."""

    def __init__(self) -> None:
        pass

    def Test(self) -> bool:
        return True

    def Wait(self, stream: Any = None) -> None:
        if stream is not None:
            stream_argument(stream)

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


#: One for all of them, as it has no state.
ENDED = _Ended()


class Requests:
    """Several requests as one, which fails with the first of them that does; can be awaited in asyncio.

    What :meth:`PageTarget.send_pages` returns.
    """

    def __init__(self, each: Sequence[Request]) -> None:
        self.each = each

    def Test(self) -> bool:
        """Make progress.

        Returns:
            bool: True if all are done.

        Raises:
            UCCHError: As that of the first request that has failed.
        """
        return [request.Test() for request in self.each].count(False) == 0

    def Wait(self, stream: Any = None) -> None:
        """Wait for all of them.

        Args:
            stream: A stream that waits instead of the host.

        Raises:
            UCCHError: As that of the first request that has failed.
        """
        for request in self.each:
            request.Wait(stream)

    def __await__(self) -> Generator[Any, None, None]:
        for request in self.each:
            yield from request.__await__()


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


#: An operation, what keeps it alive, and which loop's future is to be told of its end.
_Awaited: TypeAlias = "tuple[Any, Any, asyncio.AbstractEventLoop, asyncio.Future[None]]"


class _Watcher:
    """A thread that tells event loops of the ends of what they await; it sleeps while there is nothing."""

    def __init__(self) -> None:
        self._some = threading.Condition()
        #: What is awaited, with what it is part of: a task may be cancelled, and drop that.
        self._waiting: list[_Awaited] = []
        self._thread: threading.Thread | None = None

    def add(self, op: Any, native: Any, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        """Complete ``future`` when ``op``, which ``native`` keeps alive, has ended."""
        with self._some:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="ucch-rma-await", daemon=True)
                self._thread.start()
            lib.ucch_listen(op)
            self._waiting.append((op, native, loop, future))
            self._some.notify()
        lib.ucch_doorbell_ring()

    def _loop(self) -> None:
        while True:
            with self._some:
                while not self._waiting:
                    self._some.wait()
                known = lib.ucch_doorbell_count()
                ended, left = list[_Awaited](), list[_Awaited]()
                for each in self._waiting:
                    (ended if lib.ucch_peek(each[0]) or each[-1].cancelled() else left).append(each)
                self._waiting = left
            for *_, loop, future in ended:
                with suppress(RuntimeError):  # no task waits in a loop that is closed
                    loop.call_soon_threadsafe(_complete, future)
            if not ended:
                lib.ucch_doorbell_wait(known, 0.25)


_watcher = _Watcher()
