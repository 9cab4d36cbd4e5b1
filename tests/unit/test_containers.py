"""What the script that builds the images would tell an engine. Nothing is built."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "containers"


@pytest.mark.parametrize("words", ["cuda", "rocm worker", "launcher --no-cache"])
def test_build(words: str) -> None:
    env = {**os.environ, "DRY_RUN": "1", "ENGINE": "podman"}
    command = [str(FOLDER / "build"), *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = shlex.split(done.stdout)
    assert found[:2] == ["podman", "build"]
    target = found[found.index("--target") + 1]
    assert f" AS {target}\n" in (ROOT / found[found.index("--file") + 1]).read_text()
    for name, version in re.findall(r"^([A-Z_]+)=(.+)$", (FOLDER / "versions.env").read_text(), re.M):
        assert f"{name}={version}" in found
