"""Device memory over links that only take host memory: every region that a step uses has a mirror in pinned memory.

A step over such a link works on the mirrors; copies bring the data down before it and up after it. They are steps of
their own, so that one fragment's copies go on while another is on the wire. All regions of one base share one mirror,
in which they lie as they do in the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..native.libraries import lib
from .placement import Local, Place

__all__ = ["Mirrors", "Span"]

#: A region as the native engine wants it: base, bytes from it, elements.
Span = tuple[int, int, int]


class Mirrors:
    """The pinned memory of one program. ``itemsize`` and ``code`` are those of the elements."""

    def __init__(self, itemsize: int, code: int) -> None:
        self.itemsize, self.code = itemsize, code
        self._bounds: dict[int, tuple[int, int]] = {}
        self._starts: dict[int, int] = {}
        self.nbytes = 0

    def add(self, spans: Iterable[Span]) -> None:
        """Take note of regions that will need a mirror; before the first ``place``."""
        for base, offset, count in spans:
            if count:
                low, high = self._bounds.get(base, (offset, offset))
                self._bounds[base] = min(low, offset), max(high, offset + count * self.itemsize)

    def settle(self) -> None:
        """Lay the mirrors out."""
        for base, (low, high) in sorted(self._bounds.items()):
            self._starts[base] = self.nbytes - low
            self.nbytes += -(-(high - low) // 256) * 256

    def place(self, base: int, offset: int) -> tuple[int, int]:
        """Where bytes from a base are mirrored; what no step uses needs no more than the right kind of address."""
        return lib.UCCH_PIN, offset + self._starts[base] if base in self._starts else 0

    def copies(self, spans: Sequence[Span], *, down: bool) -> list[Local]:
        """The copies of these regions to their mirrors (``down``) or back; touching regions make one copy."""
        out = []
        for base, offset, count in _joined(spans, self.itemsize):
            there, mirror = Place(base, offset), Place(*self.place(base, offset))
            src, dst = (there, mirror) if down else (mirror, there)
            out.append(Local(lib.UCCH_COPY, self.code, 0, src, dst, count))
        return out


def _joined(spans: Sequence[Span], itemsize: int) -> list[Span]:
    """Without empty regions, in order of address, touching ones joined and repeated ones taken once."""
    whole: list[Span] = []
    for base, offset, count in sorted({span for span in spans if span[2]}):
        if whole and whole[-1][0] == base and whole[-1][1] + whole[-1][2] * itemsize == offset:
            whole[-1] = base, whole[-1][1], whole[-1][2] + count
        else:
            whole.append((base, offset, count))
    return whole
