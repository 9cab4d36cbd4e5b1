"""Result files: reading ours, OSU's and nccl-tests'; their tables, their curves, and one page with all of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ucc_hetero.bench.__main__ import main
from ucc_hetero.bench.curves import Curve, Point, UnknownFile, read, read_all
from ucc_hetero.bench.report import figures, page, tables
from ucc_hetero.bench.result_file import FORMAT, write_json

OSU = """
# OSU MPI-CUDA Allreduce Latency Test v7.5
# Datatype: MPI_CHAR.
# Size         Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations
1                         3.05                2.90                3.21        1000
2                         3.10                2.95                3.25        1000
# Datatype: MPI_FLOAT.
# Size         Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations
4                         4.00                3.90                4.10        1000
"""
OLD_OSU = """# OSU MPI Bi-Directional Bandwidth Test v5.6.3
# Size      Bandwidth (MB/s)
1                       5.00
2                      10.00
"""
NCCL = """# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    13.57    0.00    0.00       0    13.03    0.00    0.00       0
     1048576        262144     float     sum      -1    26.40   39.72   59.58       0      N/A     N/A     N/A     N/A
# Out of bounds values : 0 OK
"""


def store(folder: Path, name: str, content: str | dict[str, Any]) -> Path:
    path = folder / name
    if isinstance(content, dict):
        write_json(str(path), content)
    else:
        path.write_text(content)
    return path


def test_osu_text(tmp_path: Path) -> None:
    first, second = read(store(tmp_path, "a.txt", OSU))
    assert (first.benchmark, first.label, first.unit, first.dtype) == ("allreduce", "OSU 7.5 cuda", "us", "int8")
    assert first.points == (Point(1, 3.05), Point(2, 3.10))
    assert (second.dtype, second.points) == ("float32", (Point(4, 4.0),))
    (curve,) = read(store(tmp_path, "a.txt", OLD_OSU))
    assert (curve.benchmark, curve.label, curve.unit) == ("bibw", "OSU 5.6.3", "MB/s")
    assert [point.value for point in curve.points] == [5.0, 10.0]


def test_nccl_tests_text(tmp_path: Path) -> None:
    curves = {(c.label, c.unit): c for c in read(store(tmp_path, "a.log", NCCL))}
    assert {c.benchmark for c in curves.values()} == {"allreduce"}
    assert curves["nccl-tests", "us"].points == (Point(8, 13.57), Point(1048576, 26.40))
    assert curves["nccl-tests", "GB/s"].points[1] == Point(1048576, 59.58)
    assert len(curves["nccl-tests in place", "us"].points) == 1
    curves = read(store(tmp_path, "all_gather_perf.txt", NCCL.replace("all_reduce_perf", "all_gather_perf")))
    assert {c.benchmark for c in curves} == {"allgather by total size"}


def test_our_files(tmp_path: Path) -> None:
    row = {"dtype": "int8", "size": 8, "value": 2.0, "peers": {"mpi4py": {"value": 2.5, "ratio": {}}}}
    file = {"format": FORMAT, "benchmark": "osu_allreduce", "backend": "ours", "unit": "us", "date": "today"}
    mine, theirs = read(store(tmp_path, "a.json", {**file, "rows": [row]}))
    assert (mine.benchmark, mine.label, mine.unit, mine.dtype) == ("allreduce", "ours", "us", "int8")
    assert mine.points == (Point(8, 2.0),) and mine.facts == {"date": "today"}
    assert (theirs.label, theirs.points) == ("mpi4py", (Point(8, 2.5),))


@pytest.mark.parametrize(("content", "says"), [
    ("nothing", "neither"),
    ("{", "a.txt"),
    ('{"format": "other/9"}', "other/9"),
    ('{"gpu": "x", "rows": [{"stream": 1.0}]}', "not as its program writes it: KeyError"),
    ("# OSU MPI Allreduce Latency Test v7.4\n", "no measurements"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(UnknownFile, match=says):
        read(store(tmp_path, "a.txt", content))


def test_json_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    write_json(str(path), {"a": 1})
    with pytest.raises(TypeError):
        write_json(str(path), {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


#: One small result file of each kind, as the programs write them.
_HEAD = {
    "format": FORMAT, "command": ["python", "-m", "ucc_hetero.bench", "x", "--json", "a b.json"],
    "date": "2026-01-02T03:04:05+00:00", "machine": {"cpu": "A CPU", "cores": 4, "load": 0.5},
    "versions": {"python": "3.12.1", "libucx-cu12": "1.22.0", "mpi": "Open MPI v5.0.11, package: someone's"},
    "source": {"commit": "0123456789abcdef", "changed": True}, "settings": {"UCCH_EMULATE": "nvidia:2,amd:2"},
    "job": {"ranks": 4, "nodes": 1, "memory": ["host"] * 4}, "unit": "us",
}  # fmt: skip
_RATIO = {"value": 1.5, "low": 1.4, "high": 1.6}
_OSU = [
    {
        "dtype": "int8", "size": 8 << (5 * k), "value": 10.0 * 4**k, "percentiles": [], "limit": 2.0 * 4**k,
        "of_limit": 0.2, "plan": "tree (default)",
        "peers": {"mpi4py": {"value": 15.0 * 4**k, "ratio": _RATIO, "verdict": "faster"}},
    }
    for k in range(2)
]  # fmt: skip
_OVERLAP = {"dtype": "int8", "size": 8, "value": 30.0, "overlap": {"pure": 12.0, "percent": 75.0}}
_SERIES = [
    {"peer": name, "form": form, "us": us, "spread": 0.1, "rounds": [us, us]}
    for name, form, us in (("ours", "blocking", 2.0), ("ours", "persistent", 1.0), ("mpi4py", "blocking", 3.0))
]
_RATIOS = [{"of": "mpi4py", "to": "ours", **_RATIO, "verdict": "too noisy"}]
_CLUSTER = [
    {
        "collective": "allreduce", "nbytes": 64 << 20, "limit": 0.134, "target": target,
        "median": {"ours": 0.14, "mpi4py": 0.3}, "least": {"ours": 0.137, "mpi4py": 0.29},
    }
    for target in (1.05, 0.0)
]  # fmt: skip
_GPU = {"bytes": 65536, "blocking": 120.0, "stream": 100.0, "issue": 90.0, "nccl": 50.0, "busbw GB/s": 0.8}
_COSTS = {"ours": {"issue": 1.5, "time": 2.0}, "mpi4py": {"issue": 3.0, "time": 4.0}}

SAMPLES: dict[str, dict[str, Any]] = {
    "osu": {
        **_HEAD, "benchmark": "osu_allreduce", "family": "blocking", "backend": "ours", "percentiles": [],
        "plans": "nvidia[0-1]@0\nx: tree", "rows": _OSU,
    },
    "overlap": {
        **_HEAD, "benchmark": "osu_iallreduce", "family": "nonblocking", "backend": "ours", "rows": [_OVERLAP],
    },
    "compare": {
        **_HEAD, "benchmark": "compare", "collective": "allreduce", "dtype": "float32", "rounds": 2,
        "rows": [{"size": size, "series": _SERIES, "ratios": _RATIOS} for size in (8, 4096)],
        "figures": {"import_ms": [130.0], "creation_ms": {"ours": [50.0, 2.0], "mpi4py": [0.1]}},
    },
    "kv_transfer": {
        **_HEAD, "benchmark": "kv_transfer", "unit": "GB/s", "layers": 4, "heads": 8, "dim": 128,
        "rows": [{"way": "layout", "block_size": 16, "pages": 64, "concurrency": 4, "bytes": 1 << 26, "gbs": 2.5,
                  "best": 3.125, "ms": 1.75}],
    },
    "cluster": {
        **_HEAD, "benchmark": "cluster", "job": {}, "unit": "s",
        "cases": [{"case": "2x2", "rows": _CLUSTER, "goodput": [5e8, 5e8]}],
    },
    "gpu": {
        "date": "2026-01-02", "gpu": "GPU 1", "ranks": 4, "ucc": "1.4.0", "ucx": "1.22.0", "torch": "2.11.0",
        "command": ["./gpu_allreduce.py", "--amd", "2,3"], "environment": {"UCCH_STAGING": "staged"}, "wrong": [],
        "topology": "nvidia[0-1]@0 amd[2,5-6]@0",
        "rows": [_GPU, {"collective": "bcast", **_GPU, "gloo": 400.0, "of nccl": 0.5, "of gloo": 4.0}],
    },
    "call_cost": {"about": {"ranks": 2}, "rows": [{"call": "Bcast", "bytes": 8, "through": "", **_COSTS}]},
    "unknown": {"command": ["x.py"], "rows": [{"a": 1, "b": {"c": 2}}], "total": 3},
}  # fmt: skip


#: Some cells of the last row of a file's first table.
CELLS: dict[str, dict[str, str]] = {
    "osu": {"size": "256", "value": "40", "peers mpi4py ratio low": "1.4", "peers mpi4py verdict": "faster"},
    "overlap": {"value": "30", "overlap pure": "12", "overlap percent": "75"},
    "compare": {"series ours persistent us": "1", "ratios mpi4py ours verdict": "too noisy"},
    "cluster": {"collective": "allreduce", "nbytes": "67108864", "limit": "0.134", "median mpi4py": "0.3"},
    "gpu": {"collective": "bcast", "bytes": "65536", "gloo": "400", "of nccl": "0.5"},
    "call_cost": {"call": "Bcast", "ours issue": "1.5", "mpi4py issue": "3"},
    "unknown": {"a": "1", "b c": "2"},
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_tables(kind: str) -> None:
    found = list(tables(SAMPLES[kind]))
    for table in found:
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    last = dict(zip(found[0].header, found[0].rows[-1], strict=True))
    assert CELLS.get(kind, {}).items() <= last.items()


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


def curve(label: str, value: float) -> Curve:
    return Curve("allreduce", label, "us", "int8", "file", (Point(8, value), Point(64, 2 * value)))


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
