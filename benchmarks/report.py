"""``python -m ucc_hetero.bench report FILES -o DIR``: result files -> one self-contained HTML page, and PNGs.

Result files of all programs here are read, and the saved output of OSU's C programs and of nccl-tests.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .drawings import drawings, render
from .options import BadUsage
from .page import page
from .readers import UnknownFile, read_all

__all__ = ["run"]


def _html(paths: Sequence[str], folder: Path) -> str:
    """Write the page and the PNGs; returns what to say."""
    curves, files = read_all(paths)
    drawn = drawings(curves, files)
    os.makedirs(folder, exist_ok=True)
    for drawing in drawn:
        (folder / f"{drawing.name}.png").write_bytes(render(drawing, "png"))
    images = {drawing.name: render(drawing, "svg") for drawing in drawn}
    target = folder / "index.html"
    target.write_text(page(drawn, images, files, curves), encoding="utf-8")
    return f"{target}: {len(images)} drawings from {len(paths)} files"


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
