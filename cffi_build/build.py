"""Build the extension ``ucc_hetero._native``: cffi in API mode over the C files beside this one.

The cdef is made of the very files that the compiler reads: the declarations and constants in ``abi/`` and ``api/``, and
one prototype per line of ``abi/symbols.h``.

``UCCH_SANITIZE=address,undefined`` (or ``thread``) builds with gcc's sanitizers, for tests only (tests/sanitize).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
#: Structures and arithmetic of the engine that its device kernels include, too.
KERNELS = HERE.parent / "ucc_hetero" / "device" / "kernels"
#: Folders of the engine, lowest first: a file uses its own folder and those before it.
FOLDERS = ("abi", "api", "base", "net", "gpu", "shm", "p2p", "coll")
SOURCES = [path for folder in FOLDERS for path in sorted((HERE / folder).glob("*.c"))]


def _declarations(name: str) -> str:
    return (HERE / name).read_text()


def _prototypes() -> str:
    """One prototype per library function, from the X-macro lines of symbols.h."""
    rows = re.findall(r"^UC[CP]_(?:VOID_)?SYMBOL\(([^,]+), (\w+), (\([^)]*\)),", _declarations("abi/symbols.h"), re.M)
    return "\n".join(f"{ret} {name}{params};" for ret, name, params in rows)


def _layout() -> str:
    """The structs that kernels read, without what the compiler alone is asked."""
    return re.sub(
        r"^(#ifndef.*\n.*\n#endif|#pragma.*|static_assert.*)$", "", (KERNELS / "layout.h").read_text(), flags=re.M
    )


def _constants() -> str:
    names = re.findall(r"^#define (\w+) -?\d+$", _declarations("api/constants.h"), re.M)
    return "\n".join(f"#define {name} ..." for name in names)


#: The out-of-band exchange that libucc calls while it creates contexts; Python answers (ucc_hetero/bindings/oob.py).
CALLBACKS = """
extern "Python" ucc_status_t ucch_oob_allgather(void *src, void *dst, size_t size, void *info, void **request);
extern "Python" ucc_status_t ucch_oob_test(void *request);
extern "Python" ucc_status_t ucch_oob_free(void *request);
"""

SANITIZERS = os.environ.get("UCCH_SANITIZE", "")
FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
if SANITIZERS:
    # Python's own flags let signed integers wrap, which not every Python's do. What is undefined ends in a trap, which
    # AddressSanitizer writes down: beside it the other one has no file of its own.
    FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-wrapv", "-fstrict-overflow", f"-fsanitize={SANITIZERS}"]
    FLAGS += ["-Wno-tsan"] if SANITIZERS == "thread" else ["-fsanitize-undefined-trap-on-error"]

ffibuilder = FFI()
ffibuilder.cdef(
    "\n".join(
        [
            _declarations("abi/ucc_api.h"),
            _declarations("abi/ucp_api.h"),
            _prototypes(),
            _constants(),
            _declarations("api/api.h"),
            _declarations("api/device_api.h"),
            _layout(),
        ]
    )
)
ffibuilder.cdef(CALLBACKS)
ffibuilder.set_source(
    "ucc_hetero._native",
    '#include "base/ucch.h"\n#include "api/device_api.h"\n#include "kernels/layout.h"\n',
    sources=[f"cffi_build/{path.relative_to(HERE)}" for path in SOURCES],
    include_dirs=["cffi_build", "ucc_hetero/device"],
    depends=[
        str(path.relative_to(HERE.parent))
        for path in (HERE / "build.py", *sorted(HERE.rglob("*.h")), *sorted(KERNELS.glob("*.h")))
    ],
    libraries=["dl", "pthread", "m"],
    extra_compile_args=FLAGS,
    extra_link_args=[f"-fsanitize={SANITIZERS}"] if SANITIZERS else [],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
