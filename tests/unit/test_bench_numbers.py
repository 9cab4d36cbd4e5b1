"""The arithmetic of measurements, the limit of links against an independent count, and the checker of results."""

import runpy
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ucc_hetero.bench.cases import Case, Pool, lengths, longest
from ucc_hetero.bench.interleave import measure
from ucc_hetero.bench.memory import Memory, open_memory
from ucc_hetero.bench.options import parse
from ucc_hetero.bench.output import Row
from ucc_hetero.bench.stats import Interval, osu_percentile, ratio, sizes, verdict
from ucc_hetero.bench.stats import overlap as overlap_of
from ucc_hetero.bench.table import BENCHES, COLLECTIVES
from ucc_hetero.bench.validate import Checker, draw


def test_sizes():
    assert list(sizes(1, 16, 1)) == [1, 2, 4, 8, 16]
    assert list(sizes(1, 16, 4)) == [4, 8, 16]
    assert list(sizes(3, 20, 1)) == [3, 6, 12]
    assert list(sizes(8, 4096, 4, 8)) == [8, 64, 512, 4096]
    assert list(sizes(0, 2, 1)) == [1, 2]


@pytest.mark.parametrize(("p", "expected"), [(50, 49), (90, 89), (99, 98), (100, 99), (1, 0)])
def test_percentiles_are_samples(p, expected):
    shuffled = np.random.default_rng(0).permutation(np.arange(100.0))
    assert osu_percentile(shuffled, p) == expected


@pytest.mark.parametrize(("overall", "compute", "test", "pure", "expected"), [
    (10.0, 10.0, 0.0, 10.0, 100.0),  # all of it hidden
    (20.0, 10.0, 0.0, 10.0, 0.0),  # none
    (15.0, 10.0, 0.0, 10.0, 50.0),
    (15.0, 12.0, 2.0, 10.0, 50.0),  # calls of Test are not computation
    (30.0, 10.0, 0.0, 10.0, 0.0),  # never negative
    (1.0, 1.0, 0.0, 0.0, 0.0),
])  # fmt: skip
def test_overlap(overall, compute, test, pure, expected):
    assert overlap_of(overall, compute, test, pure) == pytest.approx(expected)


def test_ratio_interval_holds_the_truth_and_excludes_others():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        common = rng.normal(0, 0.3, 30)  # a disturbance that affects both series
        got = ratio(13 + common + rng.normal(0, 0.2, 30), 10 + common + rng.normal(0, 0.2, 30), draws=400)
        inside += got.low <= 1.3 <= got.high
        assert not got.low <= 1.0 <= got.high
    assert inside >= 85


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0, 3.0]), ([], [])])
def test_ratio_needs_pairs(a, b):
    with pytest.raises(ValueError, match="equal length"):
        ratio(a, b)


@pytest.mark.parametrize(("interval", "says"), [
    (Interval(1.3, 1.2, 1.4), "faster"), (Interval(2.0, 1.1, 4.0), "faster"), (Interval(0.5, 0.4, 0.6), "slower"),
    (Interval(1.0, 0.99, 1.01), "same"), (Interval(1.05, 1.0, 1.1), "same"), (Interval(1.1, 0.6, 1.9), "too noisy"),
])  # fmt: skip
def test_verdict(interval, says):
    assert verdict(interval) == says


CLUSTER = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "bench_cluster.py"))
KINDS = sorted({COLLECTIVES[test.collective].kind for case in CLUSTER["CASES"] for test in case.tests})
SIZE = 840  # divisible by all numbers of ranks here


def blocks(kind, ranks):
    """(ranks that contribute to a block of the results, ranks that need it, its bytes)."""
    everyone = set(range(ranks))
    if kind in ("reduce_all", "bcast"):
        yield everyone if kind == "reduce_all" else {0}, everyone, SIZE
    for r in range(ranks):
        if kind == "reduce_scatter":
            yield everyone, {r}, SIZE / ranks
        elif kind == "gather_all":
            yield {r}, everyone, SIZE
        elif kind == "exchange":
            yield from (({r}, {other}, SIZE) for other in range(ranks))


