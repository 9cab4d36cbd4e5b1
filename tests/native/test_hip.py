"""HIP 5, 6 and 7 as AMD's sources have them (docs/amd.md), over the fake HIP: what each answers, refuses and shares."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import window_scripts
from device_scripts import FEW_QUEUES, OWN_QUEUES

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


#: Every rank receives in a stream before it sends in another, in so many streams that some share a queue.
EXCHANGE = (
    window_scripts.COMMON
    + """
import ctypes
import os
if EARLY == "n" and "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    os.environ["UCCH_HOLD"] = "n"  # NVIDIA's streams would wait early
from arrays import runtime
from ucc_hetero.native.libraries import lib
from ucc_hetero.calls.p2p import Messages
with Communicator() as comm:
    gpu, r, other = runtime(), comm.rank, 1 - comm.rank
    gpu.use(comm._run.members.place.device)
    comm._messages.timeout = 120.0
    streams, messages = [gpu.stream() for _ in range(10)], comm._messages
    early, work = 0, []
    for turn in range(2):
        for k, (into, outof) in enumerate(zip(streams[:5], streams[5:])):
            x, y = Array(LONG), Array(LONG).set(-1)
            request = messages.start(messages.incoming(y, other, k, taken=True))
            request._arm()
            taken = Messages.take(request, into.handle, early=True)
            early += taken
            comm.mpi.Barrier()  # nobody has sent before
            x.fill(outof, 10.0 * turn + k + 100 * r)
            send = comm.Isend(x, other, k, stream=outof)
            while not taken and not (state := lib.ucch_wait_matched(request._op, 0.05)):
                pass
            if not taken and state == 1:
                Messages.take(request, into.handle)
            work.append((request, send, into, y, 10.0 * turn + k + 100 * other))
    for request, send, into, y, want in work:
        assert (y.copied(into) == want).all(), (want, y.peek[:3])
        request.Wait()
        send.Wait()
    assert (early > 0) == (EARLY == "y"), early
    parked = ctypes.CDLL(gpu.path).fakegpu_holds()
    by_command = "GPU_STREAMOPS_CP_WAIT" in os.environ
    assert r == 0 or not early or (parked > 0) == by_command, "a wait would be a kernel that spins"
print("right")
"""
)


@pytest.mark.mpi
@pytest.mark.parametrize(("early", "env"), [
    ("n", {**FEW_QUEUES, "UCCH_HOLD": "auto"}),
    ("n", FEW_QUEUES),
    ("y", {"GPU_STREAMOPS_CP_WAIT": "1", **OWN_QUEUES}),
    ("y", OWN_QUEUES),
], ids=["as HIP comes", "as the user says", "queues enough", "kernels wait"])  # fmt: skip
def test_receives_before_sends(fakes: Callable[..., Any], early: str, env: dict[str, str]) -> None:
    script = EXCHANGE.replace("EARLY", repr(early))
    result = fakes(script, "nvidia:1,amd:1", UCCH_STAGING="staged", FAKEGPU_DELAY_US="50", **env)
    assert result.said("right") == 2
