"""torch's tensors as buffers: shapes, gradients, what is refused, and whose device they are on."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_buffers_device import recv

from ucc_hetero.buffers import Buffer, dtype_of, pack
from ucc_hetero.types import DTYPES


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'ucc-hetero[torch]'")
    for name, dtype in DTYPES.items():
        x = torch.zeros(6).to(getattr(torch, name))
        assert recv(x) == Buffer(x.data_ptr(), 6, dtype, "host", 0, x, False)
        assert dtype_of(x.dtype) is dtype
        assert recv([x, x.dtype]).dtype is dtype
    with pytest.raises(TypeError, match=r"torch\.complex32 is not supported"):
        dtype_of(torch.complex32)


def test_torch_shapes_and_gradients() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'ucc-hetero[torch]'")
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    assert recv(x).contiguous and recv(torch.nn.Parameter(x)).count == 12
    assert recv(x.T).contiguous
    assert recv(torch.tensor(3)).count == 1 and recv(torch.zeros(0)).count == 0
    columns = recv(x[:, 1:3])
    packed = pack(columns)
    assert not columns.contiguous and isinstance(packed.owner, np.ndarray)
    assert packed.owner.view(np.float32).tolist() == [1, 2, 5, 6, 9, 10]


def test_torch_tensors_that_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'ucc-hetero[torch]'")
    z = torch.zeros(2, dtype=torch.complex64)
    for x, error, match in [
        (z.conj(), BufferError, "resolve_conj"),
        (z.conj().imag, BufferError, "resolve_neg"),
        (torch.zeros(2, device="meta"), TypeError, "meta"),
        (torch.zeros(2, 2).to_sparse(), TypeError, "to_dense"),
        (torch.zeros(2).expand(3, 2), BufferError, "overlap"),
    ]:
        with pytest.raises(error, match=f"recvbuf on rank 1: .*{match}"):
            recv(x)


def test_torch_device_tensors_are_placed_by_their_dlpack_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's ROCm build calls its devices by NVIDIA's name; only the DLPack device type differs."""

    class Tensor:
        layout = dtype = "strided"
        is_cpu = False
        device = SimpleNamespace(type="cuda", index=1)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 10, 1

        def is_conj(self) -> bool:
            return False

        is_neg = is_conj

        def is_contiguous(self) -> bool:
            return True

        def element_size(self) -> int:
            return 2

        def numel(self) -> int:
            return 7

        def data_ptr(self) -> int:
            return 0x7000

    class FakeDType:
        def __str__(self) -> str:
            return "torch.bfloat16"

    Tensor.dtype = FakeDType()  # type: ignore[assignment]
    fake = SimpleNamespace(Tensor=Tensor, dtype=FakeDType, strided="strided")
    monkeypatch.setitem(sys.modules, "torch", fake)
    tensor = Tensor()
    assert recv(tensor) == Buffer(0x7000, 7, DTYPES["bfloat16"], "amd", 1, tensor, False)
