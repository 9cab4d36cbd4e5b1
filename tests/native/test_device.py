"""GPU runtimes over the fake library: their answers, also to several threads; HIP as on AMD (docs/amd.md)."""

import ctypes
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from processes import python

from ucc_hetero import device
from ucc_hetero.device import registry
from ucc_hetero.errors import DeviceError
from ucc_hetero.machine import vendors as table
from ucc_hetero.native.libraries import ffi, lib

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]


def test_what_a_runtime_says_of_itself(runtime):
    assert runtime.count() == 4
    assert runtime.version() in {"nvidia": ["12.8"], "amd": ["5.0", "6.0", "7.0"]}[runtime.vendor]
    assert runtime.current() == 1
    assert runtime.bus(2) == "0000:03:00.0"
    assert runtime.memory_type == 0
    assert "4 device(s)" in device.report(runtime.vendor)


def test_pointers(runtime):
    host = np.zeros(4)
    with runtime.alloc(64) as memory, runtime.alloc(64, pinned=True) as pinned:
        assert runtime.pointer(memory.handle) == runtime.pointer(memory.handle + 60) == ("device", 1)
        assert runtime.pointer(pinned.handle).kind == "pinned"
        assert device.pointer_vendor(memory.handle) == (runtime.vendor, 1)
        assert device.pointer_vendor(pinned.handle) == ("host", 0)
        freed = memory.handle
    assert runtime.pointer(host.ctypes.data).kind == "unknown"
    assert runtime.vendor == "nvidia" or runtime.pointer(host.ctypes.data) == runtime.pointer(freed) == ("unknown", 0)
    with pytest.raises(BufferError, match="it was freed, or is not a device pointer"):
        device.pointer_vendor(freed)


def test_mistakes_are_named(runtime):
    with pytest.raises(DeviceError, match=f"device 9 does not exist: the {runtime.vendor} runtime sees 4"):
        runtime.use(9)
    with pytest.raises(DeviceError, match=r"bytes of device memory: .*OUT_OF_MEMORY \(2\)"):
        runtime.alloc(1 << 40)
    with pytest.raises(TypeError, match="neither a stream"):
        device.stream_handle("s")


def test_no_runtime(monkeypatch, tmp_path):
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


def test_a_library_that_is_no_runtime(fakegpu, monkeypatch):
    monkeypatch.setenv("UCCH_CUDA_LIB", str(fakegpu["amd"]))
    device.registry.forget()
    assert device.runtime_of("nvidia") is None
    assert "it has no symbol cuInit" in device.report("nvidia")
    device.registry.forget()


def test_place_of_a_rank(runtime, monkeypatch):
    assert device.place_of() == (runtime.vendor, 1)  # the thread's choice
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "6")
    assert device.local_rank() == 6
    if runtime.vendor == "amd":
        runtime.use(0)  # the same as no choice
        assert device.place_of() == ("amd", 6 % 4)
    assert device.place_of("nvidia" if runtime.vendor == "amd" else "amd").device == 0


def test_streams_of_other_libraries():
    assert device.stream_handle(0) == 0
    assert device.stream_handle(type("S", (), {"cuda_stream": 7})()) == 7
    assert device.stream_handle(type("S", (), {"ptr": 8})()) == 8
    assert device.stream_handle(type("S", (), {"__cuda_stream__": lambda self: (0, 9)})()) == 9
    assert device.stream_handle(type("S", (), {"handle": ctypes.c_void_p(None)})()) == 0


SHARED = "-Wall", "-Werror", "-O1", "-shared", "-fPIC"


def test_threads_get_words_of_their_own(runtime, compiled, tmp_path):
    """Two streams that wait for one word would see each other's values; beyond a word's page is other memory."""
    threads, each = 2, 100_000 if runtime.vendor == "nvidia" else 2_000  # each HIP word is an allocation of a page
    racing = ctypes.CDLL(str(compiled(tmp_path / "racing.so", *SHARED, HERE / "racing.c", "-lpthread")))
    words = np.zeros(threads * each, np.uint64)
    functions = (ctypes.c_void_p(int(ffi.cast("uintptr_t", at))) for at in (runtime.ops.use, runtime.ops.flag))
    assert racing.race(*functions, threads, each, words.ctypes.data_as(ctypes.c_void_p)) == 0
    assert len(np.unique(words)) == words.size
    kinds = {runtime.pointer(int(word)).kind for word in words[::997]}
    assert len(kinds) == 1
    assert "unknown" not in kinds


def test_reasons_of_failures_are_those_of_the_thread(tmp_path):
    """Another thread's failure, which may not matter, must not be reported as this thread's reason."""

    def fail(name):
        assert lib.ucch_device_load(b"cuda", str(tmp_path / name).encode()) == lib.UCCH_FAIL_DEVICE

    fail("mine")
    other = threading.Thread(target=fail, args=("others",))
    other.start()
    other.join(60)
    assert b"mine" in ffi.string(lib.ucch_device_error())
    assert b"others" in ffi.string(lib.ucch_device_last_error()), "who waits for what progress does asks for this one"


def test_an_allocation_keeps_nobody_from_the_pool(compiled, tmp_path):
    include = f"-I{ROOT / 'cffi_build'}", f"-I{ROOT / 'examples'}"
    library = compiled(tmp_path / "libsim.so", *SHARED, *include, HERE / "slow_vendor.c", "-lpthread")
    python("lone_cases:pool", str(library), env={"UCCH_SIM_LIB": str(library)})


@pytest.mark.parametrize(("text", "eager"), [("0", True), ("00", True), ("no", True), ("", True), ("1", False)])
def test_a_number_is_read_as_hip_does(load, text, eager):
    """For early loading of kernels; with it streams are held if the user says so."""
    found = load(HIP_ENABLE_DEFERRED_LOADING=text)
    assert (found.eager, found.holds) == (eager, False)
    assert load(UCCH_HOLD="y").holds is eager


def test_streams_wait_for_signal_memory_only(load):
    runtime = load()
    runtime.use(0)
    stream = runtime.stream()
    flag = runtime.flag()
    with runtime.alloc(8, pinned=True) as word:
        with pytest.raises(DeviceError):
            runtime.wait_value(stream.handle, word.handle, 0)
        runtime.wait_value(stream.handle, flag, 0)
        stream.synchronize()


def test_settings_that_come_too_late(monkeypatch):
    early = [setting for setting in table.VENDORS["amd"].settings if setting.read in ("load", "start")]
    assert {setting.name for setting in early if setting.read == "start"} >= {"GPU_MAX_HW_QUEUES"}
    monkeypatch.setattr(registry, "mapped", lambda name: "/opt/rocm/lib/libamdhip64.so.6")
    table.prepare("amd", environ := {}, registry.late_settings("amd"))
    assert environ and not any(setting.name in environ for setting in early), "HIP has not read them"


def test_a_word_is_used_up_before_its_numbers_wrap(compiled, tmp_path):
    """HIP's streams compare without wrap-around: a wait for a small number after a large one would end at once."""
    source = Path(__file__).with_name("gate_wraps.c")
    folders = [f"-I{ROOT / each}" for each in ("cffi_build", "ucc_hetero/device")]
    program = compiled(tmp_path / "gate", *folders, source, "-lpthread")
    subprocess.run([program], check=True, timeout=240)


@pytest.mark.mpi
def test_images_of_kernels_are_kept(fakes):
    """HIP reads them in place."""
    fakes("device_cases:images", "nvidia:1,amd:1")
