"""The installed package: complete, or hidden by a clone's folder; its programs; completed docstrings."""

import inspect
import os
import pydoc
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ucc_hetero.closed_pipe import CLOSED, closed_outputs, ends_with_its_reader
from ucc_hetero.docstrings import forms
from ucc_hetero.installed import module

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs tomli: pip install tomli")

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"ucc_hetero": "ucc_hetero", **{folder: name for name, folder in listed["package-dir"].items()}}
    there = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for folder, name in folders.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed["packages"]) == there


def test_the_reference_names_what_is_there():
    """All names in the reference pages exist; building the pages takes too long for a unit test."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    names = re.findall(r"^\.\. auto(?:class|function|module):: (\S+)$", pages, re.M)
    missing = [name for name in names if not name.startswith("ucc_hetero.torch") and pydoc.locate(name) is None]
    assert names and not missing


def run(*words, cwd):
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def clone(tmp_path):
    """The start of a clone without an installation."""
    (tmp_path / "cffi_build").mkdir()
    (tmp_path / "ucc_hetero").mkdir()
    for name in ("__init__.py", "installed.py"):
        shutil.copy(ROOT / "ucc_hetero" / name, tmp_path / "ucc_hetero")
    return tmp_path


def test_the_source_tree_says_what_it_is(clone):
    done = run("-S", "-m", "ucc_hetero", "info", cwd=clone)
    said = done.stderr.splitlines()[-1]
    assert done.returncode and said.startswith(f"ImportError: {clone / 'ucc_hetero'} is the source of ucc_hetero")
    assert "no ucc_hetero._native, no ucc_hetero.launch, no ucc_hetero.bench" in said
    assert f"pip install -e '.[ucc,mpi]' in {clone}" in said and "another folder" in said


def test_what_was_built_in_place_alone_is_no_installation(clone):
    (clone / "ucc_hetero" / "_native.py").touch()
    said = run("-S", "-m", "ucc_hetero.launch", "-np", "2", "true", cwd=clone).stderr.splitlines()[-1]
    assert "no ucc_hetero.launch, no ucc_hetero.bench" in said and "_native" not in said


def test_modules_run_from_the_installation(clone):
    assert run(*module("ucc_hetero"), "--version", cwd=clone).stdout.startswith("ucc_hetero ")
    assert run("-m", "ucc_hetero", "--version", cwd=clone).returncode, "the folder does hide the installed package"


def test_own_sections_stay_and_arguments_that_are_not_taken_go():
    @forms
    class Pair:
        def whole(self, one, two):
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

        def half(self, two):
            """Do as :meth:`whole`, with its arguments.

            Returns:
                A text.
            """
            return str(two)

    assert inspect.cleandoc(Pair.half.__doc__ or "") == (
        "Do as :meth:`whole`, with its arguments.\n\nArgs:\n    two: The second,\n        on two lines.\n\n"
        "Returns:\n    A text.\n\nRaises:\n    ValueError: Never."
    )


# --- programs whose output is no longer read, as in ``ucch-bench | head`` --------------------------------------------

#: Every program that is installed, with arguments that make it print.
PROGRAMS = {
    "bench": ["ucc_hetero.bench", "report", "--help"], "bench unbuffered": ["ucc_hetero.bench"],
    "ucc_hetero": ["ucc_hetero", "plan", "allreduce", "1M", "--vendors", "nvidia:2,amd:2"],
    "doctor": ["ucc_hetero.launch.doctor", "--json"], "run": ["ucc_hetero.launch", "--dry-run", "-np", "2", "true"],
    "emulate": ["ucc_hetero.launch.emulate", "--help"],
}  # fmt: skip


def run_unread(words, unbuffered):
    """Run a module as a program whose standard output is closed from the start."""
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, text=True,
            env=env, cwd=ROOT, timeout=600, check=False,
        )  # fmt: skip
    finally:
        os.close(write)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_end_quietly_without_a_reader(program):
    """Also if every line is written at once."""
    done = run_unread(PROGRAMS[program], "1" if program == "bench unbuffered" else "")
    assert (done.returncode, done.stderr) == (CLOSED, ""), done


def test_a_broken_pipe_to_anything_else_is_an_error():
    @ends_with_its_reader
    def talks_to_nobody(arguments=None):
        read, write = os.pipe()
        os.close(read)
        try:
            os.write(write, b"x")
        finally:
            os.close(write)
        return 0

    assert not closed_outputs()
    with pytest.raises(BrokenPipeError):
        talks_to_nobody()


def test_the_status_is_passed_on_and_the_signal_stays_ignored():
    assert ends_with_its_reader(lambda arguments: 7)([]) == 7
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN


def test_a_module_that_is_gone_is_not_installed(tmp_path):
    """pip builds in the clone, and leaves its build folder there."""
    stale = tmp_path / "ucc_hetero" / "gone.py"
    stale.parent.mkdir()
    stale.touch()
    words = ["setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "ucc_hetero" / "env.py").exists() and not stale.exists()
