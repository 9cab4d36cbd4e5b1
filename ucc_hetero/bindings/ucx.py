"""UCX from Python: a context, workers, connections and tagged messages, as thin as they come.

context = Context()
worker = context.worker()
connection = worker.connect(address_of_the_peer)   # peer.address, exchanged by any means
worker.send(connection, data, tag=7).wait()

One-sided transfers are :mod:`ucc_hetero.rma`'s.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, cast

from ..errors import CollectiveTimeout, LibraryError, TruncationError
from ..machine.vendors import memory_name
from ..native.libraries import ffi, lib, owned, preload_ucx, refuse_children
from ..native.waiting import wait_in_slices
from . import quarantine
from .handle import Handle, Present, locked, memory
from .ucc import MemType

__all__ = ["Connection", "Context", "Message", "Status", "Worker", "check", "status_name"]

TAG_FULL = (1 << 64) - 1

#: Bits of ``ucp_params_t``: tagged messages, one-sided transfers and active messages; workers may be used by any
#: thread, one at a time; ``_SLEEPS``: workers have an event descriptor.
_PARAMS, _FEATURES, _SLEEPS = 0x1 | 0x20, 0x43, 0x10
#: Bit of ``ucp_ep_params_t``. Without an error handler libucp reports no errors, and can use all transports.
_ADDRESS = 0x1
#: Most rounds of progress until cancelled receives have ended; it takes one or two.
_ROUNDS = 1000


#: ``ucs_status_t``.
Status = IntEnum("Status", {
    "OK": 0, "INPROGRESS": 1, "NO_MESSAGE": -1, "NO_RESOURCE": -2, "IO_ERROR": -3, "NO_MEMORY": -4, "INVALID_PARAM": -5,
    "UNREACHABLE": -6, "INVALID_ADDR": -7, "NOT_IMPLEMENTED": -8, "MESSAGE_TRUNCATED": -9, "NO_PROGRESS": -10,
    "BUFFER_TOO_SMALL": -11, "NO_ELEM": -12, "SOME_CONNECTS_FAILED": -13, "NO_DEVICE": -14, "BUSY": -15,
    "CANCELED": -16, "SHMEM_SEGMENT": -17, "ALREADY_EXISTS": -18, "OUT_OF_RANGE": -19, "TIMED_OUT": -20,
    "EXCEEDS_LIMIT": -21, "UNSUPPORTED": -22, "REJECTED": -23, "NOT_CONNECTED": -24, "CONNECTION_RESET": -25,
    "ENDPOINT_TIMEOUT": -80,
})  # fmt: skip


def status_name(status: int) -> str:
    """The name of a UCX status code."""
    try:
        return f"UCS_{Status(status).name}" if status >= 0 else f"UCS_ERR_{Status(status).name}"
    except ValueError:
        return f"UCS status {status}"


#: Hints for the user, by error.
_HINTS: dict[int, str] = {
    Status.SHMEM_SEGMENT: "is /dev/shm writable, and has it room (df /dev/shm; containers take --shm-size)? "
    "Or has the other process ended?",
    Status.NO_DEVICE: "do UCX_TLS and UCX_NET_DEVICES name transports and interfaces that this host has (ucx_info -d)?",
}


def check(call: str, status: int) -> None:
    """Raise :class:`LibraryError` when ``status`` is an error."""
    if status < 0:
        raise LibraryError(call, status, status_name(status), _HINTS.get(status, ""))


class Context(Handle):
    """A UCP context for tagged messages and remote memory access; reads ``UCX_*`` variables.

    Args:
        settings: UCX settings, by name without ``UCX_``; they take precedence over the environment.
        sleeps: True if a thread is to be able to sleep until a worker has something to do.

    Raises:
        LibraryNotFound: If libucp cannot be loaded.
        LibraryError: If libucp cannot create it, or does not know a setting.
        NotSupported: In a process that was forked from one that used UCX or UCC.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, sleeps: bool = False) -> None:
        refuse_children()
        preload_ucx()
        handle, config = ffi.new("ucp_context_h *"), ffi.new("ucp_config_t **")
        params = ffi.new(
            "ucp_params_t *",
            {"field_mask": _PARAMS, "features": _FEATURES | (_SLEEPS if sleeps else 0), "mt_workers_shared": 1},
        )
        version = [ffi.new("unsigned *") for _ in range(3)]
        locked(lib.ucp_get_version, *version)
        check("ucp_config_read", locked(lib.ucp_config_read, ffi.NULL, ffi.NULL, config))
        try:
            for name, value in (settings or {}).items():
                status = locked(lib.ucp_config_modify, config[0], name.encode(), value.encode())
                check(f"ucp_config_modify({name})", status)
            major, minor, _ = (each[0] for each in version)
            check("ucp_init_version", locked(lib.ucp_init_version, major, minor, params, config[0], handle))
        finally:
            locked(lib.ucp_config_release, config[0])
        self.handle = handle[0]

    def memory_types(self) -> list[str]:
        """Names of the memory types that this UCX build can move: ``host``, ``cuda``, ``rocm``, ..."""
        attr = ffi.new("ucp_context_attr_t *", {"field_mask": 1 << 2})
        check("ucp_context_query", locked(lib.ucp_context_query, self.handle, attr))
        bits = int(attr.memory_types)
        return list(dict.fromkeys(memory_name(bit) for bit in range(bits.bit_length()) if bits >> bit & 1))

    def transports(self) -> dict[str, list[str]]:
        """Transports that this context may use, with the devices of each, as printed by libucp."""
        found: dict[str, list[str]] = {}
        with tempfile.TemporaryFile("w+") as file:
            locked(lib.ucp_context_print_info, self.handle, cast(Any, file))
            file.seek(0)
            # Lines such as "resource 3  :  md 2  dev 1  flags -- tcp/eth0".
            for name, device in re.findall(r"resource\s+\d+.*?(\w+)/(\S+)\s*$", file.read(), re.M):
                found.setdefault(name, []).append(device)
        return found

    def worker(self) -> Worker:
        """Create a worker."""
        return Worker(self)

    def register(self, data: Any) -> Memory:
        """Register host memory for remote access.

        Args:
            data: A writable buffer, or an ``(address, bytes)`` pair.

        Returns:
            Memory: With the key for peers.

        Raises:
            LibraryError: If libucp refuses.
            BufferError: If the buffer is read-only or not contiguous.
        """
        return Memory(self, data)

    def close(self) -> None:
        """Destroy the context, after its workers."""
        if self.handle:
            handle, self.handle = self.handle, None
            locked(lib.ucp_cleanup, handle)


