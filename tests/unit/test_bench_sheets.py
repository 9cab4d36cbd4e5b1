"""Result files of every kind as tables, drawings, commands and a page of the documentation."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench_samples import SAMPLES
from figures import topology_words

from ucc_hetero.bench.files import write_json
from ucc_hetero.bench.readers import UnknownFile, read, read_all
from ucc_hetero.bench.sheets import origin, reproduce, sheets


@pytest.mark.parametrize("kind", SAMPLES)
def test_tables_are_whole(kind: str) -> None:
    found = sheets(SAMPLES[kind])
    assert found
    for sheet in found:
        assert sheet.title
        assert sheet.rows
        assert {len(row) for row in sheet.rows} == {len(sheet.header)}
        assert all(isinstance(cell, str) for row in sheet.rows for cell in row)


@pytest.mark.parametrize(("kind", "cells"), [
    ("osu", ["256", "40.00", "60.00", "1.50 [1.40, 1.60] faster", "8.00", "20%", "split_rail (default)"]),
    ("overlap", ["8", "30.00", "12.00", "75"]),
    ("compare", ["4K", "2.00", "1.00", "3.00", "1.50 [1.40, 1.60] too noisy"]),
    ("kv_transfer", ["layout", "16", "64", "4", "64M", "2.500", "3.125", "1.750"]),
    ("cluster", ["2x2", "allreduce", "64M", "134.000", "140.000", "300.000", "1.04", ""]),
    ("gpu", ["64K", "120", "100", "90", "50", "0.8"]),
    ("train", ["ddp", "1000", "990", "", "99.0%", ""]),
    ("host_cost", ["Bcast", "8", "mpi4py", "1.50", "3.00"]),
    ("unknown", ["1"]),
])  # fmt: skip
def test_last_row_of_the_first_table(kind: str, cells: list[str]) -> None:
    assert list(sheets(SAMPLES[kind])[0].rows[-1]) == cells


def test_a_table_for_each_collective_of_a_gpu_job() -> None:
    first, second = sheets(SAMPLES["gpu"])
    assert (first.title, second.title) == tuple(
        f"{name} on GPU 1: 2 nvidia + 3 amd, staged" for name in ("allreduce", "bcast")
    )
    assert second.header[-3:] == ("gloo µs", "of nccl's speed", "of gloo's speed")
    assert second.rows[0][-3:] == ("400", "50%", "400%")


def test_a_broken_file_is_shown_as_it_is() -> None:
    for kind, data in SAMPLES.items():
        broken = copy.deepcopy(data)
        for name in ("rows", "cases", "distances", "backends"):
            if name in broken:
                broken[name] = [{"odd": 1}]
        assert sheets(broken), kind


def test_where_a_file_comes_from() -> None:
    assert origin(SAMPLES["compare"]) == (
        "A CPU, 4 cores; Python 3.12.1; UCX 1.22.0; Open MPI v5.0.11; 2026-01-02; commit 0123456789, changed"
    )
    assert origin(SAMPLES["gpu"]) == "4 × GPU 1; UCX 1.22.0; UCC 1.4.0; torch 2.11.0; 2026-01-02"
    assert origin(SAMPLES["parity"]) == "torch 2.11.0; 2026-01-02"
    assert origin({}) == ""


def test_commands_that_make_a_file_again() -> None:
    again = {kind: reproduce(data) for kind, data in SAMPLES.items()}
    settings = "UCCH_EMULATE=nvidia:2,amd:2 OMPI_MCA_btl=self,sm"
    assert again["osu"] == f"{settings} mpirun -np 4 python -m ucc_hetero.bench x --json 'a b.json'"
    assert again["cluster"] == f"{settings} python -m ucc_hetero.bench x --json 'a b.json'"
    assert again["gpu"] == "UCCH_STAGING=staged mpirun -np 4 python tools/gpu_collectives.py --amd 2,3"
    assert again["parity"] == "python tools/torch_parity.py --dtype fp32"
    assert reproduce({}) == ""


def test_topologies_in_words() -> None:
    assert topology_words("nvidia[0-1]@0 amd[2,5-6]@0") == "2 nvidia + 3 amd"
    assert topology_words("host[0]@3") == "1 host"


def stored(folder: Path) -> list[Path]:
    paths = []
    for kind, data in SAMPLES.items():
        paths.append(folder / f"{kind}.json")
        write_json(str(paths[-1]), data)
    return paths


def test_curves_of_every_file(tmp_path: Path) -> None:
    curves = {(c.source, c.label): c for c in read_all(stored(tmp_path))[0]}
    assert {source for source, _ in curves} == {f"{kind}.json" for kind in ("osu", "overlap", "compare", "gpu")}
    assert [p.value for p in curves["osu.json", "limit"].points] == [2.0, 8.0]
    assert curves["overlap.json", "ours overlap"].unit == "%"
    assert {label for source, label in curves if source == "gpu.json"} == {
        "2 nvidia + 3 amd staged, blocking", "2 nvidia + 3 amd staged, stream", "nccl", "gloo"
    }  # fmt: skip
    with pytest.raises(UnknownFile, match="no measurements over message sizes"):
        read(tmp_path / "cluster.json")
