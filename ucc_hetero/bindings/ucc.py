"""UCC from Python: libraries, contexts, teams, collectives and execution engines, as thin classes.

For use of UCC without this package's planner; the engine's teams are created with them, too. Names follow ``ucc.h``
without the prefix. Every class frees its handle in ``close`` and works in a ``with`` statement.

    lib = Lib(env_prefix="UCC") context = lib.context(MPIExchange(MPI.COMM_WORLD.Dup())) team =
    context.team(range(size)) with team.collective(Coll.ALLREDUCE, src=x, dst=y, dtype=DTYPES["float32"], op=OPS["SUM"])
    as request:
        request.post() request.wait()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, IntFlag
from functools import cache
from typing import Any

from ..errors import CollectiveTimeout, LibraryError
from ..log import log
from ..native.libraries import ffi, lib, load, refuse_children
from ..native.waiting import progress_until
from ..types import DType, Op
from . import quarantine
from .handle import Handle, locked, memory
from .oob import Exchange, forget, oob_of

#: ``ucc_status_t``.
Status = IntEnum("Status", {
    "OK": 0, "INPROGRESS": 1, "OPERATION_INITIALIZED": 2, "ERR_NOT_SUPPORTED": -1, "ERR_NOT_IMPLEMENTED": -2,
    "ERR_INVALID_PARAM": -3, "ERR_NO_MEMORY": -4, "ERR_NO_RESOURCE": -5, "ERR_NO_MESSAGE": -6, "ERR_NOT_FOUND": -7,
    "ERR_TIMED_OUT": -8, "ERR_IO_ERROR": -9,
})  # fmt: skip


#: ``ucc_coll_type_t``.
Coll = IntEnum("Coll", {
    "ALLGATHER": 1 << 0, "ALLGATHERV": 1 << 1, "ALLREDUCE": 1 << 2, "ALLTOALL": 1 << 3, "ALLTOALLV": 1 << 4,
    "BARRIER": 1 << 5, "BCAST": 1 << 6, "FANIN": 1 << 7, "FANOUT": 1 << 8, "GATHER": 1 << 9, "GATHERV": 1 << 10,
    "REDUCE": 1 << 11, "REDUCE_SCATTER": 1 << 12, "REDUCE_SCATTERV": 1 << 13, "SCATTER": 1 << 14, "SCATTERV": 1 << 15,
})  # fmt: skip


class CollFlag(IntFlag):
    """``ucc_coll_args_flags_t``."""

    IN_PLACE = 1
    PERSISTENT = 2
    COUNT_64BIT = 4
    DISPLACEMENTS_64BIT = 8
    CONTIG_SRC = 16
    CONTIG_DST = 32
    TIMEOUT = 64


class MemType(IntEnum):
    """``ucc_memory_type_t``."""

    HOST = 0
    CUDA = 1
    CUDA_MANAGED = 2
    ROCM = 3
    ROCM_MANAGED = 4
    UNKNOWN = 5


class ThreadMode(IntEnum):
    """``ucc_thread_mode_t``."""

    SINGLE = 0
    FUNNELED = 1
    MULTIPLE = 2


__all__ = [
    "Coll", "CollFlag", "Context", "Lib", "MemType", "Request", "Status", "Team", "ThreadMode", "check", "status_name",
]  # fmt: skip


#: Seconds between calls of a wait's ``poll_hook``.
_CHECK_S = 2e-3


def status_name(status: int) -> str:
    """The name of a UCC status code."""
    try:
        return f"UCC_{Status(status).name}"
    except ValueError:
        return f"UCC status {status}"


def check(call: str, status: int, hint: str = "") -> int:
    """Return ``status``, or raise :class:`LibraryError` when it is an error."""
    if status < 0:
        raise LibraryError(call, status, status_name(status), hint)
    return status


@cache
def _guard() -> None:
    """Keep libucc, whose transports are loaded by now, from crashing when an endpoint fails."""
    if lib.ucch_guard_cancel() < 0:
        log("init").info("a peer that dies may end this process by a signal: libucc's TL/UCP calls libucp directly")


class Lib(Handle):
    """One initialised UCC library.

    Args:
        env_prefix: Prefix of the variables that it reads. With ``UCC`` these are UCC's usual ones; another prefix ``P``
            reads ``P_UCC_...``, so that several libraries in one process are set up independently.
        thread_mode: UCC's; the engine's lock allows any thread.

    Raises:
        LibraryNotFound: If libucc cannot be loaded.
        LibraryError: If libucc cannot be initialised.
        NotSupported: In a process that was forked from one that used UCX or UCC.
    """

    def __init__(self, env_prefix: str = "UCC", thread_mode: ThreadMode = ThreadMode.MULTIPLE) -> None:
        refuse_children()
        load()
        self.env_prefix = env_prefix
        config = ffi.new("ucc_lib_config_h *")
        prefix = ffi.NULL if env_prefix == "UCC" else env_prefix.encode()
        check("ucc_lib_config_read", locked(lib.ucc_lib_config_read, prefix, ffi.NULL, config))
        params = ffi.new("ucc_lib_params_t *", {"mask": 1, "thread_mode": thread_mode})
        handle = ffi.new("ucc_lib_h *")
        major, minor, release = (ffi.new("unsigned *") for _ in range(3))
        # libucc warns if the requested API version is not its own: request its own
        lib.ucc_get_version(major, minor, release)
        status = locked(lib.ucc_init_version, major[0], minor[0], params, config[0], handle)
        locked(lib.ucc_lib_config_release, config[0])
        check("ucc_init_version", status, f"see {env_prefix}_LOG_LEVEL=debug for the components")
        self.handle = handle[0]
        _guard()

    def attributes(self) -> dict[str, Any]:
        """Ask what the loaded components support.

        Returns:
            dict[str, Any]: ``thread_mode``, and ``collectives`` by their names.

        Raises:
            LibraryError: If libucc refuses.
        """
        attr = ffi.new("ucc_lib_attr_t *", {"mask": 3})
        check("ucc_lib_get_attr", locked(lib.ucc_lib_get_attr, self.handle, attr))
        return {
            "thread_mode": ThreadMode(attr.thread_mode),
            "collectives": [c.name for c in Coll if attr.coll_types & c],
        }

    def context(self, exchange: Exchange | None = None, settings: Mapping[str, str] | None = None) -> Context:
        """Create a context; collective over the ranks of ``exchange``.

        Args:
            exchange: Allgather among the ranks, such as :class:`.oob.MPIExchange`; this process alone without one.
            settings: libucc's settings of contexts, such as ``TEAM_IDS_POOL_SIZE``, before those of the environment.

        Returns:
            Context: The context.

        Raises:
            LibraryError: If libucc cannot create it, or knows no such setting.
            CollectiveTimeout: If the exchange has a limit and a rank does not come in time.
        """
        return Context(self, exchange, settings)

    def close(self) -> None:
        if self.handle:
            handle, self.handle = self.handle, None
            check("ucc_finalize", locked(lib.ucc_finalize, handle))


class Context(Handle):
    """A UCC context: this process's resources, and the addresses of the ranks it was created with."""

    def __init__(
        self, library: Lib, exchange: Exchange | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.lib, self.exchange = library, exchange
        config = ffi.new("ucc_context_config_h *")
        check("ucc_context_config_read", locked(lib.ucc_context_config_read, library.handle, ffi.NULL, config))
        params = ffi.new("ucc_context_params_t *", {"mask": 1, "type": 1})
        self._key, record = 0, None
        if exchange is not None:
            params.mask |= 4
            self._key, record = oob_of(exchange, params.oob)
        handle = ffi.new("ucc_context_h *")
        try:
            for name, value in (settings or {}).items():
                words = config[0], ffi.NULL, name.encode(), value.encode()
                check(f"ucc_context_config_modify({name})", locked(lib.ucc_context_config_modify, *words))
            status = locked(lib.ucc_context_create, library.handle, params, config[0], handle)
        finally:
            locked(lib.ucc_context_config_release, config[0])
        if record is not None and record.failure is not None:
            raise record.failure
        check("ucc_context_create", status)
        self.handle = handle[0]
        self.rank = exchange.rank if exchange else 0
        self.size = exchange.size if exchange else 1
        #: Native handle of the context, for the engine's wait loop.
        self.native = lib.ucch_context_new(self.handle, ffi.NULL)

    def progress(self) -> None:
        """Make one round of progress."""
        locked(lib.ucc_context_progress, self.handle)

    def address_length(self) -> int:
        """Bytes of this context's address."""
        attr = ffi.new("ucc_context_attr_t *", {"mask": 8})
        check("ucc_context_get_attr", locked(lib.ucc_context_get_attr, self.handle, attr))
        return int(attr.ctx_addr_len)

    def addresses(self, component: str) -> bool:
        """True if this context's address has a part for a component of libucc; ``ucp`` is needed for connections
        between ranks.

        libucc creates contexts without a component that fails, and teams then read an address that does not exist (UCC
        1.4.0).
        """
        attr = ffi.new("ucc_context_attr_t *", {"mask": 4 | 8})
        check("ucc_context_get_attr", locked(lib.ucc_context_get_attr, self.handle, attr))
        number = 5381  # addresses name components by Bernstein's hash, in a word of its own
        for letter in component.encode():
            number = (number * 33 + letter) % 2**64
        return number.to_bytes(8, sys.byteorder) in bytes(ffi.buffer(attr.ctx_addr, attr.ctx_addr_len))

    def team(
        self,
        ranks: Sequence[int],
        timeout: float = 60.0,
        poll_hook: Callable[[], None] | None = None,
        number: int | None = None,
    ) -> Team:
        """Create a team; collective among its ranks.

        Args:
            ranks: Ranks of this context, in the team's order.
            timeout: Seconds to wait for the other ranks.
            poll_hook: Called now and then meanwhile; may raise to end the wait.
            number: Id of the team below 32,768, equal on its ranks and used by no other team of theirs in this context;
                None: the ranks
                agree on one.

        Returns:
            Team: The team.

        Raises:
            CollectiveTimeout: If not every rank joins in time.
            LibraryError: If libucc cannot create it.
        """
        return Team(self, ranks, timeout, poll_hook, number)

    def close(self) -> None:
        """Destroy the context; collective among its ranks."""
        if self.handle:
            handle, self.handle = self.handle, None
            lib.ucch_context_free(self.native)
            status = locked(lib.ucc_context_destroy, handle)
            forget(self._key)
            check("ucc_context_destroy", status)


class Team(Handle):
    """Ranks of a context that do collectives together."""

    def __init__(
        self,
        context: Context,
        ranks: Sequence[int],
        timeout: float = 60.0,
        poll_hook: Callable[[], None] | None = None,
        number: int | None = None,
    ) -> None:
        self.context = context
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(context.rank)
        # libucc keeps a pointer to the map as long as the team exists.
        self._map = ffi.new("uint64_t[]", self.ranks)
        params = ffi.new("ucc_team_params_t *", {"mask": 1 << 2 | 1 << 4 | 1 << 10, "ep": self.rank, "ep_range": 0})
        if number is not None:
            params.mask, params.id = params.mask | 1 << 11, number
        params.ep_map.type = 3
        params.ep_map.ep_num = self.size
        params.ep_map.array.map = self._map
        params.ep_map.array.elem_size = 8
        self.handle = self._create(params, timeout, poll_hook)
        self.native = lib.ucch_team_new(context.native, self.handle)

    def _create(self, params: Any, timeout: float, poll_hook: Callable[[], None] | None) -> Any:
        handle, whom = ffi.new("ucc_team_h *"), f"team of context ranks {list(self.ranks)}"
        contexts = ffi.new("ucc_context_h[]", [self.context.handle])
        try:
            check("ucc_team_create_post", locked(lib.ucc_team_create_post, contexts, 1, params, handle))
            late = f"{whom}: not every rank joined within {timeout:g} s"
            status = self._end(lambda: int(lib.ucc_team_create_test(handle[0])), late, timeout, poll_hook)
            check("ucc_team_create_test", status, whom)
        except BaseException:
            quarantine.keep((self._map, params, handle))  # libucc still uses them
            raise
        return handle[0]

    def _end(
        self, test: Callable[[], int], late: str, timeout: float, poll_hook: Callable[[], None] | None = None
    ) -> int:
        """Make progress until ``test`` has ended, and return its status. The engine's lock is released between
        tests."""
        status = int(Status.INPROGRESS)

        def over() -> bool:
            nonlocal status
            status = locked(self._test, test)
            return status != Status.INPROGRESS

        if not progress_until(over, timeout, poll_hook or bool, step=0.0, apart=_CHECK_S):
            raise CollectiveTimeout(late)
        return status

    def _test(self, test: Callable[[], int]) -> int:
        if (status := test()) == Status.INPROGRESS:
            lib.ucc_context_progress(self.context.handle)
        return status

    def collective(
        self,
        coll: Coll,
        *,
        src: Any = None,
        dst: Any = None,
        dtype: DType | None = None,
        op: Op | None = None,
        root: int = 0,
        flags: int = 0,
        src_counts: Sequence[int] | None = None,
        src_displs: Sequence[int] | None = None,
        dst_counts: Sequence[int] | None = None,
        dst_displs: Sequence[int] | None = None,
        mem_type: MemType = MemType.HOST,
    ) -> Request:
        """Initialise a collective; every member does so in the same order, then posts.

        Counts are UCC's: allgather takes n elements and gives n times the team's size, alltoall n times the size on
        each side, bcast uses ``src`` only.

        Args:
            coll: The collective.
            src, dst: Contiguous writable buffers (PEP 3118), or ``(address, bytes)`` pairs.
            dtype: The elements' type.
            op: The reduction.
            root: Rank of the team.
            flags: Of :class:`CollFlag`.
            src_counts, src_displs, dst_counts, dst_displs: Of the v-forms, in elements, 64-bit.
            mem_type: Where the buffers lie.

        Returns:
            Request: To be posted.

        Raises:
            LibraryError: If libucc does not support it.
            ValueError: If UCC has no such dtype.
            BufferError: If a buffer is not contiguous or not writable.
        """
        args = ffi.new("ucc_coll_args_t *", {"coll_type": coll, "root": root})
        keep = [
            _fill(args.src, src, dtype, mem_type, src_counts, src_displs),
            _fill(args.dst, dst, dtype, mem_type, dst_counts, dst_displs),
        ]
        if src_counts is not None or dst_counts is not None:
            flags |= CollFlag.COUNT_64BIT | CollFlag.DISPLACEMENTS_64BIT
        if op is not None:
            args.op = op.code
        args.flags = flags
        args.mask = 1 if flags else 0
        return Request(self, args, keep)

    def close(self, timeout: float = 60.0) -> None:
        """Destroy the team; collective among its members.

        Args:
            timeout: Seconds to wait for the other ranks.

        Raises:
            CollectiveTimeout: If libucc has not ended it in time.
            LibraryError: If libucc fails.
        """
        if self.handle:
            handle, self.handle = self.handle, None
            lib.ucch_team_free(self.native)
            late = f"team of context ranks {list(self.ranks)}: not destroyed within {timeout:g} s"
            try:
                status = self._end(lambda: int(lib.ucc_team_destroy(handle)), late, timeout)
            except BaseException:
                quarantine.keep(self._map)  # libucc still uses it
                raise
            check("ucc_team_destroy", status)

    def __del__(
        self, ends: Callable[[], bool] = sys.is_finalizing, keep: Callable[[object], None] = quarantine.keep
    ) -> None:
        """A team that was not closed is used by libucc until its context is destroyed, and so is the map."""
        if getattr(self, "handle", None) and not ends():
            keep(self._map)


def _fill(
    side: Any, data: Any, dtype: DType | None, mem_type: int, counts: Sequence[int] | None, displs: Sequence[int] | None
) -> object:
    """Describe one buffer for libucc. Returns what must be kept alive."""
    if data is None:
        return None
    if dtype is None or dtype.code < 0:
        raise ValueError(f"dtype {dtype} has no UCC datatype; move its bytes as uint8")
    pointer, nbytes, keep = memory(data)
    if counts is None:
        side.info.buffer, side.info.count = pointer, nbytes // dtype.itemsize
        side.info.datatype, side.info.mem_type = dtype.code, mem_type
        return keep
    if displs is None:
        displs = [sum(counts[:i]) for i in range(len(counts))]
    tables = ffi.new("uint64_t[]", list(counts)), ffi.new("uint64_t[]", list(displs))
    side.info_v.buffer, side.info_v.datatype, side.info_v.mem_type = pointer, dtype.code, mem_type
    side.info_v.counts, side.info_v.displacements = tables
    return keep, tables


class Request(Handle):
    """An initialised collective. Persistent ones (``CollFlag.PERSISTENT``) may be posted again after they finish."""

    def __init__(self, team: Team, args: Any, keep: object) -> None:
        self.team, self._args, self._keep = team, args, keep
        handle = ffi.new("ucc_coll_req_h *")
        check("ucc_collective_init", locked(lib.ucc_collective_init, args, handle, team.handle))
        self.handle: Any = handle[0]

    def __del__(self, in_progress: int = Status.INPROGRESS) -> None:
        """Keep the buffers of an active collective alive. A finished request that was not closed is left to libucc."""
        if getattr(self, "handle", None) and self.handle.status == in_progress:
            quarantine.keep((self._args, self._keep))

    def post(self) -> None:
        """Start the collective.

        Raises:
            LibraryError: If libucc refuses.
        """
        check("ucc_collective_post", locked(lib.ucc_collective_post, self.handle))

    @property
    def status(self) -> int:
        """The status that libucc has set; it changes only while a thread makes progress."""
        return int(self.handle.status)

    def test(self) -> bool:
        """Make one round of progress.

        Returns:
            bool: True if the collective has finished.

        Raises:
            LibraryError: If it has failed.
        """
        if self.handle.status == Status.INPROGRESS:
            self.team.context.progress()
        return check("collective", self.handle.status) == Status.OK

    def wait(self, timeout: float = 60.0, poll_hook: Callable[[], None] | None = None) -> None:
        """Wait until the collective has finished.

        Args:
            timeout: Seconds.
            poll_hook: Called now and then meanwhile; may raise to end the wait.

        Raises:
            CollectiveTimeout: After ``timeout`` seconds.
            LibraryError: If it has failed.
        """
        if not progress_until(self.test, timeout, poll_hook or bool, step=0.0, apart=_CHECK_S):
            raise CollectiveTimeout(f"collective not finished after {timeout:g} s")

    def close(self) -> None:
        """Free the request; an active one is left to libucc, with its buffers."""
        if self.handle:
            handle, self.handle = self.handle, None
            if handle.status == Status.INPROGRESS:
                quarantine.keep((self._args, self._keep))
                return
            check("ucc_collective_finalize", locked(lib.ucc_collective_finalize, handle))
