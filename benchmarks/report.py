"""Draws result files as a self-contained HTML page and PNGs.

Reads result files of all programs here and in tools/, and saved output of OSU's C programs and nccl-tests. Archives of
them (.tar.xz, each with a README.md) become one page each.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import shlex
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from ..errors import counted
from .curves import LIMIT, Curve, Data, UnknownFile, read_all
from .options import BadUsage

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1160px; margin: 0 auto; padding: 1rem; color: #1c2733;
       overflow-wrap: anywhere; }
nav a { display: inline-block; margin-right: 1em; } a { color: #0065a8; }
img { max-width: 100%; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #e2e7ec; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f4f6f8; padding: .6em; white-space: pre-wrap; } summary { cursor: pointer; color: #0065a8; }
</style></head><body><h1>$title</h1><p>$lead</p><nav>$links</nav>$about$figures$files</body></html>
""")
#: Okabe and Ito's colours, which are distinguishable with colour blindness. A peer has one colour in all figures.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
_KNOWN = {"ours": 0, "mpi4py": 1, "ucc": 2, "gloo": 3, "nccl": 4, "nccl-tests": 4}
_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "ucc_hetero"}
#: Suffix of archives of results.
ARCHIVE = ".tar.xz"
#: Keys of a file that tell where its numbers come from.
_ORIGIN = ("date", "machine", "source", "versions", "gpu", "ranks", "job", "topology", "ucc", "ucx", "nccl", "torch")
#: Settings that the package sets itself, and paths, which say where and not what.
_OWN = ("UCCHB_", "UCCHN_", "UCC_MC_CUDA_MPOOL_", "UCX_MODULE_DIR", "CUDA_MODULE_LOADING")


class Table(NamedTuple):
    """A table: a title, and cells as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """Curves to draw together: equal benchmark, datatype and unit."""

    benchmark: str
    dtype: str
    unit: str
    curves: tuple[Curve, ...]

    @property
    def what(self) -> str:
        return {"us": "latency", "%": "overlap"}.get(self.unit, "bandwidth")

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{self.benchmark}-{self.dtype}-{self.what}")

    @property
    def title(self) -> str:
        return f"{self.benchmark}, {self.dtype}: {self.what}"

    @property
    def labels(self) -> list[str]:
        """Names of the curves; with the file's name if two files have the same series."""
        plain = [curve.label for curve in self.curves]
        return [f"{c.label} ({c.source})" if plain.count(c.label) > 1 else c.label for c in self.curves]


def short_size(nbytes: float) -> str:
    """``64K``: bytes in powers of 1024."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g}{unit}"
    return f"{nbytes:g}"


# --- tables -----------------------------------------------------------------------------------------------------------


def number(value: Any) -> str:
    """Four significant digits of a float; other values as they are."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of all scalars in a value, such as ``peers mpi4py ratio low``; list entries are named by their
    texts."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{name} {key}".strip())
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict):
                # The verdict differs in each row, so it is no name.
                words = {key: word for key, word in each.items() if isinstance(word, str) and key != "verdict"}
                rest = {key: part for key, part in each.items() if key not in words}
                yield from flat(rest, " ".join([*filter(None, [name]), *words.values()]))
    else:
        yield name, number(value)


