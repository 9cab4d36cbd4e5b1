"""Layouts of the pages of two caches, and the conversions on the way from one to the other."""

from __future__ import annotations

from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ..buffers.buffer import Array
from ..native.libraries import ffi, lib
from ..types import DTYPES
from .wire_format import Form

#: Types that are converted into each other, and the engine's numbers of them.
_FLOATS = {name: DTYPES[name].code for name in ("float16", "bfloat16", "float32")}
_FP8 = {"float8_e4m3fn": lib.UCCH_E4M3FN, "float8_e4m3fnuz": lib.UCCH_E4M3FNUZ}
#: Elements that are moved as they are, by their bytes.
_UNITS = {8: DTYPES["uint64"].code, 4: DTYPES["uint32"].code, 2: DTYPES["uint16"].code, 1: DTYPES["uint8"].code}


def convertible(source: str, target: str) -> bool:
    """True if elements of one type can become those of the other."""
    return source == target or any({source, target} <= known.keys() for known in (_FLOATS, _FP8))


def scale(source: str, target: str) -> float:
    """Factor of the scale of float8 elements at the receiver."""
    return {"float8_e4m3fn": 2.0, "float8_e4m3fnuz": 0.5}.get(source, 1.0) if source != target else 1.0


def strides(form: Form) -> dict[str, int]:
    """Elements from one to the next along each axis; 0 for those that there are not."""
    sizes = {"K": form.parts, "B": form.blocks, "N": form.size, "H": form.heads, "D": form.dim}
    out, step = dict.fromkeys("KBNHD", 0), 1
    for axis in reversed(form.axes):
        out[axis], step = step, step * sizes[axis]
    return out


def array_bytes(form: Form) -> int:
    """Bytes of each array."""
    parts = form.parts // form.arrays
    return parts * form.blocks * form.size * form.heads * form.dim * DTYPES[form.dtype].itemsize


def unlike(mine: Form, theirs: Form) -> str:
    """Reason for which pages of one cannot become pages of the other; empty where they can."""
    words = {"layers": "layers", "parts": "parts a layer (keys and values, or one of both)", "size": "tokens a block"}
    words |= {"dim": "elements a head", "total": "heads in all"}
    for name, what in words.items():
        here, there = getattr(mine, name), getattr(theirs, name)
        if here != there:
            return f"{what}: {here} here and {there} there, which have to be the same"
    if not convertible(mine.dtype, theirs.dtype):
        able = " or ".join(", ".join(known) for known in (_FLOATS, _FP8))
        return f"{mine.dtype} here and {theirs.dtype} there: converted are {able} among themselves"
    return ""


class Conversion(NamedTuple):
    """How each piece is gathered from rows of elements and converted."""

    row: int
    rows: int
    apart: int
    groups_apart: int
    source: int
    target: int
    source_bytes: int
    target_bytes: int

    def native(self) -> Any:
        """Form in which the engine takes it."""
        return ffi.new("ucch_rows *", list(self))


class Route(NamedTuple):
    """Ways of pages between two forms: pieces of a page by their offsets in bytes on both sides, and bytes of each."""

    mine: Array
    theirs: Array
    length: int
    conversion: Conversion | None


