"""The engine's arithmetic against numpy's, and the kernels, compiled for the host, against the engine's."""

import ctypes
import random
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from building import ARITHMETIC, CODES, COMPILED, PIECES

from ucc_hetero.device import kernels
from ucc_hetero.device.kernels import sources
from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.types import DTYPES, OPS

N = 4000

BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}

#: Kernels of short calls: for two types whose elements need different alignment, and with ordered operands.
FUSED = {
    f"fused_{op}_{name}": (lib.UCCH_FUSED, OPS[op].code, CODES[name], 0)
    for op, name in (("SUM", "float32"), ("SUM", "int16"), ("MAX", "float32"))
}
#: Element sizes of page kernels; 1 for the others.
SIZES = {code: dtype.itemsize for code, dtype in BY_CODE.items()}


@pytest.fixture(scope="module")
def library(fake_library):
    """Return a fake library with all kernels of one vendor's compiler, which runs them."""
    return ctypes.CDLL(str(fake_library(random.choice(["nvidia", "amd"]), {**COMPILED, **ARITHMETIC, **FUSED})))


def run(library, name, blocks, *arguments):
    """Run a kernel to its end, with a struct of layout.h, or with the four arguments of element kernels."""
    pointers = (ctypes.c_void_p * len(arguments))(*(int(ffi.cast("uintptr_t", each)) for each in arguments))
    assert library.fakegpu_run(name.encode(), blocks, 512, pointers, random.getrandbits(32)) == 0


#: numpy's function for each operation, or the test's own for integers, real and complex numbers.
UFUNCS = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "LAND": np.logical_and,
    "LOR": np.logical_or, "LXOR": np.logical_xor, "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip
KNOWN = {"int": 10, "uint": 10, "float": 4, "complex": 2}
#: Values at which float32 is rounded to float16, and values beyond float16's range.
EDGES = np.array([65504, 65519.996, 65520, 2**-24, 2**-25, 2**-25 * 1.0001, 6.1e-5, 0, -0.0, np.inf], np.float32)


def numpy_type(code):
    name = BY_CODE[code].name
    return np.dtype(getattr(ml_dtypes, name, name))


def elements(code, rng):
    dtype = numpy_type(code)
    if dtype.kind in "iu" or dtype.itemsize == 2:
        return rng.integers(0, 256, N * dtype.itemsize, np.uint8).view(dtype)
    parts = rng.standard_normal((1 + (dtype.kind == "c"), N)) * 10.0 ** rng.integers(-8, 5)
    if dtype.kind == "f":
        parts[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)


def to_be_rounded(code, rng):
    """Every half, or floats of any bits."""
    if BY_CODE[code].itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(numpy_type(code))
    return np.concatenate([rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32), EDGES, -EDGES])


def same(one, other):
    with np.errstate(invalid="ignore"):
        return np.array_equal(one, other, equal_nan=True)


