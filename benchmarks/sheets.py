"""Tables of result files, as text, and where a file comes from. Pure functions of the files' data.

A kind is a row of ``KINDS``: how its data is told, and what makes sheets of it. Files of no known kind get a plain
table of what they hold, so that a report never fails over one.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .files import FORMAT

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: a title, cells as text, and a sentence below it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def short_size(nbytes: float) -> str:
    """``64K``: bytes in powers of 1024."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g}{unit}"
    return f"{nbytes:g}"


def number(value: Any) -> str:
    """Four significant digits, without exponents where that reads well."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}" if size >= 1e-3 or not value else f"{value:.1e}"


def _interval(entry: Data) -> str:
    """A ratio with its interval and what it says."""
    value, low, high = (f"{entry[name]:.2f}" for name in ("value", "low", "high"))
    verdict = f" {entry['verdict']}" if entry.get("verdict") else ""
    return f"{value} [{low}, {high}]{verdict}"


def benchmark_of(data: Data) -> str:
    """Names of a benchmark's curves and tables."""
    return str(data.get("benchmark", "")).removeprefix("osu_")


def _ranks(data: Data) -> str:
    job = data.get("job") or {}
    nodes = job.get("nodes", 1)
    return f"{job.get('ranks', '?')} ranks" + (f" on {nodes} nodes" if nodes != 1 else "")


# --- one function per kind --------------------------------------------------------------------------------------------


def _compare(data: Data) -> Iterator[Sheet]:
    first = data["rows"][0]
    labels = [s["peer"] + ("*" if s["form"] == "persistent" else "") for s in first["series"]]
    header = ["bytes", *(f"{label} µs" for label in labels), *(f"{r['of']} / {r['to']}" for r in first["ratios"])]
    rows = []
    for row in data["rows"]:
        cells = [short_size(row["size"]), *(f"{series['us']:.2f}" for series in row["series"])]
        rows.append((*cells, *(_interval(ratio) for ratio in row["ratios"])))
    yield Sheet(f"{data['collective']}, {data['dtype']}, {_ranks(data)}", tuple(header), tuple(rows), _start_up(data))


def _start_up(data: Data) -> str:
    """Import and creation, where they were measured."""
    figures = data.get("figures") or {}
    middle = _median(figures.get("import_ms") or [])
    parts = ["name*: persistent; a ratio above 1: ours is faster"]
    if middle is not None:
        parts.append(f"import beyond numpy and mpi4py: {middle:.0f} ms")
    for name, times in (figures.get("creation_ms") or {}).items():
        parts.append(f"communicator of {name}: first {times[0]:.1f} ms, then {_median(times[1:]) or times[0]:.1f} ms")
    return "; ".join(parts) + "."


def _median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def _osu(data: Data) -> Iterator[Sheet]:
    rows = [row for row in data["rows"] if "size" in row]
    if not rows:
        flat = tuple(tuple(number(v) for v in row.values()) for row in data["rows"])
        yield Sheet(f"{benchmark_of(data)}, {_ranks(data)}", tuple(data["rows"][0]), flat)
        return
    unit = str(data["unit"]).replace("us", "µs")
    for dtype, group in groupby(rows, key=lambda row: str(row["dtype"])):
        found = list(group)
        yield Sheet(f"{benchmark_of(data)}, {dtype}, {_ranks(data)}", *_osu_cells(data, found, unit))


