"""The kernels' AMD branch, compiled by clang without a GPU or ROCm; registers and waits in the assembly."""

import os
import random
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from building import ARITHMETIC, CODES, PIECES

from ucc_hetero.device.kernels import sources
from ucc_hetero.native.libraries import lib
from ucc_hetero.types import OPS

#: Target -> lanes of a wave; registers of a lane up to which registers do not limit the number of waves.
TARGETS = {"gfx90a": (64, 64), "gfx942": (64, 64), "gfx1100": (32, 96), "gfx1201": (32, 96)}
#: Where to look for clang, newest first.
CLANGS = (*(f"clang-{major}" for major in range(22, 15, -1)), "clang", "amdclang", "/opt/rocm/llvm/bin/clang")
STUBS = Path(__file__).parent / "amd_stubs.h"


def fused(op, dtype):
    return lib.UCCH_FUSED, OPS[op].code, CODES[dtype], 0


#: Kernels that wait for another rank. Of the fused kernels those with the longest arithmetic.
WAITING = {
    "await": (lib.UCCH_AWAIT, 0, 0, 0), "lane": (lib.UCCH_LANE_COPY, 0, 0, 0), "ring": (lib.UCCH_RING_COPY, 0, 0, 0),
    "fused_float": fused("SUM", "float32"), "fused_half": fused("PROD", "float16"),
    "fused_complex": fused("PROD", "complex128"), "fused_int8": fused("MAX", "int8"),
}  # fmt: skip


class Kernel(NamedTuple):
    text: str
    registers: int
    scalars: int
    scratch: int
    shared: int
    wave: int

    @classmethod
    def of(cls, text):
        found = {what: int(n) for what, n in re.findall(r"^; (\w+): (\d+)", text, re.M)}
        registers = max(found["NumVgprs"], found.get("TotalNumVgprs", 0))
        wave = 32 if re.search(r"amdhsa_wavefront_size32 1", text) else 64
        return cls(text, registers, found["NumSgprs"], found["ScratchSize"], found["LDSByteSize"], wave)


#: Compiles for one target, without ROCm.
OPTIONS = ("-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-S", "-std=c++14", "-O3")


@cache
def known(clang):
    """The targets that a clang supports; it compiles nothing for others."""
    empty = (clang, *OPTIONS, "-o", os.devnull, os.devnull)
    done = {target: subprocess.run([*empty, f"--offload-arch={target}"], capture_output=True) for target in TARGETS}
    return frozenset(target for target, each in done.items() if each.returncode == 0)


@pytest.fixture(scope="module")
def clang():
    """The first clang that knows all targets, else the one that knows most."""
    found = [path for name in CLANGS if (path := shutil.which(name))]
    best = max(found, key=lambda path: len(known(path) & TARGETS.keys()), default="")
    if not best or not known(best) & TARGETS.keys():
        pytest.skip("needs a clang that compiles for AMD's devices, such as Debian's clang-19")
    return best


def compiled(clang, target, cases, folder):
    """Return the assembly that hipRTC would compile, by kernel; and the expected number of kernels.

    All kernels are in one text, each in a separate namespace, as they define the same helpers.
    """
    if target not in known(clang):
        pytest.skip(f"{clang} does not know {target}: it needs a newer one, such as Debian's clang-19")
    texts = {name: text for name, case in cases.items() if (text := sources.source(*case)) is not None}
    named = {name: text.replace("void ucch(", f"void ucch_{name}(") for name, text in texts.items()}
    parts = [f"namespace n_{name} {{\n{text}\n}}" for name, text in named.items()]
    (folder / "kernels.hip").write_text("\n".join(parts))
    words = [clang, *OPTIONS, f"--offload-arch={target}"]
    words += ["-Wall", "-Werror", "-Wno-tautological-compare", "-Wno-unused-function", "-include", str(STUBS)]
    words += [str(folder / "kernels.hip"), "-o", str(folder / "out.s")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    each = r"^ucch_(\w+):\s+; @ucch_\1$.*?^; Occupancy: \d+$"
    found = re.finditer(each, (folder / "out.s").read_text(), re.M | re.S)
    return {kernel[1]: Kernel.of(kernel[0]) for kernel in found}, len(texts)


def barriers_wait_for_stores(name, text):
    """Before one thread notifies others, each wave has waited for its own stores."""
    before, _, after = text.partition(";;#ASMSTART")
    wait, _, after = after.partition(";;#ASMEND")
    assert re.search(r"vmcnt\(0\)|vscnt null, 0x0|storecnt 0x0", wait), name
    assert "_store_" in before[before.rindex("s_barrier") :], f"{name}: waits before it has stored"
    assert "_store_" not in after[: after.index("s_barrier")], f"{name}: stores after it has waited"


def looks_empty_no_caches(name, text):
    """Polling a word does not invalidate the device's caches."""
    # From the label before a sleep to the branch after it: compilers put the load before the sleep, or between the two.
    loops = re.findall(r"^\.LBB\w+:(?:(?!^\.LBB).)*?^\ts_sleep .*?^\ts_c?branch", text, re.M | re.S)
    assert len(loops) == len(re.findall(r"^\ts_sleep ", text, re.M)) > 0, name
    for loop in loops:
        assert re.search(r"_load_(dword|b32)", loop) and not re.search(r"_(inv|wb\w*)\b", loop), (name, loop)


@pytest.mark.parametrize("targets", [("gfx90a", "gfx942"), ("gfx1100", "gfx1201")], ids=["CDNA", "RDNA"])
def test_waiting_kernels(clang, targets, tmp_path):
    """Registers do not limit how many waves run at a time, and kernels use no scratch memory."""
    target = random.choice(targets)
    kernels, n = compiled(clang, target, WAITING, tmp_path)
    wave, most = TARGETS[target]
    assert len(kernels) == n == len(WAITING)
    for name, each in kernels.items():
        assert each.wave == wave, name
        assert each.registers <= most and each.scalars <= 100, (name, each.registers, each.scalars)
        assert each.scratch == 0 and each.shared <= 512, (name, each.scratch, each.shared)
        if not target.startswith("gfx12"):
            looks_empty_no_caches(name, each.text)
        if name != "await":
            barriers_wait_for_stores(name, each.text)
            loads = r"(_load_(dwordx2|b64)(?:(?!s_wait).)*?){8}"
            assert re.search(loads, each.text, re.S), f"{name}: its loads wait for each other"


def test_arithmetic(clang, tmp_path):
    """Every operation that the engine may request compiles, and no element goes through scratch memory."""
    kernels, n = compiled(clang, "gfx942", ARITHMETIC | PIECES, tmp_path)
    assert len(kernels) == n > 100
    assert all(each.scratch == 0 and each.registers <= 64 for each in kernels.values())
