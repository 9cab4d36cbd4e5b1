"""Encoding of addresses, descriptors, page tables and tickets, with a version and a checksum."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from ..types import DTYPES

#: Version of all formats.
VERSION = 2
#: Maximum bytes of an address or descriptor; libucp's have some hundreds.
LIMIT = 64 << 10
#: Maximum bytes of a table with its regions, and of a ticket with a number for each page.
TABLE_LIMIT, TICKET_LIMIT = 1 << 20, 16 << 20

_HEAD = struct.Struct("<4sHI")
_ADDRESS = struct.Struct("<Q16sIH")
_DESCRIPTOR = struct.Struct("<QQQQ16s")

_TABLE = struct.Struct("<QQ8I5s16s")
_LENGTH = struct.Struct("<I")
_TICKET = struct.Struct("<QII")


class FormatError(ValueError):
    """The bytes are not an address, descriptor, table or ticket, or have another version."""


class Address(NamedTuple):
    """How peers reach a worker: its number, key of its host, process, IPv4 addresses, libucp's address."""

    uid: int
    host: bytes
    process: int
    interfaces: tuple[int, ...]
    worker: bytes

    def pack(self) -> bytes:
        head = _ADDRESS.pack(self.uid, self.host, self.process, len(self.interfaces))
        return _seal(b"UCHW", head + struct.pack(f"<{len(self.interfaces)}I", *self.interfaces) + self.worker)

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Decode an address. :class:`FormatError` if ``data`` is something else."""
        body = _unseal(b"UCHW", data, "address", _ADDRESS.size)
        uid, host, process, count = _ADDRESS.unpack_from(body)
        worker = _ADDRESS.size + 4 * count
        if worker > len(body):
            raise FormatError("the address is cut short")
        return cls(uid, host, process, struct.unpack_from(f"<{count}I", body, _ADDRESS.size), body[worker:])


class Descriptor(NamedTuple):
    """How peers reach a region: its owner's number and its own, address, length, memory, and libucp's key."""

    uid: int
    region: int
    base: int
    nbytes: int
    memory: str
    key: bytes

    def pack(self) -> bytes:
        memory = self.memory.encode().ljust(16, b"\0")
        return _seal(b"UCHR", _DESCRIPTOR.pack(self.uid, self.region, self.base, self.nbytes, memory) + self.key)

    @classmethod
    def unpack(cls, data: bytes) -> Descriptor:
        """Decode a descriptor. :class:`FormatError` if ``data`` is something else."""
        body = _unseal(b"UCHR", data, "descriptor", _DESCRIPTOR.size)
        uid, region, base, nbytes, memory = _DESCRIPTOR.unpack_from(body)
        if not memory.rstrip(b"\0").isalnum():
            raise FormatError("the descriptor names no kind of memory")
        kind = memory.rstrip(b"\0").decode("ascii")
        return cls(uid, region, base, nbytes, kind, body[_DESCRIPTOR.size :])


class Form(NamedTuple):
    """Layout of a cache: equal arrays per layer, whose ``axes`` in memory order are K (keys and values), B (blocks),
    N (tokens of a block), H (heads) and D (elements of a head); and which heads of the model it has."""

    layers: int
    parts: int
    arrays: int
    blocks: int
    size: int
    heads: int
    dim: int
    first: int
    total: int
    axes: str
    dtype: str

    def flaw(self) -> str:
        """What is wrong with the form; empty if it is consistent."""
        axes = self.axes
        if len(set(axes)) != len(axes) or not set("BND") <= set(axes) <= set("KBNHD"):
            return f"axes: {axes!r} are not K, B, N, H and D, once each; K and H may be missing"
        if axes[-2:] not in ("ND", "HD"):
            return f"axes: in memory they lie as {axes}, and heads or tokens with their elements have to be last"
        if ("H" not in axes and self.heads != 1) or self.arrays != (1 if "K" in axes else self.parts):
            return "arrays, heads and axes contradict each other"
        if min(self.layers, self.blocks, self.size, self.heads, self.dim) < 1 or self.parts not in (1, 2):
            return f"sizes: none may be 0, and there are keys and values, or one of both, not {self.parts} parts"
        if not 0 <= self.first <= self.total - self.heads:
            return f"heads: {self.heads} from number {self.first} on are not among {self.total}"
        return "" if self.dtype in DTYPES else f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}"


class Table(NamedTuple):
    """How peers reach a page table: its owner's number and its own, its form, descriptors of its regions."""

    uid: int
    number: int
    form: Form
    regions: tuple[bytes, ...]

    def pack(self) -> bytes:
        form = self.form
        names = form.axes.encode().ljust(5, b"\0"), form.dtype.encode().ljust(16, b"\0")
        numbers = form.layers, form.parts, form.blocks, form.size, form.heads, form.dim, form.first, form.total
        body = _TABLE.pack(self.uid, self.number, *numbers, *names)
        return _seal(b"UCHT", body + b"".join(_LENGTH.pack(len(each)) + each for each in self.regions))

    @classmethod
    def unpack(cls, data: bytes) -> Table:
        """Decode a table. :class:`FormatError` if ``data`` is something else."""
        body = _unseal(b"UCHT", data, "table of pages", _TABLE.size, TABLE_LIMIT)
        uid, number, layers, parts, *sizes, axes, dtype = _TABLE.unpack_from(body)
        regions, at = [], _TABLE.size
        while at < len(body):
            (length,) = _LENGTH.unpack_from(body.ljust(at + 4, b"\0"), at)
            regions.append(body[at + 4 : at + 4 + length])
            at += 4 + length
        arrays, left = divmod(len(regions), layers or 1)
        words = (word.rstrip(b"\0").decode("ascii", "replace") for word in (axes, dtype))
        form = Form(layers, parts, arrays, *sizes, *words)
        if at != len(body) or left or form.flaw():
            raise FormatError(f"the table of pages contradicts itself: {form.flaw() or 'its regions'}")
        return cls(uid, number, form, tuple(regions))


class Ticket(NamedTuple):
    """What a sender of pages needs: the number of the target table, the counter to increment, block numbers
    (uint32)."""

    table: int
    counter: int
    pages: bytes

    def pack(self) -> bytes:
        return _seal(b"UCHP", _TICKET.pack(self.table, self.counter, len(self.pages) // 4) + self.pages)

    @classmethod
    def unpack(cls, data: bytes) -> Ticket:
        """Decode a ticket. :class:`FormatError` if ``data`` is something else."""
        body = _unseal(b"UCHP", data, "ticket", _TICKET.size, TICKET_LIMIT)
        table, counter, count = _TICKET.unpack_from(body)
        if len(body) != _TICKET.size + 4 * count or counter >= 1 << 31:
            raise FormatError("the ticket contradicts itself")
        return cls(table, counter, body[_TICKET.size :])


def _seal(magic: bytes, body: bytes) -> bytes:
    return _HEAD.pack(magic, VERSION, zlib.crc32(body)) + body


def _unseal(magic: bytes, data: bytes, what: str, least: int, most: int = LIMIT) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"the {what} must be bytes, not {type(data).__name__}")
    data = bytes(data)
    if not _HEAD.size + least <= len(data) <= most or data[:4] != magic:
        raise FormatError(f"these {len(data)} bytes are not a valid {what}")
    _, version, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        raise FormatError(f"the {what} has version {version}, but this side has {VERSION}: both need one ucc_hetero")
    body = data[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise FormatError(f"the {what} is damaged: its checksum differs")
    return body
