"""Page of all figures in docs/, made of the committed results; and what files of developers' programs hold.

    python tools/figures.py --markdown docs/figures.md benchmarks/results/*.tar.xz
    python tools/figures.py report FILES -o DIR

The first writes the page, its pictures in the folder of its name beside it: per folder or archive what the README
there says, per file a table and its command. The second is ``python -m ucc_hetero.bench report`` that also knows the
files of the programs in tools/.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ucc_hetero.bench import drawings as pictures_of_files
from ucc_hetero.bench import readers, report
from ucc_hetero.bench import sheets as tables
from ucc_hetero.bench.drawings import COLOURS, KNOWN, MARKS, Drawing, drawings, file_name, render
from ucc_hetero.bench.options import BadUsage
from ucc_hetero.bench.readers import LIMIT, Curve, Point, UnknownFile, read_all
from ucc_hetero.bench.sheets import Sheet, number, origin, reproduce, sheets, short_size

__all__ = ["chapters", "main", "performance", "topology_words", "write_page"]

#: How the names of archives of results end.
ARCHIVE = ".tar.xz"

Data = dict[str, Any]


class Chapter:
    """The files of one folder, and what can be drawn of all of them together."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        self.folder = folder
        self.heading, self.text = _readme(folder)
        curves, self.files = read_all(paths)
        self.drawings: list[Drawing] = drawings(curves, self.files)

    def image(self, drawing: Drawing) -> str:
        """The file name of a drawing's picture, apart from those of other chapters."""
        return f"{self.folder.name}-{drawing.name}.svg"


