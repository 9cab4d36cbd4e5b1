"""Elements that are not contiguous: described, packed, unpacked, and refused where that cannot work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from ucc_hetero.buffers import Buffer, Layout, as_buffer, as_vbuffer, pack, unpack
from ucc_hetero.buffers.model import bounds, merge, scattered
from ucc_hetero.types import DTYPES


def buffer_of(spec: object, writable: bool = True) -> Buffer:
    return as_buffer(spec, writable=writable, argument="buf", rank=0)


def values(packed: Buffer, dtype: Any) -> np.ndarray[Any, Any]:
    assert isinstance(packed.owner, np.ndarray)
    return packed.owner.reshape(-1).view(dtype)


@st.composite
def views(draw: st.DrawFn, apart: int = 1) -> np.ndarray[Any, Any]:
    """A basic slice of a transposed array: steps of both signs, dropped and added axes, empty results.

    The array has one of every ``apart`` elements of memory.
    """
    base = draw(array_shapes(min_dims=1, max_dims=4, max_side=5))
    name = draw(st.sampled_from(["int8", "float16", "float32", "complex64", "complex128"]))
    whole = np.arange(np.prod(base) * apart).astype(name).reshape(*base, apart)[..., 0]
    whole = whole.transpose(draw(st.permutations(range(whole.ndim))))
    index = draw(basic_indices(whole.shape, allow_newaxis=True, allow_ellipsis=False, max_dims=5))
    # With the ellipsis the result is an array even where the index names one element.
    return whole[(*(index if isinstance(index, tuple) else (index,)), ...)]


@given(views())
def test_pack_and_unpack_any_view(view: np.ndarray[Any, Any]) -> None:
    buffer = buffer_of(view)
    assert buffer.count == view.size and buffer.contiguous == view.flags.forc
    packed = pack(buffer)
    if buffer.contiguous:
        assert packed is buffer
        unpack(packed, buffer)
        return
    assert packed.contiguous and not packed.readonly and packed.vendor == "host"
    flat = values(packed, view.dtype)
    np.testing.assert_array_equal(flat, view.ravel())
    whole = view.base.copy() if view.base is not None else None
    expected = (view + 1).astype(view.dtype)
    flat += 1
    unpack(packed, buffer)
    np.testing.assert_array_equal(view, expected)
    if whole is not None and view.base is not None:
        assert np.count_nonzero(whole != view.base) <= view.size  # nothing beside the view was touched


@given(views(apart=2), st.data())
def test_part_of_a_view(view: np.ndarray[Any, Any], data: st.DataObject) -> None:
    if view.flags.forc:
        return  # one element, or none
    first = data.draw(st.integers(0, view.size))
    count = data.draw(st.integers(0, view.size - first))
    buffer = buffer_of([view, (count, first)])
    packed = pack(buffer)
    assert packed.count == count
    np.testing.assert_array_equal(values(packed, view.dtype), view.ravel()[first : first + count])
    expected = view.ravel()
    expected[first : first + count] += 1
    values(packed, view.dtype)[...] += 1
    unpack(packed, buffer)
    np.testing.assert_array_equal(view.ravel(), expected)


@given(views())
def test_no_false_alarm_about_overlap(view: np.ndarray[Any, Any]) -> None:
    dims = merge(zip(view.shape, view.strides, strict=True), view.itemsize)
    assert scattered(dims, view.itemsize)
    steps = [(count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True)]
    touched = (sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + view.itemsize)
    assert bounds(dims, view.itemsize) == (touched if view.size else (0, 0))


def test_bits_are_copied_whatever_they_mean() -> None:
    nans = np.array([0x7F800001, 0, 0xFFC12345, 0], np.uint32).view(np.float32)[::2]
    assert values(pack(buffer_of(nans)), np.uint32).tolist() == [0x7F800001, 0xFFC12345]


def test_read_only_views_are_sent() -> None:
    spread = np.broadcast_to(np.arange(3.0), (2, 3))
    assert values(pack(buffer_of(spread, writable=False)), float).tolist() == [0, 1, 2, 0, 1, 2]
    reverse = np.arange(3.0)[::-1]
    reverse.flags.writeable = False
    buffer = buffer_of(reverse, writable=False)
    packed = pack(buffer)
    assert values(packed, float).tolist() == [2, 1, 0]
    with pytest.raises(BufferError, match="read-only"):
        unpack(packed, buffer)


def test_overlapping_elements_cannot_receive() -> None:
    windows = np.lib.stride_tricks.as_strided(np.zeros(6), (4, 3), (8, 8))
    assert pack(buffer_of(windows, writable=False)).count == 12
    with pytest.raises(BufferError, match="buf on rank 0: elements of the buffer overlap"):
        buffer_of(windows)


def test_strided_memory_is_not_relabelled() -> None:
    x = np.zeros((4, 4), np.float32)[:, ::2]
    assert buffer_of([x, "int32"]).dtype.name == "int32"
    with pytest.raises(BufferError, match=r"4-byte elements cannot be read as float64.*ascontiguousarray"):
        buffer_of([x, "float64"])
    with pytest.raises(ValueError, match="count 9 from element 0 on exceeds the 8 elements"):
        buffer_of([x, 9])
    with pytest.raises(ValueError, match="count 5 from element 4 on"):
        buffer_of([x, (5, 4)])


def test_segments_of_a_view() -> None:
    x = np.arange(12.0).reshape(3, 4)[:, ::2]
    v = as_vbuffer([x, [1, 2, 3]], 3, writable=True, argument="buf", rank=0)
    assert v.displs == (0, 1, 3)
    assert values(pack(v.buffer), float).tolist() == x.ravel().tolist()


def test_only_host_memory_is_packed_here() -> None:
    device = Buffer(0x1000, 4, DTYPES["float32"], "amd", 0, None, False, Layout(((4, 8),)))
    with pytest.raises(BufferError, match="amd memory"):
        pack(device)


def test_unpack_wants_what_pack_made() -> None:
    buffer = buffer_of(np.arange(6.0)[::2])
    other = pack(buffer_of(np.arange(8.0)[::2]))
    for packed in (other, buffer_of(np.arange(6.0)[::2])):
        with pytest.raises(ValueError, match="is not the packed form of"):
            unpack(packed, buffer)
