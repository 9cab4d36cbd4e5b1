"""Tagged point-to-point messages of one communicator over UCX, with MPI's matching rules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..bindings.handle import Kept
from ..bindings.ucx import status_name
from ..bootstrap.settings import limit_text
from ..buffers import Buffer, copy, empty_like, pack
from ..calls.arguments import whole
from ..calls.persistent import PersistentRequest, nothing
from ..calls.request import Request, run_poll_hooks, set_status, wait_op
from ..calls.runner import Runner
from ..calls.state import LOST, Limited, broken_text, gone_text, unheard_text, with_record_path
from ..device import no_runtime, stream_handle
from ..errors import (
    CollectiveError,
    CollectiveTimeout,
    DeviceError,
    NotSupported,
    PeerError,
    RevokedError,
    TruncationError,
    UCCHError,
)
from ..native.libraries import c_text, ffi, lib, messenger
from ..native.waiting import SLICE, progress_mpi, progress_until
from ..transport import wires
from .arrays import Arrays
from .captured import CapturedMessage, CapturedMessages
from .transfer import (
    COMM_SHIFT,
    OWN,
    SOURCE_MASK,
    SOURCE_SHIFT,
    TAG_MASK,
    AnyTransfer,
    LaneMessage,
    Transfer,
    object_waits,
)

_COMM_MASK = ((1 << 13) - 1) << (COMM_SHIFT - 1) | OWN

#: Messages that have ended for the caller (timeout, Ctrl-C) while libucp or a stream still uses their memory.
held: Kept[AnyTransfer] = Kept()

#: Seconds that a process may take to exit after its memory has gone.
_DYING_S = 1.0

#: Maximum number of messages of a lane under way (p2p/lane.c).
_DEPTH = 64
#: Bytes from which device messages without a stream use lanes; shorter ones are sent eagerly. The second holds where
#: libucp could also send to another host: for 64 MiB between two H200 it reaches 1.6 GB/s each way over TCP, wires
#: reach 11.
_BY_LANE_FROM, _BY_LANE_FROM_FAR = 64 << 10, 512 << 10
_ANY_TAG, _RECV = lib.UCCH_ANY_TAG, lib.UCCH_LANE_MESSAGE_RECV
_post = lib.ucch_lane_message_post


def _hold(transfer: AnyTransfer) -> None:
    """Keep the memory of a transfer that has ended for its caller while libucp or a stream uses it."""
    if transfer.held():
        held.add(transfer)


class Messages(Limited):
    """Sends and receives of one communicator. ``own``: internal messages of the package, matched apart from users'."""

    def __init__(self, state: Runner, *, own: bool = False) -> None:
        from mpi4py import MPI

        self.state, members = state, state.members
        self.rank, self.size = state.rank, state.size
        self.timeout = state.timeout
        self.process = members.job.process
        self.worker = self.process.worker.handle
        self.null, self.any_source, self.any_tag = MPI.PROC_NULL, MPI.ANY_SOURCE, MPI.ANY_TAG
        self._errors = {True: MPI.ERR_TRUNCATE, False: MPI.ERR_OTHER}
        self._endpoints: list[Any] = [None] * self.size
        self._base = members.id << COMM_SHIFT | (OWN if own else 0)
        self.arrays = Arrays(members, self.null)
        self.paths = self.arrays.paths
        board, channels = members.board, members.channels
        #: Lanes for messages in streams; NULL if libucp moves them. With lazy loading of kernels a launch may block the
        #: driver that another rank's message needs.
        self._lanes: Any = ffi.NULL
        lazy = any(facts.lazy_loading for facts in members.facts)
        #: Lanes for long messages without a stream, which libucp only matches.
        self.lanes: Any = ffi.NULL
        if channels is not None and channels.computes and not lazy:
            self.lanes = channels.lanes(board.native)
            self._lanes = ffi.NULL if own else self.lanes
        self._far = self.lanes != ffi.NULL and max(board.hosts) > 0 and wires.transport() != "rdma"
        self._reached: set[int] = set()
        self.captured = CapturedMessages(state, lambda: self.timeout)
        #: Rank of the communicator -> slot on the arrival board, which tells if the peer is gone.
        self._slots = {rank: slot for slot, rank in enumerate(board.ranks)} if board.shared else {}
        if max(board.hosts) > 0:
            self._slots |= {rank: -2 - rank for rank in range(self.size) if rank not in board.ranks}
        if self._slots:
            self._slots[self.any_source] = lib.UCCH_ALL_PEERS
        self._slots.pop(self.rank, None)

    def make_messenger(self, functions: tuple[Any, ...], queues: tuple[Any, ...]) -> Any:
        """Make a `messenger`; ``queues``: containers that are empty while nothing unusual is to be looked at."""
        tags = int(ffi.cast("uintptr_t", self.worker)), int(ffi.cast("uintptr_t", self.state.board.native)), self._base
        ranks = self.rank, self.size, self.any_source, self.any_tag
        slots = [self._slots.get(rank, self.size) for rank in (*range(self.size), self.any_source)]
        self.in_c = messenger(functions, queues, (*tags, _COMM_MASK), ranks, slots)
        self.in_c.timeout = self.timeout
        self.state.posters.append(self.in_c)
        return self.in_c

    # --- arguments ----------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise if the communicator is unusable. Frees messages that libucp and streams no longer use."""
        self.state.check_usable(calls=False)
        if self.captured.waiting:
            self.captured.check()
        if held:
            held.sweep(lambda transfer: transfer.held())

    def check(self, what: str, peer: Any, tag: Any) -> tuple[int, int]:
        """Check peer and tag, and return them as integers. ``what``: ``dest``, or ``source``, for which both may be
        any, or None for that."""
        wild = what == "source"
        if wild:
            peer, tag = self.any_source if peer is None else peer, self.any_tag if tag is None else tag
        try:
            peer, tag = whole(peer), whole(tag)
        except TypeError:
            raise TypeError(f"{what} {peer!r} and tag {tag!r} on rank {self.rank} must be integers") from None
        if not (0 <= peer < self.size or peer == self.null or (wild and peer == self.any_source)):
            extra = ", MPI.ANY_SOURCE" if wild else ""
            raise ValueError(
                f"{what} {peer} on rank {self.rank} is not a rank of this communicator of {self.size} "
                f"(nor MPI.PROC_NULL{extra})"
            )
        if not (0 <= tag <= TAG_MASK or (wild and tag == self.any_tag)):
            extra = " (or MPI.ANY_TAG)" if wild else ""
            raise ValueError(f"tag {tag} on rank {self.rank} is not within 0 and {TAG_MASK}{extra}")
        return peer, tag

    def is_gone(self, source: int) -> bool:
        """True if this rank knows that ``source`` has exited or died."""
        return bool(self._fate(source))

    def gone_text(self, source: int) -> str:
        """Return why the source cannot send any more, for an error message."""
        if source == self.any_source:
            return "every other rank has left the job or died"
        return gone_text(self.state.board, source, self.rank)

    def _fate(self, source: int) -> int:
        slot = self._slots.get(source)
        return lib.UCCH_THERE if slot is None else int(lib.ucch_board_fate(self.state.members.board.native, slot))

    def endpoint(self, dest: int) -> Any:
        """The connection with a rank, which is made here if there is none."""
        endpoint = self._endpoints[dest]
        if endpoint is None:
            facts = self.state.members.facts[dest]
            endpoint = self._endpoints[dest] = self.process.connection(facts, self.rank, dest).handle
            if facts.host.memory != self.process.host.memory:
                # A send to another host is complete once it is in this host's socket buffer, which the progress thread
                # drains.
                lib.ucch_progress_idle()
        return endpoint

    def reach(self, peer: int) -> None:
        """Open the connection on which a peer (or each peer) learns that a message on device memory was matched."""
        if self.lanes == ffi.NULL or peer in self._reached:
            return
        self._reached.add(peer)
        for rank in range(self.size) if peer == self.any_source else (peer,):
            if rank not in (self.rank, self.null):
                with suppress(PeerError):  # the peer has died and offers no message
                    slot = self._slots.get(rank, self.size)
                    lib.ucch_lanes_reach(self.lanes, rank, slot, self.endpoint(rank))

    def pattern(self, source: int, tag: int) -> tuple[int, int]:
        """(tag, mask) for the match of a receive."""
        value, mask = self._base, _COMM_MASK
        if source != self.any_source:
            value |= source << SOURCE_SHIFT
            mask |= SOURCE_MASK
        if tag != self.any_tag:
            value |= tag
            mask |= TAG_MASK
        return value, mask

    # --- sending and receiving ----------------------------------------------------------------------------------------

    def outgoing(
        self, buf: Any, dest: int, tag: int, *, sync: bool = False, copy: bool = False, stream: Any = None
    ) -> Any:
        """Make a send (an `AnyTransfer`, or a `CapturedMessage`) without starting it.

        ``sync``: it completes only once it is matched. ``copy``: send a copy that is made now. ``stream``: send what
        the buffer holds when this stream gets to it.
        """
        self.check_usable()
        dest, tag = self.check("dest", dest, tag)
        source = self.arrays.bind(buf, dest, writable=False)
        what, at = "synchronous send" if sync else "send", self._stream(stream)
        if at is not None and lib.ucch_stream_captures(at):
            return self._captured(what, source, dest, tag, at)
        if at is not None and self.goes_by_lane(dest):
            return self._lane_message(what, lib.UCCH_LANE_MESSAGE_SYNC if sync else 0, source, dest, tag, at)
        bounce = self.arrays.bounce_for(source, dest, in_stream=stream is not None, copied=copy)
        offered = not copy and self._offered(source, dest, by_host=bounce is not None)
        transfer = Transfer(what, source, dest, tag, None if offered else bounce, at)
        transfer.sync, transfer.offered = sync, offered
        self._refuse_copies(transfer)
        if copy:
            transfer.buffer = copied(transfer.buffer, self.rank)
        return transfer

    def _offered(self, source: Buffer, dest: int, *, by_host: bool) -> bool:
        """True if libucp only matches the send, and a lane moves the data."""
        if self.lanes == ffi.NULL or dest in (self.rank, self.null):
            return False
        if by_host:
            return source.nbytes >= _BY_LANE_FROM
        far = self._far and source.vendor != "host" and source.nbytes >= _BY_LANE_FROM_FAR
        return far and self.paths.undecided(dest)

    def _stream(self, stream: Any) -> int | None:
        """The handle of the stream in which a message is to start."""
        if stream is None:
            return None
        try:
            handle = stream_handle(stream)
        except TypeError as mistake:
            raise TypeError(f"rank {self.rank}: {mistake}") from None
        if self.state.members.runtime is None:
            raise DeviceError(no_runtime(self.rank, self.state.members.place.vendor))
        return handle

    def _refuse_copies(self, transfer: Transfer) -> None:
        """Raise if a message that starts later, in a stream, would need a host copy now."""
        if transfer.stream is not None and transfer.bounce is None and transfer.buffer is not transfer.original:
            raise NotSupported(f"rank {self.rank}: a {transfer.what} with stream= needs contiguous memory")

    def goes_by_lane(self, peer: int) -> bool:
        """True if messages in streams with this peer use a lane (p2p/lane.c). Raises for a receive from any rank."""
        if self._lanes == ffi.NULL or peer in (self.rank, self.null):
            return False
        if peer == self.any_source:
            raise NotSupported(
                f"rank {self.rank}: a receive with stream= between devices of several vendors must name its source; to "
                "receive from any rank, leave out stream= on both sides"
            )
        return True

    def _lane_message(self, what: str, how: int, buffer: Buffer, peer: int, tag: int, stream: int) -> LaneMessage:
        self.check_memory(what, buffer)
        self.captured.load()
        return LaneMessage(how, buffer.ptr, buffer.nbytes, peer, tag, stream, buffer)

    def _captured(self, what: str, buffer: Buffer, peer: int, tag: int, stream: int) -> CapturedMessage:
        self.check_memory(what, buffer)
        if peer in (self.any_source, self.rank) or tag == self.any_tag or what == "synchronous send":
            raise NotSupported(
                f"rank {self.rank}: a {what} in a graph capture must name another rank and a tag, and must not be "
                "synchronous"
            )
        return self.captured.post(what, buffer, peer, self.any_tag if peer == self.null else tag, stream)

    def check_memory(self, what: str, buffer: Buffer) -> None:
        if not self.arrays.on_device(buffer) and buffer.count:
            raise NotSupported(
                f"rank {self.rank}: a {what} with stream= needs memory of this rank's device; for host memory "
                "leave out stream="
            )
        if buffer.layout is not None:
            raise NotSupported(f"rank {self.rank}: a {what} with stream= needs contiguous memory")

    def incoming(self, buf: Any, source: int | None, tag: int | None, *, stream: Any = None) -> Any:
        """Make a receive without starting it. With ``stream`` it writes to the buffer once the stream gets to it."""
        self.check_usable()
        source, tag = self.check("source", source, tag)
        target = self.arrays.bind(buf, source, writable=True)
        at = self._stream(stream)
        if at is not None and lib.ucch_stream_captures(at):
            return self._captured("receive", target, source, tag, at)
        if at is not None and self.goes_by_lane(source):
            return self._lane_message("receive", lib.UCCH_LANE_MESSAGE_RECV, target, source, tag, at)
        bounce = self.arrays.bounce_for(target, source, in_stream=stream is not None)
        # Long messages arrive by a lane in the buffer itself, unless the sender's memory is host memory, which is rare.
        pinned = self.lanes == ffi.NULL or target.nbytes < _BY_LANE_FROM or source == self.rank
        transfer = Transfer("receive", target, source, tag, bounce, at, pinned=pinned)
        self._refuse_copies(transfer)
        return transfer

    def begin(self, transfer: AnyTransfer, timeout: float) -> None:
        """Start a transfer with a time limit of ``timeout`` seconds from now; 0 for none."""
        if transfer.peer == self.null:
            return  # an operation that was never started counts as complete
        if isinstance(transfer, LaneMessage):
            self._post_when_room(transfer, timeout, self._post_to_lane(transfer, timeout))
            return
        if transfer.begin is None or transfer.begins is not transfer.buffer:
            self._watch(transfer)
            transfer.begin, transfer.begins = self._beginning(transfer), transfer.buffer
        if transfer.stream is not None:
            stream = ffi.cast("void *", transfer.stream)
            if lib.ucch_message_after(transfer.handle, stream) < 0:
                raise self._not_begun(transfer)
        transfer.begin(timeout)

    def start_in_lane(
        self, address: int, nbytes: int, peer: int, tag: int, stream: int, keep: object, *, incoming: bool
    ) -> LaneMessage:
        """Start a message by a lane, without a time limit. The caller has checked peer, tag and memory.

        Few functions are called here, as each costs a hundredth of a short message's time.
        """
        if self.state.broken or held or lib.ucch_board_broken(self.state.board.native):
            self.check_usable()
        how = _RECV if incoming else 0
        message = LaneMessage(how, address, nbytes, peer, tag, stream, keep)
        slot = self._slots.get(peer, self.size)
        try:
            status = _post(self._lanes, message.handle, peer, slot, how, address, nbytes, tag, stream, 0.0)
            if status:
                self._post_when_room(message, 0.0, status)
            return message
        except BaseException:  # Ctrl-C may come right here
            self.withdraw(message)
            raise

    def _post_when_room(self, message: LaneMessage, timeout: float, status: int) -> None:
        """Post a message once its lane has room. ``status``: result of the first try."""
        until = 0.0
        while status:
            if status != lib.UCCH_LATER:
                raise self._not_posted(message, status)
            until = until or time.monotonic() + (self.timeout or math.inf)
            if time.monotonic() > until:  # no earlier message has completed
                raise self._not_posted(message, lib.UCCH_FAIL_TIMEOUT)
            lib.ucch_progress_once()
            progress_mpi()
            run_poll_hooks()
            status = self._post_to_lane(message, timeout)

    def _post_to_lane(self, message: LaneMessage, timeout: float) -> int:
        peer, tag, size, stream = message.peer, message.tag, message.nbytes, message.stream
        slot, wanted = self._slots.get(peer, self.size), _ANY_TAG if tag == self.any_tag else tag
        at = message.address
        return int(_post(self._lanes, message.handle, peer, slot, message.how, at, size, wanted, stream, timeout))

    def _not_posted(self, message: LaneMessage, status: int) -> UCCHError:
        where = f"rank {self.rank}: {self._described(message)}"
        if status in (lib.UCCH_FAIL_DEVICE, lib.UCCH_FAIL_PINNED):
            return self._not_begun(message)
        if status == lib.UCCH_FAIL_REFUSED:
            return CollectiveError(
                f"{where} was not sent: rank {message.peer} refused an earlier message with stream=, which was longer "
                "than its receive or had another tag; later messages are sent"
            )
        if status == lib.UCCH_FAIL_TIMEOUT:
            return CollectiveTimeout(f"{where}: timeout, {_DEPTH} earlier messages are still under way")
        return CollectiveError(
            f"{where}: an earlier message with stream= between the two has failed ({status_name(status)}), and none "
            "can follow it: make a new communicator"
        )

    def _beginning(self, transfer: Transfer) -> Callable[[float], Any]:
        """The native function that starts a transfer with its buffer; its argument is the time limit."""
        peer, buffer = transfer.peer, transfer.buffer
        pointer, memory = ffi.cast("void *", buffer.ptr), self.arrays.memory(buffer)
        if self.lanes != ffi.NULL and peer != self.rank:
            self._set_lanes(transfer)
        if transfer.what == "receive":
            matched = self.pattern(peer, transfer.tag)
            return partial(lib.ucch_recv, transfer.handle, self.worker, pointer, buffer.nbytes, *matched, memory)
        code = self._base | self.rank << SOURCE_SHIFT | transfer.tag
        what = transfer.handle, self.worker, self.endpoint(peer), pointer, buffer.nbytes, code
        if transfer.offered:
            return partial(lib.ucch_send_offer, *what, peer)
        return partial(lib.ucch_send, *what, memory, transfer.sync)

    def _set_lanes(self, transfer: Transfer) -> None:
        """Tell the engine the device memory of a message, in case a lane moves the data."""
        receives = transfer.what == "receive"
        if not (receives or transfer.offered):
            return
        if receives:
            self.reach(transfer.peer)
        place = transfer.original if transfer.bounce is not None else transfer.buffer
        by_host, transfer.lanes = place.vendor == "host", self.lanes
        status = 0 if receives else lib.ucch_lanes_ready(self.lanes, transfer.peer)
        pointer = ffi.cast("void *", place.ptr)
        if status or lib.ucch_message_lanes(transfer.handle, self.lanes, pointer, place.nbytes, by_host):
            raise self._not_begun(transfer)

    def _not_begun(self, transfer: AnyTransfer) -> DeviceError:
        reason = c_text(lib.ucch_device_error())
        where = "" if transfer.stream is None else f", in stream {transfer.stream}"
        return DeviceError(f"rank {self.rank}: {self._described(transfer)}{where}: {reason}")

    def _watch(self, transfer: Transfer) -> None:
        slot, rank = self._slots.get(transfer.peer, self.size), transfer.peer
        board = self.state.members.board.native
        lib.ucch_message_watch(transfer.handle, board, slot, -1 if rank == self.any_source else rank)

    def begin_taken(self, transfer: Transfer, taken: Any, timeout: float) -> None:
        """Start the receive of the message that a probe, ``taken``, has taken out."""
        pointer, memory = ffi.cast("void *", transfer.buffer.ptr), self.arrays.memory(transfer.buffer)
        nbytes = transfer.buffer.nbytes
        self._watch(transfer)
        if self.lanes != ffi.NULL and transfer.peer != self.rank:
            self._set_lanes(transfer)
        if lib.ucch_recv_taken(transfer.handle, pointer, nbytes, taken, memory, timeout) == lib.UCCH_FAIL_BUSY:
            raise ValueError("this message has been received already")

    def run(self, transfer: AnyTransfer | CapturedMessage, status: Any = None) -> None:
        if isinstance(transfer, CapturedMessage):
            transfer.Wait(status)
            return
        try:
            self.begin(transfer, self.timeout)
            self.wait(transfer, status)
        except BaseException:  # Ctrl-C may come right here
            self.withdraw(transfer)
            raise

    def wait(self, transfer: AnyTransfer, status: Any = None) -> None:
        """Wait for a transfer. If this raises, the caller has to :meth:`withdraw` it."""
        state = lib.ucch_wait(transfer.op, SLICE) or wait_op(transfer.op)
        if state != 1 or status is not None or transfer.moved:
            self._end(transfer, state, status)

    def run_all(self, transfers: Sequence[AnyTransfer | CapturedMessage], status: Any = None) -> None:
        """Start transfers, in order, and wait for the ends of all; ``status`` is that of the first."""
        ended, some = 0, list[Any](transfers)
        if some and isinstance(some[0], CapturedMessage):  # all are in one stream
            for transfer in some:
                transfer.Wait(status if transfer is some[0] else None)
            return
        try:
            for transfer in some:
                self.begin(transfer, self.timeout)
            for transfer in some:
                ended += 1
                self.wait(transfer, status if ended == 1 else None)
        except BaseException:
            for transfer in some[max(ended - 1, 0) :]:
                self.withdraw(transfer)
            raise

    def start(self, transfer: AnyTransfer | CapturedMessage) -> Request:
        if isinstance(transfer, CapturedMessage):
            return transfer
        if isinstance(transfer, LaneMessage) and transfer.what != "receive":
            transfer.how |= lib.UCCH_LANE_MESSAGE_ORDERED  # the stream goes on as well, possibly with the same memory
        try:
            self.begin(transfer, 0)
            return self.request(transfer)
        except BaseException:  # Ctrl-C, or the exit of a daemon thread, may come right here
            self.withdraw(transfer)
            raise

    def request(self, transfer: AnyTransfer) -> Request:
        """The request of a transfer that was started without a time limit; waits for it have one."""
        if not isinstance(transfer, LaneMessage):  # the engine has checked those of lanes
            lib.ucch_progress_thread(1)
        return Request(transfer.op, transfer, timeout=self.timeout, owner=self.state, **self._request_hooks(transfer))

    def adopt(
        self, owner: object, address: int, array: Any, peer: int, tag: int, receives: bool
    ) -> tuple[Transfer, dict[str, Any]]:
        """The transfer of a message that was begun in C and lives as long as ``owner``, and arguments for its
        request."""
        what, buffer = "receive" if receives else "send", self.arrays.bind(array, peer, writable=receives)
        transfer = Transfer(what, buffer, peer, tag, native=(ffi.cast("ucch_message *", address), owner))
        return transfer, self._request_hooks(transfer) | {"timeout": self.timeout, "owner": self.state}

    def persistent(self, transfer: Transfer, *, copy: bool = False) -> PersistentRequest:
        """A transfer that can be started repeatedly, each time with the current content of the buffer."""

        def start() -> int:
            self.check_usable()
            self.arrays.bounce_for(transfer.original, transfer.peer)  # raises if the memory was freed meanwhile
            transfer.refill()
            if copy:
                kept = transfer.buffer if transfer.bounce else pack(transfer.original)
                transfer.buffer = copied(kept, self.rank)
            self.begin(transfer, 0)
            lib.ucch_progress_thread(1)
            return 0

        again = partial(lib.ucch_message_again, transfer.handle)
        plain = transfer.buffer.vendor == "host" and not (copy or transfer.moved) and self.lanes == ffi.NULL
        about = self._request_hooks(transfer) | {"timeout": self.timeout, "owner": self.state}
        direct = again if plain and transfer.peer != self.null else None
        return PersistentRequest(transfer.op, transfer, start, direct=direct, **about)

    def _request_hooks(self, transfer: AnyTransfer) -> dict[str, Any]:
        """Arguments of a request: functions for its end, for its cancellation, and to fill a status before its end."""
        cancel = transfer.cancel if transfer.what == "receive" else nothing
        return {
            "finish": partial(self._end, transfer),
            "cancel": cancel,
            "fill_status": partial(self._fill_status, transfer),
        }

    # --- ends ---------------------------------------------------------------------------------------------------------

    def withdraw(self, transfer: AnyTransfer) -> None:
        """Give up a transfer: cancel an unmatched receive; keep the memory of any other transfer."""
        if transfer.what == "receive":
            transfer.cancel()
        _hold(transfer)

    def _end(self, transfer: AnyTransfer, state: int, status: Any) -> None:
        self._fill_status(transfer, state, status)
        if transfer.peer == self.null or (state != 1 and _status_of(transfer) == lib.UCCH_FAIL_CANCELLED):
            return
        if state != 1:
            raise self.failure(transfer)
        if transfer.what == "receive":
            transfer.spread()

    def _fill_status(self, transfer: AnyTransfer, state: int, status: Any) -> None:
        if status is None:
            return
        if transfer.peer == self.null:
            set_status(status, self.null, self.any_tag, 0)
            return
        failed = 0 if state == 1 else _status_of(transfer)
        truncated, cancelled = failed == lib.UCCH_FAIL_TRUNCATED, failed == lib.UCCH_FAIL_CANCELLED
        if truncated or (not failed and transfer.what == "receive"):
            source, tag, nbytes = transfer.envelope()
            nbytes = transfer.nbytes if truncated else nbytes
        else:
            source, tag, nbytes = self.any_source, self.any_tag, 0
        set_status(status, source, tag, nbytes, self._errors[truncated] if failed and not cancelled else 0)
        status.Set_cancelled(cancelled)

    def failure(self, transfer: AnyTransfer) -> UCCHError:
        """The error of a failed transfer. Its memory is kept while libucp or a stream uses it."""
        _hold(transfer)
        return with_record_path(self._explain(transfer, transfer.op.error))

    def _explain(self, transfer: AnyTransfer, error: Any) -> UCCHError:
        where = f"rank {self.rank}: {self._described(transfer)}"
        if error.status in _REASONS:
            kind, text = _REASONS[error.status]
            return kind(f"{where}: {text.format(*transfer.envelope(), transfer.peer)}")
        if error.status == lib.UCCH_FAIL_TIMEOUT:
            late = f"{where}: timeout, not complete after {error.elapsed:.3g} s ({limit_text(self.timeout)})"
            late += unheard_text(self.state.board) if transfer.peer == self.any_source else ""
            return CollectiveTimeout(late + self._of_other_kind(transfer) + self.state.freed_text())
        if error.status in (lib.UCCH_FAIL_DEVICE, lib.UCCH_FAIL_PINNED):
            return DeviceError(f"{where}: {c_text(lib.ucch_device_last_error())}")
        peer, broken = transfer.peer, error.status == lib.UCCH_FAIL_CONNECTION
        known = error.status == lib.UCCH_FAIL_PEER
        # A rank that exits now loses its memory, which libucp reads, and its connections before the process is gone.
        least = lib.UCCH_DIED if broken else lib.UCCH_LEFT
        if known or (peer in self._slots and progress_until(lambda: self._fate(peer) >= least, _DYING_S)):
            reason = "" if known or broken else f" ({status_name(error.status)})"
            return PeerError(f"{where}: {self.gone_text(peer)}{reason}")
        if broken:
            board, of_any = self.state.board, peer == self.any_source
            why = f"nothing can come{unheard_text(board)}" if of_any else broken_text(board, peer)
            return CollectiveError(f"{where}: {why}; make a new communicator")
        return CollectiveError(f"{where}: {status_name(error.status)}")

    def _of_other_kind(self, transfer: AnyTransfer) -> str:
        """A hint for a receive without a message: a Python object from ``send`` is waiting instead."""
        if transfer.what != "receive" or not object_waits(self.state.mpi, transfer.peer, transfer.tag):
            return ""
        return "; a Python object of send() waits, which recv() receives"

    def _described(self, transfer: AnyTransfer) -> str:
        peer = "any rank" if transfer.peer == self.any_source else f"rank {transfer.peer}"
        tag = "any tag" if transfer.tag == self.any_tag else f"tag {transfer.tag}"
        way = "from" if transfer.what == "receive" else "to"
        upto = "up to " if transfer.what == "receive" else ""
        return f"{transfer.what} of {upto}{transfer.nbytes} bytes {way} {peer}, {tag}"


