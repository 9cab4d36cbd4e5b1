"""Result files: reading this package's, OSU's and nccl-tests'; their tables, their curves, and a page with
everything."""

import io
import json
import tarfile
import tempfile
from pathlib import Path

import pytest

from ucc_hetero.bench.__main__ import main
from ucc_hetero.bench.curves import Curve, Point, UnknownFile, read_all
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


def store(folder, name, content):
    path = folder / name
    if isinstance(content, dict):
        write_json(str(path), content)
    else:
        path.write_text(content)
    return path


def read(path):
    return read_all([path])[0]


def test_osu_text(tmp_path):
    first, second = read(store(tmp_path, "a.txt", OSU))
    assert (first.benchmark, first.label, first.unit, first.dtype) == ("allreduce", "OSU 7.5 cuda", "us", "int8")
    assert first.points == (Point(1, 3.05), Point(2, 3.10))
    assert (second.dtype, second.points) == ("float32", (Point(4, 4.0),))
    (curve,) = read(store(tmp_path, "a.txt", OLD_OSU))
    assert (curve.benchmark, curve.label, curve.unit) == ("bibw", "OSU 5.6.3", "MB/s")
    assert [point.value for point in curve.points] == [5.0, 10.0]


def test_nccl_tests_text(tmp_path):
    curves = {(c.label, c.unit): c for c in read(store(tmp_path, "a.log", NCCL))}
    assert {c.benchmark for c in curves.values()} == {"allreduce"}
    assert curves["nccl-tests", "us"].points == (Point(8, 13.57), Point(1048576, 26.40))
    assert curves["nccl-tests", "GB/s"].points[1] == Point(1048576, 59.58)
    assert len(curves["nccl-tests in place", "us"].points) == 1
    curves = read(store(tmp_path, "all_gather_perf.txt", NCCL.replace("all_reduce_perf", "all_gather_perf")))
    assert {c.benchmark for c in curves} == {"allgather by total size"}


