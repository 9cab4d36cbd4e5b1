"""HIP 5, 6 and 7 as AMD's sources have them (docs/amd.md), over the fake HIP: what each answers, refuses and shares."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucc_hetero import device
from ucc_hetero.device import DeviceRuntime, registry
from ucc_hetero.errors import DeviceError
from ucc_hetero.machine import vendors as table

ROOT = Path(__file__).resolve().parents[2]

Load = Callable[..., DeviceRuntime]


@pytest.fixture
def load(fakegpu: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """The fake HIP runtime, started in this environment."""

    def start(**environ: str) -> DeviceRuntime:
        for name, value in {"UCCH_CUDA_LIB": "none", "UCCH_HIP_LIB": str(fakegpu["amd"]), **environ}.items():
            monkeypatch.setenv(name, value)
        device.registry.forget()
        found = device.runtime_of("amd")
        assert found is not None
        return found

    yield start
    device.registry.forget()


@pytest.mark.parametrize("version", ["5", "6", "7"])
def test_what_a_pointer_is(load: Load, version: str) -> None:
    runtime, host = load(FAKEGPU_HIP=version), np.zeros(4)
    assert runtime.version() == f"{version}.0"
    runtime.use(2)
    with runtime.alloc(64) as memory, runtime.alloc(64, pinned=True) as pinned:
        assert runtime.pointer(memory.handle) == ("device", 2)
        assert runtime.pointer(pinned.handle) == ("pinned", 2)
        freed = memory.handle
    assert runtime.pointer(host.ctypes.data) == runtime.pointer(freed) == ("unknown", 0)
    with pytest.raises(BufferError, match="it was freed, or is not a device pointer"):
        device.pointer_vendor(freed)


@pytest.mark.parametrize(("text", "eager"), [("0", True), ("00", True), ("no", True), ("", True), ("1", False)])
def test_a_number_is_read_as_hip_does(load: Load, text: str, eager: bool) -> None:
    assert load(HIP_ENABLE_DEFERRED_LOADING=text).eager is eager


def test_streams_are_held_where_the_user_says_so(load: Load) -> None:
    assert load(HIP_ENABLE_DEFERRED_LOADING="0").holds is False
    assert load(UCCH_HOLD="y").holds is True
    assert load(HIP_ENABLE_DEFERRED_LOADING="1").holds is False


def test_streams_wait_for_signal_memory_only(load: Load) -> None:
    runtime = load()
    runtime.use(0)
    stream = runtime.stream()
    flag = runtime.flag()
    with runtime.alloc(8, pinned=True) as word:
        with pytest.raises(DeviceError):
            runtime.wait_value(stream.handle, word.handle, 0)
        runtime.wait_value(stream.handle, flag, 0)
        stream.synchronize()


def test_settings_that_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    early = [setting for setting in table.VENDORS["amd"].settings if setting.read in ("load", "start")]
    assert {setting.name for setting in early if setting.read == "start"} >= {"GPU_MAX_HW_QUEUES"}
    monkeypatch.setattr(registry, "mapped", lambda name: "/opt/rocm/lib/libamdhip64.so.6")
    table.prepare("amd", environ := {}, registry.late_settings("amd"))
    assert environ and not any(setting.name in environ for setting in early), "HIP has not read them"


def test_a_word_is_used_up_before_its_numbers_wrap(compiled: Callable[..., Path], tmp_path: Path) -> None:
    """HIP's streams compare without wrapping: what waits for a small number behind a large one would go on at once."""
    source = Path(__file__).with_name("gate_wraps.c")
    folders = [f"-I{ROOT / each}" for each in ("cffi_build", "ucc_hetero/device")]
    program = compiled(tmp_path / "gate", *folders, source, "-lpthread")
    subprocess.run([program], check=True, timeout=240)


#: Kernels that HIP reads where their images are.
IMAGES = """
from arrays import Array
from ucc_hetero import Communicator
from ucc_hetero.device import kernels
gone, made, compile = [], [], kernels._Compiler.compile

class Image(bytes):
    def __del__(self):
        gone.append(bytes(self))

kernels._Compiler.compile = lambda *args: made.append(1) or Image(compile(*args))
with Communicator() as comm:
    x = Array(1000).set(comm.rank + 1)
    comm.Allreduce(x, y := Array(1000).set(-1))
    assert (y.peek == 3).all() and made and not gone
print("right")
"""


@pytest.mark.mpi
def test_images_of_kernels_are_kept(fakes: Callable[..., Any]) -> None:
    assert fakes(IMAGES, "nvidia:1,amd:1").said("right") == 2
