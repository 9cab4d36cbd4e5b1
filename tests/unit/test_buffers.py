"""as_buffer and as_vbuffer over host memory: protocols, dtypes, mpi4py's forms, strides, and every refusal."""

import array
import ctypes
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
from buffer_specs import recv, recv_v, send, send_v
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices
from processes import python

from ucc_hetero.buffers import Buffer, Layout, as_blocks, copy, dtype_of, pack
from ucc_hetero.buffers.buffer import bounds, merge, scattered
from ucc_hetero.types import BYTES, DTYPES

NUMPY_NAMES = [n for n in DTYPES if not n.startswith(("bfloat", "float8"))]


def read_only(x):
    x.flags.writeable = False
    return x


def values(packed, dtype):
    assert isinstance(packed.owner, np.ndarray)
    return packed.owner.reshape(-1).view(dtype)


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_numpy_array(name):
    x = np.ones((3, 5), name)
    for buffer in (send(x), recv(x), recv([x, name]), recv((x, 15, np.dtype(name)))):
        assert buffer == Buffer(x.ctypes.data, 15, DTYPES[name], "host", 0, x, False)
        assert buffer.contiguous and buffer.nbytes == x.nbytes


@pytest.mark.parametrize(("obj", "name", "count"), [
    (array.array("d", [1.0, 2.0]), "float64", 2),
    (array.array("l", [1]), f"int{8 * ctypes.sizeof(ctypes.c_long)}", 1), (bytearray(5), "uint8", 5),
    (memoryview(bytearray(8)).cast("f"), "float32", 2), (memoryview(bytearray(8)).cast("c"), "int8", 8),
    (memoryview(bytearray(8)).cast("?"), "bool", 8),
    (memoryview(bytearray(24)).cast("B").cast("i", (2, 3)), "int32", 6), ((ctypes.c_double * 3)(), "float64", 3),
    ((ctypes.c_int16 * 2 * 3)(), "int16", 6), (ctypes.c_uint64(5), "uint64", 1), (mmap.mmap(-1, 4096), "uint8", 4096),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_buffer_protocol(obj, name, count):
    buffer = recv(obj)
    assert (buffer.dtype.name, buffer.count, buffer.vendor, buffer.readonly) == (name, count, "host", False)
    assert buffer.ptr == np.asarray(memoryview(obj)).ctypes.data


def test_what_cannot_be_written_to_can_be_sent():
    x = read_only(np.arange(4))
    assert send(x).readonly and send(x).ptr == x.ctypes.data
    assert send(b"abcd").count == 4
    assert send(np.float32(1.5)).dtype.name == "float32"
    assert send(memoryview(b"abcdefgh").cast("d")).count == 1
    spread = np.broadcast_to(np.arange(3.0), (2, 3))
    assert values(pack(send(spread)), float).tolist() == [0, 1, 2, 0, 1, 2]
    reverse = send(read_only(np.arange(3.0)[::-1]))
    assert values(pack(reverse), float).tolist() == [2, 1, 0]
    with pytest.raises(BufferError, match="read-only"):
        copy(pack(reverse), reverse)
    assert send([np.arange(4, dtype=">i4"), "uint8"]).count == 16
    assert send([np.zeros(3, [("a", "f4"), ("b", "i8")]), np.uint8]).count == 36
    assert send(np.zeros(3).view(type("Odd", (np.ndarray,), {}))).count == 3, "of a class derived from numpy's"
    windows = np.lib.stride_tricks.as_strided(np.zeros(6), (4, 3), (8, 8))
    assert pack(send(windows)).count == 12


def test_the_buffer_keeps_its_memory_alive_and_unresized():
    memory = bytearray(16)
    buffer = recv(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del buffer
    gc.collect()
    memory.extend(b"more")
    x = np.arange(1000.0)
    buffer = recv(x)
    del x
    assert isinstance(buffer.owner, np.ndarray) and buffer.owner[999] == 999.0


@pytest.mark.parametrize(("spec", "name"), [
    (float, "float64"), (complex, "complex128"), (bool, "bool"), ("c", "int8"), ("S1", "int8"), ("q", "int64"),
    ("Zf", "complex64"), ("longlong", "int64"), ("ulonglong", "uint64"),
])  # fmt: skip
def test_other_spellings(spec, name):
    assert dtype_of(spec) is DTYPES[name]


@pytest.mark.parametrize(("spec", "match"), [
    (np.dtype([("a", ">f4")]), r"pass \[buf, MPI.BYTE\]"), (np.dtype(">U3"), "encode it"),
    (np.dtype(">f4"), r"'>f4' has foreign byte order; convert it with \.astype\('float32'\)"),
    (np.longdouble, "longdouble.*cast it to float64"), ("clongdouble", "cast it to complex128"),
    (object, "object.*pickle"), ("M8[s]", r"M8\[s\].*datetime64.*view"),
    (np.dtype([("a", "f4"), ("b", "i4")]), "void.*MPI.BYTE"), ("U4", "encode"),
    (np.rec.array([(1, 2.0)], dtype=[("a", "f4"), ("b", "i4")]).dtype, "record.*MPI.BYTE"), ("S4", "S4.*MPI.BYTE"),
    ("nonsense", "'nonsense' is not supported"), ("int4", "int4'? is not supported"),
    (None, "None .*is not a datatype"), (7, "7 .*is not a datatype"), ([1], "is not a datatype"),
])  # fmt: skip
def test_unsupported_dtypes_are_refused_by_name(spec, match):
    with pytest.raises(TypeError, match=match):
        dtype_of(spec)


@pytest.mark.parametrize("code", ["g", "G"])
def test_long_doubles_move_as_bytes(code):
    x = np.zeros((3, 4), code)
    for spec, blocks in ((x, 1), (memoryview(x), 1), ([x, code], 1), ([x, x.dtype.type], 1), ([x, 4, x.dtype], 3)):
        buffer = recv(spec, blocks=blocks)
        assert (buffer.ptr, buffer.dtype, buffer.count, buffer.layout) == (x.ctypes.data, BYTES, x.nbytes, None)
    assert recv_v([x, [5, 7]], 2).counts == (5 * x.itemsize, 7 * x.itemsize)


def test_ml_dtypes_without_the_buffer_protocol():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"):
        x = np.ones(6, getattr(ml_dtypes, name))
        assert recv(x) == Buffer(x.ctypes.data, 6, DTYPES[name], "host", 0, x, False)
        assert dtype_of(getattr(ml_dtypes, name)) is dtype_of(x.dtype) is DTYPES[name]
        assert recv(x[::2]).count == 3
    with pytest.raises(TypeError, match="int4 is not supported"):
        dtype_of(ml_dtypes.int4)


def test_import_loads_neither_mpi_nor_frameworks():
    unwanted = {"mpi4py.MPI", "torch", "ml_dtypes", "asyncio", "ssl"}
    python(f"import sys, ucc_hetero.buffers; loaded = {unwanted} & set(sys.modules); assert not loaded, loaded")


def test_forms():
    x = np.zeros(12, np.float32)
    base = x.ctypes.data
    for spec, offset, count, name in [
        ([x, 4], 0, 4, "float32"), ((x, np.int64(4)), 0, 4, "float32"), ([x, "f"], 0, 12, "float32"),
        ([x, "float64"], 0, 6, "float64"), ([x, 3, "d"], 0, 3, "float64"), ([x, None, "d"], 0, 6, "float64"),
        ([x, 0], 0, 0, "float32"), ([x, (4, 2)], 8, 4, "float32"), ([x, [4, 2], "i"], 8, 4, "int32"),
        ([x, (None, 2), "d"], 16, 4, "float64"), ([x, 4, 2, "f"], 8, 4, "float32"),
        ([x, 12, 0, DTYPES["float32"]], 0, 12, "float32"), ([bytearray(8), float], None, 1, "float64"),
    ]:  # fmt: skip
        buffer = recv(spec)
        assert (buffer.count, buffer.dtype.name) == (count, name), spec
        assert offset is None or buffer.ptr == base + offset, spec
    # An explicit count is the count for one rank.
    assert [recv(spec, blocks=4).count for spec in (x, [x, 2], [x, 3, "f"])] == [12, 8, 12]
    assert send([None, 0, "f"]).count == 0 and send([None, "f"]).ptr == 0
    assert send_v([None, [0, 0], "f"], 2).counts == (0, 0)


def test_vector_forms():
    x = np.zeros(10, np.float32)
    for spec, counts, displs in [
        (x, (4, 3, 3), (0, 4, 7)), ([x, "f"], (4, 3, 3), (0, 4, 7)), ([x, "d"], (2, 2, 1), (0, 2, 4)),
        ([x, [1, 2, 3]], (1, 2, 3), (0, 1, 3)), ([x, np.array([1, 2, 3])], (1, 2, 3), (0, 1, 3)),
        ([x, array.array("q", [1, 2, 3]), "f"], (1, 2, 3), (0, 1, 3)), ([x, 2], (2, 2, 2), (0, 2, 4)),
        ([x, (2, 3)], (2, 2, 2), (0, 3, 6)), ([x, ([1, 0, 3], None)], (1, 0, 3), (0, 1, 1)),
        ([x, ([1, 2, 3], [7, 5, 0])], (1, 2, 3), (7, 5, 0)), ([x, ((1, 2, 3), (7, 5, 0)), "f"], (1, 2, 3), (7, 5, 0)),
        ([x, (1, 2, 3), (7, 5, 0), "f"], (1, 2, 3), (7, 5, 0)), ([x, None, None, "f"], (4, 3, 3), (0, 4, 7)),
    ]:  # fmt: skip
        for v in (send_v(spec, 3), recv_v(spec, 3)):
            assert (v.counts, v.displs) == (counts, displs), spec
            assert v.buffer.ptr == x.ctypes.data
    assert recv_v([x, [1, 2, 3]], 3).dense and not recv_v([x, (2, 3)], 3).dense
    assert recv_v(x[:0], 3).counts == (0, 0, 0)


@given(st.integers(1, 9), st.integers(0, 60))
def test_a_default_division_covers_everything_once(size, total):
    v = recv_v(np.zeros(total, np.int8), size)
    assert v.dense and sum(v.counts) == total and max(v.counts) - min(v.counts) <= 1
    assert list(v.counts) == sorted(v.counts, reverse=True)


@given(st.data())
def test_segments_are_accepted_exactly_if_they_fit_and_do_not_overlap(data):
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


@st.composite
def views(draw, apart=1):
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
def test_any_view_is_packed_and_copied_back(view):
    buffer = recv(view)
    assert buffer.count == view.size and buffer.contiguous == view.flags.forc
    packed = pack(buffer)
    if buffer.contiguous:
        assert packed is buffer
        return
    assert packed.contiguous and not packed.readonly and packed.vendor == "host"
    flat = values(packed, view.dtype)
    np.testing.assert_array_equal(flat, view.ravel())
    whole = view.base.copy() if view.base is not None else None
    expected = (view + 1).astype(view.dtype)
    flat += 1
    copy(packed, buffer)
    np.testing.assert_array_equal(view, expected)
    if whole is not None and view.base is not None:
        assert np.count_nonzero(whole != view.base) <= view.size  # nothing outside the view was changed


@given(views(apart=2), st.data())
def test_part_of_a_view(view, data):
    if view.flags.forc:
        return  # one element, or none
    first = data.draw(st.integers(0, view.size))
    count = data.draw(st.integers(0, view.size - first))
    buffer = recv([view, (count, first)])
    packed = pack(buffer)
    assert packed.count == count
    np.testing.assert_array_equal(values(packed, view.dtype), view.ravel()[first : first + count])
    expected = view.ravel()
    expected[first : first + count] += 1
    values(packed, view.dtype)[...] += 1
    copy(packed, buffer)
    np.testing.assert_array_equal(view.ravel(), expected)


@given(views())
def test_no_false_alarm_about_overlap(view):
    dims = merge(zip(view.shape, view.strides, strict=True), view.itemsize)
    assert scattered(dims, view.itemsize)
    steps = [(count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True)]
    touched = (sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + view.itemsize)
    assert bounds(dims, view.itemsize) == (touched if view.size else (0, 0))


def test_segments_of_a_view():
    x = np.arange(12.0).reshape(3, 4)[:, ::2]
    v = recv_v([x, [1, 2, 3]], 3)
    assert v.displs == (0, 1, 3) and recv([x.astype("f4")[:, ::2], "int32"]).dtype.name == "int32"
    assert values(pack(v.buffer), float).tolist() == x.ravel().tolist()


def test_what_is_packed_here_and_copied():
    # Bits are copied without interpretation.
    nans = np.array([0x7F800001, 0, 0xFFC12345, 0], np.uint32).view(np.float32)[::2]
    assert values(pack(recv(nans)), np.uint32).tolist() == [0x7F800001, 0xFFC12345]
    device = Buffer(0x1000, 4, DTYPES["float32"], "amd", 0, None, False, Layout(((4, 8),)))
    with pytest.raises(BufferError, match="amd memory"):
        pack(device)
    other = pack(recv(np.arange(8.0)[::2]))
    with pytest.raises(ValueError, match="cannot be copied to"):
        copy(other, recv(np.arange(6.0)[::2]))


#: Refused buffers, made from twelve, ten or strided float32; the errors, and words of their messages.
REFUSED = [
    *((lambda x, obj=obj: send(obj), TypeError, "exports no memory")
      for obj in (3, 2.5, "text", object(), {"a": 1}, np.add, range(3))),
    (lambda x: send(None), TypeError, r"None \(IN_PLACE\) is not a buffer"),
    (lambda x: send([None, 3, "f"]), ValueError, "buffer is None but its count is 3"),
    (lambda x: send(np.ma.masked_array([1, 2], [True, False])), TypeError, "filled"),
    (lambda x: send(array.array("u", "ab")), TypeError, "encode it to bytes"),
    (lambda x: send(np.arange(4, dtype=">i4")), TypeError, "byte order"),
    (lambda x: send(np.zeros(3, [("a", "f4")])), TypeError, "void"),
    (lambda x: send([np.array([{}, None]), "uint8"]), TypeError, "Python objects"),
    (lambda x: recv(read_only(x)), BufferError, "ndarray is read-only and cannot receive"),
    (lambda x: recv([b"abc", "uint8"]), BufferError, "bytes is read-only"),
    (lambda x: recv(np.lib.stride_tricks.as_strided(x, (4, 3), (4, 4))), BufferError, "elements of the buffer overlap"),
    (lambda x: recv(x, blocks=5), ValueError, "12 elements cannot be divided evenly among the 5 ranks"),
    (lambda x: recv([x, "f"], blocks=5), ValueError, "12 elements cannot be divided evenly among the 5 ranks"),
    (lambda x: recv([x, 4], blocks=4), ValueError, "48 bytes"),
    (lambda x: recv([x, 13]), ValueError, "13 entries of float32 from byte 0 .*48 bytes"),
    (lambda x: recv([x, (10, 3)]), ValueError, "from byte 12"),
    (lambda x: recv([x, (None, 13)]), ValueError, "displacement 13 lies outside"),
    (lambda x: recv([x, -1]), ValueError, "count -1 is negative"),
    (lambda x: recv([x, (1, -1)]), ValueError, "displacement -1 is negative"),
    (lambda x: recv([x, 2.0]), TypeError, "count 2.0 is not an integer"),
    *((lambda x, rest=rest: recv([x, *rest]), ValueError, r"neither a number nor \(count, displ\)")
      for rest in (((1, 2, 3),), ((4, 2), 0, "f"))),
    (lambda x: as_blocks([x, 3, ["f"]], 1, writable=True, argument="recvbuf", rank=2), ValueError, "3 is not .counts"),
    (lambda x: recv([x]), ValueError, "a list of 1 items is not a message"),
    (lambda x: recv(()), ValueError, "a tuple of 0 items"),
    (lambda x: recv([x, 1, 0, "f", 5]), ValueError, "5 items"),
    (lambda x: recv([x, 1, "nonsense"]), TypeError, "nonsense"),
    (lambda x: recv([x, 1, 2.5]), TypeError, "2.5 .* is not a datatype"),
    (lambda x: recv([x[:3], "d"]), ValueError, "12 bytes are not a whole number of entries of float64"),
    (lambda x: recv([x, 2**63]), ValueError, str(2**63)),
    (lambda x: recv([[1.0, 2.0], 2]), TypeError, "exports no memory"),
    (lambda x: recv([x[::2], "float64"]), BufferError, "4-byte elements cannot be read as float64.*ascontiguousarray"),
    (lambda x: recv([x[::2], 7]), ValueError, "count 7 from element 0 on exceeds the 6 elements"),
    (lambda x: recv([x[::2], (3, 4)]), ValueError, "count 3 from element 4 on"),
    (lambda x: recv_v([bytearray(10), "f"], 2), ValueError, "10 bytes are not a whole number"),
    *((lambda x, rest=rest: recv_v([x[:10], *rest], 3), error, match) for rest, error, match in (
        (([1, 2],), ValueError, "2 counts given for a communicator of size 3"),
        (([1, 2, 3], [0, 1], "f"), ValueError, "2 displs given for a communicator of size 3"),
        (([1, -2, 3],), ValueError, r"counts\[1\] is -2"), ((-1,), ValueError, "count -1 is negative"),
        ((([1, 1, 1], [0, -4, 1]),), ValueError, r"displs\[1\] is -4"),
        (([1, 2.0, 3],), TypeError, "not integers"), ((np.ones(3),), TypeError, "not integers"),
        ((object(),), TypeError, "not integers"), ((), ValueError, "1 items"),
        (([4, 4, 4],), ValueError, r"the segment of rank 2 \(of 3\), 4 entries from entry 8 on, exceeds .* of 10"),
        ((([1, 1, 1], [0, 10, 1]),), ValueError, "rank 1"),
        (((1, 2, 3),), ValueError, "pass counts alone as a list"),
        ((([2, 2, 2], [0, 1, 8]),), ValueError, "segments of ranks 0 and 1 overlap at entry 1"),
        ((([2, 2, 2], 0),), ValueError, "ranks 0 and 1 overlap"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "match"), REFUSED, ids=[match for *_, match in REFUSED])
def test_refused(call, error, match):
    with pytest.raises(error, match=f"(send|recv)buf on rank 2: .*{match}"):
        call(np.zeros(12, np.float32))


MPI_CASES = Path(__file__).with_name("buffers_mpi_cases.py")


def test_against_mpi4py():
    """MPI datatypes and constants, in a separate process: initialising MPI changes the environment of later jobs."""
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py")
    probe = python("import mpi4py.MPI", check=False)
    if probe.returncode:
        pytest.skip(f"MPI does not start without mpirun here: {probe.stderr[-300:]}")
    run = python("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", "-q", "-p", "no:cacheprovider", MPI_CASES)
    assert " passed" in run.stdout
