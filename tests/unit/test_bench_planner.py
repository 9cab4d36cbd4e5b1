"""The planner's benchmark: shapes, rows and curves, on small jobs."""

import json
from pathlib import Path

import pytest
from bench_planner import SHAPES, curves, lookup, main, measure, shape


@pytest.mark.parametrize("placement", ["block", "cyclic", "uneven", "racks"])
@pytest.mark.parametrize("ranks, islands", [pair for pair in SHAPES if pair[0] <= 256])
def test_shapes_have_as_many_ranks_and_islands_as_they_say(ranks: int, islands: int, placement: str) -> None:
    topology = shape(ranks, islands, placement)
    assert (topology.size, len(topology.islands)) == (ranks, islands)


def test_a_rank_is_in_as_many_teams_as_there_are_levels() -> None:
    for ranks, islands in ((16, 4), (64, 8)):
        row = measure(shape(ranks, islands, "block"), "allreduce", 1 << 26)
        assert row["algorithm"] == "split_rail" and row["teams"] == 2
        assert row["limit"] < row["predicted"] < 1.2 * row["limit"]


def test_every_algorithm_and_levels() -> None:
    args = ["--most", "16", "--placement", "racks", "--every", "--bytes", "65536"]
    assert main(args) == 0
    topology = shape(256, 16, "racks")
    assert topology.tree.height == 2 and measure(topology, "allreduce", 1 << 26)["teams"] == 3
    again = lookup(topology, 10)
    assert set(again) == {"choose", "make_plan", "nothing"} and min(again.values()) >= 0


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--most", "16", "--placement", "block", "--json", str(tmp_path / "p.json")]) == 0
    rows = json.loads((tmp_path / "p.json").read_text())["rows"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 2 and lines[-1].startswith("# made before: choice ")
    assert [ranks for ranks, _ in curves(rows)["allreduce"]] == [2, 4, 16]
