"""HIP over CUDA (tests/hipcuda) over the fake CUDA: which threads make contexts, and where."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "hipcuda" / "hipcuda.c"

SCRIPT = """
import ctypes, sys, threading
hip, cuda = ctypes.CDLL(sys.argv[1]), ctypes.CDLL("libcuda.so.1")

def contexts():
    out, flags = [], ctypes.c_uint()
    for device in range(4):
        active = ctypes.c_int()
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        out += [device] if active.value else []
    return out

def current():
    device = ctypes.c_int(-1)
    assert hip.hipGetDevice(ctypes.byref(device)) == 0
    return device.value

def use(device):
    assert hip.hipSetDevice(device) == 0

def alloc():
    assert hip.hipMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64)) == 0

def thread(work):
    failed = []
    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)
    one = threading.Thread(target=run)
    one.start()
    one.join()
    assert not failed, failed

def passing():
    for _ in range(2):
        before = current()
        use(1)
        alloc()
        use(before)
    assert current() == 0 and contexts() == [1]

def working():
    use(2)
    assert current() == 2 and contexts() == [1]
    alloc()
    assert current() == 2 and contexts() == [1, 2]

def first():
    alloc()
    assert current() == 0 and contexts() == [0, 1, 2]

assert hip.hipInit(0) == 0
use(1)
alloc()
assert hip.hipSetDevice(4) == 101 and hip.hipSetDevice(-1) == 101
for work in (passing, working, first):
    thread(work)
assert current() == 1

class Attributes(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("room", ctypes.c_char * 96)]

about, version = Attributes(), ctypes.c_int()
hip.hipRuntimeGetVersion(ctypes.byref(version))
status = hip.hipPointerGetAttributes(ctypes.byref(about), ctypes.byref(version))
assert (status, about.type, about.device) == ((1, 0, 0) if version.value < 60000000 else (0, 0, -2))
word, pinned, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert hip.hipExtMallocWithFlags(ctypes.byref(word), ctypes.c_size_t(8), 2) == 0
assert hip.hipHostMalloc(ctypes.byref(pinned), ctypes.c_size_t(8), 3) == 0
assert hip.hipStreamCreateWithPriority(ctypes.byref(stream), 1, -1) == 0
everything = ctypes.c_uint32(0xFFFFFFFF)
assert hip.hipStreamWaitValue32(stream, pinned, 0, 0, everything) == 1
assert hip.hipStreamWaitValue32(stream, word, 0, 0, everything) == 0
assert hip.hipFree(word) == 0 and hip.hipStreamWaitValue32(stream, word, 0, 0, everything) == 1
hip.hipGetErrorName.restype = ctypes.c_char_p
assert hip.hipGetErrorName(101) == b"FAKE_INVALID_DEVICE"
"""


@pytest.mark.parametrize("version", ["5", "6"])
def test_threads_make_contexts_where_they_work(
    compiled: Callable[..., Path], fakegpu: dict[str, Path], tmp_path: Path, version: str
) -> None:
    """As with HIP. A thread that came by a device otherwise would take half a gigabyte of it."""
    words = "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", SOURCE, "-ldl"
    library = compiled(tmp_path / "libamdhip64-over-cuda.so", *words)
    (tmp_path / "libcuda.so.1").symlink_to(fakegpu["nvidia"])
    env = {"LD_LIBRARY_PATH": str(tmp_path), "FAKEGPU_DEVICES": "4", "HIPCUDA_VERSION": version}
    subprocess.run([sys.executable, "-c", SCRIPT, str(library)], env=env, check=True, timeout=240)
