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
from ucc_hetero.native.libraries import ffi, lib

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


def test_fine_grained_memory(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(HSA_FORCE_FINE_GRAIN_PCIE="1").coherent(2)
    runtime = load(HSA_FORCE_FINE_GRAIN_PCIE="yes")
    assert not runtime.coherent(2), "the driver takes 1 and nothing else"
    linked = table.Device("amd", runtime.bus(2), "/dev/dri/renderD130", 0, 0, 0, "", hive=77)
    monkeypatch.setattr(table, "devices", lambda: [linked])
    assert runtime.coherent(2) and not runtime.coherent(1)


@pytest.mark.parametrize(
    ("units", "threads", "blocks"), [("304", "2048", 1216), ("38", "2048", 152), ("32", "1024", 64)]
)
def test_blocks_that_run_at_a_time(load: Load, units: str, threads: str, blocks: int) -> None:
    runtime, out = load(FAKEGPU_UNITS=units, FAKEGPU_UNIT_THREADS=threads), ffi.new("int *")
    assert lib.ucch_device_resident(runtime.code, 0, 512, out) == 0 and out[0] == blocks


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


#: Two ranks exchange what they write again and again; ``near``: by way of arenas.
ARENAS = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
os.environ["HIP_VISIBLE_DEVICES"] = os.environ.get("VISIBLE", "0,1;0,1").split(";")[rank]
from arrays import Array, runtime
from ucc_hetero import Communicator
from ucc_hetero.device import kernels
gone, made, compile = [], [], kernels._Compiler.compile

class Image(bytes):
    def __del__(self):
        gone.append(bytes(self))

kernels._Compiler.compile = lambda *args: made.append(1) or Image(compile(*args))
Communicator._arenas = True
with Communicator() as comm:
    other = 1 - comm.rank
    assert (comm._messages._near == {other}) == (os.environ["NEAR"] == "y"), comm._messages._near
    for k in range(5):
        x, y = Array(100_000).set(10 * k + comm.rank), Array(100_000).set(-1)
        comm.Sendrecv(x, other, 1, y, other, 1)
        assert (y.peek == 10 * k + other).all(), (k, y.peek[:3])
    assert (made or os.environ["NEAR"] == "n") and not gone, "HIP reads a kernel where its image is"
print("right")
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("near", "env"), [
    ("y", {"FAKEGPU_HIP": "5"}),
    ("y", {"FAKEGPU_HIP": "7"}),
    ("y", {"FAKEGPU_HIP": "7", "VISIBLE": "0;1"}),
    ("n", {"FAKEGPU_HIP": "7", "VISIBLE": "0,1;2,3"}),
    ("n", {"HSA_FORCE_FINE_GRAIN_PCIE": "0"}),
], ids=["5", "7", "one device each", "numbers differ", "no fine-grained memory"])  # fmt: skip
def test_memory_of_other_processes(fakes: Callable[..., Any], near: str, env: dict[str, str]) -> None:
    assert fakes(ARENAS, "amd:2", NEAR=near, FAKEGPU_DELAY_US="20", **env).said("right") == 2


#: Every rank receives in a stream before it sends in another, in so many streams that some share a queue.
EXCHANGE = (
    window_scripts.COMMON
    + """
import ctypes
import os
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
    assert (early > 0) == (sys.argv[1] == "y"), early
    parked = ctypes.CDLL(gpu.path).fakegpu_holds()
    assert not early or (parked > 0) == ("GPU_STREAMOPS_CP_WAIT" in os.environ), "a wait would be a kernel that spins"
print("right")
"""
)


@pytest.mark.mpi
@pytest.mark.parametrize(("layout", "early", "env"), [
    ("amd:2", "n", {**FEW_QUEUES, "UCCH_HOLD": "auto"}),
    ("nvidia:2", "n", FEW_QUEUES),
    ("amd:2", "y", {"GPU_STREAMOPS_CP_WAIT": "1", **OWN_QUEUES}),
    ("amd:2", "y", OWN_QUEUES),
], ids=["as HIP comes", "as the user says", "queues enough", "kernels wait"])  # fmt: skip
def test_receives_before_sends(fakes: Callable[..., Any], layout: str, early: str, env: dict[str, str]) -> None:
    script = EXCHANGE.replace("sys.argv[1]", repr(early))
    result = fakes(script, layout, UCCH_STAGING="staged", FAKEGPU_DELAY_US="50", **env)
    assert result.said("right") == 2
