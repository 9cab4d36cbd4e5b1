"""Pages of KV caches between two workers of one process: layouts, types, heads, and refused arguments."""

import asyncio
import itertools

import ml_dtypes
import numpy as np
import pytest
from processes import interrupted_at

from ucc_hetero import rma
from ucc_hetero.errors import CollectiveTimeout, PeerError, UCCHError
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.rma.wire_format import Table, Ticket

LAYERS, SIZE, DIM = 3, 4, 8


class Two:
    def __init__(self):
        self.here, self.there = rma.Worker(), rma.Worker()
        self.to, self.back = self.here.connect(self.there.address), self.there.connect(self.here.address)

    def ways(self, mine, theirs):
        """Return (the sender's view of the receiver's table, the receiver's view of the sender's)."""
        return mine.open(self.to, theirs.descriptor), theirs.open(self.back, mine.descriptor)


@pytest.fixture(scope="module")
def two():
    found = Two()
    yield found
    found.here.close()
    found.there.close()


#: Axes in memory order, as in the caches of vLLM's FlashAttention, FlashInfer and others, of SGLang and of MLA.
FORMS = ("KBNHD", "KBHND", "BKNHD", "BKHND", "BNHD", "THD", "BHND", "KBHND turned")


def caches(form, heads, dtype, blocks):
    """Return arrays as an engine has them, and each layer as a view [K, B, N, H, D] to read and to write."""
    rng = np.random.default_rng()
    order, _, turned = form.partition(" ")
    sizes = {"K": 2, "B": blocks, "N": SIZE, "H": heads, "D": DIM, "T": blocks * SIZE}
    arrays = []
    seen = []
    for _ in range(LAYERS):
        pair = []
        for _ in range(1 if "K" in order else 2):
            raw = rng.integers(0, 256, [*(sizes[a] for a in order), np.dtype(dtype).itemsize], np.uint8)
            pair.append(raw.view(dtype)[..., 0])
        views = [array.reshape(blocks, SIZE, heads, DIM) if order == "THD" else array for array in pair]
        axes = order.replace("T", "BN")
        if "K" in axes:
            view = views[0].transpose([axes.index(a) for a in "KBNHD"])
            seen.append([view[0], view[1]])
            arrays.append(view if turned else pair[0])
        else:
            seen.append([array.transpose([axes.index(a) for a in "BNHD"]) for array in views])
            arrays.append(tuple(pair))
    return arrays, seen


@pytest.fixture
def table():
    """Make a table, and views of its layers: ``heads`` are the first one, the number here, and the total."""

    def make(worker, form, blocks, dtype=np.uint16, heads=(0, 4, 4)):
        first, here, total = heads
        arrays, seen = caches(form, here, dtype, blocks)
        axes = "KBNHD" if "turned" in form else form
        more = {"block_size": SIZE} if "T" in form else {}
        return rma.PageTable(worker, arrays, axes, heads=(first, total), **more), seen

    return make


def bits(layers):
    return [[part.copy().view(f"u{part.itemsize}") for part in layer] for layer in layers]


