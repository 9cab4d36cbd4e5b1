"""The report: figures of curves, tables of result files of every kind, and one page with all of it."""

from pathlib import Path

import pytest
from bench_samples import SAMPLES

from ucc_hetero.bench.__main__ import main
from ucc_hetero.bench.curves import Curve, Point, UnknownFile, read, read_all
from ucc_hetero.bench.report import figures, page, tables
from ucc_hetero.bench.result_file import write_json


def curve(label: str, value: float, source: str = "file", unit: str = "us") -> Curve:
    return Curve("allreduce", label, unit, "int8", source, (Point(8, value), Point(64, 2 * value)))


@pytest.mark.parametrize("kind", SAMPLES)
def test_tables_are_whole(kind: str) -> None:
    found = list(tables(SAMPLES[kind]))
    assert found
    for table in found:
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}
        assert all(isinstance(cell, str) for row in table.rows for cell in row)


@pytest.mark.parametrize(("kind", "cells"), [
    ("osu", {"size": "256", "value": "40", "peers mpi4py ratio low": "1.4", "peers mpi4py verdict": "faster"}),
    ("overlap", {"value": "30", "overlap pure": "12", "overlap percent": "75"}),
    ("compare", {"series ours persistent us": "1", "ratios mpi4py ours verdict": "too noisy"}),
    ("cluster", {"collective": "allreduce", "nbytes": "67108864", "limit": "0.134", "median mpi4py": "0.3"}),
    ("gpu", {"collective": "bcast", "bytes": "65536", "gloo": "400", "of nccl": "0.5"}),
    ("call_cost", {"call": "Bcast", "ours issue": "1.5", "mpi4py issue": "3"}),
    ("unknown", {"a": "1", "b c": "2"}),
])  # fmt: skip
def test_last_row_of_the_first_table(kind: str, cells: dict[str, str]) -> None:
    table = next(tables(SAMPLES[kind]))
    assert cells.items() <= dict(zip(table.header, table.rows[-1], strict=True)).items()


def test_curves_of_every_file(tmp_path: Path) -> None:
    for kind, data in SAMPLES.items():
        write_json(str(tmp_path / f"{kind}.json"), data)
    curves = {(c.source, c.label): c for c in read_all(sorted(tmp_path.iterdir()))[0]}
    kinds = ("osu", "overlap", "compare", "gpu", "cluster", "call_cost")
    assert {source for source, _ in curves} == {f"{kind}.json" for kind in kinds}
    assert [p.value for p in curves["osu.json", "limit"].points] == [2.0, 8.0]
    assert curves["overlap.json", "ours overlap"].unit == "%"
    assert [p.value for p in curves["cluster.json", "mpi4py"].points] == [3e5, 3e5]
    islands = SAMPLES["gpu"]["topology"]
    assert {label for source, label in curves if source == "gpu.json"} == {
        f"{islands} blocking", f"{islands} stream", "nccl", "gloo"
    }  # fmt: skip
    with pytest.raises(UnknownFile, match="no measurements over message sizes"):
        read(tmp_path / "kv_transfer.json")


def test_page_is_self_contained_and_escapes() -> None:
    data = {"benchmark": "<i>", "plans": "<b>", "machine": {}, "command": ["<u>"], "rows": [{"<s>": 1}]}
    drawn = [(figure, b"svg") for figure in figures([curve("<script>", 2), curve("ours", 4)])]
    text = page(drawn, [("f&g", data)], "<em>", "<q>")
    for tag in ("<script>", "<b>", "<i>", "<u>", "<s>", "<em>", "<q>"):
        assert tag not in text
    assert 'src="data:image/svg+xml;base64,' in text and "http" not in text
    assert "<td>2.00</td><td>4.00</td><td>2.00</td>" in text


def test_report_program(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    paths = []
    for kind in ("osu", "overlap", "unknown"):
        paths.append(str(tmp_path / f"{kind}.json"))
        write_json(paths[-1], SAMPLES[kind])
    assert main(["report", *paths, "-o", str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "allreduce-int8-latency.png", "iallreduce-int8-latency.png", "iallreduce-int8-overlap.png", "index.html",
    ]  # fmt: skip
    assert (tmp_path / "out" / names[0]).read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(tmp_path / "absent.json")]) == 1
