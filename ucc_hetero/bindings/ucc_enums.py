"""The enumerations of ``ucc.h`` (API 1.x), by its names with the prefix dropped."""

from __future__ import annotations

from enum import IntEnum, IntFlag


class Status(IntEnum):
    """``ucc_status_t``."""

    OK = 0
    INPROGRESS = 1
    OPERATION_INITIALIZED = 2
    ERR_NOT_SUPPORTED = -1
    ERR_NOT_IMPLEMENTED = -2
    ERR_INVALID_PARAM = -3
    ERR_NO_MEMORY = -4
    ERR_NO_RESOURCE = -5
    ERR_NO_MESSAGE = -6
    ERR_NOT_FOUND = -7
    ERR_TIMED_OUT = -8
    ERR_IO_ERROR = -9


class Coll(IntEnum):
    """``ucc_coll_type_t``."""

    ALLGATHER = 1 << 0
    ALLGATHERV = 1 << 1
    ALLREDUCE = 1 << 2
    ALLTOALL = 1 << 3
    ALLTOALLV = 1 << 4
    BARRIER = 1 << 5
    BCAST = 1 << 6
    FANIN = 1 << 7
    FANOUT = 1 << 8
    GATHER = 1 << 9
    GATHERV = 1 << 10
    REDUCE = 1 << 11
    REDUCE_SCATTER = 1 << 12
    REDUCE_SCATTERV = 1 << 13
    SCATTER = 1 << 14
    SCATTERV = 1 << 15


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
