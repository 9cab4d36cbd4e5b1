"""MPI datatypes and constants compared with mpi4py. test_buffers.py runs this file in a separate process."""

import numpy as np
import pytest
from buffer_specs import recv, recv_v
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from ucc_hetero.buffers import as_blocks, copy, dtype_of, is_in_place, pack
from ucc_hetero.types import BYTES, DTYPES, OPS, reduction

C_TYPES = {
    "INT8_T INTEGER1 SIGNED_CHAR CHAR SINT8_T": "int8", "INT16_T SHORT INTEGER2": "int16",
    "INT32_T INT INTEGER INTEGER4 SIGNED_INT": "int32", "INT64_T LONG LONG_LONG INTEGER8 AINT COUNT OFFSET": "int64",
    "UINT8_T BYTE PACKED UNSIGNED_CHAR": "uint8", "UINT16_T UNSIGNED_SHORT": "uint16",
    "UINT32_T UNSIGNED UNSIGNED_INT": "uint32", "UINT64_T UNSIGNED_LONG UNSIGNED_LONG_LONG": "uint64",
    "BOOL C_BOOL CXX_BOOL": "bool", "REAL2": "float16", "FLOAT REAL REAL4 F_FLOAT": "float32",
    "DOUBLE REAL8 DOUBLE_PRECISION": "float64",
    "C_COMPLEX C_FLOAT_COMPLEX COMPLEX COMPLEX8 CXX_FLOAT_COMPLEX": "complex64",
    "C_DOUBLE_COMPLEX DOUBLE_COMPLEX COMPLEX16": "complex128", "BFLOAT16_T": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), [(n, e) for names, e in C_TYPES.items() for n in names.split()])
def test_predefined_datatypes(name, expected):
    datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
    if datatype == MPI.DATATYPE_NULL or datatype.size == 0:
        pytest.skip(f"this MPI has no {name}")
    for _ in range(2):
        assert dtype_of(datatype) is DTYPES[expected]
    x = np.zeros(datatype.size * 4, np.uint8)
    assert recv([x, datatype]).count == recv([x, 4, datatype]).count == 4


@pytest.mark.parametrize("name", ["SHORT_INT", "DATATYPE_NULL"])
def test_datatypes_refused_by_name(name):
    with pytest.raises(TypeError, match=f"recvbuf on rank 2: .*{name.split('_')[0]}"):
        recv([bytearray(64), getattr(MPI, name)])


@pytest.mark.parametrize("name", ["LONG_DOUBLE", "C_LONG_DOUBLE_COMPLEX", "WCHAR", "FLOAT_INT", "TWOINT"])
def test_datatypes_that_nothing_computes_with_move_as_bytes(name):
    datatype = getattr(MPI, name)
    x = np.zeros(4 * datatype.size, np.uint8)
    for buffer in (recv([x, datatype]), recv([x, 4, datatype]), recv([x, 2, datatype], blocks=2)):
        assert (buffer.dtype, buffer.count, buffer.layout) == (BYTES, x.size, None)
    v = recv_v([x, [1, 2], datatype], 2)
    assert v.counts == (datatype.size, 2 * datatype.size)
    assert all(reduction(BYTES, op) is None for op in OPS.values())


