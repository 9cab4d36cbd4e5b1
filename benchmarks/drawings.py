"""Pictures of results: curves over message sizes, plans, clusters against their limit.

A drawing is data and the function that paints it with matplotlib, which is needed only then. Colours follow the series,
not the place of its file in a list, so that a peer looks the same in every drawing.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .options import BadUsage
from .readers import LIMIT, Curve
from .sheets import benchmark_of, short_size

Data = dict[str, Any]

# Okabe and Ito's colours, which people with colour blindness can tell apart. Ours is blue wherever it is measured.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKS = "osD^vP*X"
KNOWN = {"ours": 0, "mpi4py": 1, "ucc": 2, "gloo": 3, "nccl": 4, "nccl-tests": 4}
_TITLES = {"us": "Latency", "MB/s": "Bandwidth", "GB/s": "Bandwidth", "%": "Overlap"}
_STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
    "svg.hashsalt": "ucc_hetero", "svg.fonttype": "none", "font.family": "sans-serif",
}  # fmt: skip


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
        return file_name(f"{self.benchmark}-{self.dtype}-{unit}")

    @property
    def title(self) -> str:
        return f"{self.benchmark}, {self.dtype}: {_TITLES[self.unit].lower()}"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture of ``size`` inches; ``figure`` is what a drawing of curves shows, None of the others."""

    name: str
    title: str
    size: tuple[float, float]
    paint: Callable[[Any], None]
    figure: Figure | None = None


def file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.*" else "_" for c in text).replace("*", "")


def figures(curves: Sequence[Curve]) -> list[Figure]:
    """Group the curves; the order is that of first appearance."""
    groups: dict[tuple[str, str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.benchmark, curve.dtype, curve.unit), []).append(curve)
    return [Figure(*key, tuple(members)) for key, members in groups.items()]


def labels(figure: Figure) -> list[str]:
    """Unambiguous names of a figure's curves: the file's name is added where two files have the same series."""
    plain = [curve.label for curve in figure.curves]
    return [
        f"{curve.label} ({curve.source})" if plain.count(curve.label) > 1 else curve.label for curve in figure.curves
    ]


def drawings(curves: Sequence[Curve], files: Sequence[tuple[str, Data]]) -> list[Drawing]:
    """Everything that can be drawn of the curves, and of the data of each (named) JSON file."""
    groups = figures(curves)
    styles = _styles(groups)
    found = []
    for figure in groups:
        size = 10.5 if figure.unit == "us" else 6.2, 4.1
        found.append(Drawing(figure.name, figure.title, size, partial(_paint_curves, figure, styles), figure))
    for source, data in files:
        stem = source.rpartition(".")[0] or source
        if make := KINDS.get(str(data.get("benchmark"))):
            found.append(make(stem, data))
    planned = [(source, data) for source, data in files if _plans(data)]
    if planned:
        size = 9.0, 1.3 + 0.34 * sum(len(_plans(data)) for _, data in planned)
        found.append(Drawing("plans", "which plan was chosen where", size, partial(_paint_plans, planned)))
    return found


