"""docs/performance.md says what the committed result files say."""

from __future__ import annotations

import re
from pathlib import Path

from ucc_hetero.bench.markdown import chapters, performance

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m ucc_hetero.bench report --markdown docs/performance.md benchmarks/results/*/*.json"


def test_the_page_is_current() -> None:
    found = chapters(sorted((ROOT / "benchmarks" / "results").glob("*/*.json")))
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page == performance(found, "performance", COMMAND), f"the result files have changed: run {COMMAND}"


def test_its_pictures_are_there_and_small() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    linked = {ROOT / "docs" / name for name in re.findall(r"\]\((performance/[^)]+)\)", page)}
    assert linked == set((ROOT / "docs" / "performance").iterdir())
    for picture in linked:
        assert 2_000 < picture.stat().st_size < 150_000, picture.name