class Worker:
    """A UCP worker: a progress engine with an address that peers connect to."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # SERIALIZED: any thread, one at a time, which the engine's lock ensures.
        params = ffi.new("ucp_worker_params_t *", {"field_mask": 1, "thread_mode": 1})
        handle = ffi.new("ucp_worker_h *")
        check("ucp_worker_create", locked(lib.ucp_worker_create, context.handle, params, handle))
        self.handle = handle[0]
        address, length = ffi.new("void **"), ffi.new("size_t *")
        check("ucp_worker_get_address", locked(lib.ucp_worker_get_address, self.handle, address, length))
        #: Worker address, which a peer needs to connect.
        self.address = bytes(ffi.buffer(address[0], length[0]))
        locked(lib.ucp_worker_release_address, self.handle, address[0])
        self._polled = lib.ucch_context_new(ffi.NULL, self.handle)
        #: Native messages of this worker, including those of dropped Message objects.
        self._messages: Present[Any] = Present()

    def connect(self, address: bytes) -> Connection:
        """Connect to a peer.

        Args:
            address: The peer's :attr:`address`.

        Returns:
            Connection: To the peer.

        Raises:
            LibraryError: If libucp refuses.
        """
        return Connection(self, address)

    def progress(self) -> int:
        """Make one round of progress. Returns how much has moved."""
        return int(lib.ucch_progress_once())

    def send(
        self,
        connection: Connection,
        data: Any,
        tag: int,
        *,
        sync: bool = False,
        mem_type: MemType = MemType.HOST,
        timeout: float = 0.0,
    ) -> Message:
        """Start sending a message.

        Args:
            connection: To the receiver.
            data: A buffer, or an ``(address, bytes)`` pair.
            tag: 64-bit tag.
            sync: True to finish only when the message is matched.
            mem_type: Memory type of the buffer.
            timeout: Seconds after which it fails; 0: none.

        Returns:
            Message: Finished when the buffer may be reused.

        Raises:
            LibraryError: If libucp refuses.
            BufferError: If the buffer is not contiguous.
        """
        message = self._message()
        pointer, nbytes, message.keep = memory(data, writable=False)
        status = lib.ucch_send(
            message.handle, self.handle, connection.handle, pointer, nbytes, tag, mem_type, sync, timeout
        )
        check("ucp_tag_send_nbx", status)
        return message

    def recv(
        self, data: Any, tag: int, *, mask: int = TAG_FULL, mem_type: MemType = MemType.HOST, timeout: float = 0.0
    ) -> Message:
        """Start receiving a message.

        Args:
            data: A writable buffer, or an ``(address, bytes)`` pair.
            tag: 64-bit tag.
            mask: Bits of the tag that must match.
            mem_type: Memory type of the buffer.
            timeout: Seconds after which it fails; 0: none.

        Returns:
            Message: Finished when the data is in the buffer.

        Raises:
            BufferError: If the buffer is read-only or not contiguous.
        """
        message = self._message()
        pointer, nbytes, message.keep = memory(data, writable=True)
        lib.ucch_recv(message.handle, self.handle, pointer, nbytes, tag, mask, mem_type, timeout)
        return message

    def probe(self, tag: int, mask: int = TAG_FULL) -> tuple[int, int] | None:
        """Check for a message that has arrived, without receiving it.

        Args:
            tag: 64-bit tag.
            mask: Bits of the tag that must match.

        Returns:
            tuple[int, int] | None: Its tag and length in bytes, or None.
        """
        found = owned(lib.ucch_message_new(), lib.ucch_message_free)
        if not lib.ucch_probe(found, self.handle, tag, mask, False):
            return None
        return int(found.info.sender_tag), int(found.info.length)

    def _message(self) -> Message:
        message = Message()
        self._messages.add(message.handle)
        return message

    def close(self) -> None:
        """Destroy the worker, after its connections; unmatched receives are cancelled."""
        if self.handle:
            handle, self.handle = self.handle, None
            for message in self._messages.all():
                lib.ucch_message_cancel(message)
            for _ in range(_ROUNDS):
                if not any(lib.ucch_message_held(message) for message in self._messages.all()):
                    break
                lib.ucch_progress_once()
            lib.ucch_context_free(self._polled)
            locked(lib.ucp_worker_destroy, handle)


class Connection:
    """A connection from a worker to a peer's worker."""

    def __init__(self, worker: Worker, address: bytes) -> None:
        self.worker = worker
        handle, where = ffi.new("ucp_ep_h *"), ffi.from_buffer(address)
        params = ffi.new("ucp_ep_params_t *", {"field_mask": _ADDRESS, "address": where})
        check("ucp_ep_create", locked(lib.ucp_ep_create, worker.handle, params, handle))
        self.handle: Any = handle[0]

    def flush(self, timeout: float = 0.0) -> Message:
        """Start completing all messages that were sent.

        Args:
            timeout: Seconds after which it fails; 0: none.

        Returns:
            Message: Finished when the peer has received them.

        Raises:
            LibraryError: If libucp refuses.
        """
        message = self.worker._message()
        check("ucp_ep_flush_nbx", lib.ucch_flush(message.handle, self.handle, False, timeout))
        return message

    def close(self, timeout: float = 5.0) -> None:
        """Flush and close the connection.

        Args:
            timeout: Seconds after which it is closed even if the peer does not answer.
        """
        if self.handle:
            handle, self.handle = self.handle, None
            message = self.worker._message()
            lib.ucch_flush(message.handle, handle, True, timeout)
            lib.ucch_wait(message.op, timeout)


