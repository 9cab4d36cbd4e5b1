"""The runner of the suite's lanes: what passes alone is unsteady, and everything else that goes wrong fails the run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import os
from pathlib import Path

def test_right():
    pass

def test_wrong():
    assert os.environ.get("WRONG") != "always"

def test_unsteady():
    before = Path(f"{__file__}.before")
    if not before.exists() and os.environ.get("UNSTEADY"):
        before.touch()
        raise AssertionError("the first time")

def test_crash():
    if os.environ.get("CRASH"):
        os._exit(3)
"""


@pytest.fixture
def lanes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lanes", ROOT / ".ci" / "lanes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lanes"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("environment", "status", "said"),
    [
        ({"UNSTEADY": "1"}, 0, ["unsteady: 1 failed", "test_tiny.py::test_unsteady"]),
        ({"UNSTEADY": "1", "WRONG": "always"}, 1, ["wrong: tiny"]),
        ({"UNSTEADY": "1", "CRASH": "1"}, 1, ["wrong: tiny"]),
    ],
)
def test_verdicts(
    lanes: ModuleType, tmp_path: Path, monkeypatch, capfd, environment: dict[str, str], status: int, said: list[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    suite = tmp_path / "test_tiny.py"
    suite.write_text(SUITE)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(lanes.SUITE, "tiny", ["-c", str(tmp_path / "pytest.ini"), str(suite)])
    assert lanes.run([lanes.make_lane("tiny", tmp_path)]) == status
    output = capfd.readouterr().out
    assert all(text in output for text in said), output
