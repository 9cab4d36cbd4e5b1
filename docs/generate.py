"""Generate tables, figures and help texts for the pages from the code and the results; run at each build.

python docs/generate.py FOLDER
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

from ucc_hetero import env, errors
from ucc_hetero.planner.plan import Step
from ucc_hetero.planner.select import Choice, example_call, make_plan
from ucc_hetero.planner.topology import Topology

HERE = Path(__file__).resolve().parent
COLOURS = {"nvidia": ("#f0f7e6", "#4d8b00"), "amd": ("#fdeeec", "#c2311f"), "host": ("#eef2f6", "#52606d")}
BRIDGE = "#1d5fa8"
PALETTE = (BRIDGE, "#829ab1", "#c98a1b", "#4d8b00", "#7a3e9d")
#: Colours of these names, the same in every plot of times.
OF_LIBRARY = {"ours": PALETTE[0], "NCCL": PALETTE[1], "Gloo": PALETTE[2]}
#: Commands whose help is included in a page: file name, words.
COMMANDS = {
    "run": ("ucc_hetero.launch",),
    "doctor": ("ucc_hetero.launch.doctor",),
    "hang": ("ucc_hetero.launch.doctor", "hang"),
    "doctor-amd": ("ucc_hetero.launch.doctor", "amd"),
    "emulate": ("ucc_hetero.launch.emulate",),
    "tools": ("ucc_hetero",),
    "bench": ("ucc_hetero.bench",),
    **{name: ("ucc_hetero", name) for name in ("info", "env", "plan", "topo", "tune", "trace", "store")},
}


# --- tables -----------------------------------------------------------------------------------------------------------


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def environment() -> str:
    lines = ["| variable | meaning |", "|---|---|"]
    for variable in env.TABLE.values():
        value = variable.default
        default = (
            ",".join(value) if isinstance(value, tuple) else ("n", "y")[value] if isinstance(value, bool) else value
        )
        shown = f" Default: `{default}`." if default != "" else ""
        # Turn file names of pages in the table into links.
        doc = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", _cell(variable.doc))
        lines.append(f"| `{env.PREFIX}{variable.name}` | {doc} Value: `{_cell(variable.form)}`.{shown} |")
    return "\n".join(lines) + "\n"


def exceptions() -> str:
    lines = ["| exception | is also | raised when |", "|---|---|---|"]
    for name in errors.__all__:
        kind = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        text = " ".join((inspect.getdoc(kind) or "").split()).replace("``", "`")
        lines.append(f"| `{name}` | {bases} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def helps() -> dict[str, str]:
    environ = {**os.environ, "COLUMNS": "90", "NO_COLOR": "1"}

    def ask(words: Sequence[str]) -> str:
        job = [sys.executable, "-m", words[0], *words[1:], "--help"]
        return subprocess.run(job, env=environ, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(ask, COMMANDS.values())
        return {name: f"```text\n{text.rstrip()}\n```\n" for name, text in zip(COMMANDS, texts, strict=True)}


# --- plans and topologies ---------------------------------------------------------------------------------------------


def _box(axes: Any, at: tuple[float, float], size: tuple[float, float], fill: str, edge: str, **more: Any) -> None:
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch(at, *size, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=1.2, **more))


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def draw_islands(topology: Topology, path: Path) -> None:
    """Draw hosts, islands and ranks, and the bridge between the islands."""
    figure, axes = _canvas(8.0, 2.6)
    left = 0.0
    middles = []
    for island in topology.islands:
        fill, edge = COLOURS[island.vendor]
        width = island.size * 0.9 + 0.3
        _box(axes, (left, 0), (width, 1.6), fill, edge)
        hosts = sorted({topology.hosts[rank] for rank in island.ranks})
        title = f"{island.vendor} island on host {', '.join(map(str, hosts))}"
        axes.text(left + width / 2, 1.35, title, ha="center", va="center", color=edge, weight="bold", size=11)
        for k, rank in enumerate(island.ranks):
            _box(axes, (left + 0.2 + k * 0.9, 0.3), (0.8, 0.7), "white", edge)
            axes.text(left + 0.6 + k * 0.9, 0.65, f"rank {rank}", ha="center", va="center", size=9)
        middles.append((left, left + width))
        left += width + 1.4
    for (_, end), (start, _) in pairwise(middles):
        axes.annotate("", (start, 0.65), (end, 0.65), arrowprops={"arrowstyle": "<->", "color": BRIDGE, "lw": 2})
        axes.text((start + end) / 2, 0.82, "bridge", ha="center", color=BRIDGE, size=10)
    axes.set_xlim(-0.1, left - 1.3)
    axes.set_ylim(-0.1, 1.7)
    figure.savefig(path)
    pyplot.close(figure)


def draw_plan(topology: Topology, collective: str, algorithm: str, path: Path) -> None:
    """Draw a plan of one fragment: a column for each rank, a row for each stage, a box for each step."""
    call = example_call(topology, collective, 64 << 20)
    stages = make_plan(topology, call, Choice(algorithm, 1)).fragments[0].stages
    figure, axes = _canvas(8.0, 0.9 + 0.62 * len(stages))
    columns = [rank for island in topology.islands for rank in island.ranks]
    at = {rank: i + 0.35 * topology.island_of[rank] for i, rank in enumerate(columns)}
    for island in topology.islands:
        fill, edge = COLOURS[island.vendor]
        first, last = at[island.ranks[0]], at[island.ranks[-1]]
        _box(axes, (first - 0.45, -len(stages)), (last - first + 0.9, len(stages) + 0.75), fill, fill, zorder=0)
        for rank in island.ranks:
            axes.text(at[rank], 0.35, f"rank {rank}", ha="center", va="center", size=10, color=edge, weight="bold")
    for row, stage in enumerate(stages):
        axes.text(-0.75, -row - 0.5, f"stage {row}", ha="right", va="center", size=9, color="#52606d")
        _draw_stage(axes, stage, at, row)
    axes.set_xlim(-1.6, max(at.values()) + 0.6)
    axes.set_ylim(-len(stages) - 0.1, 0.85)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_stage(axes: Any, stage: Sequence[Step], at: dict[int, float], row: int) -> None:
    """Draw a stage's steps. Steps whose ranks overlap are drawn in separate rows."""
    lanes: list[float] = []  # where the last step of each row ends
    placed = []
    for step in sorted(stage, key=lambda each: min(at[rank] for rank in each.ranks)):
        begin, end = min(at[rank] for rank in step.ranks), max(at[rank] for rank in step.ranks)
        lane = next((i for i, last in enumerate(lanes) if last < begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        placed.append((step, lane, begin, end))
    height = 0.8 / len(lanes)
    for step, lane, begin, end in placed:
        colour = {"bridge": BRIDGE, "native": "#334e68"}.get(step.link, "#829ab1")
        top = -row - 0.1 - lane * height
        _box(axes, (begin - 0.38, top - height * 0.9), (end - begin + 0.76, height * 0.85), "white", colour)
        for rank in step.ranks:
            axes.plot(at[rank], top - height * 0.78, "o", color=colour, markersize=3)
        name = step.kind.replace("_", "-") + (" over the bridge" if step.link == "bridge" else "")
        size = 8.5 if height > 0.3 else 7
        axes.text((begin + end) / 2, top - height * 0.42, name, ha="center", va="center", size=size, color=colour)


# --- results ----------------------------------------------------------------------------------------------------------

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def _tables(page: str, heading: str) -> Iterator[list[list[str]]]:
    """The cells of each table below a heading, the header first."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n)+", section, re.M):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def _bytes(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * _UNITS[unit or "B"]


def draw_times(table: list[list[str]], columns: dict[int, str], path: Path, names: Sequence[str] = ()) -> None:
    """Plot time over bytes. Cells such as ``33 / 41`` give one curve for each of ``names``; one panel for each
    column."""
    panels = list(columns) if names else [0]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(8.0, 3.4), sharey=True, squeeze=False, layout="constrained")
    sizes = [_bytes(row[0]) for row in table[1:]]
    for panel, one in zip(panels, axes[0], strict=True):
        if names:
            curves = {name: [float(row[panel].split(" / ")[i]) for row in table[1:]] for i, name in enumerate(names)}
            one.set_title(columns[panel], size=10)
        else:
            curves = {label: [float(row[column]) for row in table[1:]] for column, label in columns.items()}
        for i, (label, values) in enumerate(curves.items()):
            one.plot(sizes, values, "o-", markersize=3.5, label=label, color=OF_LIBRARY.get(label, PALETTE[i]))
        one.set_xscale("log", base=2)
        one.set_yscale("log")
        one.grid(True, color="#e4e7eb", linewidth=0.7)
        one.set_xlabel("bytes", size=9)
        one.tick_params(labelsize=8)
        one.xaxis.set_major_formatter(lambda value, _: _short(value))
        one.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0][0].set_ylabel("microseconds", size=9)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def _short(value: float) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def draw_bars(bars: dict[str, dict[str, float]], path: Path, axis: str, unit: str, line: float) -> None:
    """Draw a group of bars for each name, and a line at the reference value."""
    labels = list(dict.fromkeys(label for each in bars.values() for label in each))
    figure, axes = pyplot.subplots(figsize=(8.0, 0.7 + 0.27 * sum(map(len, bars.values()))), layout="constrained")
    ticks, y = [], 0.0
    for name, each in bars.items():
        ticks.append((y + (len(each) - 1) / 2, name))
        for label, value in each.items():
            axes.barh(y, value, 0.8, color=PALETTE[labels.index(label) % len(PALETTE)])
            axes.annotate(
                f"{label}: {value:g}{unit}", (value, y), (5, 0), textcoords="offset points", va="center", size=8
            )
            y += 1
        y += 0.5
    axes.axvline(line, color="black", linewidth=1, linestyle=(0, (4, 2)))
    axes.set_yticks([position for position, _ in ticks], [name for _, name in ticks], size=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(each.values()) for each in bars.values()) * 1.3)
    axes.set_xlabel(axis, size=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def draw_shares(table: list[list[str]], path: Path) -> None:
    """Draw throughput as a share of NCCL's: row names, and each cell with a percentage."""
    bars: dict[str, dict[str, float]] = {}
    for name, *row in table[1:]:
        cells = zip(table[0][1:], row, strict=True)
        bars[name] = {label: float(cell.split()[0]) for label, cell in cells if cell.endswith("%")}
    draw_bars(bars, path, "training throughput, % of NCCL's on the same GPUs", " %", 100)


def draw_limits(table: list[list[str]], path: Path) -> None:
    """Draw times relative to the least time that plain sockets need, for the rows that have it."""
    bars = {}
    for ranks, collective, size, limit, *times in table[1:]:
        if limit:
            values = zip(table[0][4:], times, strict=True)
            bars[f"{ranks}: {collective} {size}"] = {label: round(float(ms) / float(limit), 2) for label, ms in values}
    draw_bars(bars, path, "time / least time that plain sockets need over these links", "", 1)


def draw_results(folder: Path) -> None:
    """Draw the tables of docs/performance.md."""
    page = (HERE / "performance.md").read_text(encoding="utf-8")
    (host,) = _tables(page, "Host memory, one host")
    draw_times(host, dict(enumerate(host[0][1:], 1)), folder / "perf-host.svg")
    (hosts,) = _tables(page, "Host memory, several hosts")
    draw_limits(hosts, folder / "perf-hosts.svg")
    calls, training = _tables(page, "GPUs of one vendor, one host")
    draw_times(calls, dict(enumerate(calls[0][1:], 1)), folder / "perf-one-vendor.svg", ("ours", "NCCL"))
    draw_shares(training, folder / "perf-one-vendor-training.svg")
    calls, training = _tables(page, "GPUs of one vendor, two hosts without RDMA")
    draw_times(calls, dict(enumerate(calls[0][1:], 1)), folder / "perf-one-vendor-hosts.svg", ("ours", "NCCL"))
    draw_shares(training, folder / "perf-one-vendor-hosts-training.svg")
    calls, training, _, _, between, four, _, four_training, *_ = _tables(page, "GPUs of two vendors")
    draw_times(calls, dict(enumerate(calls[0][1:], 1)), folder / "perf-two-vendors.svg", ("ours", "Gloo", "NCCL"))
    draw_shares(training, folder / "perf-two-vendors-training.svg")
    draw_shares(between, folder / "perf-two-vendors-hosts.svg")
    draw_times(four, dict(enumerate(four[0][1:], 1)), folder / "perf-two-hosts-of-two.svg", ("ours", "NCCL"))
    draw_shares(four_training, folder / "perf-two-hosts-of-two-training.svg")


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    pyplot.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "ucc_hetero"})
    texts = {"environment": environment(), "errors": exceptions()}
    texts |= {f"help-{name}": text for name, text in helps().items()}
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    two, three = _layout(2, 2), _layout(2, 2, 2)
    draw_islands(_layout(4, 4), folder / "islands.svg")
    for algorithm in ("flat", "split_rail", "tree"):
        draw_plan(two, "allreduce", algorithm, folder / f"allreduce-{algorithm}.svg")
    draw_plan(three, "bcast", "ring", folder / "bcast-ring.svg")
    draw_results(folder)


def _layout(*sizes: int) -> Topology:
    """Make a topology of hosts with so many ranks each, alternately of NVIDIA and AMD."""
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    vendors = [("nvidia", "amd")[host % 2] for host in hosts]
    return Topology.group(vendors, hosts, (), (), hosts)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
