"""``python -m ucc_hetero.bench report FILES -o DIR``: result files -> one self-contained HTML page, and PNGs.

Result files of all programs here are read, and the saved output of OSU's C programs and of nccl-tests.
"""

from __future__ import annotations

import argparse
import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .drawings import Drawing, Figure, drawings, labels, render
from .options import BadUsage
from .readers import LIMIT, Curve, UnknownFile, read_all
from .sheets import Sheet, origin, reproduce, sheets, short_size

Data = dict[str, Any]

_CSS = """
:root { --ink: #1c2733; --soft: #5d6b7a; --line: #e2e7ec; --card: #fff; --back: #f4f6f8; --link: #0065a8;
  --good: #0a7d4f; --bad: #b3261e; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0; color: var(--ink);
  background: var(--back); }
main { max-width: 1160px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 0 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.lead { color: var(--soft); margin: 0 0 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0 0 1.5rem; }
nav a { background: var(--card); border: 1px solid var(--line); border-radius: 999px; padding: .15rem .7rem;
  font-size: .85rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.3rem;
  margin: 0 0 1.3rem; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; background: #fff; border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5em 0 .8em; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22em .8em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.faster { color: var(--good); } td.slower { color: var(--bad); } td.noisy { color: var(--soft); }
pre { background: var(--back); border-radius: 6px; padding: .6em .8em; overflow-x: auto; font-size: .82rem; }
summary { cursor: pointer; color: var(--link); margin-top: .4rem; } .note { color: var(--soft); font-size: .88rem; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde4ea; --soft: #93a1af; --line: #2e3943; --card: #1a222a;
  --back: #11171c; --link: #6db9ee; --good: #5bd19d; --bad: #ff8a80; } img { padding: 6px; } }
"""
_VERDICTS = {"faster": "faster", "slower": "slower", "too noisy": "noisy"}


def _table(sheet: Sheet) -> str:
    def cell(text: str, tag: str) -> str:
        kind = next((name for word, name in _VERDICTS.items() if text.endswith(word)), "")
        return f"<{tag}{f' class={kind!r}' if kind else ''}>{html.escape(text)}</{tag}>"

    head = "<tr>" + "".join(cell(text, "th") for text in sheet.header) + "</tr>"
    body = "".join("<tr>" + "".join(cell(text, "td") for text in row) + "</tr>" for row in sheet.rows)
    note = f'<p class="note">{html.escape(sheet.note)}</p>' if sheet.note else ""
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{note}'


def _values(figure: Figure) -> Sheet:
    """The numbers of a figure, with the ratio of every other series to the first where both have a size."""
    columns = [{point.size: point.value for point in curve.points} for curve in figure.curves]
    names = labels(figure)
    others = [i for i, curve in enumerate(figure.curves) if i and curve.label != LIMIT]
    header = ["size", *(f"{name} [{figure.unit.replace('us', 'µs')}]" for name in names)]
    header += [f"{names[i]} / {names[0]}" for i in others]
    rows = []
    for size in sorted(set().union(*columns)):
        cells = [short_size(size), *(f"{column[size]:.2f}" if size in column else "" for column in columns)]
        first = columns[0].get(size)
        cells += [f"{columns[i][size] / first:.2f}" if first and size in columns[i] else "" for i in others]
        rows.append(tuple(cells))
    return Sheet("", tuple(header), tuple(rows))


def _drawing(drawing: Drawing, svg: bytes) -> str:
    title, data = html.escape(drawing.title), base64.b64encode(svg).decode()
    text = (
        f'<section id="{html.escape(drawing.name)}"><h2>{title}</h2>'
        f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
    )
    if drawing.figure is not None:
        text += f"<details><summary>Numbers</summary>{_table(_values(drawing.figure))}</details>"
    return text + "</section>"


def _file(source: str, data: Data) -> str:
    """One result file: its tables, its command, its plans."""
    parts = [f"<h3>{html.escape(source)}</h3>", f'<p class="note">{html.escape(origin(data))}</p>']
    command = reproduce(data)
    parts.append(f"<pre>{html.escape(command)}</pre>" if command else "")
    tables = "".join(f"<h4>{html.escape(sheet.title)}</h4>{_table(sheet)}" for sheet in sheets(data))
    parts.append(f"<details><summary>Tables</summary>{tables}</details>" if tables else "")
    if data.get("plans"):
        parts.append(f"<details><summary>Plans</summary><pre>{html.escape(str(data['plans']))}</pre></details>")
    return "".join(parts)


def page(
    drawn: Sequence[Drawing],
    images: Mapping[str, bytes],
    files: Sequence[tuple[str, Data]],
    curves: Sequence[Curve],
    heading: str = "ucc_hetero benchmarks",
    about: str = "",
) -> str:
    """The whole page; ``images`` are SVGs by the drawings' names, ``files`` the JSON files by name."""
    links = "".join(f'<a href="#{html.escape(d.name)}">{html.escape(d.title)}</a>' for d in drawn)
    body = "".join(_drawing(drawing, images[drawing.name]) for drawing in drawn)
    names = list(dict.fromkeys([*(source for source, _ in files), *(curve.source for curve in curves)]))
    sources = "".join(_file(source, data) for source, data in files)
    if sources:
        sources = f'<section id="files"><h2>Where the numbers come from</h2>{sources}</section>'
        links += '<a href="#files">files</a>'
    lead = f"{len(drawn)} drawings from {len(names)} files: {', '.join(names)}"
    text, title = f"<section><pre>{html.escape(about)}</pre></section>" if about else "", html.escape(heading)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_CSS}</style></head><body><main><h1>{title}</h1>"
        f'<p class="lead">{html.escape(lead)}</p><nav>{links}</nav>{text}{body}{sources}</main></body></html>\n'
    )


def write_page(paths: Sequence[str | Path], target: Path, *words: str) -> Sequence[Drawing]:
    """Write the page of some result files, with a heading and a text; returns what was drawn."""
    curves, files = read_all(paths)
    drawn = drawings(curves, files)
    images = {drawing.name: render(drawing, "svg") for drawing in drawn}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(drawn, images, files, curves, *words), encoding="utf-8")
    return drawn


def _html(paths: Sequence[str], folder: Path) -> str:
    """Write the page and the PNGs; returns what to say."""
    drawn = write_page(paths, folder / "index.html")
    for drawing in drawn:
        (folder / f"{drawing.name}.png").write_bytes(render(drawing, "png"))
    return f"{folder / 'index.html'}: {len(drawn)} drawings from {len(paths)} files"


def run(words: Sequence[str], command: list[str]) -> int:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m ucc_hetero.bench report", description=__doc__)
    parser.add_argument("files", nargs="+", help="results of --json, or the output of OSU's programs or nccl-tests")
    parser.add_argument("-o", "--output", default="report", help="folder to write to (report)")
    arguments = parser.parse_args(list(words))
    try:
        print(_html(arguments.files, Path(arguments.output)))
    except UnknownFile as why:
        raise BadUsage(f"report: {why}") from None
    return 0
