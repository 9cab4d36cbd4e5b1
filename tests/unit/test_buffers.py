"""as_buffer over host memory: protocols, dtypes, and every refusal; forms are in test_buffers_forms.py."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ucc_hetero.buffers import Buffer, VBuffer, as_buffer, as_vbuffer, dtype_of, is_in_place
from ucc_hetero.types import DTYPES

NUMPY_NAMES = [n for n in DTYPES if not n.startswith(("bfloat", "float8"))]


def send(spec: object, **kwargs: Any) -> Buffer:
    return as_buffer(spec, writable=False, argument="sendbuf", rank=2, **kwargs)


def recv(spec: object, **kwargs: Any) -> Buffer:
    return as_buffer(spec, writable=True, argument="recvbuf", rank=2, **kwargs)


def recv_v(spec: object, size: int) -> VBuffer:
    return as_vbuffer(spec, size, writable=True, argument="recvbuf", rank=2)


# --- protocols -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_numpy_array(name: str) -> None:
    x = np.ones((3, 5), name)
    for buffer in (send(x), recv(x), recv([x, name]), recv((x, 15, np.dtype(name)))):
        assert buffer == Buffer(x.ctypes.data, 15, DTYPES[name], "host", 0, x, False)
        assert buffer.contiguous and buffer.nbytes == x.nbytes


def test_read_only_array_sends_but_does_not_receive() -> None:
    x = np.arange(4)
    x.flags.writeable = False
    assert send(x).readonly and send(x).ptr == x.ctypes.data
    with pytest.raises(BufferError, match="recvbuf on rank 2: ndarray is read-only and cannot receive"):
        recv(x)
    with pytest.raises(BufferError, match="bytes is read-only"):
        recv([b"abc", "uint8"])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (1, 1, 1)])
def test_zero_dimensional_and_empty_arrays(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert recv(x).count == x.size and recv(x).contiguous
    assert recv_v([x, [x.size, 0]], 2).counts == (x.size, 0)


def test_fortran_order_is_contiguous_memory() -> None:
    x = np.zeros((3, 4), order="F")
    assert recv(x).contiguous and recv(x).count == 12


@pytest.mark.parametrize(
    ("obj", "name", "count"),
    [
        (array.array("d", [1.0, 2.0]), "float64", 2),
        (array.array("l", [1]), f"int{8 * ctypes.sizeof(ctypes.c_long)}", 1),
        (bytearray(5), "uint8", 5),
        (memoryview(bytearray(8)).cast("f"), "float32", 2),
        (memoryview(bytearray(8)).cast("c"), "int8", 8),
        (memoryview(bytearray(8)).cast("?"), "bool", 8),
        (memoryview(bytearray(24)).cast("B").cast("i", (2, 3)), "int32", 6),
        ((ctypes.c_double * 3)(), "float64", 3),
        ((ctypes.c_int16 * 2 * 3)(), "int16", 6),
        (ctypes.c_uint64(5), "uint64", 1),
        (mmap.mmap(-1, 4096), "uint8", 4096),
    ],
    ids=lambda value: type(value).__name__,
)
def test_buffer_protocol(obj: Any, name: str, count: int) -> None:
    buffer = recv(obj)
    assert (buffer.dtype.name, buffer.count, buffer.vendor, buffer.readonly) == (name, count, "host", False)
    assert buffer.ptr == np.asarray(memoryview(obj)).ctypes.data


def test_read_only_exporters_can_be_sent() -> None:
    assert send(b"abcd").count == 4
    assert send(np.float32(1.5)).dtype.name == "float32"
    assert send(memoryview(b"abcdefgh").cast("d")).count == 1


def test_the_buffer_keeps_its_memory_alive_and_unresized() -> None:
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


def test_owner_takes_no_part_in_comparison() -> None:
    x = np.ones(3)
    assert recv(x) == recv(x) and "owner" not in repr(recv(x))
    with pytest.raises(AttributeError):
        recv(x).count = 1  # type: ignore[misc]


@pytest.mark.parametrize("obj", [3, 2.5, "text", object(), {"a": 1}, np.add, range(3)])
def test_not_memory(obj: object) -> None:
    with pytest.raises(TypeError, match=r"sendbuf on rank 2: .*exports no memory"):
        send(obj)


def test_masked_array() -> None:
    with pytest.raises(TypeError, match="filled"):
        send(np.ma.masked_array([1, 2], [True, False]))


def test_subclasses_of_ndarray_are_arrays() -> None:
    class Odd(np.ndarray[Any, Any]):
        pass

    assert send(np.zeros(3).view(Odd)).count == 3


def test_characters_are_refused() -> None:
    with pytest.raises(TypeError, match=r"sendbuf on rank 2: .*encode it to bytes"):
        send(array.array("u", "ab"))


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_name_names_its_dtype(name: str) -> None:
    assert dtype_of(name) is DTYPES[name] and dtype_of(DTYPES[name]) is DTYPES[name]


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_numpy_spellings(name: str) -> None:
    dtype = np.dtype(name)
    for spec in (dtype, dtype.type, dtype.char, dtype.str, "@" + dtype.char):
        assert dtype_of(spec) is DTYPES[name]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (float, "float64"),
        (complex, "complex128"),
        (bool, "bool"),
        ("c", "int8"),
        ("S1", "int8"),
        ("q", "int64"),
        ("Zf", "complex64"),
        ("longlong", "int64"),
        ("ulonglong", "uint64"),
    ],
)
def test_other_spellings(spec: object, name: str) -> None:
    assert dtype_of(spec) is DTYPES[name]


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (np.dtype(">f4"), r"'>f4' has foreign byte order; convert it with \.astype\('float32'\)"),
        (np.longdouble, "longdouble.*cast it to float64"),
        ("clongdouble", "cast it to complex128"),
        (object, "object.*pickle"),
        ("M8[s]", r"M8\[s\].*datetime64.*view"),
        (np.dtype([("a", "f4"), ("b", "i4")]), "void.*MPI.BYTE"),
        ("U4", "encode"),
        ("S4", "bytes.*not supported|S4.*not supported"),
        ("nonsense", "'nonsense' is not supported"),
        ("int4", "'int4' is not supported"),
        (None, "None .*is not a datatype"),
        (7, "7 .*is not a datatype"),
        ([1], "is not a datatype"),
    ],
)
def test_unsupported_dtypes_are_refused_by_name(spec: object, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        dtype_of(spec)


def test_big_endian_arrays_are_refused_unless_moved_as_bytes() -> None:
    x = np.arange(4, dtype=">i4")
    with pytest.raises(TypeError, match=r"sendbuf on rank 2: .*byte order"):
        send(x)
    assert send([x, "uint8"]).count == 16


def test_structured_arrays_move_as_bytes() -> None:
    x = np.zeros(3, [("a", "f4"), ("b", "i8")])
    with pytest.raises(TypeError, match="void"):
        send(x)
    assert send([x, np.uint8]).count == 36


def test_arrays_of_objects_never_move() -> None:
    x = np.array([{}, None])
    with pytest.raises(TypeError, match="Python objects"):
        send([x, "uint8"])


def test_ml_dtypes_without_the_buffer_protocol() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"):
        x = np.ones(6, getattr(ml_dtypes, name))
        assert recv(x) == Buffer(x.ctypes.data, 6, DTYPES[name], "host", 0, x, False)
        assert dtype_of(getattr(ml_dtypes, name)) is dtype_of(x.dtype) is DTYPES[name]
        assert recv(x[::2]).count == 3
    with pytest.raises(TypeError, match="int4 is not supported"):
        dtype_of(ml_dtypes.int4)


# --- the module itself -----------------------------------------------------------------------------------------------


def test_is_in_place_without_mpi() -> None:
    assert is_in_place(None)
    assert not is_in_place(np.zeros(1)) and not is_in_place(0) and not is_in_place(-1)


def test_import_loads_neither_mpi_nor_frameworks() -> None:
    code = (
        "import sys, ucc_hetero.buffers\n"
        "unwanted = {'mpi4py.MPI', 'torch', 'ml_dtypes'}\n"
        "loaded = unwanted & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
