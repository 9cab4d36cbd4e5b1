"""Pages of all figures, made of the committed results.

    python tools/figures.py benchmarks/results/*.tar.xz -o DIR

writes a page for each archive: what its README says, every figure, every file's tables and command.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ucc_hetero.bench import report
from ucc_hetero.bench.curves import UnknownFile
from ucc_hetero.bench.options import BadUsage

#: How the names of archives of results end.
ARCHIVE = ".tar.xz"


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
    return f"{folder}: {drawn} figures from {len(archives)} archives"


def main(words: Sequence[str]) -> int:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", help="archives of results")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write to")
    try:
        arguments = parser.parse_args(list(words))
        print(write_pages(arguments.archives, arguments.output))
    except (BadUsage, UnknownFile) as why:
        parser.exit(1, f"error: {why}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
