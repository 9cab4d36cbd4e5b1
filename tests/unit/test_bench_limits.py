"""The roofline against a count of its own, limits as columns, interleaved peers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from ucc_hetero.bench.interleave import measure
from ucc_hetero.bench.links import Links
from ucc_hetero.bench.options import Options, parse
from ucc_hetero.bench.output import Row, osu_header, osu_row
from ucc_hetero.bench.roofline import crossing_bytes, least_seconds, port_bytes
from ucc_hetero.bench.stats import Interval, Overlap
from ucc_hetero.bench.table import BENCHES, COLLECTIVES

KINDS = sorted({row.kind for row in COLLECTIVES.values()})
SIZE = 840  # divisible by all numbers of ranks here


def blocks(kind: str, ranks: int, root: int) -> Iterator[tuple[set[int], set[int], float]]:
    """(ranks that contribute to a block of the results, ranks that need it, its bytes)."""
    everyone = set(range(ranks))
    if kind == "reduce_all":
        yield everyone, everyone, SIZE
    elif kind == "reduce_root":
        yield everyone, {root}, SIZE
    elif kind == "bcast":
        yield {root}, everyone, SIZE
    for r in range(ranks):
        if kind == "reduce_scatter":
            yield everyone, {r}, SIZE / ranks
        elif kind in ("gather_all", "gather_root"):
            yield {r}, everyone if kind == "gather_all" else {root}, SIZE
        elif kind == "scatter_root":
            yield {root}, {r}, SIZE
        elif kind == "exchange":
            yield from (({r}, {other}, SIZE) for other in range(ranks))


def crossing(kind: str, ranks: int, root: int, inside: set[int]) -> float:
    """Blocks that have to enter or leave: those (or one side's sum for them) that the other side needs."""
    enters = leaves = 0.0
    for sources, needers, nbytes in blocks(kind, ranks, root):
        enters += nbytes * bool(needers & inside and sources - inside)
        leaves += nbytes * bool(needers - inside and sources & inside)
    return max(enters, leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_bytes_that_must_cross(kind: Any, ranks: int) -> None:
    for count in range(1, ranks):
        for inside in map(set, combinations(range(ranks), count)):
            got = crossing_bytes(kind, SIZE, count, ranks, has_root=0 in inside)
            assert got == pytest.approx(crossing(kind, ranks, 0, inside))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_bytes_of_a_port(kind: Any, ranks: int) -> None:
    busiest = max(crossing(kind, ranks, 0, {rank}) for rank in range(ranks))
    if kind == "reduce_all":
        # All ports together carry P-1 vectors to the sums and as many back.
        busiest = 2 * (ranks - 1) * SIZE / ranks
    assert port_bytes(kind, SIZE, ranks) == pytest.approx(busiest)


def test_least_time_of_one_island_and_of_two() -> None:
    flat = Links(1e-6, None, 1e9, ())
    assert least_seconds("reduce_all", 1000, flat, [[0, 1, 2, 3]]) == pytest.approx(1e-6 + 1.5e-6)
    assert least_seconds("barrier", 0, flat, [[0, 1]]) == pytest.approx(1e-6)
    bridged = Links(1e-6, 5e-6, 1e9, (1e8, 1e8))
    assert least_seconds("reduce_all", 1000, bridged, [[0, 1], [2, 3]]) == pytest.approx(5e-6 + 1e-5)
    # Three islands: four vectors over three bridges of this rate, not one over one.
    three = Links(1e-6, 5e-6, 1e9, (1e8,) * 3)
    assert least_seconds("reduce_all", 1200, three, [[0, 1], [2, 3], [4]]) == pytest.approx(5e-6 + 4 * 1200 / 3e8)
    # The root's island receives three blocks, the others send one or two.
    assert least_seconds("gather_root", 1000, bridged, [[0], [1, 2, 3]]) == pytest.approx(5e-6 + 3e-5)


def line(name: str, words: str, row: Row) -> tuple[list[str], list[str]]:
    bench, options = BENCHES[name], parse(BENCHES[name], words.split())
    header, text = osu_header(bench, options), osu_row(bench, options, row)
    assert len(header) == len(text)
    return header.split(), text.split()


def test_limit_columns() -> None:
    header, cells = line("osu_allreduce", "--limit", Row(8, 10.0, limit=2.5))
    assert header[-3:] == ["Limit(us)", "Of", "limit(%)"]
    assert cells == ["8", "10.00", "2.50", "25.00"]
    _, cells = line("osu_bw", "--limit", Row(8, 10.0, limit=40.0))
    assert cells == ["8", "10.00", "40.00", "25.00"]
    times = Overlap(20.0, 9.0, 1.0, 0.0, 1.0, 10.0, 9.0, 11.0, 50.0)
    _, cells = line("osu_iallreduce", "--limit", Row(8, 20.0, overlap=times, limit=2.5))
    assert cells[-2:] == ["2.50", "25.00"]
    assert Row(8, 0.0, limit=1.0).of_limit(rates=False) is None


def test_ratio_columns_say_how_many_times_faster() -> None:
    row = Row(8, 10.0, ratios={"mpi4py": (20.0, Interval(2.0, 1.9, 2.1))})
    for name, columns in (("osu_latency", ["mpi4py(us)", "mpi4py/ours"]), ("osu_bw", ["mpi4py(MB/s)", "ours/mpi4py"])):
        header, cells = line(name, "--peer mpi4py", row)
        assert header[-2:] == columns and cells == ["8", "10.00", "20.00", "2.00", "[1.90,2.10]"]


class FakeWorld:
    def barrier(self) -> None: ...

    def total(self, value: int) -> int:
        return value


@dataclass
class FakeSession:
    bench: Any
    options: Options
    peers: dict[str, float]
    asked: list[tuple[float, int, int]] = field(default_factory=list)
    world: FakeWorld = field(default_factory=FakeWorld)


class FakeSeries:
    """Calls of a peer whose every sample is the same, and of which two elements are wrong."""

    def __init__(self, session: FakeSession, peer: float, dtype: Any, size: int) -> None:
        self.session, self.peer, self.size, self.wrong = session, peer, size, 2

    def run(self, iterations: int, warmup: int) -> Any:
        self.session.asked.append((self.peer, iterations, warmup))
        return np.full(iterations, self.peer)

    def row(self, samples: Any) -> Row:
        return Row(self.size, float(samples.mean()), iterations=samples.size)

    def free(self) -> None:
        self.peer = float("nan")


@pytest.mark.parametrize(("name", "faster"), [("osu_latency", 3.0), ("osu_bw", 1 / 3), ("osu_iallreduce", 3.0)])
def test_peers_take_turns(name: str, faster: float) -> None:
    bench = BENCHES[name]
    options = parse(bench, ["--peer", "mpi4py", "-i", "7", "-x", "5", "--rounds", "3", "-c"])
    session: Any = FakeSession(bench, options, {"ours": 2.0, "mpi4py": 6.0})
    row = measure(session, FakeSeries, np.dtype("int8"), 8)  # type: ignore[arg-type]
    assert session.asked == [(2.0, 3, 5), (6.0, 3, 5), (6.0, 2, 1), (2.0, 2, 1), (2.0, 2, 1), (6.0, 2, 1)]
    assert (row.size, row.value, row.iterations, row.wrong) == (8, 2.0, 7, 4)
    value, interval = row.ratios["mpi4py"]
    assert (value, interval.value) == (6.0, pytest.approx(faster))
