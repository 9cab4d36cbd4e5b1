"""``python -m ucc_hetero.bench report FILES -o DIR``: result files -> one self-contained HTML page, and its PNGs.

Curves of one benchmark, datatype and unit share a figure, whoever measured them. Colours follow the series, not the
file's place in the list, so that a peer looks the same in every figure.
"""

from __future__ import annotations

import argparse
import base64
import html
import importlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .options import BadUsage
from .readers import Curve, UnknownFile, read_all

__all__ = ["Figure", "figures", "page", "run"]

# Okabe and Ito's colours, which people with colour blindness can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKS = "osD^vP*"
_TITLES = {"us": "Latency", "MB/s": "Bandwidth", "GB/s": "Bandwidth", "%": "Overlap"}


@dataclass(frozen=True, slots=True)
class Figure:
    """The curves drawn together: same benchmark, datatype and unit."""

    benchmark: str
    dtype: str
    unit: str
    curves: tuple[Curve, ...]

    @property
    def name(self) -> str:
        """A file name."""
        unit = {"us": "latency", "%": "overlap"}.get(self.unit, "bandwidth")
        return f"{self.benchmark}-{self.dtype}-{unit}".replace(" ", "_").replace("/", "_")

    @property
    def title(self) -> str:
        return f"{self.benchmark}, {self.dtype}: {_TITLES[self.unit].lower()}"


def figures(curves: Sequence[Curve]) -> list[Figure]:
    """Group the curves; the order is that of first appearance."""
    groups: dict[tuple[str, str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.benchmark, curve.dtype, curve.unit), []).append(curve)
    return [Figure(*key, tuple(members)) for key, members in groups.items()]


def _labels(figure: Figure) -> list[str]:
    """Unambiguous names of a figure's curves: the file's name is added where two files have the same series."""
    plain = [curve.label for curve in figure.curves]
    return [
        f"{curve.label} ({curve.source})" if plain.count(curve.label) > 1 else curve.label for curve in figure.curves
    ]


def _size(nbytes: float) -> str:
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g}{unit}"
    return f"{nbytes:g}"


def _draw(axes: Any, figure: Figure, styles: dict[str, int], rate: bool) -> None:
    """One panel: the values, or with ``rate`` the message size over them in GB/s."""
    for curve, label in zip(figure.curves, _labels(figure), strict=True):
        style = styles[label]
        x = [point.size for point in curve.points]
        y = [point.size / point.value / 1e3 if rate else point.value for point in curve.points]
        colour, mark = _COLOURS[style % len(_COLOURS)], _MARKS[style // len(_COLOURS) % len(_MARKS)]
        axes.plot(x, y, color=colour, marker=mark, markersize=4, linewidth=1.5, label=label)
    axes.set_xscale("log", base=2)
    if figure.unit != "%":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # Between the powers of ten only where there would be no other number.
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high < 30 * low else "")
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    axes.set_xlabel("message size [bytes]")
    axes.set_ylabel("size / time [GB/s]" if rate else f"{_TITLES[figure.unit]} [{figure.unit.replace('us', 'µs')}]")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def png(figure: Figure, styles: dict[str, int]) -> bytes:
    """The figure as a PNG. Raises BadUsage where matplotlib is missing."""
    try:
        matplotlib = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise BadUsage("report: matplotlib draws the figures; install the extra 'plot'") from None
    both = figure.unit == "us"
    drawing = matplotlib.Figure(figsize=(11 if both else 6, 4.2), dpi=110, layout="constrained")
    panels = drawing.subplots(1, 2 if both else 1, squeeze=False)[0]
    _draw(panels[0], figure, styles, rate=False)
    if both:
        _draw(panels[1], figure, styles, rate=True)
    drawing.suptitle(figure.title)
    out = io.BytesIO()
    drawing.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _styles(groups: Sequence[Figure]) -> dict[str, int]:
    names = dict.fromkeys(label for figure in groups for label in _labels(figure))
    return {name: number for number, name in enumerate(names)}


