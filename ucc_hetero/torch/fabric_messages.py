"""Point-to-point messages inside one vendor's fabric, in a group of several vendors, by torch's NCCL or RCCL backend.

NVLink and the like are several times as fast as host memory, through which GPUs of two vendors exchange data. Each
direction between two ranks has a backend of its own, and so a stream of its own: sends never wait for receives,
whatever order the two ranks post them in, and need no group call. These libraries match messages in the order of
posting and have no tags, so a message with a tag other than 0 takes the path between vendors.

Making such a backend, and its first message, waits for the other rank. A thread does that, and posts what was called
meanwhile, so that the caller does not wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from .. import log
from ..native.waiting import progress_until
from . import creation
from .futures import Future
from .layout import Finish
from .not_compiled import not_compiled
from .streams import current, in_idle_stream, module, used_in_current, using_stream
from .work import NO_LIMIT, Work, limit_of, seconds_of, torch_error

#: (store, rank, places of the two ranks in the group, timeout of a message in seconds) -> a backend of two ranks.
BackendMaker: TypeAlias = Callable[[Any, int, Sequence[int], float], Any]


def _nccl(store: Any, rank: int, places: Sequence[int], seconds: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupNCCL(store, rank, len(places), options)


#: Element types that all these backends have; others are sent as bytes.
_KNOWN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8
})  # fmt: skip
#: Name of the vendor's backend in torch -> function that makes it.
BACKENDS: dict[str, BackendMaker] = {"nccl": _nccl}


def fabric_messages_of(ranks: Sequence[int], at: int, store: Any, timeout: timedelta | None) -> FabricMessages | None:
    """Messages within the fabric of rank ``at`` of ``ranks`` (default group). None if no other rank shares it."""
    name, places = creation.fabric_peers(ranks, at)
    if not places or name not in BACKENDS:
        return None
    log.log("torch").info("messages between rank %d and ranks %s: torch's %s", at, sorted(places), name)
    return FabricMessages(BACKENDS[name], at, places, store, limit_of(timeout) or NO_LIMIT)


class FabricMessages:
    """Messages among ranks that share a fabric. The backend of a pair and direction is made by its first message."""

    def __init__(self, make: BackendMaker, rank: int, places: frozenset[int], store: Any, seconds: float) -> None:
        self._make, self._rank, self._places, self._store, self._seconds = make, rank, places, store, seconds
        self._directions: dict[tuple[int, bool], _Direction] = {}
        self._lock = threading.Lock()

    def reaches(self, peer: int) -> bool:
        """True if this rank of the group shares the fabric."""
        return peer in self._places

    def carries(self, peer: int, tag: int) -> bool:
        """True if messages with this peer and tag use the backend; the peer decides alike. ``ValueError`` for any
        tag."""
        if peer in self._places and tag < 0:
            raise ValueError(
                f"tag {tag} of a message between rank {self._rank} and rank {peer}: a tag of 0 or more is needed: it "
                "decides if their vendor's library sends the message"
            )
        return tag == 0 and peer in self._places

    def post(self, group: Any, tensor: Any, peer: int, outgoing: bool, outputs: Sequence[Any], finish: Finish) -> Work:
        """Start a message of a group's on contiguous device memory, behind what the current stream has to do."""
        message = FabricWork(group, tensor, peer, outgoing, outputs, finish, self._seconds)
        self._direction(peer, outgoing).post(message)
        return message

    def _direction(self, peer: int, outgoing: bool) -> _Direction:
        with self._lock:
            direction = self._directions.get((peer, outgoing))
            if direction is None:
                direction = self._directions[peer, outgoing] = _Direction(lambda: self._backend(peer, outgoing))
            return direction

    def _backend(self, peer: int, outgoing: bool) -> Any:
        places = (self._rank, peer) if outgoing else (peer, self._rank)
        # A copy: a thread that waits for a key keeps other threads from the store.
        store = dist.PrefixStore(f"ucch/fabric/{places[0]}/{places[1]}", self._store.clone())
        return self._make(store, int(not outgoing), places, self._seconds)

    def abort(self) -> None:
        for direction in self._all():
            direction.end()

    def close(self, seconds: float) -> None:
        """Release the backends, once what was posted has gone; those whose other rank never came are left."""
        until = time.monotonic() + (seconds or NO_LIMIT)
        for direction in self._all():
            if direction.is_drained(until):
                direction.end()

    def _all(self) -> list[_Direction]:
        with self._lock:
            return list(self._directions.values())


