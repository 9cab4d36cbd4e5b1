"""pyproject.toml says what is there."""

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli: pip install tomli")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]
MAPPED = {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}


def packages() -> set[str]:
    """Every package in the tree, under the name that it is installed as."""
    found = set()
    for top in ("ucc_hetero", *MAPPED):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / top).parts
            found.add(".".join([MAPPED.get(top, top), *parts]))
    return found


def test_every_package_is_installed() -> None:
    assert set(SETUPTOOLS["packages"]) == packages()