@pytest.mark.parametrize(("content", "says"), [
    ("nothing", "neither"), ("{", "a.txt"), ("# OSU MPI Allreduce Latency Test v7.4\n", "no measurements"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path, content, says):
    with pytest.raises(UnknownFile, match=says):
        read(store(tmp_path, "a.txt", content))


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "deep" / "r.json"
    write_json(str(path), {"a": 1})
    with pytest.raises(TypeError):
        write_json(str(path), {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def leaves(value, *names):
    """Return the parts of a row that tables show, without lists: names of columns, and numbers with four digits."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from leaves(each, *names, name)
        elif not isinstance(each, list):
            digits = ".0f" if isinstance(each, float) and abs(each) >= 1e4 else ".4g"
            yield " ".join((*names, name)), format(each, digits) if isinstance(each, float) else str(each)


def kept(archive, name):
    """Return one of the committed result files."""
    with tarfile.open(Path(__file__).parents[2] / "benchmarks" / "results" / f"{archive}.tar.xz") as tar:
        found = tar.extractfile(f"{name}.json")
        return json.load(found)


#: A result file of each kind, without its heading.
BENCH = {"format": FORMAT, "unit": "us", "backend": "ours"}
FILES = {
    "osu": kept("host", "allreduce-2-ranks"), "compare": kept("host", "compare-2-ranks"),
    "cluster": kept("cluster", "2x2"), "gpu": kept("h200", "h200x4_homogeneous"),
    "calls": kept("h200-two-hosts", "messages_one_host"), "costs": kept("host", "host-cost"),
    "unknown": {"rows": [{"a": 12345.6, "b": {"c": None}}], "total": 3},
    "overlap": BENCH | {"benchmark": "osu_iallreduce", "rows": [
        {"dtype": "int8", "size": 8, "value": 30.0, "overlap": {"pure": 12.0, "percent": 75.0}},
    ]},
    "kv_transfer": BENCH | {"benchmark": "kv_transfer", "layers": 4, "rows": [{"way": "layout", "gbs": 2.5}]},
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_tables(kind):
    data, found = FILES[kind], list(tables(FILES[kind]))
    for table in found:
        assert table.rows and {len(row) for row in table.rows} == {len(table.header)}
    rows = data.get("rows") or data["cases"][0]["rows"]
    for row, shown in zip(rows, found[0].rows, strict=True):
        cells = {name: text if text != "None" else "" for name, text in leaves(row)}
        assert cells.items() <= dict(zip(found[0].header, shown, strict=True)).items()
    if kind == "compare":  # entries of a list are identified by their words
        last = dict(zip(found[0].header, found[0].rows[-1], strict=True))
        assert last["series ours persistent us"] == f"{rows[-1]['series'][1]['us']:.4g}"
        assert last["ratios mpi4py ours verdict"] == rows[-1]["ratios"][0]["verdict"]
    others = {"unknown": ("total", "3"), "kv_transfer": ("layers", "4")}
    assert kind not in others or others[kind] in found[-1].rows


def test_curves_of_every_file(tmp_path):
    for kind, data in FILES.items():
        write_json(str(tmp_path / f"{kind}.json"), data)
    every = read_all(sorted(tmp_path.iterdir()))[0]
    curves = {(c.source.removesuffix(".json"), c.benchmark.split()[0], c.label): c for c in every}
    assert {source for source, *_ in curves} == FILES.keys() - {"unknown", "kv_transfer", "costs"}

    def values(*key):
        return [point.value for point in curves[key].points]

    rows = {kind: data.get("rows", []) for kind, data in FILES.items()}
    assert values("osu", "allreduce", "limit") == [row["limit"] for row in rows["osu"]]
    assert values("osu", "allreduce", "gloo") == [row["peers"]["gloo"]["value"] for row in rows["osu"]]
    assert values("compare", "allreduce", "ours*") == [row["series"][1]["us"] for row in rows["compare"]]
    (overlap,) = curves["overlap", "iallreduce", "ours overlap"].points
    assert (overlap, curves["overlap", "iallreduce", "ours overlap"].unit) == (Point(8, 75.0), "%")
    seconds = [row["median"]["mpi4py"] for row in FILES["cluster"]["cases"][0]["rows"]]
    assert values("cluster", "allreduce", "mpi4py") == [each * 1e6 for each in seconds]
    by_calls = [row["nccl"]["time"] for row in rows["calls"] if row["call"] == "Sendrecv" and "time" in row["nccl"]]
    assert values("calls", "Sendrecv", "nccl") == by_calls
    for label, name in ((f"{FILES['gpu']['topology']} blocking", "blocking"), ("nccl", "nccl")):
        assert values("gpu", "bcast", label) == [row[name] for row in rows["gpu"] if row["collective"] == "bcast"]


def curve(label, value):
    return Curve("allreduce", label, "us", "int8", "file", (Point(8, value), Point(64, 2 * value)))


def test_page_is_self_contained_and_escapes():
    data = {"benchmark": "<i>", "plans": "<b>", "machine": {}, "command": ["<u>"], "rows": [{"<s>": 1}]}
    drawn = [(figure, b"svg") for figure in figures([curve("<script>", 2), curve("ours", 4)])]
    text = page(drawn, [("f&g", data)], "<em>", "<q>")
    for tag in ("<script>", "<b>", "<i>", "<u>", "<s>", "<em>", "<q>"):
        assert tag not in text
    assert 'src="data:image/svg+xml;base64,' in text and "http" not in text
    assert "<td>2.00</td><td>4.00</td><td>2.00</td>" in text


def test_report_program(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    paths = []
    for kind in ("osu", "overlap", "unknown"):
        paths.append(str(tmp_path / f"{kind}.json"))
        write_json(paths[-1], FILES[kind])
    assert main(["report", *paths, "-o", str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "allreduce-float32-latency.png", "iallreduce-int8-latency.png", "iallreduce-int8-overlap.png", "index.html",
    ]  # fmt: skip
    assert (tmp_path / "out" / names[0]).read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(tmp_path / "absent.json")]) == 1


def test_an_archive_has_a_page(tmp_path, monkeypatch):
    """It has only its own files, below the text of its README."""
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = FILES["overlap"] | {"command": ["x", "a b"], "job": {"ranks": 3}, "settings": {"A": "b c", "UCCHB_D": "1"}}
    files = {"README.md": "# Title\n\nAll <of> it.\n", "a.json": json.dumps(data), "../b.json": "{", "c/d.json": "{"}
    with tarfile.open(archive := tmp_path / "some.tar.xz", "w:xz") as tar:
        for name, text in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(text)
            tar.addfile(about, io.BytesIO(text.encode()))
    assert main(["report", str(archive), "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "some.html").read_text()
    for words in (
        *("<h1>Title</h1><p>2 figures, 1 result file</p>", "<pre>All &lt;of&gt; it.</pre>"),
        "<pre>A=&#x27;b c&#x27; mpirun -np 3 x &#x27;a b&#x27;</pre>",
    ):
        assert words in text, words
    assert not (tmp_path / "b.json").exists()
    archive.write_text("no archive")
    assert main(["report", str(archive)]) == 1