def _osu_cells(data: Data, rows: Sequence[Data], unit: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Header and rows; a column only where some row has something for it."""
    peers = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
    columns: list[tuple[str, Callable[[Data], str]]] = [
        ("bytes", lambda row: short_size(row["size"])),
        ("window", lambda row: number(row.get("window"))),
        (f"{data['backend']} {unit}", lambda row: f"{row['value']:.2f}"),
        ("in place", lambda row: "yes" if row.get("in_place") else ""),
        ("alone µs", lambda row: f"{row['overlap']['pure']:.2f}" if "overlap" in row else ""),
        ("overlap %", lambda row: f"{row['overlap']['percent']:.0f}" if "overlap" in row else ""),
    ]
    for name in peers:

        def value(row: Data, name: str = name) -> str:
            return f"{row['peers'][name]['value']:.2f}" if name in row.get("peers", {}) else ""

        def ratio(row: Data, name: str = name) -> str:
            entry = row.get("peers", {}).get(name)
            return _interval({**entry["ratio"], "verdict": entry.get("verdict")}) if entry else ""

        columns += [(f"{name} {unit}", value), (f"times as fast as {name}", ratio)]
    columns += [
        (f"limit {unit}", lambda row: f"{row['limit']:.2f}" if row.get("limit") else ""),
        ("of limit", lambda row: f"{row['of_limit']:.0%}" if row.get("of_limit") else ""),
        ("plan", lambda row: row.get("plan") or ""),
    ]
    kept = [(name, cell) for name, cell in columns if any(cell(row) for row in rows)]
    return tuple(name for name, _ in kept), tuple(tuple(cell(row) for _, cell in kept) for row in rows)


def _kv_transfer(data: Data) -> Iterator[Sheet]:
    names = ("way", "block_size", "pages", "concurrency")
    rows = [
        (
            *(str(row[name]) for name in names),
            short_size(row["bytes"]),
            *(f"{row[of]:.3f}" for of in ("gbs", "best", "ms")),
        )
        for row in data["rows"]
    ]
    header = ("way", "tokens a page", "pages", "prompts", "bytes", "GB/s", "best GB/s", "ms to the first token")
    what = f"{data['layers']} layers, {data['heads']} heads of {data['dim']}"
    yield Sheet(f"pages of a KV cache, {what}, {_ranks(data)}", header, tuple(rows), "Without the model's own work.")


def _anything(data: Data) -> Iterator[Sheet]:
    """Contents of a file of no known kind: its rows if they are flat, and its plain values."""
    rows = data.get("rows")
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        names = [n for n in dict.fromkeys(name for row in rows for name in row) if not _nested(rows, n)]
        yield Sheet("rows", tuple(names), tuple(tuple(number(row.get(name)) for name in names) for row in rows))
    values = ((name, v) for name, v in data.items() if name != "format")
    plain = tuple((name, f"{len(v)} entries" if isinstance(v, (dict, list)) else number(v)) for name, v in values)
    yield Sheet("values", ("name", "value"), plain or (("nothing", ""),))


def _nested(rows: Sequence[Data], name: str) -> bool:
    return any(isinstance(row.get(name), (dict, list)) for row in rows)


#: (whether data is of a kind, what makes sheets of it)
KINDS: list[tuple[Callable[[Data], bool], Callable[[Data], Iterator[Sheet]]]] = [
    (lambda d: d.get("benchmark") == "compare", _compare),
    (lambda d: d.get("benchmark") == "kv_transfer", _kv_transfer),
    (lambda d: d.get("format") == FORMAT and "family" in d, _osu),
]


def sheets(data: Data) -> list[Sheet]:
    """The tables of a result file. A file that is not what its kind promises is shown as it is."""
    for fits, make in KINDS:
        if fits(data):
            try:
                return list(make(data))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                break
    return list(_anything(data))


# --- where a file comes from ------------------------------------------------------------------------------------------


def _about(data: Data) -> Data:
    """The facts of a file, wherever its kind keeps them."""
    for name in ("runs", "backends"):
        for each in (data.get(name) or {}).values():
            if isinstance(each, dict) and "about" in each:
                return {**each["about"], **data}
    for name in ("small", "ddp"):
        if isinstance(data.get(name), dict) and "about" in data[name]:
            return {**data[name]["about"], **data}
    return data


def origin(data: Data) -> str:
    """Machine, versions, date and commit in one line; what is not known is left out."""
    data = _about(data)
    machine, commit, versions = data.get("machine") or {}, data.get("source") or {}, data.get("versions") or {}
    parts = []
    if machine:
        parts.append(f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores")
    if data.get("gpu"):
        parts.append(f"{data.get('ranks', '?')} × {data['gpu']}")
    known = {name: versions.get(key) for name, key in (("Python", "python"), ("UCX", "libucx-cu12"), ("MPI", "mpi"))}
    known |= {"UCC": data.get("ucc"), "UCX": known["UCX"] or data.get("ucx"), "NCCL": data.get("nccl")}
    known |= {"torch": data.get("torch") or versions.get("torch")}
    if known["MPI"]:
        known["MPI"] = known["MPI"].partition(",")[0]
    parts += [f"{name} {value}".replace("MPI Open MPI", "Open MPI") for name, value in known.items() if value]
    if data.get("date"):
        parts.append(str(data["date"])[:10])
    if commit.get("commit"):
        parts.append(f"commit {commit['commit'][:10]}" + (", changed" if commit.get("changed") else ""))
    return "; ".join(parts)


#: Programs that have another name than when they wrote a file.
_RENAMED = {"gpu_allreduce.py": "gpu_collectives.py"}
#: Settings that the package makes itself, and paths, which say where and not what.
_OWN = ("UCCHB_", "UCCHN_", "UCC_MC_CUDA_MPOOL_", "UCX_MODULE_DIR", "CUDA_MODULE_LOADING")


def reproduce(data: Data) -> str:
    """The command that makes such a file: settings, mpirun where the ranks are its own, and the words of then."""
    facts = _about(data)
    command = [str(word) for word in facts.get("command") or []]
    if not command:
        return ""
    settings = facts.get("settings") or facts.get("environment") or {}
    shown = [f"{k}={shlex.quote(v)}" for k, v in settings.items() if v and "/" not in v and not k.startswith(_OWN)]
    ranks = (facts.get("job") or {}).get("ranks")
    script = command[0].rpartition("/")[2]
    script = _RENAMED.get(script, script)
    if script.endswith(".py"):
        command = ["python", f"tools/{script}", *command[1:]]
        ranks = facts.get("ranks") if script.startswith("gpu") else None
    launcher = ["mpirun", "-np", str(ranks)] if ranks else []
    return " ".join([*shown, *launcher, *map(shlex.quote, command)])
