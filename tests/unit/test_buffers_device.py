"""Memory that arrives through DLPack, ``__cuda_array_interface__`` or torch: whose it is; let go exactly once."""

import ctypes
import gc
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from buffer_specs import recv, recv_v, send

from ucc_hetero.buffers import Buffer, dtype_of, pack
from ucc_hetero.buffers.dtypes import DLPackType
from ucc_hetero.types import DTYPES

READ_ONLY, IS_COPIED = 1, 2


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Exporter:
    """Exports an array as DLPack memory of any device: numpy's own capsule, of which something is changed."""

    def __init__(self, data, device=(2, 0), *, versioned=True, version=(1, 0), flags=0, dtype=(2, 32, 1), strides=True):
        self.data, self.device, self.versioned, self.strides = data.view(), device, versioned, strides
        self.version, self.flags, self.dtype, self.asked = version, flags, dtype, []
        self.before = sys.getrefcount(self.data)

    @property
    def held(self):
        """How many exports are there that nobody has let go of."""
        gc.collect()
        return sys.getrefcount(self.data) - self.before

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        self.asked.append(kwargs)
        if not self.versioned and set(kwargs) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        capsule = self.data.__dlpack__(**({"max_version": (1, 0)} if self.versioned else {}))
        at, base = _pointer(capsule, b"dltensor_versioned" if self.versioned else b"dltensor"), 32 * self.versioned
        memory = (ctypes.c_uint8 * (base + 48)).from_address(at)  # DLManagedTensorVersioned, or DLManagedTensor
        if self.versioned:
            struct.pack_into("<II", memory, 0, *self.version)
            struct.pack_into("<Q", memory, 24, self.flags)
        struct.pack_into("<ii", memory, base + 8, *self.device)
        struct.pack_into("<BBH", memory, base + 20, *self.dtype)
        struct.pack_into("<Q", memory, base, self.data.ctypes.data - 8)
        struct.pack_into("<Q", memory, base + 40, 8)  # an offset: the array begins behind the address
        if not self.strides:
            struct.pack_into("<Q", memory, base + 32, 0)
        return capsule


X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(("device", "whose"), [
    ((1, 0), ("host", 0)), ((2, 3), ("nvidia", 3)), ((3, 0), ("host", 0)), ((10, 1), ("amd", 1)),
    ((11, 2), ("host", 0)), ((13, 2), ("nvidia", 2)),
])  # fmt: skip
def test_the_vendor_comes_from_the_dlpack_device(device, whose, versioned):
    exporter = Exporter(X, device, versioned=versioned)
    buffer = recv(exporter)
    assert buffer == Buffer(X.ctypes.data, 12, DTYPES["float32"], *whose, None, False)
    assert exporter.held == 1
    del buffer
    assert exporter.held == 0


def test_the_export_does_not_synchronise_or_copy():
    device, host = Exporter(X), Exporter(X, (1, 0))
    send(device), send(host)
    assert device.asked == [{"stream": -1, "max_version": (1, 0), "copy": False}]
    assert host.asked == [{"max_version": (1, 0), "copy": False}]
    device, host = Exporter(X, versioned=False), Exporter(X, (1, 0), versioned=False)
    send(device), send(host)
    assert device.asked[1:] == [{"stream": -1}]
    assert host.asked[1:] == [{}]


class Computing(Exporter):
    """As JAX's arrays: there only when waited for, and no judge of streams."""

    ready = False

    def block_until_ready(self):
        self.ready = True
        return self

    def __dlpack__(self, **kwargs):
        assert self.ready
        return super().__dlpack__(**kwargs)


@pytest.mark.parametrize("device", [(2, 0), (1, 0)])
def test_what_is_still_computed_is_waited_for(device):
    exporter = Computing(X, device)
    send(exporter)
    assert exporter.asked == [{"max_version": (1, 0), "copy": False}]
    with pytest.raises(BufferError, match="recvbuf on rank 2: Computing is read-only"):
        recv(exporter)


def test_a_refused_export_is_let_go_too():
    exporter = Exporter(X, flags=READ_ONLY)
    assert send(exporter).readonly
    with pytest.raises(BufferError, match="recvbuf on rank 2: Exporter is read-only"):
        recv(exporter)
    with pytest.raises(ValueError, match="13 entries"):
        send([exporter, 13])
    assert exporter.held == 0 and len(exporter.asked) == 3


def test_strided_device_memory_is_refused_with_the_way_out():
    with pytest.raises(BufferError, match=r"strided elements in nvidia device memory .*\.contiguous\(\)"):
        send(Exporter(X[:, ::2]))
    assert send(Exporter(X.T)).contiguous  # Fortran order
    assert send(Exporter(X, strides=False)).contiguous
    assert pack(send(Exporter(X[:, ::2], (1, 0)))).count == 6


def test_exports_that_cannot_be_used():
    for exporter, error, match in [
        (Exporter(X, version=(2, 0)), BufferError, r"DLPack version 2\.0 is not supported"),
        (Exporter(X, flags=IS_COPIED), BufferError, "copy"),
        (Exporter(X, (8, 0)), TypeError, "DLPack device type 8 is not supported"),
        (Exporter(X, dtype=(3, 64, 1)), TypeError, "DLPack code 3, 64 bits, 1 lanes is not supported"),
        (Exporter(X, dtype=(2, 32, 4)), TypeError, "4 lanes is not supported"),
    ]:
        with pytest.raises(error, match=f"sendbuf on rank 2: .*{match}"):
            send(exporter)
        assert exporter.held == 0

    class Nothing:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **_):
            return None

    with pytest.raises(BufferError, match="None, which is not an unused DLPack capsule"):
        send(Nothing())


