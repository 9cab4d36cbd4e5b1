"""A clone's folder that hides the installed package: Python is told so, and the doctor never starts from it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ucc_hetero.installed import module

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The beginning of a clone in which nothing was installed."""
    (tmp_path / "cffi_build").mkdir()
    (tmp_path / "ucc_hetero").mkdir()
    for name in ("__init__.py", "installed.py"):
        shutil.copy(ROOT / "ucc_hetero" / name, tmp_path / "ucc_hetero")
    return tmp_path


def test_the_source_tree_says_what_it_is(clone: Path) -> None:
    done = run("-S", "-m", "ucc_hetero", "info", cwd=clone)
    said = done.stderr.splitlines()[-1]
    assert done.returncode and said.startswith(f"ImportError: {clone / 'ucc_hetero'} is the source of ucc_hetero")
    assert "no ucc_hetero._native, no ucc_hetero.launch, no ucc_hetero.bench" in said
    assert f"pip install -e '.[ucc,mpi]' in {clone}" in said and "another folder" in said


def test_what_was_built_in_place_alone_is_no_installation(clone: Path) -> None:
    (clone / "ucc_hetero" / "_native.py").touch()
    said = run("-S", "-m", "ucc_hetero.launch", "-np", "2", "true", cwd=clone).stderr.splitlines()[-1]
    assert "no ucc_hetero.launch, no ucc_hetero.bench" in said and "_native" not in said


def test_modules_run_from_the_installation(clone: Path) -> None:
    assert run(*module("ucc_hetero"), "--version", cwd=clone).stdout.startswith("ucc_hetero ")
    assert run("-m", "ucc_hetero", "--version", cwd=clone).returncode, "the folder does hide the installed package"