class Plan:
    """Way of pages of ``mine`` into pages of ``theirs``, which :func:`unlike` says is possible."""

    def __init__(self, mine: Form, theirs: Form, alignment: int = 8) -> None:
        self.mine, self.theirs, self._alignment = mine, theirs, alignment
        self.first = max(mine.first, theirs.first)
        self.heads = min(mine.first + mine.heads, theirs.first + theirs.heads) - self.first
        #: Pairs of arrays in a layer, each with a transfer of its own.
        self.pairs = max(mine.arrays, theirs.arrays)

    def __str__(self) -> str:
        ways = (f"{''.join(a for a in form.axes if a in 'NHD')} {form.dtype}" for form in (self.mine, self.theirs))
        heads = "" if self.heads == self.mine.heads == self.theirs.heads else f", {self.heads} heads"
        return f"{' to '.join(ways)}{heads}{'' if self.route.conversion else ', as it is'}"

    @cached_property
    def route(self) -> Route:
        """The pieces of a page: as long as they can be at the receiver, each converted if it does not lie so here."""
        here, there = strides(self.mine), strides(self.theirs)
        source, target = (DTYPES[form.dtype].itemsize for form in (self.mine, self.theirs))
        counts = {"N": self.mine.size, "H": self.heads}
        inner, outer = sorted("NH", key=lambda axis: (counts[axis] > 1, there[axis]))
        run = counts[inner] * self.mine.dim
        whole = counts[outer] == 1 or there[outer] == run
        steps = np.arange(1 if whole else counts[outer], dtype=np.uint64)
        rows = [(counts[outer] if whole else 1, here[outer]), (counts[inner], here[inner]), (self.mine.dim, 1)]
        begin = [(self.first - form.first) * step["H"] for form, step in ((self.mine, here), (self.theirs, there))]
        return Route(
            (steps * np.uint64(here[outer]) + np.uint64(begin[0])) * np.uint64(source),
            (steps * np.uint64(there[outer]) + np.uint64(begin[1])) * np.uint64(target),
            run * (counts[outer] if whole else 1) * target,
            self._conversion(rows, source, target),
        )

    def _conversion(self, loops: list[tuple[int, int]], source: int, target: int) -> Conversion | None:
        """Of elements that three loops of (how many, how far apart) visit; None where they are as they should be."""
        merged = [loops[-1]]
        for count, apart in reversed(loops[:-1]):
            if count > 1 and apart == merged[0][0] * merged[0][1]:
                merged[0] = count * merged[0][0], merged[0][1]
            elif count > 1:
                merged.insert(0, (count, apart))
        same = self.mine.dtype == self.theirs.dtype
        if same and len(merged) == 1:
            return None
        (groups_apart, (rows, apart)), row = _nested(merged), merged[-1][0]
        if not same:
            codes = _FLOATS | _FP8
            numbers = codes[self.mine.dtype], codes[self.theirs.dtype]
            return Conversion(row, rows, apart, groups_apart, *numbers, source, target)
        unit = gcd(8, self._alignment, self.mine.dim * source)
        sizes = (size * source // unit for size in (row, apart, groups_apart))
        row, apart, groups_apart = sizes
        return Conversion(row, rows, apart, groups_apart, _UNITS[unit], _UNITS[unit], unit, unit)

    def lists(self, pages: Array, theirs: Array, part: int | None) -> tuple[Array, Array, Array]:
        """Offsets on both sides and lengths of pages of one array: of one ``part`` of them, or of all (None) where both
        sides have these in one array."""
        offsets = []
        parts = np.arange(self.mine.parts) if part is None else np.array([part])
        for form, numbers, pieces in ((self.mine, pages, self.route.mine), (self.theirs, theirs, self.route.theirs)):
            step, size = strides(form), DTYPES[form.dtype].itemsize
            which = (parts * (step["K"] * size)).astype(np.uint64)[:, None, None]
            where = numbers.astype(np.uint64)[None, :, None] * np.uint64(step["B"] * size)
            offsets.append((which + where + pieces[None, None, :]).reshape(-1))
        mine, target = offsets
        if self.route.conversion is None:
            return _joined(mine, target, self.route.length)
        return mine, target, np.full(len(mine), self.route.length, np.uint64)


def _nested(merged: list[tuple[int, int]]) -> tuple[int, tuple[int, int]]:
    """(elements between groups, (rows of a group, elements between them)) of loops around rows."""
    if len(merged) == 1:
        return 0, (1, 0)
    if len(merged) == 2:
        return 0, merged[0]
    return merged[0][1], merged[1]


def _joined(mine: Array, theirs: Array, length: int) -> tuple[Array, Array, Array]:
    """Pieces that follow each other on both sides made one."""
    size = np.uint64(length)
    begins = np.ones(len(mine), bool)
    begins[1:] = (mine[1:] != mine[:-1] + size) | (theirs[1:] != theirs[:-1] + size)
    at = np.flatnonzero(begins)
    return mine[at], theirs[at], (np.diff(at, append=len(mine)) * length).astype(np.uint64)
