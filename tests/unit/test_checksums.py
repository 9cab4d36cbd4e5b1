"""Checksums of calls: a flipped bit is found, with its element and ranks, and correct calls give no finding."""

import random

import numpy as np
import pytest

from ucc_hetero.calls.checksums import PIECES, MovedData, ReducedData
from ucc_hetero.planner.collectives import ROWS, Call, Shape
from ucc_hetero.types import DTYPES, OPS, reduction

RANKS = 3
#: Bits whose flip a checksum of this many ordinary numbers detects: exponent and sign, and all bits of integers.
TYPES = {"float32": (24, 32), "float64": (53, 64), "int16": (0, 16), "uint8": (0, 8), "int64": (0, 64)}


def a_call(name, rng):
    n = rng.choice([1, 2, 63, 64, 65, 700, 5000])
    counts = {
        "vector": (n,), "equal": (n,), "ranks": (*(rng.choice([0, 1, n]) for _ in range(RANKS - 1)), n),
        "matrix": (*(rng.choice([0, 1, n]) for _ in range(RANKS**2 - 1)), n),
    }  # fmt: skip
    return Call(name, RANKS, counts[ROWS[name].layout], rng.randrange(RANKS) if ROWS[name].rooted else -1)


def inputs(call, dtype, rng):
    row, shape, numbers = ROWS[call.collective], Shape(call), np.random.default_rng(rng.randrange(1 << 30))
    kind = np.dtype(dtype)
    sizes = [row.send(shape, rank) for rank in range(RANKS)]
    if kind.kind == "f":
        return [numbers.uniform(0.5, 1.5, size).astype(kind) for size in sizes]
    return [numbers.integers(0, 100, size).astype(kind) for size in sizes]


def outputs(call, given, op):
    row, shape = ROWS[call.collective], Shape(call)
    found = []
    for rank in range(RANKS):
        out = np.full(row.recv(shape, rank), 77, given[0].dtype)
        for e in row.post(shape, rank):
            parts = [given[r][e.source : e.source + e.count] for r in e.ranks]
            out[e.offset : e.offset + e.count] = op.reduce(parts, dtype=given[0].dtype) if op else parts[0]
        found.append(out)
    return found


def judge(sums):
    """Return the finding of all ranks, as :class:`~ucc_hetero.calls.verification.Verification` computes it."""
    span, ranks = sums[0].suspect(np.stack([each.first() for each in sums]))
    if span is None:
        return ""
    if span.stop < 0:
        span = span._replace(stop=max(each.count(span) for each in sums))
    span = span._replace(pieces=min(PIECES, span.stop - span.start))
    for _ in range(12):
        rows = np.stack([each.words(span) for each in sums])
        if span.stop - span.start == 1:
            fault = sums[0].describe(rows, span, ranks)
            return f"{fault.text} {list(fault.ranks)}"
        number = sums[0].worse(rows, span)
        assert number >= 0
        span = span.piece(number)
    raise AssertionError("no end")


def checksums(call, dtype, op, given, got):
    made = []
    for rank in range(RANKS):
        how = reduction(DTYPES[dtype], OPS[op]) if op else None
        each = (
            ReducedData(call, how, DTYPES[dtype], rank) if how else MovedData(call, DTYPES[dtype], rank, (None, None))
        )
        each.before = given[rank].view(np.uint8) if given[rank].size or call.collective != "bcast" else None
        each.after = got[rank].view(np.uint8) if ROWS[call.collective].post(Shape(call), rank) else None
        made.append(each)
    return made


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "barrier"])
def test_a_flipped_bit_is_found(name, dtype):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(6):
        call = a_call(name, rng)
        given = inputs(call, dtype, rng)
        got = outputs(call, given, np.add if ROWS[name].reduces else None)
        op = "SUM" if ROWS[name].reduces else ""
        assert judge(checksums(call, dtype, op, given, got)) == "", (seed, call)
        rank = rng.choice([r for r in range(RANKS) if any(e.count for e in ROWS[name].post(Shape(call), r))])
        part = rng.choice([e for e in ROWS[name].post(Shape(call), rank) if e.count])
        at, bit = part.offset + rng.randrange(part.count), rng.randrange(*TYPES[dtype])
        got[rank].view(np.uint8)[at * got[rank].itemsize + bit // 8] ^= 1 << bit % 8
        text = judge(checksums(call, dtype, op, given, got))
        element = at - part.offset + (part.source if op else 0)
        assert f"element {element} " in text, (seed, call, rank, at, bit, text)
        assert text.endswith(f"[{rank}]"), (seed, call, rank, text)
        assert op or f"from rank {part.ranks[0]} to rank {rank} " in text


def test_any_bit_of_a_replica_is_found():
    """Also within the bound of rounding, and for operations without rounding."""
    for op, dtype, ufunc in (
        ("SUM", "float32", np.add), ("PROD", "float64", np.multiply), ("MAX", "float32", np.maximum),
    ):  # fmt: skip
        call, rng = Call("allreduce", RANKS, (3000,)), random.Random()
        given = inputs(call, dtype, rng)
        got = outputs(call, given, ufunc)
        assert judge(checksums(call, dtype, op, given, got)) == ""
        got[1].view(np.uint8)[1234 * got[1].itemsize] ^= 1  # the last bit
        text = judge(checksums(call, dtype, op, given, got))
        assert "element 1234 " in text and "rank(s) [1]" in text, text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "bool", "uint32"])
def test_all_types_have_checksums(dtype):
    """Correct results pass; a result with another sign, or another truth value, does not."""
    rng = np.random.default_rng()
    call, op = Call("allreduce", RANKS, (600,)), "BXOR" if dtype == "bool" else "SUM"
    if dtype == "bfloat16":
        given = [
            (rng.uniform(1, 2, 600).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(RANKS)
        ]
        total = np.add.reduce([(each.astype(np.uint32) << 16).view(np.float32) for each in given])
        right = (total.view(np.uint32) >> 16).astype(np.uint16)
    else:
        given = [rng.integers(0, 2, 600).astype(dtype) for _ in range(RANKS)]
        right = (np.logical_xor if dtype == "bool" else np.add).reduce(given).astype(dtype)
    got = [right.copy() for _ in range(RANKS)]
    assert judge(checksums(call, dtype, op, given, got)) == ""
    for each in got:
        each.view(np.uint8)[(each.itemsize - 1) :: each.itemsize][99:100] ^= 0x41 if dtype != "bool" else 1
    assert "element 99 " in judge(checksums(call, dtype, op, given, got))
