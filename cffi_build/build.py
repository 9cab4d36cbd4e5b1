"""Build the extension ``ucc_hetero._native``: cffi in API mode over the C files in this folder.

The cdef consists of files that the compiler reads, too: the declarations and constants in ``abi/`` and ``api/``, and
one prototype per line of ``abi/symbols.h``. The stub for mypy, ``ucc_hetero/_native.pyi``, is made from the same text;
like the extension it is not in the repository.

``UCCH_SANITIZE=address,undefined`` (or ``thread``) builds with gcc's sanitizers, for tests only (tests/sanitize).
"""

from __future__ import annotations

import os
import re
from keyword import iskeyword
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
#: Structures and arithmetic that the engine shares with its device kernels.
KERNELS = HERE.parent / "ucc_hetero" / "device" / "kernels"
#: Folders of the engine, lowest first: a file includes only headers of its own folder and of those before it.
FOLDERS = ("abi", "api", "base", "net", "gpu", "shm", "p2p", "rma", "coll", "python")
SOURCES = [path for folder in FOLDERS for path in sorted((HERE / folder).glob("*.c"))]


def _declarations(name: str) -> str:
    return (HERE / name).read_text()


def _prototypes() -> str:
    """One prototype per library function, from the X-macro lines of symbols.h."""
    rows = re.findall(r"^UC[CP]_SYMBOL\(([^,]+), (\w+), (\([^)]*\)),", _declarations("abi/symbols.h"), re.M)
    return "\n".join(f"{ret} {name}{params};" for ret, name, params in rows)


def _operations() -> str:
    """The structure of a GPU runtime's functions, from the X-macro lines of ops.h."""
    rows = re.findall(r"^DEVICE\((\w+), (\([^)]*\))\)", _declarations("gpu/ops.h"), re.M)
    return "struct device_ops {\n" + "".join(f"int (*{name}){params};\n" for name, params in rows) + "};"


def _layout() -> str:
    """The structs that kernels read, without the lines that only the compiler can process."""
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

#: Fields of the engine's structures that Python reads.
FIELDS = """
struct ucch_op { ucch_error error; ...; };
struct ucch_message { ucp_tag_recv_info_t info; int by_lane; ...; };
struct ucch_lane_message { uint64_t found_bytes, found_tag; ...; };
struct ucch_peer { int by_kernel; uint64_t counts[...]; ...; };
struct ucch_target { int is_stale, users; char *seen; ...; };
struct ucch_transfer { char *link; ...; };
"""

SANITIZERS = os.environ.get("UCCH_SANITIZE", "")
FLAGS = [
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-O3",
    "-ffp-contract=off",  # as for the kernels (ucc_hetero/machine/vendors.py)
    "-fno-trapping-math",  # lets gcc vectorize loops over floats
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    "-Werror=implicit-function-declaration",
    "-Werror=int-conversion",
]
if SANITIZERS:
    # Some Pythons are built with -fwrapv, which makes signed overflow defined. Undefined behaviour ends in a trap,
    # which AddressSanitizer reports: beside it, UBSan cannot write a log file of its own.
    FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-wrapv", "-fstrict-overflow", f"-fsanitize={SANITIZERS}"]
    FLAGS += ["-DUCCH_CHECK_LOCKS"]
    FLAGS += ["-Wno-tsan"] if SANITIZERS == "thread" else ["-fsanitize-undefined-trap-on-error"]

CDEF = "\n".join(
    [
        _declarations("abi/ucc_api.h"),
        _declarations("abi/ucp_api.h"),
        _prototypes(),
        _constants(),
        _declarations("api/api.h"),
        _operations(),
        _declarations("api/device_api.h"),
        _layout(),
    ]
)
ffibuilder, declared = FFI(), FFI()
for each in ffibuilder, declared:
    each.cdef(CDEF)
ffibuilder.cdef(FIELDS)
ffibuilder.cdef(CALLBACKS)
ffibuilder.set_source(
    "ucc_hetero._native",
    '#include "p2p/p2p.h"\n#include "rma/rma.h"\n',
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

#: Beginning of the stub, with the part of cffi that the package uses. A pointer may go where a number is expected, as
#: numbers are read from pointers (``size[0]``); a number or None may not go where a pointer is.
STUB = """\
# Written by cffi_build/build.py.
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

class CData(Any): ...  # type: ignore[misc]

Pointer: TypeAlias = CData | bytes | Sequence[Any]

class FFI:
    NULL: CData
    def addressof(self, cdata: CData | Lib, /, *fields: str | int) -> CData: ...
    def buffer(self, cdata: CData, size: int = ...) -> Any: ...
    def cast(self, cdecl: str, value: CData | int) -> CData: ...
    def def_extern(
        self, name: str = ..., error: Any = ..., onerror: Callable[..., Any] | None = ...
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
    def from_buffer(self, cdecl: Any, buffer: Any = ..., require_writable: bool = ...) -> CData: ...
    def gc(self, cdata: CData, destructor: Callable[[CData], Any] | None, size: int = ...) -> CData: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def new(self, cdecl: str, init: Any = ...) -> CData: ...
    def offsetof(self, cdecl: str, field: str | int, /, *fields: str | int) -> int: ...
    def sizeof(self, cdecl: str | CData) -> int: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def typeof(self, cdecl: str | CData) -> Any: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...

class Lib:
"""


def _python_type(ctype: FFI.CType, pointer: str) -> str:
    """Python type of a C type; ``pointer`` is that of pointers."""
    if ctype.kind == "primitive":
        return "float" if ctype.cname == "double" else "int"
    return "None" if ctype.kind == "void" else pointer


def stub() -> str:
    """The stub of the extension: every function of ``lib`` with its arguments, and every constant."""
    text = re.sub(r"/\*.*?\*/", "", CDEF, flags=re.S)
    lines = [f"    {name}: int" for name in re.findall(r"^#define (\w+)", text, re.M)]
    lines += [
        f"    {name}: int"
        for names in re.findall(r"^enum {(.*?)}", text, re.M)
        for name in re.findall(r"[A-Z]\w+", names)
    ]
    lines += [f"    {name}: CData" for name in re.findall(r" (\w+)\(", CALLBACKS)]
    for result, name, parameters in re.findall(r"^(\w[\w ]*?[ *]+)(\w+)\(([^)]*)\);", text, re.M):
        ctype = declared.typeof(f"{result}(*)({parameters})")
        shown = "".join(
            f", {word}{'_' * iskeyword(word)}: {_python_type(arg, 'Pointer')}"
            for word, arg in zip(re.findall(r"(\w+)(?:,|$)", parameters), ctype.args, strict=bool(ctype.args))
        )
        lines.append(f"    def {name}(self{shown}, /) -> {_python_type(ctype.result, 'CData')}: ...")
    return STUB + "\n".join(lines) + "\n\nffi: FFI\nlib: Lib\n"


(KERNELS.parents[1] / "_native.pyi").write_text(stub())

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
