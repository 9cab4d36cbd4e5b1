"""Pages of a KV cache: tables of pages, and their transfer into a peer's cache, which may have another layout.

table = rma.PageTable(worker, caches, "KBNHD")     # vLLM's: an array a layer
theirs = table.open(peer, descriptor)              # the peer's table.descriptor
receipt = table.recv_pages([7, 9], theirs)         # on the receiver; receipt.ticket goes to the sender
theirs.send_pages([3, 4], ticket).Wait()           # on the sender
receipt.Wait()                                     # on the receiver: the pages are there
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ..bindings.handle import Handle
from ..buffers import dtype_of
from ..buffers.buffer import Array
from ..device import kernels
from ..errors import DeviceError, UCCHError
from ..machine.vendors import INTERFACES
from ..native.libraries import ffi, lib
from ..types import DTYPES
from .endpoint import Endpoint, Target
from .region import Region
from .request import Requests
from .wire_format import Descriptor, Form, FormatError, Table, Ticket
from .worker import Counter, Worker

#: Types that can be converted into each other, with their numbers in the engine.
_FLOATS = {name: DTYPES[name].code for name in ("float16", "bfloat16", "float32")}
_FP8 = {"float8_e4m3fn": lib.UCCH_E4M3FN, "float8_e4m3fnuz": lib.UCCH_E4M3FNUZ}
#: Bytes of an element -> integer type in which it is moved unchanged.
_UNITS = {8: DTYPES["uint64"].code, 4: DTYPES["uint32"].code, 2: DTYPES["uint16"].code, 1: DTYPES["uint8"].code}


def convertible(source: str, target: str) -> bool:
    """True if elements of type ``source`` can be converted to type ``target``."""
    return source == target or any({source, target} <= known.keys() for known in (_FLOATS, _FP8))


def scale(source: str, target: str) -> float:
    """Factor for the scale of float8 elements at the receiver, as its format has another range."""
    return {"float8_e4m3fn": 2.0, "float8_e4m3fnuz": 0.5}.get(source, 1.0) if source != target else 1.0


def strides(form: Form) -> dict[str, int]:
    """Distance in elements along each axis; 0 for axes that the form lacks."""
    sizes = {"K": form.parts, "B": form.blocks, "N": form.size, "H": form.heads, "D": form.dim}
    out, step = dict.fromkeys("KBNHD", 0), 1
    for axis in reversed(form.axes):
        out[axis], step = step, step * sizes[axis]
    return out


def array_bytes(form: Form) -> int:
    parts = form.parts // form.arrays
    return parts * form.blocks * form.size * form.heads * form.dim * DTYPES[form.dtype].itemsize


def unlike(mine: Form, theirs: Form) -> str:
    """Why pages of one form cannot become pages of the other; empty if they can."""
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
    """How each piece is gathered from rows of elements, and converted."""

    row: int
    rows: int
    apart: int
    groups_apart: int
    source: int
    target: int
    source_bytes: int
    target_bytes: int

    def native(self) -> Any:
        return ffi.new("ucch_rows *", list(self))


class Route(NamedTuple):
    """A page between two forms: offsets in bytes of its pieces on both sides, their length, and their conversion."""

    mine: Array
    theirs: Array
    length: int
    conversion: Conversion | None


class Plan:
    """Transfer of pages from ``mine`` to ``theirs``; :func:`unlike` must be empty for the two."""

    def __init__(self, mine: Form, theirs: Form, alignment: int = 8) -> None:
        self.mine, self.theirs, self._alignment = mine, theirs, alignment
        self.first = max(mine.first, theirs.first)
        self.heads = min(mine.first + mine.heads, theirs.first + theirs.heads) - self.first
        #: Number of array pairs of a layer, each with a transfer of its own.
        self.pairs = max(mine.arrays, theirs.arrays)

    def __str__(self) -> str:
        ways = (f"{''.join(a for a in form.axes if a in 'NHD')} {form.dtype}" for form in (self.mine, self.theirs))
        heads = "" if self.heads == self.mine.heads == self.theirs.heads else f", {self.heads} heads"
        return f"{' to '.join(ways)}{heads}{'' if self.route.conversion else ', as it is'}"

    @cached_property
    def route(self) -> Route:
        """The pieces of a page, as long as possible at the receiver; converted if they are not contiguous here."""
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
        """Conversion of elements that three loops of (count, stride) visit; None if they need none."""
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
        """Offsets on both sides, and lengths, of the pages of one array: of one ``part``, or of both if each side has
        one array for keys and values."""
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
    """(elements between groups, (rows of a group, elements between rows)) of the loops around rows."""
    if len(merged) == 1:
        return 0, (1, 0)
    if len(merged) == 2:
        return 0, merged[0]
    return merged[0][1], merged[1]


def _joined(mine: Array, theirs: Array, length: int) -> tuple[Array, Array, Array]:
    """Merge pieces that are adjacent on both sides."""
    size = np.uint64(length)
    begins = np.ones(len(mine), bool)
    begins[1:] = (mine[1:] != mine[:-1] + size) | (theirs[1:] != theirs[:-1] + size)
    at = np.flatnonzero(begins)
    return mine[at], theirs[at], (np.diff(at, append=len(mine)) * length).astype(np.uint64)


# --- layouts of two caches, and conversions on the way from one to the other ------------------------------------------


class PageTable(Handle):
    """A KV cache as pages: for each layer one array, or a pair of arrays for keys and values, all of equal shape.

    Args:
        worker: The worker that registers the arrays.
        caches: An array, or a pair of arrays, for each layer.
        axes: A letter for each dimension of the arrays, in index order: K (2: keys and values), B (blocks), N
            (tokens of a block), or T for B and N together, H (heads), D (elements of a head). The order in memory
            follows from the strides.
        block_size: Tokens of a block; needed with T.
        dtype: Element type, for arrays that do not have it, such as arrays of bytes.
        heads: Number of the first head in this cache, and number of heads of the model.

    Attributes:
        descriptor: Bytes for a peer's :meth:`open`; valid until the table is closed.

    Raises:
        ValueError: The arrays differ, or do not fit ``axes``.
        BufferError: An array cannot be registered.
    """

    def __init__(
        self,
        worker: Worker,
        caches: Sequence[Any],
        axes: str,
        *,
        block_size: int | None = None,
        dtype: str | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        self.worker = worker
        layers = [tuple(each) if isinstance(each, list | tuple) else (each,) for each in caches]
        if not layers or len({len(each) for each in layers}) != 1:
            raise ValueError("caches: must have an array, or a pair of arrays, for each layer")
        arrays = [_in_memory_order(array, axes) for layer in layers for array in layer]
        shapes = {(tuple(order), shape) for _, order, shape in arrays}
        if len(shapes) > 1:
            raise ValueError(f"caches: arrays have different shapes, {sorted(shapes)[:3]}; all must be equal")
        _, order, shape = arrays[0]
        name = _dtype(arrays[0][0], dtype)
        self.form = _form(order, shape, len(layers), len(layers[0]), block_size, name, heads)
        self.regions: list[Region] = []
        try:
            for array, *_ in arrays:
                self.regions.append(worker.register(array))
                self._check(self.regions[-1])
        except BaseException:
            self.close()
            raise
        number = int.from_bytes(os.urandom(8), "little")
        told = Table(worker.uid, number, self.form, tuple(region.descriptor for region in self.regions))
        self.number, self.descriptor = number, told.pack()
        self._receipts: list[Receipt] = []
        if self.on_device:  # compile the layout kernel now: at the first page streams may be held
            kernels.ready(lib.UCCH_PIECES, 0, DTYPES["uint64"].code, DTYPES["uint64"].code)

    def _check(self, region: Region) -> None:
        if region.nbytes != array_bytes(self.form):
            raise ValueError(f"caches: an array has {region.nbytes} bytes, but {array_bytes(self.form)} by its shape")
        if self._base(region) % DTYPES[self.form.dtype].itemsize:
            raise BufferError(f"caches: an array begins in the middle of an element of {self.form.dtype}")

    @staticmethod
    def _base(region: Region) -> int:
        return Descriptor.unpack(region.descriptor).base

    def __repr__(self) -> str:
        form = self.form
        heads = f"heads {form.first} to {form.first + form.heads - 1} of {form.total}"
        return f"<PageTable of {form.layers} layers, {form.blocks} blocks of {form.size} tokens, {heads}, {form.dtype}>"

    @property
    def on_device(self) -> bool:
        """True if the cache is in a device's memory."""
        return self.regions[0].memory != "host"

    @cached_property
    def alignment(self) -> int:
        """Largest power of two, up to 8 bytes, that divides all array addresses."""
        return gcd(8, *(self._base(region) for region in self.regions))

    def open(self, peer: Endpoint, descriptor: bytes, *, layers: Sequence[tuple[int, int]] | None = None) -> PageTarget:
        """Open a peer's table, to send pages to it or receive pages from it.

        Args:
            peer: Endpoint of the table's process.
            descriptor: The peer's :attr:`descriptor`.
            layers: Numbers of a layer in this table and in the peer's, for each layer that both have; by default both
                have the same.

        Returns:
            PageTarget: The peer's table, for :meth:`PageTarget.send_pages` and :meth:`recv_pages`.

        Raises:
            FormatError: ``descriptor`` is not a table's, or is one of another version.
            ValueError: The table belongs to another process, or its pages cannot be exchanged with this table's.
        """
        found = Table.unpack(descriptor)
        if found.uid != peer.uid:
            raise ValueError("the table is of another process, not of this endpoint's peer")
        mine, theirs = self.form, found.form
        why = unlike(mine, theirs if layers is None else theirs._replace(layers=mine.layers))
        if why:
            raise ValueError(f"pages of the two tables cannot be exchanged: {why}")
        pairs = [(i, i) for i in range(mine.layers)] if layers is None else layers
        for most, numbers in zip((mine.layers, theirs.layers), zip(*pairs, strict=True), strict=False):
            _numbers("layers", numbers, most, once=True)
        return PageTarget(self, peer, found, dict(pairs))

    def recv_pages(
        self, pages: Any, sources: PageTarget | Sequence[PageTarget], *, timeout: float | None = None
    ) -> Receipt:
        """Prepare to receive pages from a peer's table, or from several that together have all layers and heads of
        this one.

        Args:
            pages: Block numbers in this table. Do not use the blocks until the receipt is complete.
            sources: The peer's table, or several.
            timeout: Seconds; the worker's by default.

        Returns:
            Receipt: Its ``ticket`` (with several sources, one of its ``tickets`` each) goes to the sender.

        Raises:
            ValueError: A number is out of range or occurs twice, or the sources do not have each head of each layer
                exactly once.
        """
        each = [sources] if isinstance(sources, PageTarget) else list(sources)
        if any(source.table is not self for source in each):
            raise ValueError("sources: one of them was opened by another table")
        numbers = _numbers("pages", pages, self.form.blocks, once=True)
        self._check_heads(each)
        self._receipts = [receipt for receipt in self._receipts if not receipt.ended()]
        return Receipt(self, each, numbers, timeout)

    def _check_heads(self, sources: list[PageTarget]) -> None:
        form = self.form
        come = np.zeros((form.layers, form.heads), int)
        for source in sources:
            first, count = source.plan.first - form.first, max(source.plan.heads, 0)
            come[list(source.layers), first : first + count] += 1
        for layer, head in np.argwhere(come != 1)[:1].tolist():
            what = f"head {form.first + head} of {form.total}" + (f" of layer {layer}" if form.layers > 1 else "")
            raise ValueError(
                f"sources: {come[layer, head]} of the {len(sources)} sources have {what}; exactly one must have each "
                f"of {form.first} to {form.first + form.heads - 1}"
            )

    def _keep(self, receipt: Receipt) -> None:
        """Keep a receipt alive while a stream waits for it."""
        self._receipts.append(receipt)

    def close(self) -> None:
        """Withdraw the cache from all peers.

        Raises:
            CollectiveTimeout: A peer that is alive does not release it.
        """
        while self.regions:
            self.regions[-1].close()
            self.regions.pop()


