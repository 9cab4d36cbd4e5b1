"""Cases of pages between caches on devices of any vendors, converted by their kernels."""

import ml_dtypes
import numpy as np
import pytest
from arrays import Array, Gate
from device_rma_cases import RNG, Side

from ucc_hetero import rma
from ucc_hetero.errors import DeviceError

#: Layers, tokens of a page, heads, and elements of a head.
L, N, H, D = 2, 16, 4, 32
WHOLE = ((0, H, H), (0, H, H))
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FN, FNUZ = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz)


def drawn(shape, dtype):
    return RNG.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


class Cache:
    """An array in device memory with a shape."""

    def __init__(self, shape, dtype):
        self.memory = Array(int(np.prod(shape)), dtype)
        self.shape, self.peek = shape, self.memory.peek.reshape(shape)
        self.peek[:] = drawn(shape, dtype)

    @property
    def __cuda_array_interface__(self):
        raw, size = self.memory.__cuda_array_interface__, self.memory.dtype.itemsize
        return raw | {"shape": self.shape, "typestr": f"<u{size}"}


class Pair(Side):
    """One of two ranks, and its tables of pages."""

    def __init__(self, pages):
        super().__init__()
        self.pages, self.other = pages, 1 - self.r

    def table(self, axes, dtype, heads=(0, H, H)):
        """(a table, its layers as [K, B, N, H, D])"""
        first, here, total = heads
        sizes = {"K": 2, "B": self.pages, "N": N, "H": here, "D": D}
        caches = [(Cache if self.gpu else drawn)(tuple(sizes[a] for a in axes), dtype) for _ in range(L)]
        seen = [getattr(c, "peek", c).transpose([axes.index(a) for a in "KBNHD"]) for c in caches]
        return rma.PageTable(self.worker, caches, axes, dtype=np.dtype(dtype).name, heads=(first, total)), seen

    def swap(self, mine):
        return self.mpi.sendrecv(mine, self.other, source=self.other)

    def open(self, table):
        return table.open(self.peers[self.other], self.swap(table.descriptor))

    def close(self, *tables):
        self.mpi.Barrier()
        [table.close() for table in tables]
        self.mpi.Barrier()

    def exchange(self, axes, dtypes, heads=WHOLE):
        """Rank 0 sends to rank 1."""
        mine, seen = self.table(axes[self.r], dtypes[self.r], heads[self.r])
        theirs, places = self.open(mine), RNG.permutation(self.pages)[:50]
        way = self.peers[self.other].info(mine.regions[0], theirs.targets[0])["put"]
        assert theirs.direct == way.startswith("direct"), (theirs.direct, way)
        if self.r == 0:
            ticket = self.mpi.recv(source=1)
            theirs.send_pages(places, ticket, layers=[0]).Wait()
            theirs.send_pages(places, ticket, layers=[1], stream=self.gpu.stream() if self.gpu else None).Wait()
            self.mpi.send((places, [layer.copy() for layer in seen], theirs.scale), 1)
            assert self.peers[1].counts()["failed"] == 0
        else:
            want = [layer.copy() for layer in seen]
            receipt = mine.recv_pages(places, theirs)
            self.mpi.send(receipt.ticket, 0)
            receipt.Wait()
            pages, source, scale = self.mpi.recv(source=0)
            low = heads[1][0] - heads[0][0]
            for layer, come in zip(want, source, strict=True):
                layer[:, places] = converted(come[:, pages][:, :, :, low : low + heads[1][1]], dtypes, scale)
            for now, then in zip(seen, want, strict=True):
                a, b = then.astype(np.float32), now.astype(np.float32)
                assert ((a == b) | (np.isnan(a) & np.isnan(b))).all(), (axes, dtypes)
        self.close(mine)


def converted(values, dtypes, scale):
    if dtypes[0] == dtypes[1]:
        return values
    with np.errstate(all="ignore"):
        return (values.astype(np.float32) / np.float32(scale)).astype(dtypes[1])


def all_kinds(pages):
    """Layouts, types, and heads."""
    me = Pair(int(pages))
    me.exchange(("KBNHD", "KBNHD"), (F16, F16))
    me.exchange(("KBNHD", "KBHND"), (F16, F16))
    me.exchange(("BKHND", "KBNHD"), (F16, BF16))
    me.exchange(("KBNHD", "KBHND"), (BF16, F16))
    me.exchange(("KBNHD", "KBHND"), (FN, FNUZ))
    me.exchange(("KBNHD", "KBNHD"), (F16, F16), ((0, H, H), (1, 2, H)))
    me.exchange(("KBNHD", "KBHND"), (F16, F16), ((0, H, H), (2, 2, H)))
    me.worker.close()


def put_behind_a_stream(me):
    """From host memory to host memory, in a process that has not used its device yet."""
    (mine, sent), (room, came) = (me.memory(1000, on_device=False) for _ in range(2))
    target = me.opened(room, me.other)
    me.gpu.use(0)  # as an application would, before it makes a stream
    gate = Gate(stream := me.gpu.stream())
    put = me.peers[me.other].put(mine, target, stream=stream)
    assert not put.Test()
    gate.open()
    put.Wait()
    assert (came == me.swap(sent.copy())).all()


def no_compiler():
    """Without a run-time compiler unconverted pages are moved, and pages that need conversion are refused with a
    message."""
    me = Pair(70)
    put_behind_a_stream(me)
    me.exchange(("KBNHD", "KBNHD"), (F16, F16))
    mine, _ = me.table("KBNHD" if me.r == 0 else "KBHND", F16)
    theirs = me.open(mine)
    receipt = mine.recv_pages([0], theirs)
    with pytest.raises(DeviceError, match="UCCH_RTC_LIB"):
        theirs.send_pages([0], me.swap(receipt.ticket))
    receipt.close()
    me.mpi.Barrier()
    me.worker.close()


def in_streams():
    """Pages that are sent in stream order, and that a stream waits for."""
    me, pages = Pair(70), range(70)
    mine, seen = me.table("KBNHD" if me.r == 0 else "KBHND", F16)
    theirs, stream = me.open(mine), me.gpu.stream()
    if me.r == 0:
        gate = Gate(stream)
        first = Array(L, np.float32)  # something that the stream does before
        first.fill(stream, 1.0)
        request = theirs.send_pages(pages, me.mpi.recv(source=1), stream=stream)
        for _ in range(100):
            assert not request.Test()
        for layer in seen:
            layer[:] = 3.5  # as if a kernel in front of it did
        me.mpi.Barrier()
        gate.open()
        request.Wait()
    else:
        for layer in seen:
            layer[:] = -1
        receipt = mine.recv_pages(pages, theirs)
        me.mpi.send(receipt.ticket, 0)
        receipt.Wait(stream=stream)
        copies = [Array(region.nbytes // 2, np.float16) for region in mine.regions]
        for copy, region in zip(copies, mine.regions, strict=True):
            me.gpu.copy(copy.block.handle, region._owner.array.memory.block.handle, region.nbytes, stream.handle)
        assert not receipt.Test() and all((layer == -1).all() for layer in seen)
        del receipt
        me.mpi.Barrier()
        stream.synchronize()
        assert all((copy.peek == 3.5).all() for copy in copies)
    me.mpi.Barrier()
    me.worker.close()
