"""Every kind of result file as tables of text. Pure functions of the files' data.

A kind is a row of ``_KINDS``: how its data is told, and what makes sheets of it. Files of no known kind get a plain
table of what they hold, so that a report never fails over one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .files import FORMAT

__all__ = ["Sheet", "benchmark_of", "sheets", "short_size", "topology_words"]

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


def _number(value: Any) -> str:
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
        flat = tuple(tuple(_number(v) for v in row.values()) for row in data["rows"])
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
        ("window", lambda row: _number(row.get("window"))),
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


def _pairs(data: Data) -> Iterator[Sheet]:
    for name, unit in (("bandwidth", "MB/s"), ("latency", "µs")):
        rows = tuple(
            (label, *("–" if value is None else _number(value) for value in row))
            for label, row in zip(data["ranks"], data[name], strict=True)
        )
        yield Sheet(f"{name} of pairs, {unit}, {data['backend']}", ("from \\ to", *data["ranks"]), rows)


def _mixed(data: Data) -> Iterator[Sheet]:
    names = list(data["rows"][0]["us"])
    header = ("collective", "bytes", *(f"{name} µs" for name in names), *(f"{name} / plan" for name in names[1:]))
    rows = tuple(
        (
            row["collective"],
            short_size(row["size"]),
            *(f"{row['us'][name]:.1f}" for name in names),
            *(_interval(row["to_plan"][name]) for name in names[1:]),
        )
        for row in data["rows"]
    )
    yield Sheet(f"mixed plans, {data['dtype']}, {_ranks(data)}", header, rows, "A ratio above 1: the plan is faster.")


def _cluster(data: Data) -> Iterator[Sheet]:
    peers = list(dict.fromkeys(name for case in data["cases"] for row in case["rows"] for name in row["median"]))
    header = ("case", "collective", "bytes", "limit ms", *(f"{name} ms" for name in peers), "ours / limit", "to reach")
    rows = []
    for case in data["cases"]:
        for row in case["rows"]:
            times = (f"{row['median'][name] * 1e3:.3f}" if name in row["median"] else "" for name in peers)
            reached = f"{row['median']['ours'] / row['limit']:.2f}" if "ours" in row["median"] and row["limit"] else ""
            target = f"{row['target']:.2f}" if row.get("target") else ""
            size = short_size(row["nbytes"])
            rows.append((case["case"], row["collective"], size, f"{row['limit'] * 1e3:.3f}", *times, reached, target))
    yield Sheet("emulated clusters", header, tuple(rows), "Medians; the limit is that of plain sockets over the links.")


def _planner(data: Data) -> Iterator[Sheet]:
    header = ("ranks", "islands", "placement", "collective", "plan", "ms", "MiB", "teams")
    rows = tuple(
        (
            *(_number(row.get(name)) for name in ("ranks", "islands", "placement", "collective", "algorithm")),
            f"{row['seconds'] * 1e3:.1f}",
            _number(row["memory"] / 2**20),
            _number(row.get("teams")),
        )
        for row in data["rows"]
        if row["ranks"] in (16, 1024, 16384)
    )
    yield Sheet(
        "planning from nothing", header, rows, "Shapes of 16, 1,024 and 16,384 ranks; the others are in the file."
    )


def topology_words(text: str) -> str:
    """``2 nvidia + 2 amd`` of a topology as ``describe()`` gives it, such as ``nvidia[0-1]@0 amd[2-3]@0``."""
    words = []
    for island in text.split():
        vendor, _, ranks = island.partition("[")
        count = 0
        for run in ranks.partition("]")[0].split(","):
            first, _, last = run.partition("-")
            count += int(last or first) - int(first) + 1
        words.append(f"{count} {vendor}")
    return " + ".join(words)


def _gpu(data: Data) -> Iterator[Sheet]:
    wrong = data.get("wrong")
    note = (
        f"{len(wrong)} results were wrong."
        if wrong
        else "blocking: the host waits for each call; stream: calls in one stream, device time; issue: host time to "
        "issue one; medians."
    )
    for collective, group in groupby(data["rows"], key=lambda row: str(row.get("collective", "allreduce"))):
        rows = list(group)
        names = [n for n in dict.fromkeys(name for row in rows for name in row) if n not in ("bytes", "collective")]
        header = ("bytes", *map(_gpu_header, names))
        cells = tuple((short_size(row["bytes"]), *(_gpu_cell(name, row.get(name)) for name in names)) for row in rows)
        yield Sheet(
            f"{collective} on {data['gpu']}: {topology_words(data['topology'])}{_path(data)}", header, cells, note
        )


def _gpu_header(name: str) -> str:
    if name.startswith("of "):
        return f"{name}'s speed"
    return name if "/s" in name else f"{name} µs"


def _gpu_cell(name: str, value: Any) -> str:
    return f"{value:.0%}" if name.startswith("of ") and value else _number(value)


def _path(data: Data) -> str:
    path = data.get("environment", {}).get("UCCH_STAGING", "")
    return f", {path}" if path else ""


def _parity(data: Data) -> Iterator[Sheet]:
    rows = tuple(
        (way, name, *(_number(found.get(part)) for part in ("first", "worst", "tail")))
        for way, each in data["distances"].items()
        for name, found in each.items()
    )
    header = ("way to train", "losses of", "first step", "worst step", "mean of the last 20")
    rule = ", ".join(f"{name} {value:g}" for name, value in data["rule"].items())
    verdict = "the rule holds" if data["good"] else "THE RULE DOES NOT HOLD"
    yield Sheet("training parity: relative differences of the losses", header, rows, f"{verdict} ({rule}).")


def _train(data: Data) -> Iterator[Sheet]:
    backends = data["backends"]
    ways = dict.fromkeys(way for each in backends.values() for way in each.get("ways", {}))
    rate = {
        (name, way): each.get("ways", {}).get(way, {}).get("tokens/s")
        for name, each in backends.items()
        for way in ways
    }
    base = "nccl" if "nccl" in backends else "gloo"
    header = ["way to train", *(f"{name} tokens/s" for name in backends)]
    header += [f"{name} / {base}" for name in backends if name != base]
    rows = []
    for way in ways:
        cells = [way, *(_number(rate[name, way]) for name in backends)]
        for name in backends:
            if name != base:
                one, two = rate[name, way], rate.get((base, way))
                cells.append(f"{one / two:.1%}" if one and two else "")
        rows.append(tuple(cells))
    failed = [name for name, each in backends.items() if "error" in each]
    yield Sheet("training steps", tuple(header), tuple(rows), f"Failed: {', '.join(failed)}." if failed else "")


def _torch_cpu(data: Data) -> Iterator[Sheet]:
    for case, title in (("small", "torch all_reduce, 2 ranks"), ("ddp", "DDP step, 2 + 2 ranks")):
        rows = tuple(
            (label, *(f"{1e6 * row[name]['median']:.1f}" for name in ("ucch", "gloo")),
             f"{row['gloo']['median'] / row['ucch']['median']:.2f}", *(_cost(row[name]) for name in ("ucch", "gloo")))
            for label, row in data.get(case, {}).get("rows", {}).items()
        )  # fmt: skip
        if rows:
            costs = "ucch: processor µs, switches", "gloo: processor µs, switches"
            yield Sheet(title, ("", "ucch µs", "gloo µs", "times as fast", *costs), rows, "Costs are a rank's.")


def _cost(row: Data) -> str:
    """Processor time of a call, and how often the core was given away or lost meanwhile."""
    if "processor" not in row:
        return ""
    return f"{1e6 * row['processor']:.1f}, {row['given'] + row['lost']:.1f}"


def _anything(data: Data) -> Iterator[Sheet]:
    """Contents of a file of no known kind: its rows if they are flat, and its plain values."""
    rows = data.get("rows")
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        names = [n for n in dict.fromkeys(name for row in rows for name in row) if not _nested(rows, n)]
        yield Sheet("rows", tuple(names), tuple(tuple(_number(row.get(name)) for name in names) for row in rows))
    values = ((name, v) for name, v in data.items() if name != "format")
    plain = tuple((name, f"{len(v)} entries" if isinstance(v, (dict, list)) else _number(v)) for name, v in values)
    yield Sheet("values", ("name", "value"), plain or (("nothing", ""),))


def _nested(rows: Sequence[Data], name: str) -> bool:
    return any(isinstance(row.get(name), (dict, list)) for row in rows)


#: (whether data is of a kind, what makes sheets of it)
_KINDS: tuple[tuple[Callable[[Data], bool], Callable[[Data], Iterator[Sheet]]], ...] = (
    (lambda d: d.get("benchmark") == "compare", _compare),
    (lambda d: d.get("benchmark") == "pairs", _pairs),
    (lambda d: d.get("benchmark") == "mixed", _mixed),
    (lambda d: d.get("benchmark") == "cluster", _cluster),
    (lambda d: d.get("benchmark") == "planner", _planner),
    (lambda d: d.get("format") == FORMAT and "family" in d, _osu),
    (lambda d: "gpu" in d and "topology" in d and "rows" in d, _gpu),
    (lambda d: "distances" in d and "rule" in d, _parity),
    (lambda d: "backends" in d, _train),
    (lambda d: "small" in d or "ddp" in d, _torch_cpu),
)


def sheets(data: Data) -> list[Sheet]:
    """The tables of a result file. A file that is not what its kind promises is shown as it is."""
    for fits, make in _KINDS:
        if fits(data):
            try:
                return list(make(data))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                break
    return list(_anything(data))
