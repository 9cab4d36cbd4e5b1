"""Result files as a page of the documentation: per folder what its README says, per file a table and its command."""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .drawings import Drawing, drawings
from .origins import origin, reproduce
from .readers import UnknownFile, read, read_data
from .sheets import Sheet, sheets

__all__ = ["ARCHIVE", "Chapter", "chapters", "performance"]

#: How the names of archives of results end.
ARCHIVE = ".tar.xz"

Data = dict[str, Any]


class Chapter:
    """The files of one folder, and what can be drawn of all of them together."""

    def __init__(self, folder: Path, paths: Sequence[Path]) -> None:
        self.folder = folder
        self.heading, self.text = _readme(folder)
        self.files: list[tuple[str, Data]] = []
        self.texts: list[str] = []
        curves = []
        for path in paths:
            data = read_data(path)
            if data is not None:
                self.files.append((path.name, data))
            else:
                self.texts.append(path.name)
            try:
                curves += read(path)
            except UnknownFile:
                if data is None:
                    raise
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
