"""The checker finds every kind of wrong result; a simulated job of several ranks shows it right results too."""

from typing import Any

import numpy as np
import pytest

from ucc_hetero.bench.cases import Buffers, Case, Pool, lengths, longest, shares
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


def complete(cases: list[Case], blocks: list[Buffers]) -> None:
    """Do what MPI says the collective does, from the buffers alone."""
    kind, n, ranks = cases[0].row.kind, cases[0].count, len(cases)
    root = cases[0].root

    def given(rank: int) -> Any:
        block, case = blocks[rank], cases[rank]
        if case.sends_in_place and kind != "scatter_root":
            assert block.recv is not None
            data = block.recv.get().copy()
            return data[rank * n : (rank + 1) * n] if kind in ("gather_all", "gather_root") else data
        return None if block.send is None else block.send.get().copy()

    inputs = [given(rank) for rank in range(ranks)]
    for rank, (case, block) in enumerate(zip(cases, blocks, strict=True)):
        if kind == "bcast":
            assert block.send is not None
            block.send.put(inputs[root])
            continue
        if block.recv is None or (kind == "scatter_root" and case.sends_in_place):
            continue
        if kind in ("gather_all", "gather_root"):
            out = np.concatenate(inputs)
        elif kind == "exchange":
            out = np.concatenate([data[rank * n : (rank + 1) * n] for data in inputs])
        elif kind == "scatter_root":
            out = inputs[root][rank * n : (rank + 1) * n]
        else:
            out = np.sum(inputs, axis=0, dtype=inputs[0].dtype)
            if kind == "reduce_scatter":
                parts = shares(n, ranks, case.row.vector)
                out = out[sum(parts[:rank]) : sum(parts[: rank + 1])]
        block.recv.put(out)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [INT, FLOAT], ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_right_results_pass_and_poison_fails(name: str, dtype: np.dtype[Any], in_place: bool) -> None:
    for ranks, count, root in ((2, 4, 0), (3, 5, 2)):
        cases = job(name, ranks, count, root, in_place)
        made = [loaded(case, dtype, iteration=7) for case in cases]
        before = [checker.wrong(buffers, 7) for checker, buffers in made]
        complete(cases, [buffers for _, buffers in made])
        assert [checker.wrong(buffers, 7) for checker, buffers in made] == [0] * ranks
        # Nothing having been done, every rank that receives anything new must have noticed.
        receives = [lengths(case)[1] is not None or (case.row.kind == "bcast" and case.rank != root) for case in cases]
        for case, noticed, wrong in zip(cases, receives, before, strict=True):
            if noticed and not (case.row.kind == "scatter_root" and case.sends_in_place):
                assert wrong > 0


def finished(name: str, dtype: np.dtype[Any]) -> tuple[Checker, Buffers]:
    cases = job(name, 2, 8)
    made = [loaded(case, dtype) for case in cases]
    complete(cases, [buffers for _, buffers in made])
    return made[0]


@pytest.mark.parametrize("dtype", [INT, FLOAT], ids=str)
@pytest.mark.parametrize("side", ["send", "recv"])
def test_one_wrong_element_is_one(dtype: np.dtype[Any], side: str) -> None:
    """Also where the call has changed what was only to be sent."""
    checker, buffers = finished("allreduce", dtype)
    getattr(buffers, side).whole[5] += 1
    assert checker.wrong(buffers, 0) == 1


@pytest.mark.parametrize("side", ["send", "recv"])
def test_overrun_is_noticed(side: str) -> None:
    checker, buffers = finished("allgather", INT)
    block = getattr(buffers, side)
    block.whole[block.count] = 0
    assert checker.wrong(buffers, 0) == 1


def test_data_of_another_iteration_is_wrong() -> None:
    checker, buffers = finished("bcast", INT)
    assert checker.wrong(buffers, 0) == 0
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
