"""GPU runtimes that several threads use at a time: memory, words, and the reasons of failures."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from processes import python

from ucc_hetero.device import DeviceRuntime
from ucc_hetero.native.libraries import ffi, lib

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]

SHARED = "-Wall", "-Werror", "-O1", "-shared", "-fPIC"


def test_threads_get_words_of_their_own(runtime: DeviceRuntime, compiled: Callable[..., Path], tmp_path: Path) -> None:
    """Two streams that wait for one word pass each other's waits; a word behind its page is somebody's memory."""
    threads, each = 2, 100_000 if runtime.vendor == "nvidia" else 2_000  # HIP's are an allocation each, of a page
    racing = ctypes.CDLL(str(compiled(tmp_path / "racing.so", *SHARED, HERE / "racing.c", "-lpthread")))
    words = np.zeros(threads * each, np.uint64)
    functions = (ctypes.c_void_p(int(ffi.cast("uintptr_t", at))) for at in (runtime.ops.use, runtime.ops.flag))
    assert racing.race(*functions, threads, each, words.ctypes.data_as(ctypes.c_void_p)) == 0
    assert len(np.unique(words)) == words.size
    kinds = {runtime.pointer(int(word)).kind for word in words[::997]}
    assert len(kinds) == 1
    assert "unknown" not in kinds


def test_reasons_of_failures_are_those_of_the_thread(tmp_path: Path) -> None:
    """Another thread's failure, which may be of no interest, must not be taken for the reason of this one's."""

    def fail(name: str) -> None:
        assert lib.ucch_device_load(b"cuda", str(tmp_path / name).encode()) == lib.UCCH_FAIL_DEVICE

    fail("mine")
    other = threading.Thread(target=fail, args=("others",))
    other.start()
    other.join(60)
    assert b"mine" in ffi.string(lib.ucch_device_error())
    assert b"others" in ffi.string(lib.ucch_device_last_error()), "who waits for what progress does asks for this one"


#: A process of its own: its device stays the engine's.
POOL = """
import ctypes, sys, threading
from ucc_hetero import device
from ucc_hetero.machine.vendors import Vendor
from ucc_hetero.native.libraries import ffi, lib
device.register(Vendor(name="sim", adapter="sim", setting="SIM_LIB"))
runtime = device.runtime_of("sim")
assert runtime is not None, device.report("sim")
runtime.use(0)
assert not lib.ucch_device_bind(runtime.code, 0)
library = ctypes.CDLL(sys.argv[1])
first = lib.ucch_pool_take(0, 4096, ffi.NULL, 1)
library.gate(1)
made, again = [], []
def allocate():
    runtime.use(0)
    made.append(lib.ucch_pool_take(0, 1 << 20, ffi.NULL, 1))
def go_on():
    lib.ucch_pool_give(first)
    again.append(lib.ucch_pool_take(0, 4096, ffi.NULL, 0))
slow, other = threading.Thread(target=allocate), threading.Thread(target=go_on)
slow.start()
while not library.at_gate():
    pass
other.start()
other.join(20)
waits = other.is_alive()
library.gate(0)
slow.join()
other.join()
assert not waits, "progress, which gives memory back, waits for another thread's allocation"
assert again == [first] and made[0] != ffi.NULL
lib.ucch_pool_give(made[0])
assert lib.ucch_pool_take(0, 1 << 20, ffi.NULL, 0) == made[0]
"""


def test_an_allocation_keeps_nobody_from_the_pool(compiled: Callable[..., Path], tmp_path: Path) -> None:
    include = f"-I{ROOT / 'cffi_build'}", f"-I{ROOT / 'examples'}"
    library = compiled(tmp_path / "libsim.so", *SHARED, *include, HERE / "slow_vendor.c", "-lpthread")
    python(POOL, library, env={"UCCH_SIM_LIB": str(library)})
