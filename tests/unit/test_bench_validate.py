"""The checker of benchmarks finds every kind of wrong result."""

from typing import Any

import numpy as np
import pytest

from ucc_hetero.bench.cases import Buffers, Case, Pool, lengths, longest
from ucc_hetero.bench.memory import Memory, open_memory
from ucc_hetero.bench.table import COLLECTIVES
from ucc_hetero.bench.validate import Checker, draw

INT, FLOAT = np.dtype(np.int32), np.dtype(np.float32)
HOST = Memory("host")
MOVING = sorted(set(COLLECTIVES) - {"barrier"})


def job(name: str, ranks: int, count: int, root: int = 0, in_place: bool = False) -> list[Case]:
    row = COLLECTIVES[name]
    return [Case(row, rank, ranks, count, root if row.rooted else 0, in_place) for rank in range(ranks)]


def loaded(case: Case, dtype: np.dtype[Any], iteration: int = 0) -> tuple[Checker, Buffers]:
    buffers = Pool(HOST, dtype, longest(case.row, case.count, case.ranks)).take(case)
    checker = Checker(case, dtype)
    checker.load(buffers, iteration)
    return checker, buffers


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [INT, FLOAT], ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_what_was_not_done_is_wrong(name: str, dtype: np.dtype[Any], in_place: bool) -> None:
    """On every rank that receives anything new; that right results pass, tests/mpi/test_bench.py has."""
    for ranks, count, root in ((2, 4, 0), (3, 5, 2)):
        for case in job(name, ranks, count, root, in_place):
            checker, buffers = loaded(case, dtype, iteration=7)
            receives = lengths(case)[1] is not None or (case.row.kind == "bcast" and case.rank != root)
            new = receives and not (case.row.kind == "scatter_root" and case.sends_in_place)
            assert bool(checker.wrong(buffers, 7)) == new


def finished(dtype: np.dtype[Any]) -> tuple[Checker, Buffers]:
    """The first of two ranks after an allreduce."""
    (checker, buffers), (_, other) = (loaded(case, dtype) for case in job("allreduce", 2, 8))
    buffers.recv.put(buffers.send.get() + other.send.get())
    assert checker.wrong(buffers, 0) == 0
    return checker, buffers


@pytest.mark.parametrize("dtype", [INT, FLOAT], ids=str)
@pytest.mark.parametrize("side", ["send", "recv"])
def test_one_wrong_element_is_one(dtype: np.dtype[Any], side: str) -> None:
    """Also where the call has changed what was only to be sent, or what lies behind it."""
    checker, buffers = finished(dtype)
    block = getattr(buffers, side)
    block.whole[5] += 1
    assert checker.wrong(buffers, 0) == 1
    block.whole[5] -= 1
    block.whole[block.count] = 0
    assert checker.wrong(buffers, 0) == 1


def test_data_of_another_iteration_is_wrong() -> None:
    checker, buffers = finished(INT)
    assert checker.wrong(buffers, 1) > 0


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "float16", "float32", "float64", "complex64"])
def test_draws_repeat_differ_and_sum_exactly(dtype: str) -> None:
    kind = np.dtype(dtype)
    a = draw(kind, 1000, 1, 3, 5, summed=16)
    assert a.dtype == kind
    assert np.array_equal(a, draw(kind, 1000, 1, 3, 5, summed=16))
    assert not np.array_equal(a, draw(kind, 1000, 1, 4, 5, summed=16))
    assert not np.array_equal(a, draw(kind, 1000, 1, 3, 6, summed=16))
    parts = [draw(kind, 1000, 1, r, 5, summed=16) for r in range(16)]
    forwards, backwards = parts[0].copy(), parts[-1].copy()
    for up, down in zip(parts[1:], parts[-2::-1], strict=True):
        forwards += up
        backwards += down
    assert np.array_equal(forwards, backwards)
    exact = np.sum([part.astype(object) for part in parts], axis=0)
    assert forwards.tolist() == exact.tolist(), "no sum may overflow or be rounded"


def test_more_ranks_than_an_int8_counts() -> None:
    total = sum(draw(np.dtype(np.int8), 100, 1, r, 0, summed=300).astype(int) for r in range(300))
    assert np.abs(total).max() <= 127


def test_memory_is_guarded() -> None:
    part = HOST.block(INT, 10).head(4)
    part.put(np.arange(4, dtype=INT))
    assert part.array.tolist() == part.get().tolist() == [0, 1, 2, 3]
    assert not part.overrun()
    part.whole[4] += 1
    assert part.overrun()


def test_accelerators_that_are_not_there() -> None:
    assert open_memory("host", 0) == HOST
    if open_memory("auto", 0).accelerator == "host":
        with pytest.raises(ValueError, match="leave -d out"):
            open_memory("cuda", 0)