def hold(target, wanted):
    pairs = zip(bits(target), wanted, strict=True)
    return all((a == b).all() for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("here", FORMS)
def test_layouts(two, table, here, there):
    """Every page arrives at its place, and nothing else changes."""
    rng = np.random.default_rng()
    mine, source = table(two.here, here, 9)
    theirs, target = table(two.there, there, 12)
    send, receive = two.ways(mine, theirs)
    pages, places = rng.permutation(9)[:6], rng.permutation(12)[:6]
    wanted = bits(target)
    for one, other in zip(bits(source), wanted, strict=True):
        for k in range(2):
            other[k][places] = one[k][pages]
    receipt = theirs.recv_pages(places, receive)
    assert not receipt.Test()
    send.send_pages(pages, receipt.ticket, layers=[1]).Wait()
    assert not receipt.Test()
    send.send_pages(pages.tolist(), receipt.ticket, layers=[2, 0]).Wait()
    receipt.Wait()
    assert receipt.Test()
    assert hold(target, wanted)


CASES = [*itertools.permutations(("float16", "bfloat16", "float32"), 2), ("float8_e4m3fn", "float8_e4m3fnuz")]


def numpy_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("forms", [("KBNHD", "KBNHD"), ("KBNHD", "BKHND"), ("THD", "KBHND")])
@pytest.mark.parametrize("types", [*CASES, ("float8_e4m3fnuz", "float8_e4m3fn")])
def test_types(two, table, types, forms):
    """Numbers equal ml_dtypes' bit for bit, except which NaN it is; float8 with its scale."""
    mine, source = table(two.here, forms[0], 40, numpy_of(types[0]))
    theirs, target = table(two.there, forms[1], 40, numpy_of(types[1]))
    send, receive = two.ways(mine, theirs)
    receipt = theirs.recv_pages(range(40), receive)
    send.send_pages(range(40), receipt.ticket).Wait()
    receipt.Wait()
    assert send.scale == {"float8_e4m3fn": 2.0, "float8_e4m3fnuz": 0.5}.get(types[0], 1.0)
    for one, other in zip(source, target, strict=True):
        for a, b in zip(one, other, strict=True):
            with np.errstate(all="ignore"):
                values = a.astype(np.float32)
                if "float8" in types[0]:
                    most = 448 if types[1] == "float8_e4m3fn" else 240
                    values = np.clip(values / np.float32(send.scale), -most, most)
                wanted = values.astype(b.dtype)
            same = (wanted.astype(np.float32) == b.astype(np.float32)) | (np.isnan(wanted) & np.isnan(b))
            assert same.all()


def test_float8_by_its_rules():
    """All 256 values of each: minus zero becomes plus zero, NaN stays NaN, 240 is the largest number, the rest is
    equal."""
    every = np.arange(256, dtype=np.uint8)
    fnuz, back = np.empty_like(every), np.empty_like(every)
    for source, target, of, to in (
        (every, fnuz, lib.UCCH_E4M3FN, lib.UCCH_E4M3FNUZ),
        (every, back, lib.UCCH_E4M3FNUZ, lib.UCCH_E4M3FN),
    ):
        assert lib.ucch_cast(of, to, *(ffi.cast("void *", a.ctypes.data) for a in (source, target)), 256) == 0
    assert fnuz.tolist() == [{0x80: 0, 0x7F: 0x80, 0xFF: 0x80}.get(x, x) for x in range(256)]
    assert back.tolist() == [{0x80: 0x7F, 0x7F: 0x7E, 0xFF: 0xFE}.get(x, x) for x in range(256)]


def test_latent_attention_and_bytes_and_asyncio(two):
    """One array per layer without heads; float8 in arrays of bytes; awaited transfers."""
    source = [np.random.default_rng().integers(0, 256, (9, SIZE, 24), np.uint8) for _ in range(2)]
    target = [np.zeros((36, 1, 24), np.uint8) for _ in range(2)]
    mine = rma.PageTable(two.here, source, "BND", dtype="float8_e4m3fn")
    theirs = rma.PageTable(two.there, target, "THD", block_size=SIZE, dtype="float8_e4m3fn")
    send, receive = two.ways(mine, theirs)
    assert repr(send) == "<PageTarget: ND float8_e4m3fn to NHD float8_e4m3fn, as it is>"

    async def waited(each):
        await each

    async def both():
        receipt = theirs.recv_pages(range(8), receive)
        await asyncio.gather(waited(send.send_pages(range(1, 9), receipt.ticket)), waited(receipt))

    asyncio.run(both())
    assert send.peer.counts()["failed"] == 0
    for one, other in zip(source, target, strict=True):
        assert (other.reshape(9, SIZE, 24)[:8] == one[1:]).all()
    empty = theirs.recv_pages([], receive)
    send.send_pages([], empty.ticket).Wait()
    empty.Wait()
    mine.close()
    theirs.close()


def test_many_receipts_give_their_counters_back(two, table):
    mine, source = table(two.here, "KBNHD", 4)
    theirs, target = table(two.there, "KBNHD", 4)
    send, receive = two.ways(mine, theirs)
    for i in range(3 * lib.UCCH_RMA_COUNTERS):
        receipt = theirs.recv_pages([i % 4], receive)
        if i % 100 == 0:
            send.send_pages([i % 3], receipt.ticket).Wait()
            receipt.Wait()
            assert (target[0][0][i % 4].view(np.uint16) == source[0][0][i % 3].view(np.uint16)).all()
    late = theirs.recv_pages([0], receive)
    late.close()
    after = theirs.recv_pages([1], receive)
    send.send_pages([1], late.ticket).Wait()
    assert not after.Test(), "a ticket that is over counts for the next one"


def test_a_signal_during_a_wait_does_not_close_the_receipt(two, table):
    mine, source = table(two.here, "KBNHD", 4)
    theirs, target = table(two.there, "KBNHD", 4)
    send, receive = two.ways(mine, theirs)
    receipt = theirs.recv_pages([2], receive)
    for ask in (receipt.Wait, receipt.ended):
        assert interrupted_at(3, ask, TimeoutError)
    send.send_pages([1], receipt.ticket).Wait()
    receipt.Wait()
    assert (target[0][0][2].view(np.uint16) == source[0][0][1].view(np.uint16)).all()


def test_a_receipt_that_is_closed_lets_nothing_in(two, table):
    """Data that passes through slots, such as converted pages, is refused on arrival: the pages may have other owners
    then."""
    mine, _ = table(two.here, "KBNHD", 4, np.float16)
    theirs, target = table(two.there, "KBNHD", 4, np.float32)
    send, receive = two.ways(mine, theirs)
    before, receipt = bits(target), theirs.recv_pages([1], receive)
    receipt.close()
    with pytest.raises(UCCHError, match="given up"):
        send.send_pages([2], receipt.ticket).Wait()
    assert receipt.idle and hold(target, before)


BAD = [
    (ValueError, r"axes: 'KBNH' names 4 dimensions, and an array has 5", lambda w: table_of(w, axes="KBNH")),
    (ValueError, "are not K, B, N, H and D", lambda w: table_of(w, axes="KBNHX")),
    (ValueError, "have to be last", lambda w: table_of(w, axes="KBDNH")),
    (ValueError, "different shapes", lambda w: rma.PageTable(w, [np.zeros((2, n, 4, 2, 8)) for n in (3, 4)], "KBNHD")),
    (ValueError, "for each layer", lambda w: rma.PageTable(w, [], "KBNHD")),
    (ValueError, "do not divide into blocks", lambda w: rma.PageTable(w, [np.zeros((16, 2, 8))], "THD", block_size=3)),
    (ValueError, "'float16' does not have elements of 8 bytes", lambda w: table_of(w, dtype="float16")),
    (ValueError, "2 from number 3 on are not among 4", lambda w: table_of(w, heads=(3, 4))),
    (BufferError, "contiguous", lambda w: rma.PageTable(w, [np.zeros((2, 3, 4, 4, 8))[:, :, :, ::2]], "KBNHD")),
    (TypeError, "has no shape", lambda w: rma.PageTable(w, [5], "KBNHD")),
]  # fmt: skip


def table_of(worker, axes="KBNHD", **more):
    return rma.PageTable(worker, [np.zeros((2, 3, 4, 2, 8))], axes, **more)


@pytest.mark.parametrize("case", BAD, ids=[case[1] for case in BAD])
def test_caches_that_are_none(two, case):
    known = len(two.here.regions)
    with pytest.raises(case[0], match=case[1]):
        case[2](two.here)
    assert len(two.here.regions) == known


def test_unlike_tables(two, table):
    mine, _ = table(two.here, "KBNHD", 4)
    for what, arrays, more in (
        ("layers: 3 here and 2 there", [np.zeros((2, 4, SIZE, 4, DIM), np.uint16)] * 2, {}),
        ("tokens a block: 4 here and 8 there", [np.zeros((2, 4, 8, 4, DIM), np.uint16)] * 3, {}),
        ("elements a head: 8 here and 16 there", [np.zeros((2, 4, SIZE, 4, 16), np.uint16)] * 3, {}),
        ("heads in all: 4 here and 8 there", [np.zeros((2, 4, SIZE, 4, DIM), np.uint16)] * 3, {"heads": (4, 8)}),
        ("uint16 here and float16 there", [np.zeros((2, 4, SIZE, 4, DIM), np.float16)] * 3, {}),
    ):
        with rma.PageTable(two.there, arrays, "KBNHD", **more) as theirs, pytest.raises(ValueError, match=what):
            mine.open(two.to, theirs.descriptor)
    with pytest.raises(rma.FormatError, match="are not a valid table of pages"):
        mine.open(two.to, mine.regions[0].descriptor)
    with pytest.raises(ValueError, match="of another process"):
        mine.open(two.to, mine.descriptor)


def test_pages_that_are_none(two, table):
    """The wrong side gets an error, and the other one is unchanged."""
    mine, _ = table(two.here, "KBNHD", 4)
    theirs, target = table(two.there, "KBHND", 3)
    send, receive = two.ways(mine, theirs)
    before = bits(target)
    good = theirs.recv_pages([0, 2], receive)
    for what, pages in (("pages: 1 blocks, but the ticket is for 2", [1]), (r"pages\[1\]: 4 is not from 0", [0, 4])):
        with pytest.raises(ValueError, match=what):
            send.send_pages(pages, good.ticket)
    with pytest.raises(TypeError, match="pages: must be a list"):
        send.send_pages([0.5, 1], good.ticket)
    with pytest.raises(ValueError, match=r"layers\[0\]: 3 is not from 0"):
        send.send_pages([0, 1], good.ticket, layers=[3])
    with pytest.raises(ValueError, match=r"pages\[0\]: -1 is not from 0 to 2"):
        theirs.recv_pages([-1], receive)
    with pytest.raises(ValueError, match="a number occurs twice"):
        theirs.recv_pages([1, 1], receive)
    with pytest.raises(rma.FormatError, match="ticket"):
        send.send_pages([0, 1], b"no ticket at all, but some bytes")
    forged = Ticket.unpack(good.ticket)._replace(pages=np.array([0, 3], np.uint32).tobytes()).pack()
    with pytest.raises(ValueError, match=r"ticket\[1\]: 3 is not from 0"):
        send.send_pages([0, 1], forged)
    other, _ = table(two.there, "KBHND", 3)
    with pytest.raises(ValueError, match="for another table"):
        send.send_pages([0, 1], other.recv_pages([0, 1], other.open(two.back, mine.descriptor)).ticket)
    with pytest.raises(ValueError, match="opened by another table"):
        other.recv_pages([0, 1], receive)
    with pytest.raises(CollectiveTimeout):
        theirs.recv_pages([1], receive, timeout=0.05).Wait()
    assert hold(target, before)
    for each in (other, theirs):
        each.close()
    with pytest.raises(UCCHError, match="no longer registered"):
        send.send_pages([0, 1], good.ticket).Wait()


def test_heads_that_nobody_has(two, table):
    mine, _ = table(two.here, "KBNHD", 4, heads=(0, 2, 4))
    theirs, _ = table(two.there, "KBNHD", 4, heads=(2, 2, 4))
    send, receive = two.ways(mine, theirs)
    with pytest.raises(ValueError, match="0 of the 1 sources have head 2 of 4"):
        theirs.recv_pages([0], receive)
    with pytest.raises(ValueError, match="no head is in both tables: 0 to 1 here, 2 to 3 there"):
        send.send_pages([0], Ticket(theirs.number, 0, bytes(4)).pack())
    whole, _ = table(two.there, "KBNHD", 4)
    with pytest.raises(ValueError, match="2 of the 2 sources have head 0"):
        whole.recv_pages([0], [whole.open(two.back, mine.descriptor)] * 2)


def test_layers_that_are_none(two, table):
    """Pipeline stages have some of the layers; degrees of parallelism are tested in test_vllm.py."""
    (mine, _), (theirs, _) = table(two.here, "KBNHD", 4), table(two.there, "KBHND", 4)
    send = mine.open(two.to, theirs.descriptor, layers=[(2, 0), (0, 2)])
    receive = theirs.open(two.back, mine.descriptor, layers=[(0, 2), (2, 0)])
    with pytest.raises(ValueError, match="the peer's table has no layer 1"):
        send.send_pages([0, 2], Ticket(theirs.number, 0, bytes(8)).pack(), layers=[0, 1])
    with pytest.raises(ValueError, match="0 of the 1 sources have head 0 of 4 of layer 1"):
        theirs.recv_pages([0], receive)
    for layers in ([(0, 3)], [(3, 0)], [(0, 0), (1, 0)]):
        with pytest.raises(ValueError, match="layers"):
            mine.open(two.to, theirs.descriptor, layers=layers)


def test_a_sender_that_dies_ends_the_wait(table):
    two = Two()
    mine, _ = table(two.here, "KBNHD", 4)
    theirs, _ = table(two.there, "KBNHD", 4)
    receipt = theirs.recv_pages([0], two.ways(mine, theirs)[1])
    two.back.lose()
    with pytest.raises(PeerError):
        receipt.Wait()
    theirs.worker.close()
    mine.worker.close()


def test_damage_is_noticed(two, table):
    """The checksum covers every byte of a table and of a ticket; contradictions with a correct checksum are refused."""
    mine, _ = table(two.here, "KBNHD", 4)
    found = Table.unpack(mine.descriptor)
    assert found.pack() == mine.descriptor and found.form == mine.form
    rng = np.random.default_rng()
    for at in rng.integers(0, len(mine.descriptor), 300).tolist():
        damaged = bytearray(mine.descriptor)
        damaged[at] ^= int(rng.integers(1, 256))
        with pytest.raises(rma.FormatError):
            Table.unpack(bytes(damaged))
    wrong = {"axes": ("BND", "KBNXD"), "dtype": ("int3",), "heads": (9,), "layers": (0, 2), "parts": (3,)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(rma.FormatError, match="contradicts itself"):
            Table.unpack(found._replace(form=found.form._replace(**{name: value})).pack())