def numpys(kind, op, src, dst, by):
    with np.errstate(all="ignore"):
        if kind == lib.UCCH_CAST:
            return src.astype(dst.dtype)
        if kind == lib.UCCH_COMBINE:
            return UFUNCS[op](dst, src).astype(dst.dtype)
        if dst.dtype.kind in "iu":  # towards zero, unlike numpy's floor division
            return np.array([abs(int(v)) // by * (1 if v >= 0 else -1) for v in dst], dst.dtype)
        return (dst / np.array(by, dst.real.dtype)).astype(dst.dtype)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(library, name):
    """The engine's result is numpy's, at any alignment, and the kernel's is the engine's; or neither supports it."""
    kind, op, code, to = ARITHMETIC[name]
    rng, text, by = np.random.default_rng(), sources.source(*ARITHMETIC[name]), 3
    end = to if kind == lib.UCCH_CAST else code
    if code < 0 or end < 0:
        assert text is None
        return
    src = to_be_rounded(code, rng) if kind == lib.UCCH_CAST else elements(code, rng)
    n, dst = len(src), np.full(len(src), 7, numpy_type(end)) if kind == lib.UCCH_CAST else elements(end, rng)
    ours = [np.frombuffer(bytearray(a.nbytes + 1), np.uint8)[1:].view(a.dtype) for a in (src, dst)]
    ours[0][:], ours[1][:] = src, dst
    one, two = (ffi.cast("void *", a.ctypes.data) for a in ours)
    engine = {
        lib.UCCH_COMBINE: lambda n: lib.ucch_combine(op, code, one, two, n),
        lib.UCCH_CAST: lambda n: lib.ucch_cast(code, to, one, two, n),
        lib.UCCH_SCALE: lambda n: lib.ucch_scale(code, two, n, float(by)),
    }[kind]
    known = kind != lib.UCCH_COMBINE or op in range(KNOWN[BY_CODE[code].kind])
    assert (text is not None) == known
    assert engine(0) == (0 if known else lib.UCCH_FAIL_ARGUMENT) and same(ours[1], dst)
    if not known:
        return
    engine(n)
    wanted = numpys(kind, name.partition("_")[0], src, dst, by)
    if dst.dtype.kind == "c":  # a compiler and numpy may fuse a product's multiplications differently
        near = 4 * np.finfo(dst.dtype).eps * (abs(src) * abs(dst) + abs(src) + abs(dst))
        assert (abs(ours[1] - wanted) <= near).all()
    else:
        assert same(ours[1], wanted)
    ends = (ffi.new("void **", ffi.cast("void *", a.ctypes.data)) for a in (src, dst))
    run(library, name, random.choice([1, 3, 2048]), *ends, ffi.new("uint64_t *", n), ffi.new("double *", by))
    assert same(dst, ours[1])


def test_nothing_is_ready_without_a_device():
    assert not kernels.ready(lib.UCCH_COMBINE, OPS["SUM"].code, DTYPES["float32"].code, 0)


def beside(*sides):
    """Run kernels concurrently, as those of two ranks."""
    with ThreadPoolExecutor(len(sides)) as pool:
        for each in [pool.submit(side) for side in sides]:
            each.result()


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_fused_calls(library, dtype):
    """Two kernels, whose moves each wait for the previous one, also when the word wraps around.

    The last block to arrive writes a word, after all blocks' data has been written.
    """
    rng = np.random.default_rng()
    for _ in range(20):
        count, n = int(rng.choice([1, 7, 33, 1000, 4096])), int(rng.integers(1, 20))
        data = [rng.integers(-100, 100, count + 4).astype(dtype)[int(rng.integers(5)) :][:count] for _ in range(n + 1)]
        told = [int(each) % 2**32 for each in rng.choice([5, 2**31, 2**32 - 1], n + 1) + rng.integers(0, 5, n + 1)]
        words, wanted, sides = ffi.new("unsigned[]", [(number - 3) % 2**32 for number in told]), data[0], ([], [])
        for k, (source, target) in enumerate(pairwise(data)):
            sums = bool(rng.integers(2))
            wanted = wanted + target if sums else wanted
            move = {
                "src": ffi.cast("void *", source.ctypes.data), "dst": ffi.cast("void *", target.ctypes.data),
                "wait": words + k if k else ffi.NULL, "least": (told[k] - int(rng.integers(3))) % 2**32,
                "tell": words + k + 1, "value": told[k + 1],
                "kind": lib.MOVE_COMBINE if sums else lib.MOVE_COPY, "n": count if sums else source.nbytes,
            }  # fmt: skip
            sides[rng.integers(2)].append(move)
        together = [ffi.new("ucch_by_move *") for _ in sides]
        blocks = rng.choice([1, 2, 5, 32], 2).tolist()
        asked = [
            ffi.new("ucch_moves *", {"n": len(each), "width": width, "number": 1, "by_move": by_move, "each": each})
            for each, width, by_move in zip(sides, blocks, together, strict=True)
        ]
        beside(*(partial(run, library, f"fused_SUM_{dtype}", *each) for each in zip(blocks, asked, strict=True)))
        assert (data[-1] == wanted).all() and list(words)[1:] == told[1:]
        assert not any(any(by_move.arrived) for by_move in together)


class Flagged:
    """A channel with flags in its data, for graphs: one rank's kernels send over it, the other's receive."""

    def __init__(self, library, begun):
        self.library, self.room = library, 4096
        ring = np.full(8 * (64 + 2 * self.room) + 128, 0, np.uint8)
        self.ring = ring[-ring.ctypes.data % 64 :]
        self.words = ffi.new("unsigned[2]", [begun] * 2)  # published, consumed
        self.steps = {
            incoming: ffi.new("ucch_steps *", {"pieces": begun, "taken": begun}) for incoming in (False, True)
        }
        self.replays = {incoming: ffi.new("ucch_replays *") for incoming in (False, True)}
        self.counts = {incoming: ffi.new("ucch_replayed *") for incoming in (False, True)}
        self.by_move = {incoming: ffi.new("ucch_by_move *") for incoming in (False, True)}

    def run(self, incoming, data, count, hash_, blocks, kind=0, own=0):
        """Run a side's kernel for so many bytes; ``kind``: how they are combined with ``own``."""
        slots, there = ffi.cast("char *", self.ring.ctypes.data) + 64, ffi.cast("char *", data.ctypes.data)
        move = {
            "src": slots if incoming else there, "dst": there if incoming else slots,
            "wait": ffi.NULL if incoming else self.words + 1, "tell": self.words + incoming,
            "least": 0 if incoming else 2**32 - 7,
            "kind": kind or (lib.MOVE_LL_RECEIVE if incoming else lib.MOVE_LL_SEND), "n": count,
            "own": ffi.cast("void *", own), "steps": self.steps[incoming],
            "slot": lib.SLOT_SRC if incoming else lib.SLOT_DST, "stride": 64 + 2 * self.room,
        }  # fmt: skip
        of = {
            "n": 1, "width": blocks, "by_move": self.by_move[incoming], "replays": self.replays[incoming],
            "counts": self.counts[incoming], "hash": hash_, "each": [move],
        }  # fmt: skip
        run(self.library, "fused_MAX_float32", blocks, ffi.new("ucch_moves *", of))

    def slot(self, number):
        """Return the words of a piece's slot; the first four are its header."""
        at = 32 + number % 8 * (64 + 2 * self.room)
        return self.ring[at : at + 32 + 2 * self.room].view(np.uint64)


@pytest.mark.parametrize("blocks", [1, 2, 7])
@pytest.mark.parametrize("begun", [0, 2**32 - 9])
def test_words_with_flags(library, blocks, begun):
    """Messages of any length and alignment through used slots, until the numbers wrap around."""
    rng, channel, messages = np.random.default_rng(), Flagged(library, begun), []
    for _ in range(40):
        count = int(rng.choice([1, 3, 4, 8, 63, 64, 65, 1000, 4096, int(rng.integers(1, 4097))]))
        shift, where, hash_ = int(rng.integers(9)), int(rng.integers(9)), int(rng.integers(1 << 63))
        messages.append((rng.integers(0, 256, count + 9, np.uint8)[shift:], where, count, hash_))

    def counted(incoming, turn):
        replays = channel.replays[incoming]
        assert (replays.wrong.word, replays.begun.word, replays.ended.word) == (0, turn + 1, turn + 1)
        assert channel.steps[incoming].pieces == channel.words[incoming] == (begun + turn + 1) % 2**32
        assert not channel.counts[incoming].running and not any(channel.by_move[incoming].arrived)

    def send():
        for turn, (sent, _, count, hash_) in enumerate(messages):
            channel.run(False, sent, count, hash_, blocks)
            counted(False, turn)
            assert 0 <= (channel.words[1] - channel.steps[False].taken) % 2**32 <= 8  # it reads the word once a round

    def receive():
        for turn, (sent, where, count, hash_) in enumerate(messages):
            into = np.full(count + 30, 77, np.uint8)
            channel.run(True, into[where:], count, hash_, blocks)
            assert (into[where:][:count] == sent[:count]).all()
            assert (into[:where] == 77).all() and (into[where + count :] == 77).all()
            counted(True, turn)

    beside(send, receive)


@pytest.mark.parametrize("blocks", [1, 3])
def test_sums_of_what_comes(library, blocks):
    """Received data is the second operand or the first, and the result overwrites the other operand or is elsewhere."""
    rng, channel = np.random.default_rng(), Flagged(library, 0)
    for turn in range(30):
        n, kind = int(rng.integers(1, 1001)), (lib.MOVE_LL_FIRST, lib.MOVE_LL_SECOND)[turn % 2]
        theirs, mine = (rng.choice(np.array([0.0, -0.0, 1, -3, np.nan], np.float32), n + 3) for _ in range(2))
        theirs, mine = theirs[int(rng.integers(4)) :][:n], mine[int(rng.integers(4)) :][:n]
        one, other = (theirs, mine) if kind == lib.MOVE_LL_FIRST else (mine, theirs)
        wanted = np.where(np.isnan(one) | (one > other), one, other)
        channel.run(False, theirs, 4 * n, 5, blocks)
        into = mine if rng.integers(2) else np.full(n, 77, np.float32)
        channel.run(True, into, 4 * n, 5, blocks, kind, mine.ctypes.data)
        assert (into.view(np.uint32) == wanted.view(np.uint32)).all(), (turn, n)


@pytest.mark.parametrize("way", ["another call", "shorter", "longer"])
def test_words_of_another_call(library, way):
    """A receiver reports that the received header is a wrong one, even if parts of the data never arrive."""
    channel, data = Flagged(library, 0), np.zeros(4096, np.uint8)
    channel.run(False, data, {"another call": 1000, "shorter": 8, "longer": 3000}[way], 5, 1)
    channel.replays[True].stop.word = 1
    channel.run(True, data, 1000, 6 if way == "another call" else 5, 1)
    assert channel.replays[True].wrong.word == lib.REPLAY_DIFFERS


@pytest.mark.parametrize("begun", [0, 2**32 - 1])
@pytest.mark.parametrize("older", [0, 7 << 32])
def test_each_word_is_waited_for(library, begun, older):
    """Words arrive in any order, over older words of the slot or an empty slot: the receiver sees all of them."""
    rng, count = np.random.default_rng(), 2000
    for last in (0, 3, 4, 503, int(rng.integers(504))):
        channel = Flagged(library, begun)
        sent, into = rng.integers(0, 256, count, np.uint8), np.full(count, 77, np.uint8)
        channel.run(False, sent, count, 5, 1)
        slot = channel.slot(begun)
        words, slot[:504] = slot[:504].copy(), older and older | int(rng.integers(1 << 32))
        receiver = threading.Thread(target=channel.run, args=(True, into, count, 5, 1))
        receiver.start()
        while not channel.replays[True].begun.word:
            pass
        for k in rng.permutation(504).tolist():
            slot[k] = words[k] if k != last else slot[k]
        assert receiver.is_alive() and channel.words[1] == begun
        slot[last] = words[last]
        receiver.join(60)
        assert (
            (into == sent).all() and channel.words[1] == (begun + 1) % 2**32 and channel.replays[True].wrong.word == 0
        )


class Lane:
    """The rings of a lane, and kernels of either side."""

    def __init__(self, library, slot):
        self.library, self.slot, self.stride = library, slot, slot + 64
        self.rings = [np.zeros(8 * stride, np.uint8) for stride in (65536 + 64, self.stride)]
        self.words = ffi.new("unsigned[64]")
        self.sides = {receives: ffi.new("ucch_lane_line[2]") for receives in (False, True)}
        self.arrived = {receives: ffi.new("unsigned[16]") for receives in (False, True)}
        self.posted = {False: 0, True: 0}

    def run(self, receives, data, room, tag, blocks, base=0):
        """Run a side's kernel, after `base` pieces; return how the message ended."""
        self.posted[receives] += 1
        number, lines = self.posted[receives], self.sides[receives]
        short, long = (ffi.cast("char *", ring.ctypes.data) + 64 for ring in self.rings)
        fields = {
            "shorts": short + (number - 1) % 8 * (65536 + 64), "longs": long,
            "data": ffi.cast("char *", data.ctypes.data),
            "short_published": self.words, "short_consumed": self.words + 16, "published": self.words + 32,
            "consumed": self.words + 48, "stop": ffi.addressof(lines[0], "done"), "arrived": self.arrived[receives],
            "line": lines + 1, "bytes": room, "tag": tag, "number": number, "base": base, "limit": 65536,
            "slot": self.slot, "stride": self.stride, "to": (1 << 32) - 1, "flags": 6 | receives,
        }  # fmt: skip
        run(self.library, "lane", blocks, ffi.new("ucch_lane_copy *", fields))
        assert lines[1].done == number and not any(self.arrived[receives][0:10])
        return lines[1]


@pytest.mark.parametrize("slot", [524288, 2097152])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_both_sides_of_messages(library, slot, blocks):
    """One side's blocks fill the rings, the other's empty them, and skip a message that does not match."""
    rng, lane, messages = np.random.default_rng(), Lane(library, slot), []
    longest = 5_000_000 + int(rng.integers(4096))  # more than a ring holds
    for _ in range(20):
        nbytes = int(rng.choice([0, 1, 4096, 65536, 65537, 300_000, int(rng.integers(1 << 20)), longest]))
        tag, wrong = (int(rng.integers(n)) for n in (5, 4))
        messages.append((rng.integers(0, 256, nbytes + 1, np.uint8), nbytes, tag, wrong))

    def send():
        base = 0
        for sent, nbytes, tag, _ in messages:
            lane.run(False, sent, nbytes, tag, blocks, base)
            piece = min(max(-(-(nbytes // 4) // 4096) * 4096, 262144), slot)
            base += -(-nbytes // piece) if nbytes > 65536 else 0

    def receive():
        for sent, nbytes, tag, wrong in messages:
            wanted = (1 << 32) - 1 if wrong == 3 else tag + (wrong == 2)
            room = nbytes - 1 if wrong == 1 and nbytes else nbytes + 3
            into = np.full(nbytes + 4, 77, np.uint8)
            found = lane.run(True, into, room, wanted, blocks)
            status = 3 if wrong == 2 else 2 if room < nbytes else 0
            assert (found.status, found.tag, found.bytes) == (status, tag, nbytes)
            assert (into[:nbytes] == (77 if status else sent[:nbytes])).all() and (into[nbytes:] == 77).all()
            assert (lane.words[17] == lane.posted[True]) == (status > 0)

    beside(send, receive)


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_pieces(library, name, blocks):
    """Pieces of any length are gathered from rows in groups, as by numpy, and converted as by the host."""
    rng = np.random.default_rng()
    _, _, one, other = PIECES[name]
    size, to_size = (SIZES.get(each, 1) for each in (one, other))
    groups, rows, row = 7, 30, 40
    source = rng.integers(0, 256, (groups, 2 * rows, row + 3, size), np.uint8)
    straight = np.ascontiguousarray(source[:, :rows, :row])
    wanted = np.empty((groups * rows * row, to_size), np.uint8)
    if one == other:
        wanted[:] = straight.reshape(wanted.shape)
    else:
        ends = (ffi.cast("void *", a.ctypes.data) for a in (straight, wanted))
        assert lib.ucch_cast(one, other, *ends, len(wanted)) == 0
    out = np.full_like(wanted, 77)
    cuts = np.unique([0, *rng.integers(0, len(wanted), 5), 5000, len(wanted) - 1]).tolist()
    each = ffi.new("ucch_piece[]", len(cuts) - 1)
    for piece, begin, end in zip(each, cuts[:-1], cuts[1:], strict=True):
        piece.src, piece.first, piece.count = ffi.cast("char *", source.ctypes.data), begin, end - begin
        piece.dst = ffi.cast("char *", out.ctypes.data + begin * to_size)
    how = (row, rows, row + 3, 2 * rows * (row + 3), one, other, size, to_size)
    asked = {"each": each, "n": len(each), "most": int(np.diff(cuts).max()), "rows": how}
    run(library, name, blocks, ffi.new("ucch_pieces *", asked))
    assert (out[:-1] == wanted[:-1]).all() and (out[-1] == 77).all()


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("before", [0, 5, 2**32 - 3])
def test_messages_through_rings(library, width, before):
    """Two ranks' kernels exchange messages over two rings in each direction, one ring with two messages; words may wrap
    around."""
    rng, stride = np.random.default_rng(), 4096 + 64
    lengths = [int(rng.integers(1, 4 * 4096)), int(rng.integers(1, 8 * 4096)), int(rng.integers(1, 4 * 4096 + 1))]
    over = [0, 1, 0]  # the ring of each message
    rings = np.zeros((2, 2, 8 * stride), np.uint8)  # by sender
    words = np.full((2, 2, 2), before, np.uint32)  # published, consumed
    sent = [[rng.integers(0, 256, n, np.uint8) for n in lengths] for _ in range(2)]
    got = [[np.full(n + 3, 77, np.uint8) for n in lengths] for _ in range(2)]
    asked, meetings = [], [np.zeros(48 * 8, np.uint32) for _ in range(2)]
    for rank in range(2):
        each = []
        for sender, data in ((rank, sent[rank]), (1 - rank, got[rank])):
            behind = [0, 0]
            for n, ring, array in zip(lengths, over, data, strict=True):
                word = words[sender, ring].ctypes.data
                pieces, incoming = -(-n // 4096), sender != rank
                addresses = (
                    array.ctypes.data,
                    rings[sender, ring].ctypes.data,
                    word + 4 * (not incoming),
                    word + 4 * incoming,
                )
                at = [ffi.cast("void *", address) for address in addresses]
                begins, behind[ring] = behind[ring], behind[ring] + pieces
                past = (before + begins) % 2**32
                each.append([*at, n, 4096, stride, past, begins, behind[ring], 0 if incoming else 8])
        where = ffi.cast("void *", meetings[rank].ctypes.data)
        asked.append(ffi.new("ucch_ring_copies *", {"arrived": where, "n": 6, "out": 3, "width": width, "each": each}))
    beside(*(partial(run, library, "ring", 2 * width, each) for each in asked))
    for rank in range(2):
        for there, here in zip(sent[1 - rank], got[rank], strict=True):
            assert (here[: there.size] == there).all() and (here[there.size :] == 77).all()
        assert not meetings[rank].any()
    pieces = [sum(-(-n // 4096) for n, ring in zip(lengths, over, strict=True) if ring == k) for k in range(2)]
    assert (words == [[[(before + n) % 2**32] * 2 for n in pieces]] * 2).all()


@pytest.mark.parametrize("blocks", [1, 3])
def test_plain_pieces(library, blocks):
    """Pieces of bytes, between any addresses; some are empty, and some take several slices."""
    rng = np.random.default_rng()
    source, out = rng.integers(0, 256, 400_000, np.uint8), np.full(400_000, 77, np.uint8)
    wanted = out.copy()
    sizes = [0, 1, 8, 16384, *rng.integers(0, 50_000, 6).tolist(), 8 * int(rng.integers(3000, 6000))]
    each, at = ffi.new("ucch_piece[]", len(sizes)), 0
    for piece, size in zip(each, sizes, strict=True):
        begin, first = int(rng.integers(0, len(source) - size)) & ~7, int(rng.integers(0, 2))
        piece.src, piece.dst = (ffi.cast("char *", a.ctypes.data + k) for a, k in ((source, begin - first), (out, at)))
        piece.first, piece.count = first, size
        wanted[at : at + size] = source[begin : begin + size]
        at += size + int(rng.integers(0, 20))
        at += -at % 8 if rng.integers(2) else 0
    code = DTYPES["uint8"].code
    asked = {"each": each, "n": len(each), "most": max(sizes), "rows": (0, 0, 0, 0, code, code, 1, 1)}
    run(library, f"pieces_{code}_{code}", blocks, ffi.new("ucch_pieces *", asked))
    assert (out == wanted).all()


@pytest.mark.parametrize("arch, blocks", [(750, 2), (800, 4), (860, 3), (890, 3), (1000, 4), (1200, 3)])
def test_blocks_that_run_at_a_time(arch, blocks):
    """Kernels that wait use few enough registers for as many blocks of 512 threads as the device has threads for."""
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler, to preprocess")
    for case in (*FUSED.values(), COMPILED["lane"]):
        words = ["c++", "-x", "c++", "-E", "-P", f"-D__CUDA_ARCH__={arch}", "-"]
        done = subprocess.run(
            words, input=sources.source(*case), capture_output=True, text=True, check=True, timeout=240
        )
        assert f"__global__ __launch_bounds__(512, {blocks}) void ucch(" in done.stdout
