"""The device runtimes over the fake GPU library: what they answer, and that mistakes of order do not go unnoticed.

The last tests are about the tests: each leaves one synchronisation out of an order that is right, and the data must
come out wrong. A fake that forgave them would prove nothing about the engine that runs on it.
"""

import ctypes
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucc_hetero import device
from ucc_hetero.buffers import as_buffer
from ucc_hetero.device import Block, DeviceRuntime, Event, Stream
from ucc_hetero.errors import DeviceError

N = 4096


def view(block: Block) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The memory itself: the fake's device memory is the host's."""
    data = (ctypes.c_float * (block.nbytes // 4)).from_address(block.handle)
    return np.frombuffer(data, dtype=np.float32)


def fill(runtime: DeviceRuntime, stream: int, block: Block, value: float) -> None:
    """A kernel."""
    library = ctypes.CDLL(runtime.path)
    handles = ctypes.c_void_p(stream), ctypes.c_void_p(block.handle)
    assert library.fakegpu_fill(*handles, ctypes.c_size_t(block.nbytes // 4), ctypes.c_float(value)) == 0


def until(event: Event) -> None:
    """Wait for an event as the engine does: by asking."""
    while not event.done():
        time.sleep(1e-4)


def held(runtime: DeviceRuntime, stream: Stream) -> bool:
    """True if the stream has come to a wait for what is not there yet."""
    return bool(ctypes.CDLL(runtime.path).fakegpu_held(ctypes.c_void_p(stream.handle)))


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


class Bench:
    """Two streams, a producer's array, a copy on the device, a pinned array on the host."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.one, self.two = runtime.stream(), runtime.stream()
        self.data, self.copy = runtime.alloc(4 * N), runtime.alloc(4 * N)
        self.host = runtime.alloc(4 * N, pinned=True)
        self.event = runtime.event()

    def right(self, value: float) -> bool:
        return bool((view(self.host) == value).all())

    def end(self) -> None:
        self.one.synchronize()
        self.two.synchronize()


def through_two_streams(
    b: Bench, *, wait: bool = True, late: bool = True, sync: bool = True, keep: bool = True
) -> bool:
    """Produce in one stream, copy in the other, look at it on the host. Each keyword leaves one thing out, or wrong.

    The producer is held until everything was issued and whatever does not wait for it has had its chance to run.
    """
    runtime = b.runtime
    word = runtime.flag()
    gate = ctypes.c_uint32.from_address(word)
    gate.value = 0
    runtime.wait_value(b.one.handle, word, 1)
    fill(runtime, b.one.handle, b.data, 3.0)
    b.event.record(b.one.handle if late else b.two.handle)
    if wait:
        runtime.wait_event(b.two.handle, b.event)
    runtime.copy(b.copy.handle, b.data.handle, 4 * N, b.two.handle)
    if not keep:
        b.data.close()
    runtime.copy(b.host.handle, b.copy.handle, 4 * N, b.two.handle)
    done = runtime.event()
    done.record(b.two.handle)
    while not done.done() and not held(runtime, b.two):
        time.sleep(1e-3)
    early = b.right(3.0)
    gate.value = 1
    if sync:
        until(done)
    right = b.right(3.0) if sync else early
    b.end()
    return right


def test_the_right_order_is_right(runtime: DeviceRuntime) -> None:
    assert through_two_streams(Bench(runtime))


@pytest.mark.parametrize("left_out", ["sync", "late", "wait"])
def test_a_wrong_order_is_wrong(runtime: DeviceRuntime, left_out: str) -> None:
    assert not through_two_streams(Bench(runtime), **{left_out: False})


def test_a_stream_waits_for_memory(runtime: DeviceRuntime) -> None:
    b = Bench(runtime)
    word = runtime.flag()
    flag = ctypes.c_uint32.from_address(word)
    flag.value = 0
    runtime.wait_value(b.one.handle, word, 2)
    fill(runtime, b.one.handle, b.data, 1.0)
    b.event.record(b.one.handle)
    flag.value = 1
    while not held(runtime, b.one):
        time.sleep(1e-3)
    assert not b.event.done()
    runtime.write_value(b.two.handle, word, 2)
    until(b.event)
    assert (view(b.data) == 1.0).all()


def test_freed_memory_is_noticed(runtime: DeviceRuntime) -> None:
    if runtime.vendor == "amd":
        pytest.skip("HIP's free waits for the device")
    library = ctypes.CDLL(runtime.path)
    before = library.fakegpu_misuses()
    assert not through_two_streams(Bench(runtime), keep=False)
    assert library.fakegpu_misuses() > before


@pytest.mark.parametrize("call", ["free", "copy", "current"])
def test_network_threads_that_call_a_driver_end_the_process(fakegpu: dict[str, Path], call: str) -> None:
    """All jobs on fake GPUs rely on that: the engine's network threads go by this name."""
    script = f"""
import ctypes, threading
driver, libc = ctypes.CDLL({str(fakegpu["nvidia"])!r}), ctypes.CDLL(None)
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), driver.cuCtxSetCurrent(context)
driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(64))
calls = {{
    "free": lambda: driver.cuMemFree_v2(memory),
    "copy": lambda: driver.cuMemcpyAsync(memory, memory, ctypes.c_size_t(8), None),
    "current": lambda: driver.cuCtxSetCurrent(context),
}}
def network():
    libc.prctl(15, b"ucch-wire", 0, 0, 0)
    calls[{call!r}]()
thread = threading.Thread(target=network)
thread.start(), thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == -6 and "a network thread calls the driver" in done.stderr, done
