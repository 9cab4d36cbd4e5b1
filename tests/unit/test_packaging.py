"""The package as it is installed: all of it, or hidden by a clone's folder; and docstrings that are completed."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ucc_hetero.docstrings import forms
from ucc_hetero.installed import module

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli: pip install tomli")

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"ucc_hetero": "ucc_hetero", **{folder: name for name, folder in listed["package-dir"].items()}}
    there = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for folder, name in folders.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed["packages"]) == there


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


def test_own_sections_stay_and_arguments_that_are_not_taken_go() -> None:
    @forms
    class Pair:
        def whole(self, one: int, two: int) -> int:
            """Do it.

            Args:
                one: The first.
                two: The second,
                    on two lines.

            Returns:
                A number.

            Raises:
                ValueError: Never.
            """
            return one + two

        def half(self, two: int) -> str:
            """Do as :meth:`whole`, with its arguments.

            Returns:
                A text.
            """
            return str(two)

    assert inspect.cleandoc(Pair.half.__doc__ or "") == (
        "Do as :meth:`whole`, with its arguments.\n\nArgs:\n    two: The second,\n        on two lines.\n\n"
        "Returns:\n    A text.\n\nRaises:\n    ValueError: Never."
    )