def render(drawing: Drawing, kind: str) -> bytes:
    """The drawing as ``png`` or ``svg``. Raises BadUsage where matplotlib is missing."""
    try:
        matplotlib, module = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError:
        raise BadUsage("report: matplotlib draws the figures; install the extra 'plot'") from None
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        canvas = module.Figure(figsize=drawing.size, dpi=110, layout="constrained")
        drawing.paint(canvas)
        if kind == "png":  # a page has titles of its own
            canvas.suptitle(drawing.title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        # Neither date nor version: equal results make equal files.
        canvas.savefig(
            out, format=kind, metadata={"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        )
    return _smaller(out.getvalue()) if kind == "svg" else out.getvalue()


def _smaller(svg: bytes) -> bytes:
    """The same picture in half of the bytes: hundredths of a point, no indentation, no list of fonts."""
    svg = re.sub(rb"\d+\.\d{5,}", lambda found: b"%.2f" % float(found[0]), svg)
    svg = re.sub(rb"font-family: [^;\"]*", b"font-family: 'DejaVu Sans', sans-serif", svg)
    return re.sub(rb"\s*\n\s*", b"\n", svg)


# --- curves -----------------------------------------------------------------------------------------------------------


def _styles(groups: Sequence[Figure]) -> dict[str, tuple[int, int]]:
    """Label -> (colour, mark): a colour for each series, the same for a peer everywhere, and a mark for each file."""
    out: dict[str, tuple[int, int]] = {}
    colours = dict(KNOWN)
    free = iter((5, 6, *range(len(COLOURS), 1000)))
    for figure in groups:
        files = list(dict.fromkeys(curve.source for curve in figure.curves))
        for curve, label in zip(figure.curves, labels(figure), strict=True):
            series = _series(curve.label)
            if series not in colours and series != LIMIT:
                colours[series] = next(free)
            mark = files.index(curve.source) if label != curve.label else 0
            out.setdefault(label, (colours.get(series, 0), mark))
    return out


def _series(label: str) -> str:
    """Curves of one colour: the forms of a call (persistent ones have a star) differ in their lines."""
    return label.removesuffix("*").removesuffix(", blocking").removesuffix(", stream")


def _paint_curves(figure: Figure, styles: dict[str, tuple[int, int]], canvas: Any) -> None:
    both = figure.unit == "us"
    panels = canvas.subplots(1, 2 if both else 1, squeeze=False)[0]
    _curves(panels[0], figure, styles, rate=False)
    if both:
        _curves(panels[1], figure, styles, rate=True)
    handles, names = panels[0].get_legend_handles_labels()
    columns = max(1, min(len(names), int(canvas.get_figwidth() * 11) // (max(map(len, names)) + 6)))
    canvas.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _curves(axes: Any, figure: Figure, styles: dict[str, tuple[int, int]], rate: bool) -> None:
    """One panel: the values, or with ``rate`` the message size over them in GB/s."""
    for curve, label in zip(figure.curves, labels(figure), strict=True):
        x = [point.size for point in curve.points]
        y = [point.size / point.value / 1e3 if rate else point.value for point in curve.points]
        if curve.label == LIMIT:
            axes.plot(x, y, color="black", linestyle=(0, (4, 2)), linewidth=1.1, label=label, zorder=1)
            continue
        style, file = styles[label]
        colour, mark = COLOURS[style % len(COLOURS)], MARKS[(style // len(COLOURS) + file) % len(MARKS)]
        line = "--" if curve.label.endswith(("*", ", blocking")) else "-"
        axes.plot(x, y, color=colour, marker=mark, markersize=3.5, linewidth=1.6, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    if figure.unit != "%":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # Between the powers of ten only where there would be no other number.
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high < 30 * low else "")
    else:
        axes.set_ylim(0, 105)
    axes.xaxis.set_major_formatter(lambda value, _: short_size(value))
    axes.set_xlabel("message size [bytes]")
    axes.set_ylabel("size / time [GB/s]" if rate else f"{_TITLES[figure.unit]} [{figure.unit.replace('us', 'µs')}]")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


# --- the others -------------------------------------------------------------------------------------------------------


def _plans(data: Data) -> dict[str, list[tuple[int, str]]]:
    """Measurement -> (size, plan) of each row, of a file that has plans."""
    found: dict[str, list[tuple[int, str]]] = {}
    if "family" in data:
        for row in data.get("rows", []):
            if row.get("plan") and "size" in row:
                found.setdefault(f"{benchmark_of(data)} {row['dtype']}", []).append((row["size"], row["plan"]))
    return found


def _paint_plans(files: Sequence[tuple[str, Data]], canvas: Any) -> None:
    """A strip per benchmark: the algorithm of each size as a colour."""
    axes = canvas.subplots()
    strips = [(f"{what}\n{source}", rows) for source, data in files for what, rows in _plans(data).items()]
    names = list(dict.fromkeys(plan.partition(" (")[0].partition(",")[0] for _, rows in strips for _, plan in rows))
    for y, (_, rows) in enumerate(strips):
        for size, plan in rows:
            colour = COLOURS[names.index(plan.partition(" (")[0].partition(",")[0]) % len(COLOURS)]
            axes.barh(y, size * 0.69, 0.7, left=size * 0.72, color=colour)
    for i, name in enumerate(names):
        axes.barh(0, 0, color=COLOURS[i % len(COLOURS)], label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: short_size(value))
    axes.set_yticks(range(len(strips)), [what for what, _ in strips], fontsize=8)
    axes.set_ylim(len(strips) - 0.4, -0.6)
    axes.set_xlabel("message size [bytes]")
    canvas.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)


#: Drawings of whole files: benchmark -> what makes one of the file's stem and data.
KINDS: dict[str, Callable[[str, Data], Drawing]] = {}
