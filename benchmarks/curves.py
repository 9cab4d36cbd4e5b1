"""Reads result files as curves: this package's JSON, and the text output of OSU's C programs and nccl-tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .result_file import FORMAT
from .table import BENCHES

Data = dict[str, Any]

#: Label of the curve of the links' limit, which files of emulated clusters have, and older ones of benchmarks.
LIMIT = "limit"


class UnknownFile(ValueError):
    """The file has none of the known formats. The message says what was expected."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value at one size."""

    size: int
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over message sizes. ``unit``: us, MB/s or GB/s; ``label``: the implementation; ``source``: the file."""

    benchmark: str
    label: str
    unit: str
    dtype: str
    source: str
    points: tuple[Point, ...]


#: Benchmark, label, unit and datatype of a curve, and the size and value of one of its points.
Sample = tuple[tuple[str, str, str, str], int, float]


def _curves(source: str, samples: Iterable[Sample]) -> list[Curve]:
    """The curves of a file's samples, in the order of their first points."""
    found: dict[tuple[str, str, str, str], list[Point]] = {}
    for key, size, value in samples:
        found.setdefault(key, []).append(Point(size, value))
    return [Curve(*key, source, tuple(points)) for key, points in found.items()]


def read_all(paths: Sequence[str | Path]) -> tuple[list[Curve], list[tuple[str, Data]]]:
    """The curves of all files in order, and (name, contents) of the JSON files, which may have no curves.

    ``UnknownFile`` names a file that cannot be read.
    """
    curves: list[Curve] = []
    files: list[tuple[str, Data]] = []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if text.lstrip().startswith("{") else None
        except (OSError, ValueError) as why:
            raise UnknownFile(f"{path}: {getattr(why, 'strerror', None) or why}") from why
        if data is None:
            found = _curves(path.name, _of_text(path, text))
            if not found:
                raise UnknownFile(f"{path}: no measurements over message sizes in it")
            curves += found
            continue
        files.append((path.name, data))
        with suppress(KeyError, TypeError, AttributeError, ValueError):  # another program's
            curves += _curves(path.name, _of_json(data))
    return curves, files


def _of_text(path: Path, text: str) -> Iterator[Sample]:
    if re.search(r"^# OSU MPI", text, re.M):
        return _of_osu(text)
    if re.search(r"^#\s+size\s+count\s+type", text, re.M):
        return _of_nccl(path, text)
    raise UnknownFile(f"{path}: neither a result file of ucch-bench (--json) nor the output of OSU or nccl-tests")


# --- our own ----------------------------------------------------------------------------------------------------------


def _of_json(data: Data) -> Iterable[Sample]:
    if "about" in data and "rows" in data:
        return _of_calls(data)
    if "gpu" in data and "rows" in data:
        return _of_gpus(data)
    if data.get("format") != FORMAT:
        return ()
    if data["benchmark"] == "compare":
        return _of_compare(data)
    if data["benchmark"] == "cluster":
        return _of_cluster(data)
    return _of_benchmark(data) if data["benchmark"] in BENCHES else ()


def _of_compare(data: Data) -> Iterator[Sample]:
    for row in data["rows"]:
        for series in row["series"]:
            label = series["peer"] + ("*" if series["form"] == "persistent" else "")
            yield (data["collective"], label, "us", data["dtype"]), row["size"], series["us"]


def _of_benchmark(data: Data) -> Iterator[Sample]:
    name, unit = data["benchmark"].removeprefix("osu_"), data["unit"]
    for row in data["rows"]:
        if "size" not in row or "dtype" not in row:
            continue
        size, dtype = row["size"], row["dtype"]
        label = data["backend"] + (" in place" if row.get("in_place") else "")
        label += f" window {row['window']}" if "window" in row else ""
        yield (name, label, unit, dtype), size, row["value"]
        if "overlap" in row:
            yield (name, f"{label} overlap", "%", dtype), size, row["overlap"]["percent"]
        for peer, entry in row.get("peers", {}).items():
            yield (name, peer, unit, dtype), size, entry["value"]
        if row.get("limit"):
            yield (name, LIMIT, unit, dtype), size, row["limit"]