#: Failures with one cause each; texts use source, tag and length of what arrived, and the peer.
_REASONS: dict[int, tuple[type[UCCHError], str]] = {
    lib.UCCH_FAIL_TRUNCATED: (TruncationError, "rank {0} sent {2} bytes with tag {1}, more than the buffer holds"),
    lib.UCCH_FAIL_REVOKED: (RevokedError, "a rank has revoked the communicator"),
    lib.UCCH_FAIL_MEMORY: (CollectiveError, "no memory left on this host"),
    lib.UCCH_FAIL_LOST: (CollectiveError, LOST),
    lib.UCCH_FAIL_REFUSED: (CollectiveError, "rank {3} could not receive it, and its own error says why"),
    lib.UCCH_FAIL_MISMATCH: (
        CollectiveError,
        "rank {0} sent {2} bytes with tag {1}: messages with stream= are matched in the order in which both ranks "
        "begin them",
    ),
    lib.UCCH_FAIL_BROKEN: (
        CollectiveError,
        "an earlier message between the memory of the two ranks' devices has failed, and none can follow it: make a "
        "new communicator",
    ),
}


def copied(source: Buffer, rank: int) -> Buffer:
    if source.vendor != "host":
        raise NotSupported(f"rank {rank}: buffered sends are for host memory; use Isend")
    kept = empty_like(source)
    copy(source, kept)
    return kept


def part_of(buffer: Buffer, first: int, count: int) -> Buffer:
    about = buffer.dtype, buffer.vendor, buffer.device, buffer.owner, buffer.readonly
    if buffer.layout is None:
        return Buffer(buffer.ptr + first * buffer.dtype.itemsize, count, *about)
    return Buffer(buffer.ptr, count, *about, replace(buffer.layout, first=buffer.layout.first + first))


def _status_of(transfer: AnyTransfer) -> int:
    return int(transfer.op.error.status)
