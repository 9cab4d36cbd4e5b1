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

from ucc_hetero.device.kernels import sources
from ucc_hetero.native.libraries import lib
from ucc_hetero.types import DTYPES, OPS

#: Target -> lanes of a wave; registers of a lane up to which the most waves run at a time.
TARGETS = {"gfx90a": (64, 64), "gfx942": (64, 64), "gfx1100": (32, 96), "gfx1201": (32, 96)}
#: Where a clang may be, newest first.
CLANGS = (*(f"clang-{major}" for major in range(22, 15, -1)), "clang", "amdclang", "/opt/rocm/llvm/bin/clang")
STUBS = Path(__file__).parent / "amd_stubs.h"

TYPES = [t.code for t in DTYPES.values()]


def fused(op: str, dtype: str) -> tuple[int, int, int, int]:
    return lib.UCCH_FUSED, OPS[op].code, DTYPES[dtype].code, 0


#: Kernels that wait for another rank. Of the fused ones those whose arithmetic is longest.
WAITING = {
    "await": (lib.UCCH_AWAIT, 0, 0, 0), "lane": (lib.UCCH_LANE_COPY, 0, 0, 0), "ring": (lib.UCCH_RING_COPY, 0, 0, 0),
    "fused_float": fused("SUM", "float32"), "fused_half": fused("PROD", "float16"),
    "fused_complex": fused("PROD", "complex128"), "fused_int8": fused("MAX", "int8"),
}  # fmt: skip
OTHERS = {"post": (lib.UCCH_POST, 0, 0, 0)}
OTHERS |= {f"combine_{op.code}_{t}": (lib.UCCH_COMBINE, op.code, t, 0) for op in OPS.values() for t in TYPES}
OTHERS |= {f"scale_{t}": (lib.UCCH_SCALE, 0, t, 0) for t in TYPES}
OTHERS |= {
    f"cast_{one}_{other}": (lib.UCCH_CAST, 0, DTYPES[one].code, DTYPES[other].code)
    for half in ("float16", "bfloat16")
    for one, other in ((half, "float32"), ("float32", half))
}


OTHERS |= {
    f"pieces_{one}_{other}": (lib.UCCH_PIECES, 0, one, other)
    for types in ([DTYPES[name].code for name in ("float16", "bfloat16", "float32", "uint64")], [256, 264])
    for one in types
    for other in types
}


class Kernel(NamedTuple):
    """One kernel's assembly and what it takes of a device."""

    text: str
    registers: int
    scalars: int
    scratch: int
    shared: int
    wave: int


#: Compiles for one target, without ROCm.
OPTIONS = ("-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-S", "-std=c++14", "-O3")


@cache
def known(clang: str) -> frozenset[str]:
    """The targets that a clang can compile for: it compiles nothing for them."""
    empty = (clang, *OPTIONS, "-o", os.devnull, os.devnull)
    done = {target: subprocess.run([*empty, f"--offload-arch={target}"], capture_output=True) for target in TARGETS}
    return frozenset(target for target, each in done.items() if each.returncode == 0)


@pytest.fixture(scope="module")
def clang() -> str:
    """The first clang that knows all targets, else the one that knows most."""
    found = [path for name in CLANGS if (path := shutil.which(name))]
    best = max(found, key=lambda path: len(known(path) & TARGETS.keys()), default="")
    if not best or not known(best) & TARGETS.keys():
        pytest.skip("needs a clang that compiles for AMD's devices, such as Debian's clang-19")
    return best


def text_of(cases: dict[str, tuple[int, int, int, int]]) -> tuple[str, int]:
    """All kernels in one text, each in a namespace of its own as they define the same helpers; and how many."""
    parts, n = [], 0
    for name, case in cases.items():
        source = sources.source(*case)
        if source is not None:
            n += 1
            parts.append(f"namespace n{n} {{\n{source.replace('void ucch(', f'void ucch_{name}(')}\n}}")
    return "\n".join(parts), n


def compiled(clang: str, target: str, text: str, folder: Path) -> dict[str, Kernel]:
    """Assembly as hipRTC would have it made, by kernel."""
    if target not in known(clang):
        pytest.skip(f"{clang} does not know {target}: it needs a newer one, such as Debian's clang-19")
    (folder / "kernels.hip").write_text(text)
    words = [clang, *OPTIONS, f"--offload-arch={target}"]
    words += ["-Wall", "-Werror", "-Wno-tautological-compare", "-Wno-unused-function", "-include", str(STUBS)]
    done = subprocess.run(
        [*words, str(folder / "kernels.hip"), "-o", str(folder / "out.s")], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        found[1]: kernel(found[0])
        for found in re.finditer(
            r"^ucch_(\w+):\s+; @ucch_\1$.*?^; Occupancy: \d+$", (folder / "out.s").read_text(), re.M | re.S
        )
    }


def kernel(text: str) -> Kernel:
    def number(what: str) -> int:
        found = re.search(rf"^; {what}: (\d+)", text, re.M)
        assert found, what
        return int(found[1])

    registers = max(number("NumVgprs"), number("TotalNumVgprs") if "TotalNumVgprs" in text else 0)
    wave = 32 if re.search(r"amdhsa_wavefront_size32 1", text) else 64
    return Kernel(text, registers, number("NumSgprs"), number("ScratchSize"), number("LDSByteSize"), wave)


def barriers_wait_for_stores(name: str, text: str) -> None:
    """Before one thread tells others, each wave has waited for what it stored itself."""
    before, _, after = text.partition(";;#ASMSTART")
    wait, _, after = after.partition(";;#ASMEND")
    assert re.search(r"vmcnt\(0\)|vscnt null, 0x0|storecnt 0x0", wait), name
    assert "_store_" in before[before.rindex("s_barrier") :], f"{name}: waits before it has stored"
    assert "_store_" not in after[: after.index("s_barrier")], f"{name}: stores after it has waited"


def looks_empty_no_caches(name: str, text: str) -> None:
    """Whoever looks at a word again and again leaves others on the device their caches."""
    # From the label before a nap to the branch behind it: compilers put the look before that, or between the two.
    loops = re.findall(r"^\.LBB\w+:(?:(?!^\.LBB).)*?^\ts_sleep .*?^\ts_c?branch", text, re.M | re.S)
    assert len(loops) == len(re.findall(r"^\ts_sleep ", text, re.M)) > 0, name
    for loop in loops:
        assert re.search(r"_load_(dword|b32)", loop) and not re.search(r"_(inv|wb\w*)\b", loop), (name, loop)


@pytest.mark.parametrize("targets", [("gfx90a", "gfx942"), ("gfx1100", "gfx1201")], ids=["CDNA", "RDNA"])
def test_waiting_kernels(clang: str, targets: tuple[str, str], tmp_path: Path) -> None:
    """They let as many waves run at a time as there is room for, and use no memory of the device."""
    target = random.choice(targets)
    text, n = text_of(WAITING)
    kernels = compiled(clang, target, text, tmp_path)
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


def test_arithmetic(clang: str, tmp_path: Path) -> None:
    """Everything that the engine may ask for compiles, and no element goes by way of memory."""
    text, n = text_of(OTHERS)
    kernels = compiled(clang, "gfx942", text, tmp_path)
    assert len(kernels) == n > 100
    assert all(each.scratch == 0 and each.registers <= 64 for each in kernels.values())