# --- the page ---------------------------------------------------------------------------------------------------------

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: #222; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .8em; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f5f5f5; padding: .7em; overflow-x: auto; }
summary { cursor: pointer; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } pre { background: #2a2a2a; }
  img { background: #fff; } th, td { border-color: #444; } }
"""


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(header, "th") + "".join(row(line, "td") for line in lines) + "</table>"


def _values(figure: Figure) -> str:
    """The numbers of a figure, with the ratio of every other series to the first where both have a size."""
    columns = [{point.size: point.value for point in curve.points} for curve in figure.curves]
    labels = _labels(figure)
    header = ["size", *(f"{label} [{figure.unit.replace('us', 'µs')}]" for label in labels)]
    header += [f"{label} / {labels[0]}" for label in labels[1:]]
    lines = []
    for size in sorted(set().union(*columns)):
        cells = [_size(size), *(f"{column[size]:.2f}" if size in column else "" for column in columns)]
        first = columns[0].get(size)
        cells += [f"{column[size] / first:.2f}" if first and size in column else "" for column in columns[1:]]
        lines.append(cells)
    return _table(header, lines)


def _sources(curves: Sequence[Curve]) -> str:
    """Where each file comes from: machine, job, versions, command; and the plans that were used."""
    seen = {curve.source: curve.facts for curve in curves if curve.facts}
    parts = []
    for source, facts in seen.items():
        machine, job, commit = facts.get("machine", {}), facts.get("job", {}), facts.get("source") or {}
        changed = " (changed)" if commit.get("changed") else ""
        lines = [
            ("date", facts.get("date", "")),
            (
                "machine",
                f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores, load {machine.get('load', '?')}",
            ),
            ("job", f"{job.get('ranks', '?')} ranks on {job.get('nodes', '?')} nodes, memory {job.get('memory', '')}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())),
            ("commit", f"{commit.get('commit', 'unknown')}{changed}"),
            ("command", " ".join(facts.get("command", []))),
        ]
        plans = f"<pre>{html.escape(str(facts['plans']))}</pre>" if facts.get("plans") else ""
        parts.append(
            f"<h3>{html.escape(source)}</h3>{_table(('', ''), [(name, str(text)) for name, text in lines])}{plans}"
        )
    return "".join(parts)


def page(curves: Sequence[Curve], images: dict[str, bytes]) -> str:
    """The whole HTML page; ``images`` are PNGs by the figures' names."""
    body = []
    for figure in figures(curves):
        data = base64.b64encode(images[figure.name]).decode()
        title = html.escape(figure.title)
        body.append(
            f'<h2 id="{html.escape(figure.name)}">{title}</h2>'
            f'<img alt="{title} over message size" src="data:image/png;base64,{data}">'
            f"<details><summary>Numbers</summary>{_values(figure)}</details>"
        )
    sources = _sources(curves)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>ucc_hetero benchmarks</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_CSS}</style></head><body><h1>ucc_hetero benchmarks</h1>{''.join(body)}"
        f"{'<h2>Where the numbers come from</h2>' + sources if sources else ''}</body></html>\n"
    )


def run(words: Sequence[str], command: list[str]) -> int:
    """Write the page and the PNGs."""
    parser = argparse.ArgumentParser(prog="python -m ucc_hetero.bench report", description=__doc__)
    parser.add_argument("files", nargs="+", help="results of --json, or the output of OSU's programs or nccl-tests")
    parser.add_argument("-o", "--output", default="report", help="folder to write to (report)")
    arguments = parser.parse_args(list(words))
    try:
        curves = read_all(arguments.files)
    except UnknownFile as why:
        raise BadUsage(f"report: {why}") from None
    groups = figures(curves)
    styles = _styles(groups)
    images = {figure.name: png(figure, styles) for figure in groups}
    folder = Path(arguments.output)
    os.makedirs(folder, exist_ok=True)
    for name, data in images.items():
        (folder / f"{name}.png").write_bytes(data)
    target = folder / "index.html"
    target.write_text(page(curves, images), encoding="utf-8")
    print(f"{target}: {len(images)} figures from {len(arguments.files)} files")
    return 0
