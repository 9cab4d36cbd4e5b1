"""The fake libraries, built with the package's own kernels, which are compiled for the host (device.h, blocks.h)."""

import fcntl
import hashlib
import re
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path

from ucc_hetero.device.kernels import sources
from ucc_hetero.native.libraries import lib
from ucc_hetero.types import DTYPES, OPS

HERE = Path(__file__).parent
#: Cache of libraries for later runs of the tests, by a hash of their sources.
KEPT = HERE.parents[1] / "build" / "fakes"


class NoCompiler(Exception):
    """There is no C compiler, or no C++ compiler."""


CODES = {name: dtype.code for name, dtype in DTYPES.items()}
_SUM = OPS["SUM"].code
#: Pairs of float types between which pages are converted, and sizes of elements that are copied unchanged.
FLOATS = [CODES[name] for name in ("float16", "bfloat16", "float32")]
UNITS = [CODES[f"uint{8 * n}"] for n in (1, 2, 4, 8)]
PIECES = {
    f"pieces_{one}_{other}": (lib.UCCH_PIECES, 0, one, other)
    for one, other in (
        *((unit, unit) for unit in UNITS),
        *((one, other) for one in FLOATS for other in FLOATS if one != other),
        (lib.UCCH_E4M3FN, lib.UCCH_E4M3FNUZ), (lib.UCCH_E4M3FNUZ, lib.UCCH_E4M3FN),
    )
}  # fmt: skip
#: Kernels of which the host has an equivalent, by the names of operations and types.
ARITHMETIC = {
    **{f"{op}_{name}": (lib.UCCH_COMBINE, OPS[op].code, code, 0) for op in OPS for name, code in CODES.items()},
    **{f"scale_{name}": (lib.UCCH_SCALE, 0, code, 0) for name, code in CODES.items()},
    **{f"cast_{one}_{other}": (lib.UCCH_CAST, 0, CODES[one], CODES[other])
       for short in ("float16", "bfloat16") for one, other in ((short, "float32"), ("float32", short))},
}  # fmt: skip
#: Kernels that the fakes' compilers support; they fail for all others.
COMPILED = {
    "await": (lib.UCCH_AWAIT, 0, 0, 0), "lane": (lib.UCCH_LANE_COPY, 0, 0, 0), "ring": (lib.UCCH_RING_COPY, 0, 0, 0),
    "sum": (lib.UCCH_COMBINE, _SUM, CODES["float32"], 0),
    **{f"fused_{name}": (lib.UCCH_FUSED, _SUM, CODES[name], 0) for name in ("float32", "uint8")}, **PIECES,
}  # fmt: skip
#: Compiler options of each vendor: they select the vendor's branch of the kernels.
VENDORS = {"nvidia": ("-DFAKE_CUDA",), "amd": ("-DFAKE_HIP", "-D__AMDGCN__")}


def _entry(name, text):
    """Return a kernel in a separate namespace, as all define the same helpers, and its row of the table."""
    number = count()
    body = (
        re.sub(
            r"__shared__ (\w+) (\w+);",
            lambda at: f"{at[1]} &{at[2]} = *({at[1]} *)fakegpu_shared({next(number)});",
            text,
        )
        .replace("void ucch(", "void kernel(")
        .replace('extern "C" ', "")
    )
    return f"""namespace n_{name} {{
{body}
static void run(void **arguments) {{ fakegpu_enter(kernel, arguments); }}
static constexpr fakegpu_kernel row = {{"{name}", R"~~({text})~~", run, fakegpu_bytes(kernel)}};
}}
"""


def build_all():
    """vendor -> its fake library."""
    return {vendor: build(vendor) for vendor in VENDORS}


def build(vendor, cases=COMPILED):
    """Return one vendor's fake library, whose compiler supports these kernels; a cached one is reused."""
    cc, cxx = (shutil.which(a) or shutil.which(b) for a, b in (("cc", "gcc"), ("c++", "g++")))
    if not cc or not cxx:
        raise NoCompiler("needs compilers for C and C++")
    texts = {name: text for name, case in cases.items() if (text := sources.source(*case)) is not None}
    rows = ", ".join(f"n_{name}::row" for name in texts)
    code = (
        '#include "device.h"\n' + "".join(_entry(*each) for each in texts.items())
        + f'extern "C" const fakegpu_kernel fakegpu_kernels[] = {{{rows}, {{}}}};\n'
    )  # fmt: skip
    parts = [code, vendor, *(path.read_text() for path in (Path(__file__), *sorted(HERE.glob("*.[ch]"))))]
    out = KEPT / f"{hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # all lanes start at once, and one compiles
        if not out.exists():
            with tempfile.TemporaryDirectory(dir=KEPT) as folder:
                made = Path(folder, "fake.so")
                _compile(cc, cxx, VENDORS[vendor], code, made)
                made.replace(out)
    return out


def _compile(cc, cxx, branch, code, out):
    source, made = out.with_suffix(".cc"), out.with_suffix(".o")
    source.write_text(code)
    # With -fsanitize=thread every memory access becomes a call of blocks.h.
    words = "-std=c++14 -O1 -fPIC -w -fsanitize=thread -ffp-contract=off -fno-exceptions".split()
    subprocess.run([cxx, *words, f"-I{HERE}", *branch, "-c", source, "-o", made], check=True, timeout=600)
    # Those calls read thread-local data: directly, not through a function of the linker.
    words = "-std=gnu11 -O2 -shared -fPIC -ftls-model=initial-exec -Wl,-Bsymbolic".split()
    libraries = "-lpthread", "-lm"
    subprocess.run([cc, *words, *branch, HERE / "fakegpu.c", made, *libraries, "-o", out], check=True, timeout=600)
