"""Tagged point-to-point messages of one communicator over UCX, with MPI's matching rules."""

from __future__ import annotations

from typing import Any

from .buffers import Buffer, as_buffer, pack, unpack
from .errors import CollectiveError, CollectiveTimeout, TruncationError
from .native import ffi, lib
from .request import Request, wait_op
from .runner import Runner
from .ucx import status_name

__all__ = ["Messages"]

#: Bits of a UCX tag, high to low: communicator (12), program message or not (1), source rank (20), MPI tag (31).
_SOURCE_SHIFT, _COMM_SHIFT = 31, 52
_TAG_MASK = (1 << 31) - 1
_SOURCE_MASK = ((1 << 20) - 1) << _SOURCE_SHIFT
_COMM_MASK = ((1 << 13) - 1) << (_COMM_SHIFT - 1)


class Messages:
    """Sends and receives of one communicator."""

    def __init__(self, runner: Runner) -> None:
        from mpi4py import MPI

        self.runner = runner
        self.rank, self.size = runner.rank, runner.size
        self.worker = runner.members.job.process.worker.handle
        self.null, self.any_source, self.any_tag = MPI.PROC_NULL, MPI.ANY_SOURCE, MPI.ANY_TAG
        self._byte = MPI.BYTE
        self._endpoints: list[Any] = [None] * self.size

    # --- arguments ------------------------------------------------------------------------------------------------------

    def _peer(self, what: str, rank: int, *, wild: bool = False) -> None:
        if 0 <= rank < self.size or rank == self.null or (wild and rank == self.any_source):
            return
        extra = ", MPI.ANY_SOURCE" if wild else ""
        raise ValueError(
            f"{what} {rank} on rank {self.rank} is not a rank of this communicator of {self.size} (nor MPI.PROC_NULL{extra})"
        )

    def _tag(self, tag: int, *, wild: bool = False) -> None:
        if 0 <= tag <= _TAG_MASK or (wild and tag == self.any_tag):
            return
        raise ValueError(
            f"tag {tag} on rank {self.rank} is not within 0 and {_TAG_MASK}{' (or MPI.ANY_TAG)' if wild else ''}"
        )

    def _endpoint(self, dest: int) -> Any:
        endpoint = self._endpoints[dest]
        if endpoint is None:
            runner = self.runner
            endpoint = self._endpoints[dest] = runner.members.job.process.endpoint(runner.members.facts[dest]).handle
        return endpoint

    def _pattern(self, source: int, tag: int) -> tuple[int, int]:
        """(tag, mask) that a receive matches."""
        value = self.runner.members.id << _COMM_SHIFT
        mask = _COMM_MASK
        if source != self.any_source:
            value |= source << _SOURCE_SHIFT
            mask |= _SOURCE_MASK
        if tag != self.any_tag:
            value |= tag
            mask |= _TAG_MASK
        return value, mask

    # --- sending and receiving ------------------------------------------------------------------------------------------

    def isend(self, buf: Any, dest: int, tag: int = 0, *, sync: bool = False) -> Request:
        """Start a send; ``sync`` finishes only when the message has been matched."""
        self.runner._usable()
        self._peer("dest", dest)
        self._tag(tag)
        source = pack(as_buffer(buf, writable=False, argument="buf", rank=self.rank))
        message = _Message(source)
        if dest == self.null:
            return self._request(message, None)
        code = self.runner.members.id << _COMM_SHIFT | self.rank << _SOURCE_SHIFT | tag
        pointer = ffi.cast("void *", source.ptr)
        lib.ucch_send(
            message.handle,
            self.worker,
            self._endpoint(dest),
            pointer,
            source.nbytes,
            code,
            0,
            sync,
            self.runner.timeout,
        )
        return self._request(message, f"send of {source.nbytes} bytes to rank {dest}, tag {tag}")

    def irecv(self, buf: Any, source: int, tag: int) -> Request:
        """Start a receive."""
        self.runner._usable()
        self._peer("source", source, wild=True)
        self._tag(tag, wild=True)
        target = as_buffer(buf, writable=True, argument="buf", rank=self.rank)
        packed = pack(target)
        message = _Message(packed, None if packed is target else (packed, target))
        if source == self.null:
            return self._request(message, None)
        value, mask = self._pattern(source, tag)
        pointer = ffi.cast("void *", packed.ptr)
        lib.ucch_recv(message.handle, self.worker, pointer, packed.nbytes, value, mask, 0, self.runner.timeout)
        return self._request(message, f"receive of up to {packed.nbytes} bytes from rank {source}, tag {tag}")

    def imrecv(self, buf: Any, matched: Any, source: int) -> Request:
        """Start the receive of a message that a matched probe took out."""
        target = as_buffer(buf, writable=True, argument="buf", rank=self.rank)
        packed = pack(target)
        message = _Message(packed, None if packed is target else (packed, target))
        pointer = ffi.cast("void *", packed.ptr)
        lib.ucch_recv_matched(message.handle, self.worker, pointer, packed.nbytes, matched, 0, self.runner.timeout)
        return self._request(message, f"receive of a matched message of rank {source}")

    def probe(self, source: int, tag: int, *, remove: bool) -> tuple[int, int, int, Any] | None:
        """(source, tag, bytes, matched message) of an arrived message, or None."""
        self.runner._usable()
        self._peer("source", source, wild=True)
        self._tag(tag, wild=True)
        value, mask = self._pattern(source, tag)
        code, nbytes, matched = ffi.new("uint64_t *"), ffi.new("size_t *"), ffi.new("ucp_tag_message_h *")
        if not lib.ucch_probe(self.worker, value, mask, remove, code, nbytes, matched):
            return None
        return (int(code[0]) & _SOURCE_MASK) >> _SOURCE_SHIFT, int(code[0]) & _TAG_MASK, int(nbytes[0]), matched[0]

    # --- ends -----------------------------------------------------------------------------------------------------------

    def _request(self, message: _Message, what: str | None) -> Request:
        def finish(state: int, status: Any) -> None:
            if what is None:
                self.fill(status, self.null, self.any_tag, 0)
                return
            if state != 1:
                self._fail(message, what)
            if message.unpack is not None:
                unpack(*message.unpack)
            if status is not None:
                code, nbytes = message.info()
                self.fill(status, (code & _SOURCE_MASK) >> _SOURCE_SHIFT, code & _TAG_MASK, nbytes)

        return Request(message.op, message, finish)

    def _fail(self, message: _Message, what: str) -> None:
        error = ffi.new("ucch_error *")
        lib.ucch_op_error(message.op, error)
        where = f"rank {self.rank}: {what}"
        if error.status == lib.UCCH_FAIL_TRUNCATED:
            raise TruncationError(f"{where}: the message was longer than the buffer")
        # A send cannot be taken back from UCX: what it points to stays.
        _stuck.append(message)
        if error.status == lib.UCCH_FAIL_TIMEOUT:
            raise CollectiveTimeout(f"{where}: timeout, not complete after {error.elapsed:.3g} s")
        raise CollectiveError(f"{where}: {status_name(error.status)}")

    def fill(self, status: Any, source: int, tag: int, nbytes: int) -> None:
        """Write into an ``MPI.Status``."""
        if status is None:
            return
        status.source, status.tag = source, tag
        status.Set_elements(self._byte, nbytes)

    def wait(self, request: Request, status: Any = None) -> None:
        """Wait for one of our own requests (a blocking call's)."""
        if not request._done:
            try:
                state = wait_op(request._op)
            except BaseException:
                _stuck.append(request._keep)
                raise
            request._complete(state, status)


class _Message:
    """A native message with the memory that it uses."""

    __slots__ = ("buffer", "handle", "op", "unpack")

    def __init__(self, buffer: Buffer, unpacked: tuple[Buffer, Buffer] | None = None) -> None:
        self.handle = ffi.gc(lib.ucch_message_new(), lib.ucch_message_free)
        self.op = lib.ucch_message_op(self.handle)
        self.buffer = buffer
        self.unpack = unpacked

    def info(self) -> tuple[int, int]:
        code, nbytes = ffi.new("uint64_t *"), ffi.new("size_t *")
        lib.ucch_message_info(self.handle, code, nbytes)
        return int(code[0]), int(nbytes[0])


#: Messages that timed out or were interrupted; UCX may still read or write their memory.
_stuck: list[object] = []