class PageTarget:
    """A peer's table, opened by :meth:`PageTable.open` for ``table``. ``layers``: the numbers of the layers that both
    have, in ``table`` and in the peer's."""

    def __init__(self, table: PageTable, peer: Endpoint, told: Table, layers: dict[int, int]) -> None:
        self.table, self.peer, self.form, self.number, self.layers = table, peer, told.form, told.number, layers
        self._descriptors = told.regions
        self.plan = Plan(table.form, told.form, table.alignment)

    def __repr__(self) -> str:
        return f"<PageTarget: {self.plan if self.plan.heads > 0 else 'no heads in common'}>"

    @property
    def scale(self) -> float:
        """Factor by which the receiver multiplies the scales of float8 elements."""
        return scale(self.table.form.dtype, self.form.dtype)

    @property
    def direct(self) -> bool:
        """True if the sender may write pages without this process's slots, so that only the sender knows when they
        arrive."""
        mine = self.table.regions
        if mine[0].memory != Descriptor.unpack(self._descriptors[0]).memory:
            return False
        if mine[0].memory == "host":
            return self.peer.near or self.table.worker.by_hardware
        return self.peer.near and any(region.lent for region in mine)

    @cached_property
    def targets(self) -> list[Target]:
        """The peer's arrays. They are opened, and kernels compiled, at the first use."""
        if self.plan.heads < 1:
            here, there = (f"{form.first} to {form.first + form.heads - 1}" for form in (self.table.form, self.form))
            raise ValueError(f"no head is in both tables: {here} here, {there} there")
        conversion = self.plan.route.conversion if self.table.on_device else None
        if conversion and not kernels.ready(lib.UCCH_PIECES, 0, conversion.source, conversion.target, insist=True):
            raise DeviceError(
                f"pages on this device cannot become {self.plan}: the conversion kernel needs the vendor's run-time "
                "compiler (UCCH_RTC_LIB); UCCH_LOG_LEVEL=info UCCH_LOG_SUBSYS=device logs what is missing"
            )
        out = [self.peer.open(descriptor) for descriptor in self._descriptors]
        if any(target.nbytes != array_bytes(self.form) for target in out):
            raise FormatError("the table of pages contradicts its regions")
        return out

    def send_pages(
        self,
        pages: Any,
        ticket: bytes,
        *,
        layers: Iterable[int] | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> Requests:
        """Send pages into the blocks that the receiver's ticket names, in the same order.

        Args:
            pages: Block numbers in this process's table.
            ticket: The receiver's :attr:`Receipt.ticket`.
            layers: Layers to send, by their numbers here; all that both have by default. Send others by further calls
                once they are computed.
            stream: The transfer starts when this stream gets to it.
            timeout: Seconds; the worker's by default.

        Returns:
            Requests: Complete when the pages are there, and the blocks here may be reused.

        Raises:
            FormatError: ``ticket`` is not a ticket.
            ValueError: The ticket is for another table or another number of pages, or a number is out of range.
            DeviceError: Pages have to be converted on this device, but there is no run-time compiler.
            PeerError: The peer has ended; also from the request.
            CollectiveTimeout: From the request, after the timeout.
        """
        told = Ticket.unpack(ticket)
        if told.table != self.number:
            raise ValueError("ticket: it is for another table, not for the peer's")
        mine = _numbers("pages", pages, self.table.form.blocks)
        there = _numbers("ticket", np.frombuffer(told.pages, np.uint32), self.form.blocks)
        if len(mine) != len(there):
            raise ValueError(f"pages: {len(mine)} blocks, but the ticket is for {len(there)}")
        chosen = _numbers("layers", list(self.layers if layers is None else layers), self.table.form.layers, True)
        if lacking := [layer for layer in chosen.tolist() if layer not in self.layers]:
            raise ValueError(f"layers: the peer's table has no layer {lacking[0]}")
        if not len(mine):
            return Requests([])
        plan, arrays = self.plan, self.table.form.arrays
        conversion = plan.route.conversion
        rows = conversion.native() if conversion else None
        parts = [None] if plan.pairs == 1 else list(range(self.form.parts))
        lists = [plan.lists(mine, there, part) for part in parts]
        requests = []
        for layer in chosen.tolist():
            for part, each in zip(parts, lists, strict=True):
                local = self.table.regions[layer * arrays + ((part or 0) if arrays > 1 else 0)]
                theirs = self.layers[layer] * self.form.arrays + ((part or 0) if self.form.arrays > 1 else 0)
                target = self.targets[theirs]
                requests.append(self.peer.put_rows(local, target, each, rows, told.counter, stream, timeout))
        return Requests(requests)


class Receipt:
    """Pages that are being received; made by :meth:`PageTable.recv_pages`. Can be awaited in asyncio.

    Attributes:
        tickets: Bytes for the senders, one entry for each source.
    """

    def __init__(self, table: PageTable, sources: list[PageTarget], pages: Array, timeout: float | None) -> None:
        self._table, self._sources, self._timeout = table, sources, timeout
        self._counters: list[Counter] = []
        self.tickets: list[bytes] = []
        for _ in sources:
            self._counters.append(table.worker.counter())
            self.tickets.append(
                Ticket(table.number, self._counters[-1].number, pages.astype(np.uint32).tobytes()).pack()
            )
        self._least = [len(source.layers) * source.plan.pairs if len(pages) else 0 for source in sources]
        self._all = self._waits(None)
        self._streams: list[Requests] = []
        self._numbers = [counter.number for counter in self._counters]

    @property
    def ticket(self) -> bytes:
        """The ticket, if there is one source."""
        (ticket,) = self.tickets
        return ticket

    def _waits(self, stream: Any) -> Requests:
        each = zip(self._counters, self._least, self._sources, strict=True)
        return Requests([c.wait(n, peer=of.peer, stream=stream, timeout=self._timeout) for c, n, of in each])

    def Test(self) -> bool:
        """Test whether the pages have arrived.

        Returns:
            bool: True when all pages are there.

        Raises:
            PeerError: A sender has ended.
            CollectiveTimeout: The timeout is over.
        """
        return self._settled(self._all.Test)

    def Wait(self, stream: Any = None) -> None:
        """Wait until all pages are there.

        Args:
            stream: Stream that waits instead of the host; queue work on the pages behind it.

        Raises:
            PeerError: A sender has ended.
            CollectiveTimeout: The timeout is over.
        """
        if stream is None:
            self._settled(self._all.Wait)
        elif self._counters:
            self._streams.append(self._waits(stream))
            self._table._keep(self)

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield from self._all.__await__()
        finally:
            self.close()

    def _settled(self, ask: Any) -> bool:
        try:
            done = ask() is not False
        except UCCHError:  # not what a signal's handler raises: the next wait gets the pages
            self.close()
            raise
        if done:
            self.close()
        return done

    def ended(self) -> bool:
        """True if the receipt has completed or failed."""
        try:
            return self.Test()
        except UCCHError:
            return True

    def close(self) -> None:
        """Give the pages up. Late data is refused, except from a :attr:`PageTarget.direct` sender."""
        while self._counters:
            self._counters.pop().close()

    @property
    def idle(self) -> bool:
        """True if, after :meth:`close`, no data is on its way to the pages any more."""
        native = self._table.worker.native
        return not any(lib.ucch_rma_arriving(native, number) for number in self._numbers)

    def __del__(self) -> None:
        self.close()


# --- caches -----------------------------------------------------------------------------------------------------------


def _interface(array: Any) -> dict[str, Any]:
    found = next((getattr(array, name) for name in INTERFACES if hasattr(array, name)), None)
    if found is None:
        raise TypeError(f"caches: {type(array).__name__} has no shape: arrays are wanted")
    return dict(found)


def _in_memory_order(array: Any, axes: str) -> tuple[Any, str, tuple[int, ...]]:
    """(array, axes, shape), transposed so that the array is contiguous if its memory is."""
    shape = tuple(array.shape) if hasattr(array, "shape") else tuple(_interface(array)["shape"])
    if len(shape) != len(axes):
        raise ValueError(f"axes: {axes!r} names {len(axes)} dimensions, and an array has {len(shape)}: {shape}")
    stride = getattr(array, "stride", None)
    steps = stride() if callable(stride) else getattr(array, "strides", None)
    order = list(range(len(axes)))
    if steps is not None:
        order.sort(key=lambda i: -steps[i])
    if order != sorted(order):
        array = array.permute(order) if hasattr(array, "permute") else array.transpose(order)
    return array, "".join(axes[i] for i in order), tuple(shape[i] for i in order)


def _dtype(array: Any, name: str | None) -> str:
    found = dtype_of(array.dtype if hasattr(array, "dtype") else _interface(array)["typestr"])
    if name is None:
        return found.name
    if name not in DTYPES or DTYPES[name].itemsize != found.itemsize:
        raise ValueError(f"dtype: {name!r} does not have elements of {found.itemsize} bytes, as {found} has")
    return name


def _form(
    order: str, shape: tuple[int, ...], layers: int, arrays: int, block_size: int | None, dtype: str,
    heads: tuple[int, int] | None,
) -> Form:  # fmt: skip
    sizes = dict(zip(order, shape, strict=True))
    if "T" in sizes:
        tokens = sizes.pop("T")
        if not block_size or tokens % block_size:
            raise ValueError(f"block_size: {tokens} tokens do not divide into blocks of {block_size}")
        sizes |= {"B": tokens // block_size, "N": block_size}
    elif block_size not in (None, sizes.get("N")):
        raise ValueError(f"block_size: {block_size}, and the arrays have {sizes.get('N')} tokens a block")
    first, total = heads or (0, sizes.get("H", 1))
    numbers = layers, sizes.get("K", arrays), arrays, sizes.get("B", 0), sizes.get("N", 0), sizes.get("H", 1)
    form = Form(*numbers, sizes.get("D", 0), first, total, order.replace("T", "BN"), dtype)
    if form.flaw():
        raise ValueError(form.flaw())
    return form


def _numbers(name: str, values: Any, most: int, once: bool = False) -> Array:
    array = np.atleast_1d(np.asarray(values))
    if not array.size:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name}: must be a list or array of integers, not {values!r:.60}")
    bad = (array < 0) | (array >= most)
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"{name}[{i}]: {array[i]} is not from 0 to {most - 1}")
    if once and len(np.unique(array)) != len(array):
        raise ValueError(f"{name}: a number occurs twice")
    return array.astype(np.int64)
