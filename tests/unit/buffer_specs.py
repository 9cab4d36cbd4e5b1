"""Make buffers from specs as calls do, for the tests of host and device memory."""

from ucc_hetero.buffers import as_buffer, as_vbuffer

RANK = 2


def send(spec, **kwargs):
    return as_buffer(spec, writable=False, argument="sendbuf", rank=RANK, **kwargs)


def recv(spec, **kwargs):
    return as_buffer(spec, writable=True, argument="recvbuf", rank=RANK, **kwargs)


def send_v(spec, size, **kwargs):
    return as_vbuffer(spec, size, writable=False, argument="sendbuf", rank=RANK, **kwargs)


def recv_v(spec, size, **kwargs):
    return as_vbuffer(spec, size, writable=True, argument="recvbuf", rank=RANK, **kwargs)
