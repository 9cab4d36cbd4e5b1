"""The fake libraries, built with the package's own kernels, which are compiled for the host (device.h, blocks.h)."""

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
#: Where libraries are kept for other runs of tests, by what they are made of.
KEPT = HERE.parents[1] / "build" / "fakes"


class NoCompiler(Exception):
    """There is none for C, or none for C++."""


CODES = {name: dtype.code for name, dtype in DTYPES.items()}
_SUM = OPS["SUM"].code
#: Float types between which pages are converted, and elements of pages that are copied as they are.
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
#: What the fakes' compilers can compile; all else is too hard for them.
COMPILED = {
    "await": (lib.UCCH_AWAIT, 0, 0, 0), "lane": (lib.UCCH_LANE_COPY, 0, 0, 0), "ring": (lib.UCCH_RING_COPY, 0, 0, 0),
    "sum": (lib.UCCH_COMBINE, _SUM, CODES["float32"], 0),
    **{f"fused_{name}": (lib.UCCH_FUSED, _SUM, CODES[name], 0) for name in ("float32", "uint8")}, **PIECES,
}  # fmt: skip
#: How each is built: the branch of its vendor's is what the kernels have.
VENDORS = {"nvidia": ("-DFAKE_CUDA",), "amd": ("-DFAKE_HIP", "-D__AMDGCN__")}


def _entry(name, text):
    """A kernel in a namespace of its own, as all define the same helpers, and its row of the table."""
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
    """One vendor's fake library, whose compiler knows these kernels; what has been built before is used again."""
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
    if not out.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            made = Path(folder, "fake.so")
            _compile(cc, cxx, VENDORS[vendor], code, made)
            made.replace(out)
    return out


def _compile(cc, cxx, branch, code, out):
    source, made = out.with_suffix(".cc"), out.with_suffix(".o")
    source.write_text(code)
    # Every access to memory becomes a call of blocks.h: that is what -fsanitize=thread is for here.
    words = "-std=c++14 -O1 -fPIC -w -fsanitize=thread -ffp-contract=off -fno-exceptions".split()
    subprocess.run([cxx, *words, f"-I{HERE}", *branch, "-c", source, "-o", made], check=True, timeout=600)
    # Those calls ask for what is their thread's own: not by a function of the linker's.
    words = "-std=gnu11 -O2 -shared -fPIC -ftls-model=initial-exec -Wl,-Bsymbolic".split()
    libraries = "-lpthread", "-lm"
    subprocess.run([cc, *words, *branch, HERE / "fakegpu.c", made, *libraries, "-o", out], check=True, timeout=600)
