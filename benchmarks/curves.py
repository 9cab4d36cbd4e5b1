"""Reads result files as curves: this package's JSON, and the text output of OSU's C programs and nccl-tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .result_file import FORMAT
from .table import BENCHES

Data = dict[str, Any]

#: Label of the curve of the links' limit.
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
    facts: Data = field(default_factory=dict, compare=False, hash=False)


class _Points:
    """Collects the points of a file into curves."""

    def __init__(self, source: str, facts: Data | None = None) -> None:
        self._source, self._facts = source, facts or {}
        self._found: dict[tuple[str, str, str, str], list[Point]] = {}

    def add(self, key: tuple[str, str, str, str], size: int, value: float) -> None:
        """Add a point to the curve with this benchmark, label, unit and dtype."""
        self._found.setdefault(key, []).append(Point(size, value))

    def curves(self) -> list[Curve]:
        """The curves, in the order of their first points."""
        return [Curve(*key, self._source, tuple(points), self._facts) for key, points in self._found.items()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as why:
        raise UnknownFile(f"{path}: {why.strerror}") from why
    except UnicodeDecodeError as why:
        raise UnknownFile(f"{path}: {why}") from why


def _data(path: Path, text: str) -> Data | None:
    """Contents of a JSON result file of any kind; None for other text."""
    try:
        return json.loads(text) if text.lstrip().startswith("{") else None
    except ValueError as why:
        raise UnknownFile(f"{path}: {why}") from why


def _curves(path: Path, text: str, data: Data | None) -> list[Curve]:
    if data is not None:
        try:
            curves = _read_json(path, data)
        except (KeyError, TypeError, AttributeError, ValueError) as why:
            if isinstance(why, UnknownFile):
                raise
            raise UnknownFile(f"{path}: not as its program writes it: {why!r}") from None
    elif re.search(r"^# OSU MPI", text, re.M):
        curves = _read_osu(path, text)
    elif re.search(r"^#\s+size\s+count\s+type", text, re.M):
        curves = _read_nccl(path, text)
    else:
        raise UnknownFile(f"{path}: neither a result file of ucch-bench (--json) nor the output of OSU or nccl-tests")
    if not curves:
        raise UnknownFile(f"{path}: no measurements over message sizes in it")
    return curves


def read(path: str | Path) -> list[Curve]:
    """The curves of a file. ``UnknownFile`` names a file that cannot be read."""
    path = Path(path)
    text = _text(path)
    return _curves(path, text, _data(path, text))


def read_all(paths: Sequence[str | Path]) -> tuple[list[Curve], list[tuple[str, Data]]]:
    """The curves of all files in order, and (name, contents) of the JSON files, which may have no curves."""
    curves: list[Curve] = []
    files: list[tuple[str, Data]] = []
    for path in map(Path, paths):
        text = _text(path)
        data = _data(path, text)
        if data is not None:
            files.append((path.name, data))
        try:
            curves += _curves(path, text, data)
        except UnknownFile:
            if data is None:
                raise
    return curves, files


# --- our own ----------------------------------------------------------------------------------------------------------


def _read_json(path: Path, data: Data) -> list[Curve]:
    if "about" in data and "rows" in data:
        return _call_curves(path, data)
    if "gpu" in data and "rows" in data:
        return _gpu_curves(path, data)
    if data.get("format") != FORMAT:
        raise UnknownFile(f"{path}: format {data.get('format')!r}; this version reads {FORMAT!r}")
    names = ("date", "machine", "versions", "source", "job", "command", "plans", "figures")
    facts: Data = {name: data[name] for name in names if data.get(name)}
    if data["benchmark"] == "compare":
        return _compare_curves(path, data, facts)
    if data["benchmark"] == "cluster":
        return _cluster_curves(path, data, facts)
    return _benchmark_curves(path, data, facts) if data["benchmark"] in BENCHES else []


def _compare_curves(path: Path, data: Data, facts: Data) -> list[Curve]:
    found = _Points(path.name, facts)
    for row in data["rows"]:
        for series in row["series"]:
            label = series["peer"] + ("*" if series["form"] == "persistent" else "")
            key = data["collective"], label, "us", data["dtype"]
            found.add(key, row["size"], series["us"])
    return found.curves()


def _benchmark_curves(path: Path, data: Data, facts: Data) -> list[Curve]:
    found, name, unit = _Points(path.name, facts), data["benchmark"].removeprefix("osu_"), data["unit"]
    for row in data["rows"]:
        if "size" not in row or "dtype" not in row:
            continue
        size, dtype = row["size"], row["dtype"]
        label = data["backend"] + (" in place" if row.get("in_place") else "")
        label += f" window {row['window']}" if "window" in row else ""
        found.add((name, label, unit, dtype), size, row["value"])
        if "overlap" in row:
            found.add((name, f"{label} overlap", "%", dtype), size, row["overlap"]["percent"])
        for peer, entry in row.get("peers", {}).items():
            found.add((name, peer, unit, dtype), size, entry["value"])
        if row.get("limit"):
            found.add((name, LIMIT, unit, dtype), size, row["limit"])
    return found.curves()


def _cluster_curves(path: Path, data: Data, facts: Data) -> list[Curve]:
    """Of tools/bench_cluster.py: medians of each case, and the limit of its links."""
    found = _Points(path.name, facts)
    for case in data["cases"]:
        for row in case["rows"]:
            for label, seconds in {**row["median"], LIMIT: row["limit"]}.items():
                key = f"{row['collective']} on cluster {case['case']}", label, "us", "float32"
                found.add(key, row["nbytes"], seconds * 1e6)
    return found.curves()


def _call_curves(path: Path, data: Data) -> list[Curve]:
    """Of tools/call_cost.py: times of a call, of each side."""
    found, about = _Points(path.name, {"date": data["about"].get("date", "")}), data["about"]
    for row in data["rows"]:
        benchmark = f"{row.get('call', 'messages')} on {about.get('ranks', '?')} {about.get('gpu', 'hosts')}"
        for label, cost in row.items():
            if isinstance(cost, dict) and "time" in cost:
                found.add((benchmark, label, "us", "float32"), row["bytes"], cost["time"])
    return found.curves()


def _gpu_curves(path: Path, data: Data) -> list[Curve]:
    """Collectives of archives: jobs of one size are drawn together, whatever their islands."""
    found = _Points(path.name, {"date": data.get("date", "")})
    for row in data["rows"]:
        for name in ("blocking", "stream", "nccl", "gloo"):
            if name in row:
                label = name if name in ("nccl", "gloo") else f"{data.get('topology', '')} {name}".strip()
                benchmark = f"{row.get('collective', 'allreduce')} on {data.get('ranks', '?')} {data['gpu']}"
                found.add((benchmark, label, "us", "float32"), row["bytes"], row[name])
    return found.curves()


# --- OSU's C programs -------------------------------------------------------------------------------------------------

_TYPES = {"MPI_CHAR": "int8", "MPI_INT": "int32", "MPI_FLOAT": "float32", "MPI_DOUBLE": "float64"}
_NAMES = {bench.plain_title: name.removeprefix("osu_") for name, bench in BENCHES.items()}


def _osu_name(title: str) -> str:
    """The benchmark of a title line, whatever the accelerator and the version."""
    plain = re.sub(r"-(CUDA|ROCM|OPENACC|MANAGED|SYCL)(?= )", "", title)
    return _NAMES.get(plain, plain.removeprefix("OSU MPI ").removesuffix(" Test"))


def _read_osu(path: Path, text: str) -> list[Curve]:
    found, name, label, dtype, unit = _Points(path.name), "", "OSU", "int8", "us"
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
            found.add((name, label, unit, dtype), int(size), float(value))
    return found.curves()


# --- nccl-tests -------------------------------------------------------------------------------------------------------

_NCCL_TYPES = {"float": "float32", "double": "float64", "half": "float16"}


def _nccl_name(text: str, path: Path) -> str:
    """OSU's name of the collective; where nccl-tests' sizes mean something else than OSU's, the name says so."""
    found = re.search(r"^# Collective test starting: \S*?(\w+)_perf", text, re.M)
    name = (
        (found[1] if found else re.sub(r"_perf.*", "", path.stem)).replace("all_", "all").replace("broadcast", "bcast")
    )
    return f"{name} by total size" if name in ("allgather", "alltoall", "gather", "scatter") else name


def _read_nccl(path: Path, text: str) -> list[Curve]:
    found, name = _Points(path.name), _nccl_name(text, path)
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#") or len(words) < 13 or not words[0].isdigit():
            continue
        dtype = _NCCL_TYPES.get(words[2], words[2])
        for label, at in (("nccl-tests", 5), ("nccl-tests in place", 9)):
            if words[at] != "N/A":
                found.add((name, label, "us", dtype), int(words[0]), float(words[at]))
                found.add((name, label, "GB/s", dtype), int(words[0]), float(words[at + 2]))
    return found.curves()