def chapters(paths: Sequence[str | Path]) -> list[Chapter]:
    """The files by folder, folders and files in order of their names; an archive counts as a folder of its name."""
    folders: dict[Path, list[Path]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted({Path(p).resolve() for p in paths}):
            for member in _unpacked(path, Path(scratch)) if path.name.endswith(ARCHIVE) else [path]:
                folders.setdefault(member.parent, []).append(member)
        return [Chapter(folder, members) for folder, members in folders.items()]


def _unpacked(archive: Path, scratch: Path) -> list[Path]:
    """The result files of an archive, written to a folder of its name together with its README."""
    folder = scratch / archive.name.removesuffix(ARCHIVE)
    folder.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                # Names are looked at, not trusted: an archive holds plain files and no folders.
                if member.isfile() and member.name == Path(member.name).name:
                    content = tar.extractfile(member)
                    assert content is not None
                    (folder / member.name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as why:
        raise UnknownFile(f"{archive}: not an archive of results: {why}") from None
    return sorted(folder.glob("*.json"))


def _readme(folder: Path) -> tuple[str, str]:
    """(heading, the rest with its headings one level further down) of a folder's README; its name without one."""
    path = folder / "README.md"
    if not path.exists():
        return folder.name, ""
    heading, _, rest = path.read_text(encoding="utf-8").partition("\n")
    # Every other piece is a block of code, whose comments are no headings.
    pieces = re.split(r"^(```.*?^```)", rest.strip(), flags=re.M | re.S)
    rest = "".join(p if p.startswith("```") else re.sub(r"^#", "##", p, flags=re.M) for p in pieces)
    return heading.lstrip("# ").strip() or folder.name, rest


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*") or " "


def _table(sheet: Sheet) -> str:
    lines = ["| " + " | ".join(map(_cell, sheet.header)) + " |"]
    lines.append("|---|" + "---:|" * (len(sheet.header) - 1))
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in sheet.rows]
    return "\n".join(lines)


def _file(name: str, data: Data) -> list[str]:
    parts = [f"### {name}"]
    if about := origin(data):
        parts.append(about + ".")
    if command := reproduce(data):
        parts.append(f"```sh\n{command}\n```")
    for sheet in sheets(data):
        parts += [f"{sheet.title[:1].upper()}{sheet.title[1:]}:", _table(sheet)]
        parts += [sheet.note.replace("*", "\\*")] if sheet.note else []
    return parts


def performance(found: Sequence[Chapter], images: str, made_by: str) -> str:
    """The page. ``images`` is the folder of the pictures as seen from it, ``made_by`` the command that writes it."""
    parts = [
        "# All figures",
        "Every measurement with its machine and its command; [Performance](performance.md) is the summary. A ratio "
        "comes with its 95 % confidence interval, and says where a machine was too noisy to tell; "
        "[Benchmarks](benchmarks.md) explains how it is measured.",
        f"This page is made from the committed results by\n\n```sh\n{made_by}\n```",
    ]
    for chapter in found:
        parts += [f"## {chapter.heading}", *([chapter.text] if chapter.text else [])]
        parts += [f"![{d.title}]({images}/{chapter.image(d)})" for d in chapter.drawings]
        for name, data in chapter.files:
            parts += _file(name, data)
    return "\n\n".join(parts) + "\n"


def pictures(found: Sequence[Chapter], render: Any) -> Mapping[str, bytes]:
    """File name -> picture, for all drawings of all chapters."""
    return {chapter.image(d): render(d, "svg") for chapter in found for d in chapter.drawings}


def write_page(paths: Sequence[str], target: Path) -> str:
    """Write a page of the documentation and its pictures; returns what to say."""
    found = chapters(paths)
    images = target.parent / target.stem
    drawn = pictures(found, render)
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, data in drawn.items():
        (images / name).write_bytes(data)
    target.write_text(performance(found, images.name, _made_by(paths, target)), encoding="utf-8")
    return f"{target}: {len(drawn)} pictures from {sum(len(chapter.files) for chapter in found)} files"


def _made_by(paths: Sequence[str], target: Path) -> str:
    """The command as a reader would type it: folders with a pattern, not every file."""
    patterns = dict.fromkeys(
        f"{Path(path).parent.as_posix()}/*{ARCHIVE}"
        if path.endswith(ARCHIVE)
        else f"{Path(path).parent.parent.as_posix()}/*/*{Path(path).suffix}"
        for path in paths
    )
    return " ".join(["python tools/figures.py --markdown", shlex.quote(str(target)), *patterns])


# --- files of the programs in tools/ ----------------------------------------------------------------------------------


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
            *(number(row.get(name)) for name in ("ranks", "islands", "placement", "collective", "algorithm")),
            f"{row['seconds'] * 1e3:.1f}",
            number(row["memory"] / 2**20),
            number(row.get("teams")),
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
    note = (
        "blocking: the host waits for each call; stream: calls in one stream, device time; issue: host time to issue "
    )
    note = f"{len(data['wrong'])} results were wrong." if data.get("wrong") else note + "one; medians."
    where = f"on {data['gpu']}: {', '.join(_shape(data))}"
    for collective, group in groupby(data["rows"], key=lambda row: str(row.get("collective", "allreduce"))):
        rows = list(group)
        names = [n for n in dict.fromkeys(name for row in rows for name in row) if n not in ("bytes", "collective")]
        header = ("bytes", *map(_gpu_header, names))
        cells = tuple((short_size(row["bytes"]), *(_gpu_cell(name, row.get(name)) for name in names)) for row in rows)
        yield Sheet(f"{collective} {where}", header, cells, note)


def _gpu_header(name: str) -> str:
    if name.startswith("of "):
        return f"{name}'s speed"
    return name if "/s" in name else f"{name} µs"


def _gpu_cell(name: str, value: Any) -> str:
    return f"{value:.0%}" if name.startswith("of ") and value else number(value)


def _shape(data: Data) -> list[str]:
    """Islands of a GPU job, and the path between them where one was chosen."""
    return [topology_words(data["topology"]), *filter(None, [data.get("environment", {}).get("UCCH_STAGING")])]


def _parity(data: Data) -> Iterator[Sheet]:
    rows = tuple(
        (way, name, *(number(found.get(part)) for part in ("first", "worst", "tail")))
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
        cells = [way, *(number(rate[name, way]) for name in backends)]
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


def _paint_cluster(data: Data, canvas: Any) -> None:
    """Bars of time over the limit, for each case and peer."""
    axes = canvas.subplots()
    rows = [(case["case"], row) for case in data["cases"] for row in case["rows"]]
    names = list(dict.fromkeys(name for _, row in rows for name in row["median"]))
    height = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        at = [y - 0.4 + (i + 0.5) * height for y in range(len(rows))]
        shown = [row["median"].get(name, math.nan) / row["limit"] for _, row in rows]
        axes.barh(at, shown, height, color=COLOURS[KNOWN.get(name, 6) % len(COLOURS)], label=name)
    axes.axvline(1.0, color="black", linestyle=(0, (4, 2)), linewidth=1.1, label=LIMIT)
    axes.set_yticks(range(len(rows)), [f"{c}: {r['collective']} {short_size(r['nbytes'])}" for c, r in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value < 10 and value == int(value) else "")
    axes.set_xlabel("time / least time over these links")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0.8)
    canvas.legend(loc="outside lower center", ncols=len(names) + 1, frameon=False, fontsize=8)


def _paint_planner(data: Data, canvas: Any) -> None:
    axes = canvas.subplots()
    slowest: dict[str, dict[int, float]] = {}
    for row in data["rows"]:
        of = slowest.setdefault(row["collective"], {})
        of[row["ranks"]] = max(of.get(row["ranks"], 0.0), row["seconds"] * 1e3)
    for i, (name, points) in enumerate(slowest.items()):
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i // len(COLOURS)]
        axes.loglog(*zip(*sorted(points.items()), strict=True), color=colour, marker=mark, markersize=3.5, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("planning from nothing [ms], slowest placement")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)


def _gpu_curves(path: Path, data: dict[str, Any]) -> list[Curve]:
    """Of gpu_collectives.py: jobs of one size are drawn together, whatever their islands."""
    shape = " ".join(_shape(data))
    found: dict[tuple[str, str], list[Point]] = {}
    for row in data["rows"]:
        for name, value in row.items():
            if name in ("blocking", "stream", "nccl", "gloo"):
                label = name if name in ("nccl", "gloo") else f"{shape}, {name}"
                key = str(row.get("collective", "allreduce")), label
                found.setdefault(key, []).append(Point(row["bytes"], value))
    where = f"on {data['ranks']} {data['gpu']}"
    return [
        Curve(f"{collective} {where}", label, "us", "float32", path.name, tuple(points), {"date": data.get("date", "")})
        for (collective, label), points in found.items()
    ]


def _gpu_file(data: Data) -> bool:
    return "gpu" in data and "topology" in data and "rows" in data


def _cluster_drawing(stem: str, data: Data) -> Drawing:
    size = 9.0, 1.2 + 0.32 * sum(len(case["rows"]) for case in data["cases"])
    return Drawing(file_name(f"cluster-{stem}"), "emulated clusters", size, partial(_paint_cluster, data))


def _planner_drawing(stem: str, data: Data) -> Drawing:
    return Drawing(file_name(f"planner-{stem}"), "planning time", (6.5, 4.1), partial(_paint_planner, data))


tables.KINDS += [
    (lambda d: d.get("benchmark") == "cluster", _cluster),
    (lambda d: d.get("benchmark") == "planner", _planner),
    (_gpu_file, _gpu),
    (lambda d: "distances" in d and "rule" in d, _parity),
    (lambda d: "backends" in d, _train),
    (lambda d: "small" in d or "ddp" in d, _torch_cpu),
]
pictures_of_files.KINDS |= {"cluster": _cluster_drawing, "planner": _planner_drawing}
readers.KINDS.append((_gpu_file, _gpu_curves))


def main(words: Sequence[str]) -> int:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="results of --json, the output of OSU's programs, or archives of them")
    parser.add_argument("--markdown", metavar="FILE", type=Path, required=True, help="the page to write")
    try:
        if words[:1] == ["report"]:
            return report.run(words[1:], [])
        arguments = parser.parse_args(list(words))
        print(write_page(arguments.files, arguments.markdown))
    except (BadUsage, UnknownFile) as why:
        parser.exit(1, f"error: {why}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