def crossing(kind, ranks, inside):
    """Blocks that must cross: those (or one side's partial sum) that the other side needs."""
    enters = leaves = 0.0
    for sources, needers, nbytes in blocks(kind, ranks):
        enters += nbytes * bool(needers & inside and sources - inside)
        leaves += nbytes * bool(needers - inside and sources & inside)
    return max(enters, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_bytes_that_must_cross(kind, ranks):
    for count in range(1, ranks):
        for inside in map(set, combinations(range(ranks), count)):
            got = CLUSTER["crossing_bytes"](kind, SIZE, count, ranks)
            assert got == pytest.approx(crossing(kind, ranks, inside))


def test_least_time_of_two_hosts_and_of_three():
    limit, test = CLUSTER["limit"], CLUSTER["Test"]("allreduce", 1200)
    assert limit(test, [0, 1, 1, 0], [1e8, 1e8]) == pytest.approx(1200 / 1e8)
    assert limit(test, [0, 1, 1, 0], [1e8, 1e7]) == pytest.approx(1200 / 1e7)
    # Three hosts: four vectors over three links of this rate, instead of one over one.
    assert limit(test, [0, 0, 1, 1, 2], [1e8] * 3) == pytest.approx(4 * 1200 / 3e8)


INT, FLOAT = np.dtype(np.int32), np.dtype(np.float32)
HOST = Memory("host")
MOVING = sorted(set(COLLECTIVES) - {"barrier"})


def job(name, ranks, count, root=0, in_place=False):
    row = COLLECTIVES[name]
    return [Case(row, rank, ranks, count, root if row.rooted else 0, in_place) for rank in range(ranks)]


def loaded(case, dtype, iteration=0):
    buffers = Pool(HOST, dtype, longest(case.row, case.count, case.ranks)).take(case)
    checker = Checker(case, dtype)
    checker.load(buffers, iteration)
    return checker, buffers


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [INT, FLOAT], ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_what_was_not_done_is_wrong(name, dtype, in_place):
    """On every rank that receives new data. tests/mpi/test_bench.py checks that correct results pass."""
    for ranks, count, root in ((2, 4, 0), (3, 5, 2)):
        for case in job(name, ranks, count, root, in_place):
            checker, buffers = loaded(case, dtype, iteration=7)
            in_its_place = in_place and name != "bcast" and (not case.row.rooted or case.rank == root)
            receives = lengths(case)[1] is not None or (name == "bcast" and case.rank != root)
            new = receives and not (case.row.kind == "scatter_root" and in_its_place)
            assert (case.sends_in_place, bool(checker.wrong(buffers, 7))) == (in_its_place, new)


def finished(dtype):
    (checker, buffers), (_, other) = (loaded(case, dtype) for case in job("allreduce", 2, 8))
    buffers.recv.put(buffers.send.get() + other.send.get())
    assert checker.wrong(buffers, 0) == 0
    return checker, buffers


@pytest.mark.parametrize("dtype", [INT, FLOAT], ids=str)
@pytest.mark.parametrize("side", ["send", "recv"])
def test_one_wrong_element_is_one(dtype, side):
    """Also if the call has changed the send buffer, or memory behind a buffer."""
    checker, buffers = finished(dtype)
    assert checker.wrong(buffers, 1) > 1
    block = getattr(buffers, side)
    block.whole[5] += 1
    assert checker.wrong(buffers, 0) == 1
    block.whole[5] -= 1
    block.whole[block.count] = 0
    assert checker.wrong(buffers, 0) == 1


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "float16", "float32", "float64", "complex64"])
def test_draws_repeat_differ_and_sum_exactly(dtype):
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
    total = sum(draw(np.dtype(np.int8), 100, 1, r, 0, summed=300).astype(int) for r in range(300))
    assert np.abs(total).max() <= 127


def test_accelerators_that_are_not_there():
    assert open_memory("host", 0) == HOST
    if open_memory("auto", 0).accelerator == "host":
        with pytest.raises(ValueError, match="leave -d out"):
            open_memory("cuda", 0)


class FakeSeries:
    """Calls of a peer with equal samples and two wrong elements."""

    def __init__(self, session, peer, dtype, size):
        self.session, self.peer, self.size, self.wrong = session, peer, size, 2

    def run(self, iterations, warmup):
        self.session.asked.append((self.peer, iterations, warmup))
        return np.full(iterations, self.peer)

    def row(self, samples):
        return Row(self.size, float(samples.mean()), iterations=samples.size)

    def free(self):
        self.peer = float("nan")


@pytest.mark.parametrize(("name", "faster"), [("osu_latency", 3.0), ("osu_bw", 1 / 3), ("osu_iallreduce", 3.0)])
def test_peers_take_turns(name, faster):
    bench = BENCHES[name]
    options = parse(bench, ["--peer", "mpi4py", "-i", "7", "-x", "5", "--rounds", "3", "-c"])
    world = SimpleNamespace(barrier=lambda: None, total=lambda value: value)
    peers = {"ours": 2.0, "mpi4py": 6.0}
    session = SimpleNamespace(bench=bench, options=options, peers=peers, asked=[], world=world)
    row = measure(session, FakeSeries, np.dtype("int8"), 8)
    assert session.asked == [(2.0, 3, 5), (6.0, 3, 5), (6.0, 2, 1), (2.0, 2, 1), (2.0, 2, 1), (6.0, 2, 1)]
    assert (row.size, row.value, row.iterations, row.wrong) == (8, 2.0, 7, 4)
    value, interval = row.ratios["mpi4py"]
    assert (value, interval.value) == (6.0, pytest.approx(faster))
