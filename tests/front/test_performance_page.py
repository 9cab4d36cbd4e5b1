"""docs/performance.md says what the committed results say, of which the pages of all figures are made."""

import html
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from figures import write_pages

from ucc_hetero.bench.curves import UnknownFile

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def result(archive: str, name: str) -> Any:
    with tarfile.open(RESULTS / archive) as tar:
        file = tar.extractfile(name)
        assert file is not None
        return json.load(file)


def rows(heading: str) -> list[list[str]]:
    """The cells of all tables below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]


def test_the_files_that_the_page_names_exist() -> None:
    stored = set()
    for archive in RESULTS.glob("*.tar.xz"):
        with tarfile.open(archive) as tar:
            stored |= set(tar.getnames())
    for named in re.findall(r"[\w*-]+\.json", PAGE):
        assert [name for name in stored if re.fullmatch(named.replace(".", r"\.").replace("*", ".*"), name)], named


def test_host_memory() -> None:
    measured = {row["size"]: row for row in result("host.tar.xz", "compare-2-ranks.json")["rows"]}
    shown = [row for row in rows("Host memory, one host") if row[0].isdigit()]
    assert len(shown) >= 5
    for size, *cells in shown:
        assert cells == [f"{one['us']:.2f}" for one in measured[int(size)]["series"]], size


@pytest.mark.parametrize(("heading", "column", "name", "other"), [
    ("GPUs of one vendor, one host", 1, "h200x4_train_one_vendor.json", "ucch"),
    ("GPUs of one vendor, one host", 2, "h200x2_train_one_vendor.json", "ucch"),
    ("GPUs of two vendors", 1, "h200x4_train_mixed.json", "mixed"),
    ("GPUs of two vendors", 2, "h200x2_train_mixed.json", "mixed"),
])  # fmt: skip
def test_training(heading: str, column: int, name: str, other: str) -> None:
    found = result("h200.tar.xz", name)["backends"]
    keys = {"FSDP2": "fsdp2", "two pipeline stages × data parallel": "pp2 x dp"}
    for row in rows(heading):
        if row[0] in keys:
            ours, nccl = (found[side]["ways"][keys[row[0]]]["tokens/s"] for side in (other, "nccl"))
            assert row[column] == f"{100 * ours / nccl:.1f} %", row[0]


def test_pages_of_all_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    archives = sorted(RESULTS.glob("*.tar.xz"))
    assert f"from {len(archives)} archives" in write_pages(archives, tmp_path)
    files = 0
    for archive in archives:
        page = (tmp_path / archive.name.replace("tar.xz", "html")).read_text()
        with tarfile.open(archive) as tar:
            names = [name for name in tar.getnames() if name.endswith(".json")]
            heading, _, about = str(tar.extractfile("README.md").read(), "utf-8").partition("\n")  # type: ignore[union-attr]
        assert page.count("<img ") > 0 and all(f"<h3>{name}</h3>" in page for name in names)
        assert html.escape(heading.lstrip("# ")) in page and html.escape(about.strip()) in page
        files += len(names)
    assert files > 45


def test_broken_archives_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "x.tar.xz"
    broken.write_bytes((RESULTS / "host.tar.xz").read_bytes()[:5000])
    with pytest.raises(UnknownFile, match=r"x\.tar\.xz: not an archive of results"):
        write_pages([broken], tmp_path)
