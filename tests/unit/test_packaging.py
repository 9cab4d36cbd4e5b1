"""pyproject.toml says what is there."""

import subprocess
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


def test_an_old_python_is_refused_at_once() -> None:
    script = f"import sys; sys.version_info = (3, 9, 18); exec(open({str(ROOT / 'setup.py')!r}).read())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and done.stderr.startswith("ucc_hetero needs Python 3.10 or newer, and this is 3.9")