def test_constants():
    assert is_in_place(MPI.IN_PLACE) and is_in_place(None)
    assert not is_in_place(MPI.BOTTOM) and not is_in_place(-1) and not is_in_place(np.zeros(1))
    spec: object
    with pytest.raises(TypeError, match=r"recvbuf on rank 2"):
        recv(MPI.BOTTOM)
    x = np.arange(4, dtype=np.float32)
    assert recv([MPI.BOTTOM, (4, x.ctypes.data // 4), MPI.FLOAT]).ptr == x.ctypes.data
    for spec in (MPI.IN_PLACE, [MPI.IN_PLACE, 4, MPI.FLOAT]):
        with pytest.raises(TypeError, match=r"recvbuf on rank 2: MPI\.IN_PLACE is not a buffer"):
            recv(spec)
    assert recv([None, 0, MPI.INT]).count == 0


def test_memory_as_long_as_the_data_that_a_datatype_spreads():
    x, column = np.zeros((6, 4)), MPI.DOUBLE.Create_vector(6, 1, 4).Create_resized(0, 8).Commit()
    address = x.ctypes.data
    buffer = recv([MPI.memory.fromaddress(address, 12 * 8), 2, column])
    assert (buffer.ptr, buffer.count) == (address, 12) and buffer.layout is not None
    for nbytes in (11 * 8, 13 * 8):
        with pytest.raises(ValueError, match="occupy bytes 0 to"):
            recv([MPI.memory.fromaddress(address, nbytes), 2, column])
    with pytest.raises(ValueError, match="occupy bytes 0 to"):
        recv([x.ravel()[:12], 2, column])
    column.Free()


def test_memory_of_mpi4py():
    memory = MPI.Alloc_mem(16)
    assert recv([memory, MPI.DOUBLE]).count == 2 and recv(memory).dtype.name == "uint8"
    MPI.Free_mem(memory)


def check_against_mpi(datatype, entries, room=4096):
    run = datatype.Create_contiguous(entries)
    whole = run.Create_resized(0, room).Commit()  # MPI_Pack takes as many as fit: one
    try:
        x = np.random.default_rng(1).integers(0, 255, room, np.uint8)
        buffer = recv([x, entries, datatype])
        expected = np.zeros(whole.Pack_size(1, MPI.COMM_SELF), np.uint8)
        used = whole.Pack(x, expected, 0, MPI.COMM_SELF)
        assert buffer.nbytes == used
        packed = pack(buffer)
        if packed is buffer:
            start = buffer.ptr - x.ctypes.data
            assert x[start : start + used].tobytes() == expected[:used].tobytes()
            return
        assert isinstance(packed.owner, np.ndarray)
        flat = packed.owner.reshape(-1).view(np.uint8)
        assert flat.tobytes() == expected[:used].tobytes()
        flat ^= 255
        reference = x.copy()
        whole.Unpack(flat.copy(), 0, reference, MPI.COMM_SELF)
        copy(packed, buffer)
        assert x.tobytes() == reference.tobytes()
    finally:
        for made in (whole, run, datatype):
            made.Free()


@settings(max_examples=150)
@given(st.data())
def test_nested_types(data):
    made = [MPI.FLOAT.Dup()]
    for _ in range(data.draw(st.integers(1, 3))):
        count, block, gap = (data.draw(st.integers(1, 3)) for _ in range(3))
        kind = data.draw(st.sampled_from(["contiguous", "vector", "hvector", "resized", "subarray", "columns"]))
        old = made[-1]
        if kind == "contiguous":
            made.append(old.Create_contiguous(count))
        elif kind == "vector":
            made.append(old.Create_vector(count, block, block + gap - 1))
        elif kind == "hvector":
            made.append(old.Create_hvector(count, block, (block + gap - 1) * old.extent + 4))
        elif kind == "columns":
            made.append(old.Create_subarray([count + 1, block + gap], [count, block], [0, gap], MPI.ORDER_FORTRAN))
        elif kind == "resized":
            made.append(old.Create_resized(0, old.extent + 4 * (gap - 1)))
        else:
            made.append(old.Create_subarray([count + 1, block + gap], [count, block], [1, gap - 1]))
    try:
        check_against_mpi(made[-1].Dup(), data.draw(st.integers(0, 2)), room=1 << 17)  # room for 24**3 floats twice
    finally:
        for datatype in made:
            datatype.Free()


def test_columns_of_a_matrix():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    column = MPI.FLOAT.Create_vector(3, 1, 4)
    buffer = recv([x, 1, column])
    packed = pack(buffer)
    assert buffer.count == 3 and isinstance(packed.owner, np.ndarray)
    assert packed.owner.view(np.float32).tolist() == [0, 4, 8]
    for spec, match in [
        ([x, 2, column], "the buffer has 48 bytes"),
        ([x, column], "not a whole number of entries"),
        ([x, (1, 1), column], "the buffer has 48 bytes"),
    ]:
        with pytest.raises(ValueError, match=match):
            recv(spec)
    columns = recv_v([x, [1, 0], column], 2)
    assert columns.buffer.dtype.name == "float32" and sum(columns.counts) == 3
    with pytest.raises(BufferError, match="ascontiguousarray"):
        recv([x[:, ::2], 1, column])
    column.Free()


def test_contiguous_types_in_vector_forms():
    pair = MPI.FLOAT.Create_contiguous(2)
    v = recv_v([np.zeros(12, np.float32), ([1, 2], [3, 0]), pair], 2)
    assert (v.counts, v.displs, v.buffer.dtype.name) == ((2, 4), (6, 0), "float32")
    assert recv_v([np.zeros(10, np.float32), pair], 2).counts == (6, 4)
    pair.Free()


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_structures_move_as_bytes(entries):
    """With gaps, fields in any order, a vector field, and a nested structure."""
    vector = MPI.SHORT.Create_vector(2, 1, 3)
    inner = MPI.Datatype.Create_struct([1, 2, 1], [16, 0, 24], [MPI.DOUBLE, MPI.INT, vector])
    outer = MPI.Datatype.Create_struct([2, 1], [8, 0], [inner, MPI.CHAR])
    for datatype in (inner.Dup(), outer.Dup(), MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.LONG, MPI.DOUBLE])):
        assert recv([bytearray(4096), entries, datatype]).dtype is BYTES
        check_against_mpi(datatype, entries)
    for made in (outer, inner, vector):
        made.Free()


def test_an_address_with_a_datatype_vouches_for_itself():
    """As Heat passes arrays: MPI memory of zero bytes, a count and a datatype."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    bare = MPI.memory.fromaddress(x.ctypes.data, 0)
    column = MPI.FLOAT.Create_vector(4, 1, 6)
    found = recv([bare, 24, MPI.FLOAT])
    assert (found.ptr, found.count) == (x.ctypes.data, 24)
    packed = pack(recv([bare, 1, column]))
    assert isinstance(packed.owner, np.ndarray)
    assert packed.owner.view(np.float32).tolist() == [0, 6, 12, 18]
    v = recv_v([bare, ([2, 3], [0, 6]), MPI.FLOAT], 2)
    assert v.counts == (2, 3)
    blocks = as_blocks([bare, ([1, 2], [0, 4]), [column, MPI.FLOAT]], 2, writable=True, argument="x", rank=0)
    assert [block.count for block in blocks] == [4, 2]
    assert blocks[1].ptr == x.ctypes.data + 4
    assert recv([bare, MPI.FLOAT]).count == 0, "as in mpi4py"
    for spec in ([bare, 24, np.float32], [MPI.memory.fromaddress(x.ctypes.data, 8), 24, MPI.FLOAT]):
        with pytest.raises(ValueError, match="the buffer has"):
            recv(spec)
    asked = recv([bare, 24, MPI.FLOAT], pointer_vendor=lambda address: ("nvidia", 1))
    assert (asked.vendor, asked.device) == ("nvidia", 1)

    def unknown(address):
        raise BufferError("no memory of nvidia")

    assert recv([bare, 24, MPI.FLOAT], pointer_vendor=unknown).vendor == "host"
    column.Free()


def test_kinds_of_derived_types_that_are_refused():
    datatype = MPI.INT.Create_darray(1, 0, [4], [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [1])
    with pytest.raises(TypeError, match=r"recvbuf on rank 2"):
        recv([bytearray(64), 1, datatype])
    datatype.Free()
