"""Questions about AMD devices, one per process: ``python -m`` this module with a question's name.

The process prints one line of JSON and exits at once, without HIP's own shutdown, which may wait for work that never
ends. Its parent limits its time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import DeviceError
from ...machine.vendors import devices
from ...native.libraries import lib
from ...types import DTYPES, OPS
from .amd_hip import Hip, Word

MODULE = "ucc_hetero.launch.doctor.amd_probes"
#: Prefix of the output line with the answer.
MARK = "ucch-answer "

MIB = 1 << 20
#: Streams of a process that may wait at the same time: five each way for messages, and lanes of collectives.
STREAMS = 10
#: Seconds after which held streams are released, to see whether a call had waited for them.
HELD = 1.0
#: Round trips between host and device.
TURNS = 50

Answer = dict[str, Any]


def answer(right: bool, text: str, **data: Any) -> Answer:
    return {"verdict": "yes" if right else "no", "text": text, **data}


def _bytes(address: int, n: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address))


def _start(pages: mmap.mmap) -> int:
    """The address of pages; the caller keeps them alive."""
    first = ctypes.c_char.from_buffer(pages)
    return ctypes.addressof(first)


def _random(n: int) -> Any:
    return np.random.default_rng().integers(0, 256, n, np.uint8)


@contextlib.contextmanager
def _held(hip: Hip, n: int = 1) -> Iterator[tuple[list[int], Word]]:
    """Streams that wait, in kernels, until the word is 1. It is set to 1 at the end, also after errors."""
    word = hip.word()
    streams = [hip.stream() for _ in range(n)]
    hip.kernel(lib.UCCH_AWAIT)
    try:
        for stream in streams:
            hip.awaits(stream, word.device, 1)
        yield streams, word
    finally:
        word.value = 1


# --- memory -----------------------------------------------------------------------------------------------------------


def memory() -> Answer:
    """HIP classifies every kind of memory as the library assumes."""
    hip = Hip()
    plain = np.zeros(MIB, np.uint8)
    fresh = mmap.mmap(-1, MIB)
    registered = _start(fresh)
    hip.register(registered, MIB)
    block = hip.runtime.alloc(4 * MIB)
    freed = block.handle
    block.close()
    expected = {
        "device": (hip.alloc(MIB), "device"),
        "pinned": (hip.pinned(MIB), "pinned"),
        "registered": (registered, "pinned"),
        "plain": (plain.ctypes.data, "unknown"),
        "freed": (freed, "unknown"),
    }
    found = {name: hip.runtime.pointer(address).kind for name, (address, _) in expected.items()}
    wrong = {name: kind for name, kind in found.items() if kind != expected[name][1]}
    words = ", ".join(f"{name} memory is {kind}" for name, kind in wrong.items())
    return answer(not wrong, words or f"all of {len(found)} kinds are what they should be", kinds=found)


def _rate(hip: Hip, dst: int, src: int, n: int) -> float:
    """GB/s of copies, one after the other."""
    stream, seconds = hip.stream(), 0.0
    for times in (1, 8):
        start = time.perf_counter()
        for _ in range(times):
            hip.runtime.copy(dst, src, n, stream)
        hip.ends(stream, "a copy")
        seconds = time.perf_counter() - start
    return 8 * n / seconds / 1e9


def _carried(hip: Hip, n: int, *ways: int) -> bool:
    """True if random bytes arrive unchanged when copied from pinned memory through these buffers to pinned memory."""
    data, first, last, stream = _random(n), hip.pinned(n), hip.pinned(n), hip.stream()
    ctypes.memmove(first, data.ctypes.data, n)
    for src, dst in pairwise((first, *ways, last)):
        hip.runtime.copy(dst, src, n, stream)
    hip.ends(stream, "a copy")
    return bool((_bytes(last, n) == data).all())


def copies() -> Answer:
    """Copies between all kinds of memory are correct; their rates."""
    hip, n = Hip(), int(os.environ.get("PROBE_BYTES", 64 * MIB))
    host, back, one, other = hip.pinned(n), hip.pinned(n), hip.alloc(n), hip.alloc(n)
    right = _carried(hip, n, one, other)
    shared = mmap.mmap(-1, n)
    mapped = _start(shared)
    hip.register(mapped, n)
    ways = {
        "host to device": (one, host), "device to host": (back, one), "device": (other, one),
        "shared pages to device": (one, mapped), "device to shared pages": (mapped, one),
    }  # fmt: skip
    if hip.runtime.count() > 1:
        hip.runtime.use(1)
        far = hip.alloc(n)
        hip.runtime.use(0)
        right = _carried(hip, n, one, far) and right
        ways["device to device"] = far, one
    rates = {name: round(_rate(hip, dst, src, n), 2) for name, (dst, src) in ways.items()}
    words = ", ".join(f"{name} {rate:g} GB/s" for name, rate in rates.items())
    return answer(right, words if right else f"the data is wrong; {words}", rates=rates)


# --- kernels and waits ------------------------------------------------------------------------------------------------


def compiler() -> Answer:
    """HipRTC compiles the kernels, and the device runs them: a sum, a wait and a post."""
    hip, n = Hip(), 4096
    start = time.perf_counter()
    kernel = hip.load(hip.compiled(lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code))
    seconds = time.perf_counter() - start
    fused = lib.UCCH_FUSED, OPS["SUM"].code, DTYPES["float32"].code
    for case in ((lib.UCCH_AWAIT,), (lib.UCCH_LANE_COPY,), (lib.UCCH_RING_COPY,), fused):
        hip.load(hip.compiled(*case))
    a, b = (np.random.default_rng().standard_normal(n).astype(np.float32) for _ in range(2))
    host, stream = hip.pinned(2 * a.nbytes), hip.stream()
    one, other = hip.alloc(a.nbytes), hip.alloc(a.nbytes)
    for at, array, place in ((host, a, one), (host + a.nbytes, b, other)):
        ctypes.memmove(at, array.ctypes.data, a.nbytes)
        hip.runtime.copy(place, at, a.nbytes, stream)
    hip.launch(kernel, stream, one, other, n, blocks=16, threads=256)
    hip.runtime.copy(host, other, a.nbytes, stream)
    hip.ends(stream, "the kernel")
    right = bool((_bytes(host, a.nbytes).view(np.float32) == a + b).all())
    return answer(right, f"{seconds:.2f} s for one kernel" if right else "the sum is wrong", seconds=seconds)


def _turns(give: Callable[[int], None], there: Word, back: Word, failure: str) -> Answer:
    """``give`` makes a stream wait for ``there``, then write ``back``: check this, and time it."""
    times: list[float] = []
    for i in range(1, TURNS + 1):
        start = time.perf_counter()
        give(i)
        early = back.reaches(i, 0.0002)
        there.value = i
        if early or not back.reaches(i):
            break
        times.append(time.perf_counter() - start)
    there.value = 1 << 20
    us = round(float(np.median(times)) * 1e6, 1) if len(times) == TURNS else None
    return answer(us is not None, f"{us} us a turn" if us else failure, us=us)


def kernel_waits() -> Answer:
    """A running kernel sees a word that the host writes, and the host one that a kernel writes."""
    hip = Hip()
    stream, there, back = hip.stream(), hip.word(), hip.word()
    hip.kernel(lib.UCCH_AWAIT)

    def give(i: int) -> None:
        hip.awaits(stream, there.device, i)
        hip.posts(stream, back.device, i)

    return _turns(give, there, back, "a word is not seen")


def stream_waits() -> Answer:
    """A stream waits for signal memory that the host writes, and writes signal memory."""
    hip = Hip()
    stream, there, back = hip.stream(), hip.signal(), hip.signal()

    def give(i: int) -> None:
        hip.runtime.wait_value(stream, there.device, i)
        hip.runtime.write_value(stream, back.device, i)

    return _turns(give, there, back, "a word is not seen, or not waited for")


def queues() -> Answer:
    """With this many waiting streams another stream still makes progress."""
    hip, most = Hip(), 0
    for n in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24):
        with _held(hip, n) as (streams, _):
            post, free = hip.word(), hip.stream()
            hip.posts(free, post.device, 1)
            through = post.reaches(1)
        if not all(hip.finishes(stream) for stream in streams):
            return answer(False, f"{n} streams were released and do not continue", most=most)
        if not through:
            break
        most = n
    enough = most >= STREAMS
    words = f"{most} streams can wait beside one that runs (GPU_MAX_HW_QUEUES={os.environ.get('GPU_MAX_HW_QUEUES')})"
    return answer(enough, words if enough else f"{words}: messages may need {STREAMS}", most=most)


def engines() -> Answer:
    """A copy that waits in a stream does not block copies of other streams."""
    hip, through = Hip(), {}
    device, host = hip.alloc(2 * MIB), hip.pinned(2 * MIB)
    for name, dst, src in (("to the host", host, device), ("to the device", device, host)):
        with _held(hip) as (streams, _):
            hip.runtime.copy(dst, src, MIB, streams[0])
            free = hip.stream()
            hip.runtime.copy(dst + MIB, src + MIB, MIB, free)
            through[name] = hip.finishes(free)
    stopped = [name for name, passed in through.items() if not passed]
    words = (
        f"copies {' and '.join(stopped)} stop behind one that waits" if stopped else "copies overtake one that waits"
    )
    return answer(not stopped, words, through=through)


def calls() -> Answer:
    """No call made while a stream waits blocks on that stream."""
    hip, seconds = Hip(), {}
    code = hip.compiled(lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code)
    region = mmap.mmap(-1, MIB)
    spare, pinned, extra = hip.runtime.alloc(MIB), hip.runtime.alloc(MIB, pinned=True), hip.runtime.stream()
    asked: dict[str, Callable[[], object]] = {
        "allocating device memory": lambda: hip.alloc(4 * MIB),
        "pinning memory": lambda: hip.pinned(4 * MIB),
        "registering memory": lambda: hip.register(_start(region), MIB),
        "making a stream": hip.stream,
        "loading a kernel": lambda: hip.load(code),
        "destroying a stream": extra.close,
        "freeing pinned memory": pinned.close,
        "freeing device memory": spare.close,
    }
    for name, act in asked.items():
        with _held(hip) as (_, word):
            later = threading.Timer(HELD, setattr, (word, "value", 1))
            later.start()
            start = time.perf_counter()
            act()
            seconds[name] = round(time.perf_counter() - start, 4)
            later.cancel()
    waited = [name for name, took in seconds.items() if took > HELD / 2]
    frees = {"freeing pinned memory", "freeing device memory"}
    words = f"{', '.join(waited)} waits for held streams" if waited else "none waits for held streams"
    return answer(not set(waited) - frees, words, seconds=seconds)


# --- this host --------------------------------------------------------------------------------------------------------


def host() -> Answer:
    """This host without its name, and the ordinary doctor's findings."""
    from . import checks, facts  # the other questions do not need these imports

    here = facts.collect()
    gpus = [f"{each.pci} {each.arch} {each.memory >> 30} GiB" for each in here.usable if each.vendor == "amd"]
    findings = [asdict(each) for each in checks.examine(here)]
    text = f"kernel {here.kernel}, {here.processor}; {', '.join(gpus)}"
    return answer(True, text, env=dict(here.env), python=sys.version, findings=findings)


def found() -> Answer:
    """The runtime and its devices."""
    hip = Hip()
    here = {device.pci.partition(".")[0]: device.arch for device in devices()}
    buses = [hip.runtime.bus(i) for i in range(hip.runtime.count())]
    named = [f"{bus} {here.get(bus.partition('.')[0], '')}".strip() for bus in buses]
    words = f"HIP {hip.runtime.version()} from {hip.runtime.path}: {', '.join(named)}"
    return answer(True, words, version=hip.runtime.version(), path=hip.runtime.path, devices=named)


def main(arguments: list[str]) -> None:
    """Answer one question, by the function of that name, and exit."""
    try:
        result = globals()[arguments[0]]()
    except Exception as error:  # any exception is the answer
        kind = "" if isinstance(error, DeviceError) else f"{type(error).__name__}: "
        result = answer(False, f"{kind}{error}")
    print(MARK + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
