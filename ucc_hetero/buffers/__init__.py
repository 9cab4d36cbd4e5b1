"""Descriptions of array-likes in memory: address, number and type of elements, and vendor and device of the memory.

``as_buffer``, ``as_vbuffer`` and ``as_blocks`` take every buffer form of mpi4py and return a :class:`Buffer`, a
:class:`VBuffer`, or a Buffer per rank. ``copy`` and ``pack`` move elements that need not be contiguous; ``dtype_of``
names an element type. Wrong arguments raise here, before a byte is sent: ``TypeError``, ``ValueError`` or
``BufferError``.
"""

from .buffer import Buffer, Entries, Layout, PointerVendor, VBuffer, copy, empty_like, pack
from .dtypes import dtype_of
from .forms import as_blocks, as_buffer, as_entries, as_vbuffer, is_in_place

__all__ = [
    "Buffer", "Entries", "Layout", "PointerVendor", "VBuffer", "as_blocks", "as_buffer", "as_entries", "as_vbuffer",
    "copy", "dtype_of", "empty_like", "is_in_place", "pack",
]  # fmt: skip
