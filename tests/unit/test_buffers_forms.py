"""as_buffer and as_vbuffer over host memory: mpi4py's ways to say buffer, counts, displacements and datatype."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucc_hetero.buffers import Buffer, VBuffer, as_buffer, as_vbuffer
from ucc_hetero.types import DTYPES


def send(spec: object, **kwargs: Any) -> Buffer:
    return as_buffer(spec, writable=False, argument="sendbuf", rank=2, **kwargs)


def recv(spec: object, **kwargs: Any) -> Buffer:
    return as_buffer(spec, writable=True, argument="recvbuf", rank=2, **kwargs)


def send_v(spec: object, size: int) -> VBuffer:
    return as_vbuffer(spec, size, writable=False, argument="sendbuf", rank=2)


def recv_v(spec: object, size: int) -> VBuffer:
    return as_vbuffer(spec, size, writable=True, argument="recvbuf", rank=2)


def test_forms() -> None:
    x = np.zeros(12, np.float32)
    base = x.ctypes.data
    for spec, offset, count, name in [
        ([x, 4], 0, 4, "float32"),
        ((x, np.int64(4)), 0, 4, "float32"),
        ([x, "f"], 0, 12, "float32"),
        ([x, "float64"], 0, 6, "float64"),
        ([x, 3, "d"], 0, 3, "float64"),
        ([x, None, "d"], 0, 6, "float64"),
        ([x, 0], 0, 0, "float32"),
        ([x, (4, 2)], 8, 4, "float32"),
        ([x, [4, 2], "i"], 8, 4, "int32"),
        ([x, (None, 2), "d"], 16, 4, "float64"),
        ([x, 4, 2, "f"], 8, 4, "float32"),
        ([x, 12, 0, DTYPES["float32"]], 0, 12, "float32"),
        ([bytearray(8), float], None, 1, "float64"),
    ]:
        buffer = recv(spec)
        assert (buffer.count, buffer.dtype.name) == (count, name), spec
        assert offset is None or buffer.ptr == base + offset, spec


def test_blocks() -> None:
    x = np.zeros(12, np.float32)
    assert recv(x, blocks=4).count == 12
    assert recv([x, 2], blocks=4).count == 8  # an explicit count is that of one rank
    assert recv([x, 3, "f"], blocks=4).count == 12
    for spec in (x, [x, "f"]):
        with pytest.raises(
            ValueError, match="recvbuf on rank 2: 12 elements cannot be divided evenly among the 5 ranks"
        ):
            recv(spec, blocks=5)
    with pytest.raises(ValueError, match="48 bytes"):
        recv([x, 4], blocks=4)


def test_none_with_no_count_is_an_empty_buffer() -> None:
    assert send([None, 0, "f"]).count == 0 and send([None, "f"]).ptr == 0
    assert send_v([None, [0, 0], "f"], 2).counts == (0, 0)
    with pytest.raises(ValueError, match="buffer is None but its count is 3"):
        send([None, 3, "f"])
    with pytest.raises(TypeError, match="None is no buffer"):
        send(None)


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        (lambda x: [x, 13], ValueError, "13 entries of float32 from byte 0 .*48 bytes"),
        (lambda x: [x, (10, 3)], ValueError, "from byte 12"),
        (lambda x: [x, (None, 13)], ValueError, "displacement 13 lies outside"),
        (lambda x: [x, -1], ValueError, "count -1 is negative"),
        (lambda x: [x, (1, -1)], ValueError, "displacement -1 is negative"),
        (lambda x: [x, 2.0], TypeError, "count 2.0 is not an integer"),
        (lambda x: [x, (1, 2, 3)], ValueError, r"neither a number nor \(count, displ\)"),
        (lambda x: [x], ValueError, "a list of 1 items is not a message"),
        (lambda x: (), ValueError, "a tuple of 0 items"),
        (lambda x: [x, 1, 0, "f", 5], ValueError, "5 items"),
        (lambda x: [x, 1, "nonsense"], TypeError, "nonsense"),
        (lambda x: [x, 1, 2.5], TypeError, "2.5 .* is not a datatype"),
        (lambda x: [x[:3], "d"], ValueError, "12 bytes are not a whole number of entries of float64"),
        (lambda x: [x, 2**63], ValueError, str(2**63)),
        (lambda x: [[1.0, 2.0], 2], TypeError, "exports no memory"),
    ],
)
def test_wrong_forms(spec: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"recvbuf on rank 2: .*{match}"):
        recv(spec(np.zeros(12, np.float32)))


def test_vector_forms() -> None:
    x = np.zeros(10, np.float32)
    for spec, counts, displs in [
        (x, (4, 3, 3), (0, 4, 7)),
        ([x, "f"], (4, 3, 3), (0, 4, 7)),
        ([x, "d"], (2, 2, 1), (0, 2, 4)),
        ([x, [1, 2, 3]], (1, 2, 3), (0, 1, 3)),
        ([x, np.array([1, 2, 3])], (1, 2, 3), (0, 1, 3)),
        ([x, array.array("q", [1, 2, 3]), "f"], (1, 2, 3), (0, 1, 3)),
        ([x, 2], (2, 2, 2), (0, 2, 4)),
        ([x, (2, 3)], (2, 2, 2), (0, 3, 6)),
        ([x, ([1, 0, 3], None)], (1, 0, 3), (0, 1, 1)),
        ([x, ([1, 2, 3], [7, 5, 0])], (1, 2, 3), (7, 5, 0)),
        ([x, ((1, 2, 3), (7, 5, 0)), "f"], (1, 2, 3), (7, 5, 0)),
        ([x, (1, 2, 3), (7, 5, 0), "f"], (1, 2, 3), (7, 5, 0)),
        ([x, None, None, "f"], (4, 3, 3), (0, 4, 7)),
    ]:
        for v in (send_v(spec, 3), recv_v(spec, 3)):
            assert (v.counts, v.displs, v.total) == (counts, displs, sum(counts)), spec
            assert v.buffer.ptr == x.ctypes.data
    assert recv_v([x, [1, 2, 3]], 3).dense and not recv_v([x, (2, 3)], 3).dense
    assert recv_v(x[:0], 3).counts == (0, 0, 0)


@pytest.mark.parametrize(
    ("rest", "error", "match"),
    [
        (([1, 2],), ValueError, "2 counts given for a communicator of size 3"),
        (([1, 2, 3], [0, 1], "f"), ValueError, "2 displs given for a communicator of size 3"),
        (([1, -2, 3],), ValueError, r"counts\[1\] is -2"),
        ((-1,), ValueError, "count -1 is negative"),
        ((([1, 1, 1], [0, -4, 1]),), ValueError, r"displs\[1\] is -4"),
        (([1, 2.0, 3],), TypeError, "not integers"),
        ((np.ones(3),), TypeError, "not integers"),
        ((object(),), TypeError, "not integers"),
        (([4, 4, 4],), ValueError, r"the segment of rank 2 \(of 3\), 4 entries from entry 8 on, exceeds .* of 10"),
        ((([1, 1, 1], [0, 10, 1]),), ValueError, "rank 1"),
        (((1, 2, 3),), ValueError, "pass counts alone as a list"),
        ((([2, 2, 2], [0, 1, 8]),), ValueError, "segments of ranks 0 and 1 overlap at entry 1"),
        ((([2, 2, 2], 0),), ValueError, "ranks 0 and 1 overlap"),
        ((), ValueError, "1 items"),
    ],
)
def test_wrong_vector_forms(rest: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"recvbuf on rank 2: .*{match}"):
        recv_v([np.zeros(10, np.float32), *rest], 3)


def test_segments_to_send_may_overlap() -> None:
    assert send_v([np.zeros(4), ([4, 4], [0, 0])], 2).displs == (0, 0)


def test_bytes_left_over_matter_only_without_counts() -> None:
    memory = bytearray(10)
    assert recv_v([memory, [1, 1], "f"], 2).buffer.count == 2
    with pytest.raises(ValueError, match="10 bytes are not a whole number"):
        recv_v([memory, "f"], 2)


@given(st.integers(1, 9), st.integers(0, 60))
def test_a_default_division_covers_everything_once(size: int, total: int) -> None:
    v = recv_v(np.zeros(total, np.int8), size)
    assert v.dense and v.total == total and max(v.counts) - min(v.counts) <= 1
    assert list(v.counts) == sorted(v.counts, reverse=True)


@given(st.data())
def test_segments_are_accepted_exactly_if_they_fit_and_do_not_overlap(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    counts = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    displs = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    touched = [d + i for c, d in zip(counts, displs, strict=True) for i in range(c)]
    spec = [np.zeros(10), (counts, displs)]
    if max(touched, default=0) >= 10:
        with pytest.raises(ValueError, match="exceeds"):
            send_v(spec, size)
    else:
        assert send_v(spec, size).displs == tuple(displs)
        if len(set(touched)) == len(touched):
            assert recv_v(spec, size).counts == tuple(counts)
        else:
            with pytest.raises(ValueError, match="overlap"):
                recv_v(spec, size)
