"""Buffers of specs as calls have them made, for the tests of both kinds of memory."""

from typing import Any

from ucc_hetero.buffers import Buffer, VBuffer, as_buffer, as_vbuffer

RANK = 2


def send(spec: object, **kwargs: Any) -> Buffer:
    return as_buffer(spec, writable=False, argument="sendbuf", rank=RANK, **kwargs)


def recv(spec: object, **kwargs: Any) -> Buffer:
    return as_buffer(spec, writable=True, argument="recvbuf", rank=RANK, **kwargs)


def send_v(spec: object, size: int, **kwargs: Any) -> VBuffer:
    return as_vbuffer(spec, size, writable=False, argument="sendbuf", rank=RANK, **kwargs)


def recv_v(spec: object, size: int, **kwargs: Any) -> VBuffer:
    return as_vbuffer(spec, size, writable=True, argument="recvbuf", rank=RANK, **kwargs)
