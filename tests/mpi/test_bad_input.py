"""Bad input of every kind raises a clear exception and never hangs; if one rank can know, nothing is sent."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from crews import program

ROOT = Path(__file__).resolve().parents[2]


def fake_library(compiled, library, version, *, without=""):
    """A library with libucc's functions, which do nothing, and a chosen version."""
    table = (ROOT / "cffi_build" / "abi" / "symbols.h").read_text()
    names = set(re.findall(r"^UCC_(?:VOID_)?SYMBOL\([\w *]+?,? ?\*?(ucc_\w+),", table, re.M))
    names |= set(re.findall(r"(?<![\w])(ucc_[a-z_]+), \(", table))
    assert len(names) > 20 and {without} - {""} <= names
    names -= {"ucc_get_version_string", "ucc_get_version", without}
    code = "\n".join(f"int {name}(void) {{ return -2; }}" for name in sorted(names))
    major, minor = version.split(".")
    code += f'\nconst char *ucc_get_version_string(void) {{ return "{version}"; }}\n'
    code += f"void ucc_get_version(unsigned *a, unsigned *b) {{ *a = {major}; *b = {minor}; }}\n"
    source = library.with_name("fake.c")
    source.write_text(code)
    compiled(library, "-shared", "-fPIC", "-w", source)


@pytest.mark.parametrize(("version", "without", "said"), [
    (None, "", "libucc.so.1 does not exist"), ("", "", "LibraryNotFound: libucc could not be loaded"),
    ("1.0", "", "is UCC 1.0; 1.1 or newer is needed"), ("1.4", "ucc_team_create_post", "ucc_team_create_post"),
], ids=["no file", "no library", "too old", "lacks a function"])  # fmt: skip
def test_a_library_that_will_not_do(compiled, tmp_path, request, version, without, said):
    """With one rank, started without mpirun; several ranks are tested below."""
    library = tmp_path / "libucc.so.1"
    if version:
        fake_library(compiled, library, version, without=without)
    elif version is not None:
        library.write_text("not an ELF file")
    env = {**os.environ, "UCCH_UCC_LIB": str(library)}
    words = [sys.executable, *program(tmp_path, "script_cases:refused", [{}], request.path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.count(said) == 1 and "[ucc]" in done.stdout, done.stdout + done.stderr


def test_library_missing_on_one_rank(mpirun, tmp_path):
    """No rank waits for the one without the library."""
    job = mpirun("script_cases:refused", 3, args=[{"UCCH_UCC_LIB": [None, str(tmp_path / "libucc.so.1"), None]}])
    assert job.stdout.count("AgreementError: some ranks of this job cannot take part") == 3, job.output
    assert "rank 1: LibraryNotFound" in job.stdout


def test_a_wrong_setting_is_said_once(mpirun):
    """The first rank prints it for all, below the user's line and this package's frame."""
    wrong, who = random.choice([("012", "all 3 ranks"), ("1", "rank 1")])
    values = {"UCCH_TIMEOUT": ["abc" if str(rank) in wrong else None for rank in range(3)]}
    job = mpirun("script_cases:opened", 3, args=[values], check=False)
    said = f"ValueError: UCCH_TIMEOUT: 'abc' is not a number of seconds, or inf (on {who})"
    assert job.returncode != 0 and job.output.count(said) == 1, job.output
    assert re.findall(r"ucc_hetero/\w+/\w+\.py", job.output) == ["ucc_hetero/api/comm.py"], job.output