class _Direction:
    """One direction between two ranks: its backend, and its messages in order of posting."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock, self._waiting = make, threading.Lock(), deque[FabricWork]()
        self._backend: Any = None
        self._connected = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._last: FabricWork | None = None

    def post(self, message: FabricWork) -> None:
        """Start a message. Until the backend exists, its thread starts it."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._connected:
                message.begin(self._backend)
            else:
                message.mark()
                self._waiting.append(message)
            self._last = message  # only messages that have started: others never record an end
            if self._thread is None:
                self._thread = threading.Thread(target=self._connect, name="ucch-fabric", daemon=True)
                self._thread.start()

    def _connect(self) -> None:
        message: FabricWork | None = None
        try:
            self._backend = self._make()
            while True:
                with self._lock:
                    if not self._waiting:
                        self._connected = True
                        return
                    message = self._waiting.popleft()
                message.begin_marked(self._backend)
        except Exception as failure:
            with self._lock:
                self._failure = torch_error(failure)
                left = [*([message] if message is not None else []), *self._waiting]
                self._waiting.clear()
            for each in left:
                each.fail(self._failure)

    def is_drained(self, until: float) -> bool:
        """True once the backend exists and its last message has completed. Waits until the time ``until``."""
        if self._thread is not None:
            self._thread.join(max(until - time.monotonic(), 0.0))
        last = self._last
        return self._connected and (last is None or progress_until(last.is_completed, until - time.monotonic()))

    def end(self) -> None:
        """Abort the backend. Its ``shutdown`` would wait in NCCL until the other rank ends its own backend too, but
        that rank may have died, or may be ending another backend first."""
        if self._backend is not None:
            self._backend.abort()


@not_compiled
class FabricWork(Work):
    """A message by the vendor's own backend: ``wait`` makes the current stream wait, as with that backend."""

    _work: Any = None
    _posted: Any = None

    def __init__(
        self, group: Any, tensor: Any, peer: int, outgoing: bool, outputs: Sequence[Any], finish: Finish, seconds: float
    ) -> None:
        super().__init__(group, outputs)
        self._tensor = self._keep = tensor
        self._peer, self._outgoing, self._finish = peer, outgoing, finish
        self._begun, self._done, self._seconds = threading.Event(), False, seconds

    def begin(self, backend: Any) -> None:
        """Start the message behind what is queued in the current stream."""
        tensor = self._tensor
        memory = [tensor if tensor.dtype in _KNOWN else tensor.reshape(-1).view(torch.uint8)]
        self._work = backend.send(memory, 1, 0) if self._outgoing else backend.recv(memory, 0, 0)
        self._begun.set()

    def mark(self) -> None:
        """Record an event in the current stream, behind which the message is to start."""
        device = self._tensor.device
        self._posted = module(device).Event()
        self._posted.record(current(device))

    def begin_marked(self, backend: Any) -> None:
        """Start the message in another thread, behind the event of :meth:`mark`."""
        device = self._tensor.device
        stream = module(device).Stream(device)
        stream.wait_event(self._posted)
        with using_stream(device, stream):
            self.begin(backend)

    def fail(self, failure: Exception) -> None:
        """Fail the message without starting it."""
        self._error = failure
        self._begun.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message. For the first messages the host waits until they have
        started."""
        if not self._begun.is_set():
            self._until(self._begun.wait, time.monotonic() + (seconds_of(timeout) or self._seconds))
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._ready is None:
                self._work.wait()
                if self._finish is not None:
                    self._deliver()
                    self._finish = None
        if self._ready is not None:
            self._ready.order()
        return self._told()

    def is_completed(self) -> bool:
        if not self._done and self._begun.is_set():
            self._done = self._error is not None or self._is_there()
        return self._done

    def _is_there(self) -> bool:
        if not self._work.is_completed():
            return False
        if self._finish is not None:
            with in_idle_stream([self._tensor.device]):
                self.wait()
        return self._ready is None or bool(self._ready.query())

    is_over = is_completed

    def exception(self) -> Exception | None:
        if self._error is None and self._work is not None:
            found: Exception | None = self._work.exception()
            return found
        return self._error

    def get_future(self) -> Future:
        with in_idle_stream([self._tensor.device]):
            self.wait()
            with self._lock:
                if self._ready is None:
                    self._ready = used_in_current([self._tensor])
        return super().get_future()
