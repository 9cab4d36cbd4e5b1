"""The device runtimes over the fake GPU library: what they answer."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from ucc_hetero import device
from ucc_hetero.buffers import as_buffer
from ucc_hetero.device import DeviceRuntime
from ucc_hetero.errors import DeviceError


def test_what_a_runtime_says_of_itself(runtime: DeviceRuntime) -> None:
    assert runtime.count() == 4
    assert runtime.version() == {"nvidia": "12.8", "amd": "6.0"}[runtime.vendor]
    assert runtime.current() == 1
    assert runtime.bus(2) == "0000:03:00.0"
    assert runtime.memory_type == 0
    assert "4 device(s)" in device.report(runtime.vendor)


def test_pointers(runtime: DeviceRuntime) -> None:
    host = np.zeros(4)
    with runtime.alloc(64) as memory, runtime.alloc(64, pinned=True) as pinned:
        assert runtime.pointer(memory.handle) == ("device", 1)
        assert runtime.pointer(memory.handle + 60) == ("device", 1)
        assert runtime.pointer(pinned.handle).kind == "pinned"
        assert runtime.pointer(host.ctypes.data).kind == "unknown"
        assert device.pointer_vendor(memory.handle) == (runtime.vendor, 1)
        assert device.pointer_vendor(pinned.handle) == ("host", 0)
        freed = memory.handle
    with pytest.raises(BufferError, match="it was freed, or is not a device pointer"):
        device.pointer_vendor(freed)


def test_buffers_of_the_device_interface(runtime: DeviceRuntime) -> None:
    with runtime.alloc(64) as memory:
        array = type("Array", (), {})()
        array.__cuda_array_interface__ = {
            "shape": (16,), "typestr": "<f4", "data": (memory.handle, False), "version": 3,
        }  # fmt: skip
        found = as_buffer(array, writable=True, argument="buf", rank=3, pointer_vendor=device.pointer_vendor)
        assert (found.vendor, found.device, found.count) == (runtime.vendor, 1, 16)
    with pytest.raises(BufferError, match="buf on rank 3: .*freed"):
        as_buffer(array, writable=True, argument="buf", rank=3, pointer_vendor=device.pointer_vendor)


def test_mistakes_are_named(runtime: DeviceRuntime) -> None:
    with pytest.raises(DeviceError, match=f"device 9 does not exist: the {runtime.vendor} runtime sees 4"):
        runtime.use(9)
    with pytest.raises(DeviceError, match=r"bytes of device memory: .*OUT_OF_MEMORY \(2\)"):
        runtime.alloc(1 << 40)
    with pytest.raises(TypeError, match="neither a stream"):
        device.stream_handle("s")


def test_no_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCCH_CUDA_LIB", str(tmp_path / "libcuda.so.1"))
    monkeypatch.setenv("UCCH_HIP_LIB", "none")
    device.registry.forget()
    assert device.available() == [] and device.runtime_of("host") is None
    with pytest.raises(
        BufferError, match=r"no GPU runtime is loaded \(nvidia: .*libcuda.so.1: .*amd: UCCH_HIP_LIB=none"
    ):
        device.pointer_vendor(4096)
    assert device.place_of() == ("host", 0)
    assert device.place_of("amd") == ("amd", 0)
    device.registry.forget()


def test_a_library_that_is_no_runtime(fakegpu: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCCH_CUDA_LIB", str(fakegpu["amd"]))
    device.registry.forget()
    assert device.runtime_of("nvidia") is None
    assert "it has no symbol cuInit" in device.report("nvidia")
    device.registry.forget()


def test_place_of_a_rank(runtime: DeviceRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.place_of() == (runtime.vendor, 1)  # what the thread has chosen
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "6")
    assert device.local_rank() == 6
    if runtime.vendor == "amd":
        runtime.use(0)  # cannot be told from no choice
        assert device.place_of() == ("amd", 6 % 4)
    assert device.place_of("nvidia" if runtime.vendor == "amd" else "amd").device == 0


def test_streams_of_other_libraries() -> None:
    assert device.stream_handle(0) == 0
    assert device.stream_handle(type("S", (), {"cuda_stream": 7})()) == 7
    assert device.stream_handle(type("S", (), {"ptr": 8})()) == 8
    assert device.stream_handle(type("S", (), {"__cuda_stream__": lambda self: (0, 9)})()) == 9
    assert device.stream_handle(type("S", (), {"handle": ctypes.c_void_p(None)})()) == 0
