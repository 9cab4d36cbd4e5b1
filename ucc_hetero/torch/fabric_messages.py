"""Messages inside a vendor's fabric, in a group of several vendors: by torch's own backend of that vendor.

NVLink and its like are several times as fast as the host's memory, by which devices of two vendors hand each other
data. Each direction between two ranks has a backend of its own (NCCL's, or RCCL's), and so a stream of its own: a
rank's sends never wait for its receives, in whatever order both sides post them, and need not be posted as one.
Messages are matched in the order of posting, as these libraries do. They have no tags: a message with a tag other than
0 goes as those between vendors do.

Making such a backend, and its first message, wait for the other rank. The host does not: that is done in a thread,
which is also given what is posted meanwhile.
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

#: (store, rank, the two ranks' places in the group, seconds that a message may take) -> a backend of two ranks.
BackendMaker: TypeAlias = Callable[[Any, int, Sequence[int], float], Any]


def _nccl(store: Any, rank: int, places: Sequence[int], seconds: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupNCCL(store, rank, len(places), options)


#: Types of elements that all such backends know; the others go as bytes.
_KNOWN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8
})  # fmt: skip
#: By torch's name of the vendor's backend.
BACKENDS: dict[str, BackendMaker] = {"nccl": _nccl}


def fabric_messages_of(ranks: Sequence[int], at: int, store: Any, timeout: timedelta | None) -> FabricMessages | None:
    """Messages within the fabric of rank ``at`` among ``ranks`` of the default group; None if it is alone there."""
    name, places = creation.fabric_peers(ranks, at)
    if not places or name not in BACKENDS:
        return None
    log.log("torch").info("messages between rank %d and ranks %s: torch's %s", at, sorted(places), name)
    return FabricMessages(BACKENDS[name], at, places, store, limit_of(timeout) or NO_LIMIT)


class FabricMessages:
    """Messages among ranks that share a fabric, by a backend for each pair and direction, made at need."""

    def __init__(self, make: BackendMaker, rank: int, places: frozenset[int], store: Any, seconds: float) -> None:
        self._make, self._rank, self._places, self._store, self._seconds = make, rank, places, store, seconds
        self._directions: dict[tuple[int, bool], _Direction] = {}
        self._lock = threading.Lock()

    def reaches(self, peer: int) -> bool:
        """True if a rank of the group shares the fabric."""
        return peer in self._places

    def carries(self, peer: int, tag: int) -> bool:
        """True if messages with a rank and a tag go by its backend, on both sides alike. ``ValueError`` for any tag."""
        if peer in self._places and tag < 0:
            raise ValueError(
                f"tag {tag} of a message between rank {self._rank} and rank {peer}: the tag decides whether their "
                "vendor's library moves it, so name one of 0 or more"
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
    """One direction between two ranks: its backend, and its messages in order."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock, self._waiting = make, threading.Lock(), deque[FabricWork]()
        self._backend: Any = None
        self._connected = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._last: FabricWork | None = None

    def post(self, message: FabricWork) -> None:
        """Start a message; until the backend is there, the thread starts it."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._connected:
                message.begin(self._backend)
            else:
                message.mark()
                self._waiting.append(message)
            self._last = message  # not one that could not be begun: its end would not be seen
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
        """True if the backend is there and its last message has gone, by this time."""
        if self._thread is not None:
            self._thread.join(max(until - time.monotonic(), 0.0))
        last = self._last
        return self._connected and (last is None or progress_until(last.is_completed, until - time.monotonic()))

    def end(self) -> None:
        """Have the backend end. Not by its ``shutdown``, in which NCCL waits for the other rank to end this one, too:
        that may be ending another, as the two have made them in another order, or have died."""
        if self._backend is not None:
            self._backend.abort()


@not_compiled
class FabricWork(Work):
    """A message by the vendor's own backend: its ``wait`` makes the current stream wait, as with that backend."""

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
        """Start behind what the current stream has to do."""
        tensor = self._tensor
        memory = [tensor if tensor.dtype in _KNOWN else tensor.reshape(-1).view(torch.uint8)]
        self._work = backend.send(memory, 1, 0) if self._outgoing else backend.recv(memory, 0, 0)
        self._begun.set()

    def mark(self) -> None:
        """Note what the current stream has to do now: the message is to start behind that."""
        device = self._tensor.device
        self._posted = module(device).Event()
        self._posted.record(current(device))

    def begin_marked(self, backend: Any) -> None:
        """Start, in another thread, behind what :meth:`mark` has noted."""
        device = self._tensor.device
        stream = module(device).Stream(device)
        stream.wait_event(self._posted)
        with using_stream(device, stream):
            self.begin(backend)

    def fail(self, failure: Exception) -> None:
        """End the message with a failure, without starting it."""
        self._error = failure
        self._begun.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the message; the host waits until its start, that of a first one."""
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