class Message:
    """An active tagged message. If it is dropped, the message goes on and its buffer stays alive."""

    def __init__(self) -> None:
        quarantine.release(Message)
        self.handle = owned(lib.ucch_message_new(), lib.ucch_message_free)
        self.op = lib.ucch_message_op(self.handle)
        self.keep: object = None

    def __del__(self, held: Any = lib.ucch_message_held) -> None:
        if held(self.handle):
            handle = self.handle
            quarantine.keep((handle, self.keep), lambda: not held(handle), Message)

    def test(self) -> bool:
        """Make one round of progress.

        Returns:
            bool: True if the message has finished.

        Raises:
            TruncationError, LibraryError, CollectiveTimeout: As :meth:`wait`.
        """
        return self._done(lib.ucch_test(self.op))

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until the message has finished.

        Args:
            timeout: Seconds.

        Raises:
            TruncationError: If the message was longer than the buffer.
            LibraryError: If UCX failed.
            CollectiveTimeout: After ``timeout`` seconds, or after the timeout given at its start.
        """
        until = time.monotonic() + timeout

        def over(seconds: float) -> bool:
            if self._done(lib.ucch_wait(self.op, seconds)):
                return True
            if time.monotonic() > until:
                raise CollectiveTimeout(f"message not finished after {timeout:g} s")
            return False

        wait_in_slices(over)

    def _done(self, state: int) -> bool:
        if state == 2:
            error = self.op.error
            if error.status == lib.UCCH_FAIL_TRUNCATED:
                raise TruncationError("the message was longer than the buffer posted for it")
            if error.status == lib.UCCH_FAIL_TIMEOUT:
                raise CollectiveTimeout(f"message not finished after {error.elapsed:.3g} s")
            check("message", error.status)
        return state == 1

    @property
    def info(self) -> tuple[int, int]:
        """(tag, bytes) of the finished message."""
        info = self.handle.info
        return int(info.sender_tag), int(info.length)


class Memory:
    """Registered memory, and the packed key with which a peer can access it."""

    def __init__(self, context: Context, data: Any) -> None:
        self.context = context
        pointer, nbytes, self._keep = memory(data, writable=True)
        self.address, self.nbytes = int(ffi.cast("uintptr_t", pointer)), nbytes
        params = ffi.new("ucp_mem_map_params_t *", {"field_mask": 1 << 0 | 1 << 1 | 1 << 4})
        params.address, params.length, params.memory_type = pointer, nbytes, MemType.HOST
        handle = ffi.new("ucp_mem_h *")
        check("ucp_mem_map", locked(lib.ucp_mem_map, context.handle, params, handle))
        self.handle = handle[0]
        packed, size = ffi.new("void **"), ffi.new("size_t *")
        check("ucp_rkey_pack", locked(lib.ucp_rkey_pack, context.handle, self.handle, packed, size))
        #: The packed remote key, for processes that may read and write this memory.
        self.key = bytes(ffi.buffer(packed[0], size[0]))
        locked(lib.ucp_rkey_buffer_release, packed[0])

    def close(self) -> None:
        """Deregister the memory."""
        if self.handle:
            handle, self.handle = self.handle, None
            check("ucp_mem_unmap", locked(lib.ucp_mem_unmap, self.context.handle, handle))