def tables(data: Data, title: str = "") -> Iterator[Table]:
    """The tables of a result file of any kind: its rows, the rows of its cases, and all other values."""
    rows = data.get("rows")
    rows = [dict(flat(row)) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    if names:
        yield Table(title or "rows", names, tuple(tuple(row.get(name, "") for name in names) for row in rows))
    cases = data.get("cases")
    for case in cases if isinstance(cases, list) else ():
        if isinstance(case, dict):
            yield from tables(case, str(case.get("case", "")))
    shown = {"rows", "cases", "case", "format", "command", "settings", "environment", "plans", "about", *_ORIGIN}
    rest = {name: value for name, value in data.items() if name not in shown}
    values = tuple(flat(rest))
    if values:
        yield Table(f"{title} values".strip(), ("name", "value"), values)


def _values(figure: Figure) -> Table:
    """The numbers of a figure, with the ratio of every other series to the first at common sizes."""
    columns = [{point.size: point.value for point in curve.points} for curve in figure.curves]
    others = [i for i, curve in enumerate(figure.curves) if i and curve.label != LIMIT]
    names, rows = figure.labels, []
    for size in sorted(set().union(*columns)):
        cells = [short_size(size), *(f"{column[size]:.2f}" if size in column else "" for column in columns)]
        first = columns[0].get(size)
        cells += [f"{columns[i][size] / first:.2f}" if first and size in columns[i] else "" for i in others]
        rows.append(tuple(cells))
    header = ("size", *(f"{name} [{figure.unit}]" for name in names), *(f"{names[i]} / {names[0]}" for i in others))
    return Table("", header, tuple(rows))


def _facts(data: Data) -> Data:
    """The facts of a file, which programs store in different places."""
    about = data.get("about")
    return {**about, **data} if isinstance(about, dict) else data


def reproduce(data: Data) -> str:
    """The command that repeats a measurement: settings, mpirun if ranks were started by it, and the recorded words."""
    facts = _facts(data)
    settings = {name: str(v) for name, v in (facts.get("settings") or facts.get("environment") or {}).items()}
    shown = [f"{k}={shlex.quote(v)}" for k, v in settings.items() if v and "/" not in v and not k.startswith(_OWN)]
    ranks = (facts.get("job") or {}).get("ranks")
    launcher = ["mpirun", "-np", str(ranks)] if ranks else []
    words = [shlex.quote(str(word)) for word in facts.get("command") or []]
    return " ".join([*shown, *launcher, *words]) if words else ""


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(curves: Sequence[Curve]) -> list[Figure]:
    """Group curves into figures, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.benchmark, curve.dtype, curve.unit), []).append(curve)
    return [Figure(*key, tuple(members)) for key, members in groups.items()]


def render(figure: Figure, kind: str) -> bytes:
    """A figure as ``png`` or ``svg``. ``BadUsage`` if matplotlib is missing."""
    try:
        matplotlib, module = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError:
        raise BadUsage("report: matplotlib draws the figures; install the extra 'plot'") from None
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        columns = max(1, min(3, 110 // (max(map(len, figure.labels)) + 6)))  # of the legend: no label is cut off
        rows = -(-len(figure.labels) // columns)
        canvas = module.Figure(figsize=(8.0, 4.2 + 0.2 * rows), dpi=110, layout="constrained")
        _draw(figure, canvas, columns)
        # Without date and version, so that equal results give equal files.
        plain = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        canvas.savefig(out, format=kind, metadata=plain)
    return out.getvalue()


def _draw(figure: Figure, canvas: Any, columns: int) -> None:
    axes = canvas.subplots()
    for i, (curve, label) in enumerate(zip(figure.curves, figure.labels, strict=True)):
        x, y = [point.size for point in curve.points], [point.value for point in curve.points]
        if curve.label == LIMIT:
            axes.plot(x, y, color="black", linestyle="--", linewidth=1.1, label=label)
            continue
        series = curve.label.removesuffix("*")  # a star marks persistent calls
        colour = _COLOURS[_KNOWN.get(series, i) % len(_COLOURS)]
        line = ":" if curve.label.endswith("*") else "-"
        axes.plot(x, y, color=colour, marker="osD^vP*X"[i % 8], markersize=3.5, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    if figure.unit != "%":
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: short_size(value))
    axes.set(xlabel="message size [bytes]", ylabel=figure.unit.replace("us", "µs"))
    axes.set_title(f"{figure.benchmark}, {figure.dtype}", loc="left", fontweight="bold")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    canvas.legend(loc="outside lower center", ncols=columns, frameon=False)


# --- the page ---------------------------------------------------------------------------------------------------------


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    title = f"<h4>{escape(table.title)}</h4>" if table.title else ""
    return f'{title}<div class="wide"><table>{row(table.header, "th")}{body}</table></div>'


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>{text}</details>" if text else ""


def _section(figure: Figure, svg: bytes) -> str:
    name, title, data = escape(figure.name), escape(figure.title), base64.b64encode(svg).decode()
    image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
    return f'<section id="{name}"><h2>{title}</h2>{image}{_details("Numbers", _table(_values(figure)))}</section>'


def _file(source: str, data: Data) -> str:
    """A section about a result file: origin, tables, plans."""
    facts = _facts(data)
    origin = "; ".join(f"{name} {value}" for name, value in flat({k: facts[k] for k in _ORIGIN if k in facts}))
    plans = f"<pre>{escape(str(data['plans']))}</pre>" if data.get("plans") else ""
    return (
        f"<h3>{escape(source)}</h3><p>{escape(origin)}</p><pre>{escape(reproduce(data))}</pre>"
        + _details("Tables", "".join(map(_table, tables(data))))
        + _details("Plans", plans)
    )


def page(drawn: Sequence[tuple[Figure, bytes]], files: Sequence[tuple[str, Data]], title: str, about: str = "") -> str:
    """The page with figures (as SVG) and result files; ``about`` is shown above the figures."""
    return _PAGE.substitute(
        title=escape(title),
        lead=f"{counted(len(drawn), 'figure')}, {counted(len(files), 'result file')}",
        links="".join(f'<a href="#{escape(figure.name)}">{escape(figure.title)}</a>' for figure, _ in drawn),
        about=f"<pre>{escape(about)}</pre>" if about else "",
        figures="".join(_section(*each) for each in drawn),
        files="".join(_file(*each) for each in files),
    )


def write_page(
    paths: Sequence[str | Path], target: Path, title: str = "ucc_hetero benchmarks", about: str = ""
) -> list[Figure]:
    """Write a page for some result files, with a title and a text. Returns the figures."""
    curves, files = read_all(paths)
    found = figures(curves)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = page([(figure, render(figure, "svg")) for figure in found], files, title, about)
    target.write_text(text, encoding="utf-8")
    return found


def _unpacked(archive: Path, folder: Path) -> list[Path]:
    """Extract the result files and README of an archive to a folder."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                # Do not trust names in archives: accept plain files only.
                content = tar.extractfile(member) if member.name == Path(member.name).name else None
                if content is not None:
                    (folder / member.name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as why:
        raise UnknownFile(f"{archive}: not an archive of results: {why}") from None
    return sorted(folder.glob("*.json"))


def write_archives(archives: Sequence[str | Path], folder: Path) -> int:
    """Write a page for each archive, with its README as text. Returns the number of figures."""
    drawn = 0
    for archive in map(Path, archives):
        with tempfile.TemporaryDirectory() as scratch:
            paths = _unpacked(archive, Path(scratch))
            heading, _, about = (Path(scratch) / "README.md").read_text(encoding="utf-8").partition("\n")
            page = folder / f"{archive.name.removesuffix(ARCHIVE)}.html"
            drawn += len(write_page(paths, page, heading.lstrip("# "), about.strip()))
    return drawn


def run(words: Sequence[str], command: list[str]) -> int:
    """Write the requested outputs."""
    parser = argparse.ArgumentParser(prog="python -m ucc_hetero.bench report", description=__doc__)
    parser.add_argument(
        "files", nargs="+", help="results of --json, output of OSU's programs or nccl-tests, or archives (.tar.xz)"
    )
    parser.add_argument("-o", "--output", default="report", help="folder to write to (report)")
    arguments = parser.parse_args(list(words))
    folder = Path(arguments.output)
    try:
        if all(name.endswith(ARCHIVE) for name in arguments.files):
            drawn = counted(write_archives(arguments.files, folder), "figure")
            print(f"{folder}: {drawn} from {counted(len(arguments.files), 'archive')}")
            return 0
        found = write_page(arguments.files, folder / "index.html")
    except UnknownFile as why:
        raise BadUsage(f"report: {why}") from None
    for figure in found:
        (folder / f"{figure.name}.png").write_bytes(render(figure, "png"))
    print(f"{folder / 'index.html'}: {counted(len(found), 'figure')} from {counted(len(arguments.files), 'file')}")
    return 0
