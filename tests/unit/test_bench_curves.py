"""Result files: reading ours, OSU's and nccl-tests'."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucc_hetero.bench.curves import Point, UnknownFile, read
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


def ours(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"format": FORMAT, "benchmark": "osu_allreduce", "backend": "ours", "unit": "us", "rows": rows, **more}


def versus(values: dict[str, list[float]], size: int = 8) -> dict[str, Any]:
    """A file of ``compare`` with one size."""
    series = [
        {"peer": name, "form": "blocking", "us": float(np.median(rounds)), "rounds": rounds, "spread": 0.0}
        for name, rounds in values.items()
    ]
    rows = [{"size": size, "series": series, "ratios": []}]
    return {"format": FORMAT, "benchmark": "compare", "collective": "allreduce", "dtype": "float32", "rows": rows}


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
    mine, theirs = read(store(tmp_path, "a.json", ours([row], date="today")))
    assert (mine.benchmark, mine.label, mine.unit, mine.dtype) == ("allreduce", "ours", "us", "int8")
    assert mine.points == (Point(8, 2.0),)
    assert mine.facts == {"date": "today"}
    assert (theirs.label, theirs.points) == ("mpi4py", (Point(8, 2.5),))
    (series,) = read(store(tmp_path, "c.json", versus({"ours": [1.0, 2.0, 3.0]})))
    assert series.points == (Point(8, 2.0),)


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