def _of_cluster(data: Data) -> Iterator[Sample]:
    """Of tools/bench_cluster.py: medians of each case, and the limit of its links."""
    for case in data["cases"]:
        for row in case["rows"]:
            for label, seconds in {**row["median"], LIMIT: row["limit"]}.items():
                key = f"{row['collective']} on cluster {case['case']}", label, "us", "float32"
                yield key, row["nbytes"], seconds * 1e6


def _of_calls(data: Data) -> Iterator[Sample]:
    """Of tools/call_cost.py: times of a call, of each side."""
    about = data["about"]
    for row in data["rows"]:
        benchmark = f"{row.get('call', 'messages')} on {about.get('ranks', '?')} {about.get('gpu', 'hosts')}"
        for label, cost in row.items():
            if isinstance(cost, dict) and "time" in cost:
                yield (benchmark, label, "us", "float32"), row["bytes"], cost["time"]


def _of_gpus(data: Data) -> Iterator[Sample]:
    """Collectives of archives: jobs of one size are drawn together, whatever their islands."""
    for row in data["rows"]:
        for name in ("blocking", "stream", "nccl", "gloo"):
            if name in row:
                label = name if name in ("nccl", "gloo") else f"{data.get('topology', '')} {name}".strip()
                benchmark = f"{row.get('collective', 'allreduce')} on {data.get('ranks', '?')} {data['gpu']}"
                yield (benchmark, label, "us", "float32"), row["bytes"], row[name]


# --- OSU's C programs -------------------------------------------------------------------------------------------------

_TYPES = {"MPI_CHAR": "int8", "MPI_INT": "int32", "MPI_FLOAT": "float32", "MPI_DOUBLE": "float64"}
_NAMES = {bench.plain_title: name.removeprefix("osu_") for name, bench in BENCHES.items()}


def _osu_name(title: str) -> str:
    """The benchmark of a title line, whatever the accelerator and the version."""
    plain = re.sub(r"-(CUDA|ROCM|OPENACC|MANAGED|SYCL)(?= )", "", title)
    return _NAMES.get(plain, plain.removeprefix("OSU MPI ").removesuffix(" Test"))


def _of_osu(text: str) -> Iterator[Sample]:
    name, label, dtype, unit = "", "OSU", "int8", "us"
    for line in text.splitlines():
        if title := re.match(r"# (OSU MPI.*?)(?: v([\d.]+))?\s*$", line):
            name, label = _osu_name(title[1]), f"OSU {title[2] or ''}".strip()
            label += next((f" {kind.lower()}" for kind in ("CUDA", "ROCM") if f"-{kind} " in title[1]), "")
        elif kind := re.match(r"# Datatype: (\w+)\.", line):
            dtype = _TYPES.get(kind[1], kind[1])
        elif line.startswith("# Size"):
            first = re.split(r"\s{2,}", line.removeprefix("# Size").strip())[0]
            unit = "MB/s" if "MB/s" in first else "us"
        elif re.match(r"\d+\s", line):
            size, value, *_ = line.split()
            yield (name, label, unit, dtype), int(size), float(value)


# --- nccl-tests -------------------------------------------------------------------------------------------------------

_NCCL_TYPES = {"float": "float32", "double": "float64", "half": "float16"}


def _nccl_name(text: str, path: Path) -> str:
    """OSU's name of the collective; where nccl-tests' sizes mean something else than OSU's, the name says so."""
    found = re.search(r"^# Collective test starting: \S*?(\w+)_perf", text, re.M)
    name = (
        (found[1] if found else re.sub(r"_perf.*", "", path.stem)).replace("all_", "all").replace("broadcast", "bcast")
    )
    return f"{name} by total size" if name in ("allgather", "alltoall", "gather", "scatter") else name


def _of_nccl(path: Path, text: str) -> Iterator[Sample]:
    name = _nccl_name(text, path)
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#") or len(words) < 13 or not words[0].isdigit():
            continue
        dtype = _NCCL_TYPES.get(words[2], words[2])
        for label, at in (("nccl-tests", 5), ("nccl-tests in place", 9)):
            if words[at] != "N/A":
                yield (name, label, "us", dtype), int(words[0]), float(words[at])
                yield (name, label, "GB/s", dtype), int(words[0]), float(words[at + 2])