CODES = {
    (0, 8): "int8", (0, 64): "int64", (1, 16): "uint16", (2, 16): "float16", (2, 64): "float64", (4, 16): "bfloat16",
    (5, 64): "complex64", (5, 128): "complex128", (6, 8): "bool", (10, 8): "float8_e4m3fn", (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz",
}  # fmt: skip


@pytest.mark.parametrize(("code", "bits"), CODES)
def test_dlpack_codes(code, bits):
    assert dtype_of(DLPackType(code, bits, 1)) is DTYPES[CODES[code, bits]]


def interface(array, **changes):
    facts = {"shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, False), "version": 3}
    return SimpleNamespace(__cuda_array_interface__={**facts, **changes})


def test_the_runtime_says_whose_a_bare_pointer_is():
    asked = []

    def whose(ptr):
        asked.append(ptr)
        return "amd", 2

    obj = interface(X)
    buffer = recv(obj, pointer_vendor=whose)
    assert buffer == Buffer(X.ctypes.data, 12, DTYPES["float32"], "amd", 2, obj, False)
    assert buffer.owner is obj and asked == [X.ctypes.data]
    assert recv_v([obj, [6, 6]], 2, pointer_vendor=whose).buffer.vendor == "amd"


def test_interface_details():
    def host(_):
        return "host", 0

    def gpu(_):
        return "nvidia", 0

    gaps = {"strides": X[:, ::2].strides}
    for call, error, match in [
        (lambda: send(interface(X)), BufferError, "does not tell the vendor of pointer 0x.*no GPU runtime is loaded"),
        (lambda: recv(interface(X, data=(X.ctypes.data, True)), pointer_vendor=gpu), BufferError, "read-only"),
        (lambda: send(SimpleNamespace(__cuda_array_interface__=[1])), TypeError, "is a list, not a dict"),
        (lambda: send(interface(X, mask=interface(X)), pointer_vendor=gpu), BufferError, "mask"),
        (lambda: send(interface(X, typestr=">f4"), pointer_vendor=gpu), TypeError, "byte order"),
        (lambda: send(interface(X[:, ::2], **gaps), pointer_vendor=gpu), BufferError, "strided elements in nvidia"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            call()
    assert send(interface(X[:0], data=(0, False))).count == 0  # no pointer: nobody to ask
    assert not send(interface(X[:, ::2], **gaps), pointer_vendor=host).contiguous
    for x in (X, X.T):
        assert send(interface(x, strides=x.strides), pointer_vendor=gpu).contiguous


def test_dlpack_goes_before_the_interface_and_gives_way_to_it():
    both = Exporter(X, (10, 0))
    both.__cuda_array_interface__ = interface(X).__cuda_array_interface__
    assert send(both).vendor == "amd"

    class Refusing:
        __cuda_array_interface__ = interface(X).__cuda_array_interface__

        def __dlpack_device__(self):
            return 2, 1

        def __dlpack__(self, **_):
            raise BufferError("not on the current device")

    assert send(Refusing(), pointer_vendor=lambda ptr: ("nvidia", 1)).device == 1
    with pytest.raises(BufferError, match="not on the current device"):
        send(Refusing())


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[torch]'")
    for name, dtype in DTYPES.items():
        x = torch.zeros(6).to(getattr(torch, name))
        assert recv(x) == Buffer(x.data_ptr(), 6, dtype, "host", 0, x, False)
        assert dtype_of(x.dtype) is dtype
        assert recv([x, x.dtype]).dtype is dtype
    with pytest.raises(TypeError, match=r"torch\.complex32 is not supported"):
        dtype_of(torch.complex32)
    z = torch.zeros(2, dtype=torch.complex64)
    for x, error, match in [
        (z.conj(), BufferError, "resolve_conj"), (z.conj().imag, BufferError, "resolve_neg"),
        (torch.zeros(2, device="meta"), TypeError, "meta"), (torch.zeros(2, 2).to_sparse(), TypeError, "to_dense"),
        (torch.zeros(2).expand(3, 2), BufferError, "overlap"),
    ]:  # fmt: skip
        with pytest.raises(error, match=f"recvbuf on rank 2: .*{match}"):
            recv(x)


def test_torch_device_tensors_are_placed_by_their_dlpack_device(monkeypatch):
    """torch's ROCm build calls its devices by NVIDIA's name; only the DLPack device type differs."""

    DType = type("DType", (), {"__str__": lambda self: "torch.bfloat16"})
    Tensor = type("Tensor", (), {
        "layout": "strided", "dtype": DType(), "shape": (7,), "is_cpu": False, "is_conj": lambda self: False,
        "is_neg": lambda self: False, "is_contiguous": lambda self: True, "element_size": lambda self: 2,
        "data_ptr": lambda self: 0x7000, "device": SimpleNamespace(type="cuda", index=1),
        "__dlpack_device__": lambda self: (10, 1),
    })  # fmt: skip
    fake = SimpleNamespace(Tensor=Tensor, dtype=DType, strided="strided")
    monkeypatch.setitem(sys.modules, "torch", fake)
    tensor = Tensor()
    assert recv(tensor) == Buffer(0x7000, 7, DTYPES["bfloat16"], "amd", 1, tensor, False)
