"""``python -m ucc_hetero.bench report FILES -o DIR``: result files -> one self-contained HTML page, and PNGs.

With ``--markdown FILE`` a page for the documentation instead, its pictures in the folder of the page's name beside it.
Result files of all programs here are read, and the saved output of OSU's C programs and of nccl-tests; for a page of
the documentation archives (``.tar.xz``) of result files, too.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .drawings import drawings, render
from .markdown import ARCHIVE, chapters, performance, pictures
from .options import BadUsage
from .page import page
from .readers import UnknownFile, read_all, read_data

__all__ = ["run"]


def _html(paths: Sequence[str], folder: Path) -> str:
    """Write the page and the PNGs; returns what to say."""
    curves = read_all(paths)
    files = [(Path(path).name, data) for path in paths if (data := read_data(path)) is not None]
    drawn = drawings(curves, files)
    os.makedirs(folder, exist_ok=True)
    for drawing in drawn:
        (folder / f"{drawing.name}.png").write_bytes(render(drawing, "png"))
    images = {drawing.name: render(drawing, "svg") for drawing in drawn}
    target = folder / "index.html"
    target.write_text(page(drawn, images, files, curves), encoding="utf-8")
    return f"{target}: {len(images)} drawings from {len(paths)} files"


def _markdown(paths: Sequence[str], target: Path, command: Sequence[str]) -> str:
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
    target.write_text(performance(found, images.name, " ".join(command)), encoding="utf-8")
    return f"{target}: {len(drawn)} pictures from {sum(len(chapter.files) for chapter in found)} files"


def run(words: Sequence[str], command: list[str]) -> int:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m ucc_hetero.bench report", description=__doc__)
    parser.add_argument("files", nargs="+", help="results of --json, or the output of OSU's programs or nccl-tests")
    parser.add_argument("-o", "--output", default="report", help="folder to write to (report)")
    parser.add_argument("--markdown", metavar="FILE", help="write this page of the documentation instead")
    arguments = parser.parse_args(list(words))
    try:
        if arguments.markdown:
            print(_markdown(arguments.files, Path(arguments.markdown), _made_by(arguments)))
        else:
            print(_html(arguments.files, Path(arguments.output)))
    except UnknownFile as why:
        raise BadUsage(f"report: {why}") from None
    return 0


def _made_by(arguments: Any) -> list[str]:
    """The command as a reader would type it: folders with a pattern, not every file."""
    patterns = dict.fromkeys(
        f"{Path(path).parent.as_posix()}/*{ARCHIVE}"
        if path.endswith(ARCHIVE)
        else f"{Path(path).parent.parent.as_posix()}/*/*{Path(path).suffix}"
        for path in arguments.files
    )
    return ["python -m ucc_hetero.bench report --markdown", shlex.quote(arguments.markdown), *patterns]
