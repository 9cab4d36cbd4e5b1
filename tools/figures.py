"""Pages of all figures, made of the committed results; and what files of developers' programs hold.

    python tools/figures.py benchmarks/results/*.tar.xz -o DIR
    python tools/figures.py report FILES -o DIR

The first writes a page for each archive: what its README says, every drawing, every file's tables and command. The
second is ``python -m ucc_hetero.bench report`` that also knows the files of the programs in tools/.
"""

from __future__ import annotations

import argparse
import math
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ucc_hetero.bench import drawings as pictures_of_files
from ucc_hetero.bench import readers, report
from ucc_hetero.bench import sheets as tables
from ucc_hetero.bench.drawings import COLOURS, KNOWN, Drawing, file_name
from ucc_hetero.bench.options import BadUsage
from ucc_hetero.bench.readers import LIMIT, Curve, Point, UnknownFile
from ucc_hetero.bench.sheets import Sheet, number, short_size

#: How the names of archives of results end.
ARCHIVE = ".tar.xz"

Data = dict[str, Any]


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


def write_pages(archives: Sequence[str | Path], folder: Path) -> str:
    """Write a page for each archive, below what its README says; returns what to say."""
    drawn = 0
    with tempfile.TemporaryDirectory() as scratch:
        for archive in map(Path, archives):
            paths = _unpacked(archive, Path(scratch))
            heading, _, about = (paths[0].parent / "README.md").read_text(encoding="utf-8").partition("\n")
            name = archive.name.removesuffix(ARCHIVE)
            drawn += len(report.write_page(paths, folder / f"{name}.html", heading.lstrip("# "), about.strip()))
    return f"{folder}: {drawn} pictures from {len(archives)} archives"


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


def _host_cost(data: Data) -> Iterator[Sheet]:
    rows = tuple(
        (row["call"], str(row["bytes"]), row["beside"], *(f"{row[side]['issue']:.2f}" for side in ("ours", "peer")))
        for row in data["rows"]
    )
    yield Sheet("cost of calls to their host", ("call", "bytes", "beside", "ours µs", "peer µs"), rows)


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


tables.KINDS += [
    (lambda d: d.get("benchmark") == "cluster", _cluster),
    (_gpu_file, _gpu),
    (lambda d: "distances" in d and "rule" in d, _parity),
    (lambda d: "backends" in d, _train),
    (lambda d: "beside" in (d.get("rows") or [{}])[0], _host_cost),
]
pictures_of_files.KINDS["cluster"] = _cluster_drawing
readers.KINDS.append((_gpu_file, _gpu_curves))


def main(words: Sequence[str]) -> int:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", help="archives of results")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write to")
    try:
        if words[:1] == ["report"]:
            return report.run(words[1:], [])
        arguments = parser.parse_args(list(words))
        print(write_pages(arguments.archives, arguments.output))
    except (BadUsage, UnknownFile) as why:
        parser.exit(1, f"error: {why}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
