"""Build the extension ``ucc_hetero._native``: cffi in API mode over the C files beside this one.

The cdef is made of the very files that the compiler reads: ``ucc_api.h``, ``ucp_api.h``, ``api.h``, ``device_api.h``,
the constants, and one prototype per line of ``symbols.h``.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
SOURCES = (
    "loader.c",
    "registry.c",
    "progress.c",
    "wait.c",
    "program.c",
    "run.c",
    "step.c",
    "launch.c",
    "enqueue.c",
    "whole.c",
    "channel.c",
    "message.c",
    "token.c",
    "later.c",
    "rma.c",
    "board.c",
    "local.c",
    "trace.c",
    "device.c",
    "device_cuda.c",
    "device_hip.c",
    "device_work.c",
    "device_gate.c",
    "kernel.c",
    "window.c",
    "arena.c",
    "transfer.c",
    "take.c",
    "queued.c",
    "slip.c",
    "bell.c",
)


def _declarations(name: str) -> str:
    return (HERE / name).read_text()


def _prototypes() -> str:
    """One prototype per library function, from the X-macro lines of symbols.h."""
    rows = re.findall(r"^UC[CP]_(?:VOID_)?SYMBOL\(([^,]+), (\w+), (\([^)]*\)),", _declarations("symbols.h"), re.M)
    return "\n".join(f"{ret} {name}{params};" for ret, name, params in rows)


def _constants() -> str:
    names = re.findall(r"^#define (\w+) -?\d+$", _declarations("constants.h"), re.M)
    return "\n".join(f"#define {name} ..." for name in names)


#: The out-of-band exchange that libucc calls while it creates contexts; Python answers (ucc_hetero/bindings/oob.py).
CALLBACKS = """
extern "Python" ucc_status_t ucch_oob_allgather(void *src, void *dst, size_t size, void *info, void **request);
extern "Python" ucc_status_t ucch_oob_test(void *request);
extern "Python" ucc_status_t ucch_oob_free(void *request);
"""

ffibuilder = FFI()
ffibuilder.cdef(
    "\n".join(
        [
            _declarations("ucc_api.h"),
            _declarations("ucp_api.h"),
            _prototypes(),
            _constants(),
            _declarations("api.h"),
            _declarations("device_api.h"),
        ]
    )
)
ffibuilder.cdef(CALLBACKS)
ffibuilder.set_source(
    "ucc_hetero._native",
    '#include "ucch.h"\n#include "device_api.h"\n',
    sources=[f"cffi_build/{name}" for name in SOURCES],
    include_dirs=["cffi_build"],
    depends=[f"cffi_build/{path.name}" for path in sorted(HERE.glob("*.h"))],
    libraries=["dl", "pthread", "m"],
    extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
