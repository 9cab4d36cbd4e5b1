"""Files that comments and pages name are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "benchmarks", "cffi_build", "docs", "examples", "mpi_launch", "tests", "tools", "ucc_hetero"
NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]+\.(?:py|c|h|cuh|md)\b")
#: Another project's, and one that the reader is to write.
ELSEWHERE = {
    "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py", "cffi_build/gpu/NAME.c",
}  # fmt: skip
#: Folders under the names by which they are installed.
INSTALLED = {"ucc_hetero/launch/": "mpi_launch/", "ucc_hetero/bench/": "benchmarks/"}


def here(name: str) -> Path:
    for installed, folder in INSTALLED.items():
        name = name.replace(installed, folder)
    return ROOT / name


def test_named_files_are_there() -> None:
    kinds = ("*.py", "*.md", "*.c", "*.h", "*.cuh")
    inside = [path for folder in FOLDERS for kind in kinds for path in (ROOT / folder).rglob(kind)]
    files = [path for path in (*ROOT.glob("*.md"), *inside) if not {"_generated", "__pycache__"} & {*path.parts}]
    assert len(files) > 300
    absent = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if name not in ELSEWHERE and not here(name).exists()
    }
    assert not absent
