"""Sources of the kernels in this folder, in the language that CUDA and HIP share."""

from __future__ import annotations

import re
from pathlib import Path

from ...native.libraries import lib
from ...types import DTYPES, OPS

#: dtype -> its type in the kernels' language.
_TYPES = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long long",
    "float16": "half_t", "bfloat16": "bfloat_t", "float32": "float", "float64": "double",
    "complex64": "pair<float>", "complex128": "pair<double>",
    "float8_e4m3fn": "unsigned char", "float8_e4m3fnuz": "unsigned char",
}  # fmt: skip

#: The engine's numbers of types that UCC lacks.
_FP8 = {lib.UCCH_E4M3FN: "float8_e4m3fn", lib.UCCH_E4M3FNUZ: "float8_e4m3fnuz"}
_NAMES = {t.code: name for name, t in DTYPES.items() if name in _TYPES and t.code >= 0} | _FP8

#: Operations that arith.h implements.
_ARITHMETIC = ("SUM", "PROD", "MAX", "MIN")
_BITWISE = ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")

#: Kernels with one fixed source; the others are generated for an operation and its types.
_ALONE = {lib.UCCH_AWAIT: "await", lib.UCCH_LANE_COPY: "lane", lib.UCCH_RING_COPY: "ring"}
#: Kernel -> file that contains the loop around the statements for an element.
_AROUND = {lib.UCCH_FUSED: "fused", lib.UCCH_PIECES: "pieces"}
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.M)


def source(kind: int, op: int, dtype: int, to: int) -> str | None:
    """The kernel's source; None if there is none for these numbers."""
    if kind in _ALONE:
        return _included(f'#include "{_ALONE[kind]}.cuh"\n')
    two = kind in (lib.UCCH_CAST, lib.UCCH_PIECES)
    if dtype not in _NAMES or (two and to not in _NAMES):
        return None
    one = _NAMES[dtype]
    other = _NAMES[to] if two else one
    body = _converted(one, other) if two else _body(kind, op, one)
    if body is None:
        return None
    return _included(f"""#include "elements.cuh"
typedef {_TYPES[one]} FROM;
typedef {_TYPES[other]} TO;
static __device__ void element(TO &dst, const FROM &src, double by) {{
    {body}
}}
#include "{_AROUND.get(kind, "each")}.cuh"
""")


def _included(text: str) -> str:
    """The text with each include file inlined once: run-time compilers get a single file."""
    known = set()

    def put(found: re.Match[str]) -> str:
        if found[1] in known:
            return ""
        known.add(found[1])
        return _INCLUDE.sub(put, (Path(__file__).parent / found[1]).read_text().replace("#pragma once\n", ""))

    return _INCLUDE.sub(put, text)


def _converted(one: str, other: str) -> str | None:
    """Statements of ``element`` that convert one type to another, or copy it; the same types as ``ucch_cast``."""
    if one == other:
        return "dst = src;"
    if {one, other} == set(_FP8.values()):
        return f"dst = {one.removeprefix('float8_')}_to_{other.removeprefix('float8_e4m3')}(src);"
    if not {one, other} <= {"float16", "bfloat16", "float32"}:
        return None
    return f"dst = store<{_TYPES[other]}>::from(load(src));"


def _body(kind: int, op: int, name: str) -> str | None:
    """Statements of ``element`` for an operation."""
    one = _TYPES[name]
    sort, w = DTYPES[name].kind, f"wide<{one}>::type"
    if kind == lib.UCCH_SCALE:
        if sort == "complex":
            part = one.removeprefix("pair<").removesuffix(">")
            return f"dst = {one}{{dst.re / ({part})by, dst.im / ({part})by}};"
        by = {"int": "(long long)by", "uint": "(unsigned long long)by", "float": f"({w})by"}[sort]
        return f"dst = store<{one}>::from(({w})(load(dst) / {by}));"
    word = next((word for word, o in OPS.items() if o.code == op and word in _ARITHMETIC + _BITWISE), None)
    if word is None or (word in _BITWISE and sort not in ("int", "uint")):
        return None
    if sort == "complex" and word not in ("SUM", "PROD"):
        return None
    return f"{w} a = load(dst), b = load(src); dst = store<{one}>::from(({w})UCCH_{word}(a, b));"
