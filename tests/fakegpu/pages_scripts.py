"""Scripts of test_device_scripts.py: pages between caches on devices of any vendors, converted by their kernels."""

from rma_scripts import COMMON

_CACHES = COMMON
_CACHES += """
import ml_dtypes
L, B, N, H, D = 2, 70, 16, 4, 32

class Cache:
    "An array in device memory with a shape."
    def __init__(self, shape, dtype):
        self.itemsize = np.dtype(dtype).itemsize
        self.memory = Array(int(np.prod(shape)) * self.itemsize, np.uint8)
        self.peek = self.memory.peek.view(dtype).reshape(shape)
        self.peek.view(np.uint8)[:] = rng.integers(0, 256, self.peek.view(np.uint8).shape, np.uint8)
        self.shape = shape
    @property
    def __cuda_array_interface__(self):
        raw = dict(self.memory.__cuda_array_interface__)
        return raw | {"shape": self.shape, "typestr": f"<u{self.itemsize}"}

class Host:
    "The same of a rank without a device."
    def __new__(cls, shape, dtype):
        return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]

def table(axes, dtype, heads=(0, H, H)):
    "(a table, its layers as [K, B, N, H, D])"
    first, here, total = heads
    sizes = dict(K=2, B=B, N=N, H=here, D=D)
    shape = tuple(sizes[a] for a in axes)
    caches = [(Cache if gpu else Host)(shape, dtype) for _ in range(L)]
    name = np.dtype(dtype).name
    seen = [getattr(c, "peek", c).transpose([axes.index(a) for a in "KBNHD"]) for c in caches]
    return rma.PageTable(worker, caches, axes, dtype=name, heads=(first, total)), seen

def exchange(axes, dtypes, heads):
    "Rank 0 sends to rank 1."
    mine, seen = table(axes[r], dtypes[r], heads[r])
    other = 1 - r
    theirs = mine.open(peers[other], mpi.sendrecv(mine.descriptor, other, source=other))
    way = peers[other].info(mine.regions[0], theirs.targets[0])["put"]
    assert theirs.direct == way.startswith("direct"), (theirs.direct, way)
    pages, places = rng.permutation(B)[:50], rng.permutation(B)[:50]
    if r == 0:
        ticket = mpi.recv(source=1)
        for stream in (None, gpu.stream() if gpu else None):
            theirs.send_pages(pages, ticket, layers=[0 if stream is None else 1], stream=stream).Wait()
            if not gpu:
                theirs.send_pages(pages, ticket, layers=[1]).Wait()
                break
        mpi.send((pages, [layer.copy() for layer in seen], theirs.scale), 1)
        assert peers[1].counts()["failed"] == 0
    else:
        before = [layer.copy() for layer in seen]
        receipt = mine.recv_pages(places, theirs)
        mpi.send(receipt.ticket, 0)
        receipt.Wait()
        pages, source, scale = mpi.recv(source=0)
        lo, hi = heads[1][0] - heads[0][0], heads[1][0] - heads[0][0] + heads[1][1]
        for now, was, come in zip(seen, before, source):
            with np.errstate(all="ignore"):
                values = come[:, pages][:, :, :, lo:hi]
                if dtypes[0] != dtypes[1]:
                    values = (values.astype(np.float32) / np.float32(scale)).astype(dtypes[1])
            was[:, places] = values
            a, b = was.astype(np.float32), now.astype(np.float32)
            assert ((a == b) | (np.isnan(a) & np.isnan(b))).all(), (axes, dtypes)
    mpi.Barrier()
    mine.close()
    mpi.Barrier()
"""

#: Layouts, types, and heads.
EVERY = _CACHES
EVERY += """
whole = ((0, H, H), (0, H, H))
f16, bf16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
fn, fnuz = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz)
exchange(("KBNHD", "KBNHD"), (f16, f16), whole)
exchange(("KBNHD", "KBHND"), (f16, f16), whole)
exchange(("BKHND", "KBNHD"), (f16, bf16), whole)
exchange(("KBNHD", "KBHND"), (bf16, f16), whole)
exchange(("KBNHD", "KBHND"), (fn, fnuz), whole)
exchange(("KBNHD", "KBNHD"), (f16, f16), ((0, H, H), (1, 2, H)))
exchange(("KBNHD", "KBHND"), (f16, f16), ((0, H, H), (2, 2, H)))
worker.close()
"""

#: Without a run-time compiler unconverted pages are moved, and pages that need conversion are refused with a message.
NO_COMPILER = _CACHES
NO_COMPILER += """
whole = ((0, H, H), (0, H, H))
exchange(("KBNHD", "KBNHD"), (np.float16, np.float16), whole)
mine, _ = table("KBNHD" if r == 0 else "KBHND", np.float16)
theirs = mine.open(peers[1 - r], mpi.sendrecv(mine.descriptor, 1 - r, source=1 - r))
receipt = mine.recv_pages([0], theirs)
with pytest.raises(DeviceError, match="UCCH_RTC_LIB"):
    theirs.send_pages([0], mpi.sendrecv(receipt.ticket, 1 - r, source=1 - r))
receipt.close()
mpi.Barrier()
worker.close()
"""

#: Pages that are sent in stream order, and that a stream waits for.
STREAMS = _CACHES
STREAMS += """
mine, seen = table("KBNHD" if r == 0 else "KBHND", np.float16)
theirs = mine.open(peers[1 - r], mpi.sendrecv(mine.descriptor, 1 - r, source=1 - r))
stream = gpu.stream()
if r == 0:
    gate = Gate(stream)
    first = Array(L, np.float32)  # something that the stream does before
    first.fill(stream, 1.0)
    request = theirs.send_pages(range(B), mpi.recv(source=1), stream=stream)
    for _ in range(100):
        assert not request.Test()
    for layer in seen:
        layer[:] = 3.5  # as if a kernel in front of it did
    mpi.Barrier()
    gate.open()
    request.Wait()
else:
    for layer in seen:
        layer[:] = -1
    receipt = mine.recv_pages(range(B), theirs)
    mpi.send(receipt.ticket, 0)
    receipt.Wait(stream=stream)
    copies = [Array(region.nbytes // 2, np.float16) for region in mine.regions]
    for copy, region in zip(copies, mine.regions):
        gpu.copy(copy.block.handle, region._owner.array.memory.block.handle, region.nbytes, stream.handle)
    assert not receipt.Test() and all((layer == -1).all() for layer in seen)
    del receipt
    mpi.Barrier()
    stream.synchronize()
    assert all((copy.peek == 3.5).all() for copy in copies)
mpi.Barrier()
worker.close()
"""
