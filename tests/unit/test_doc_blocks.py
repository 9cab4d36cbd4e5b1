"""Blocks of code in the pages: YAML is read, Python compiles, and our programs take the options that they get.

A block that is a part of something, and cannot stand alone, has `<!-- a part -->` in the line before it.
"""

import argparse
import importlib
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ucc_hetero.launch import cluster

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {each.name: each for each in entry_points(group="console_scripts") if each.name.startswith("ucch-")}


def blocks(*languages: str) -> list[Any]:
    """The text of every block in one of these languages, named by its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^([^\n]*)\n+```(\w+)\n(.*?)^```", text, re.M | re.S):
            if block[2] in languages and block[1] != "<!-- a part -->":
                line = text.count("\n", 0, block.start(3)) + 1
                found.append(pytest.param(block[3], id=f"{page.name}:{line}"))
    return found


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml(text: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs yaml: pip install '.[launch]'")
    cluster.parse(yaml.safe_load(text), environ={})


@pytest.mark.parametrize("text", blocks("python"))
def test_python(text: str) -> None:
    compile(text, "block", "exec", dont_inherit=True)


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], bool]:
    """Call as ``parses(program)``: True if a program takes ``sys.argv``, which it then does nothing with."""
    usual = argparse.ArgumentParser.parse_args
    taken: list[object] = []

    def parse_args(self: argparse.ArgumentParser, *given: Any, **more: Any) -> NoReturn:
        taken.append(usual(self, *given, **more))
        sys.exit(0)

    def call(program: Callable[[], object]) -> bool:
        taken.clear()
        try:
            return program() == 0  # --help of the benchmarks, which have a parser of their own
        except SystemExit:
            return bool(taken)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    return call


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, up to a pipe or the like."""
    text = re.sub(r"(^|\s)#\s.*", "", text.replace("\\\n", " "), flags=re.M)
    reader = shlex.shlex(text, posix=True, punctuation_chars="|&;<>\n")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*reader, ";"]:
        if word and set(word) <= set("|&;<>\n"):
            yield words
            words = []
        else:
            words.append(word)


def main_of(module: str) -> Any:
    """The function by which ``python -m`` this module begins."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no {module}"
    return importlib.import_module(f"{module}.__main__" if spec.submodule_search_locations else module).main


def ours(words: list[str]) -> Iterator[tuple[Callable[[], object], list[str]]]:
    """Our programs in a command, also those that another one starts, with their words."""
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        if word in PROGRAMS:
            yield PROGRAMS[word].load(), rest
        elif word == "python" and rest[:1] == ["-m"] and rest[1].startswith("ucc_hetero"):
            yield main_of(rest[1]), [*rest[2:], *["--help"] * rest[2].startswith("osu_")]
        elif word == "python" and rest and rest[0].startswith("tools/"):
            yield lambda: runpy.run_path(rest[0], run_name="__main__"), rest[1:]  # noqa: B023  called at once


@pytest.mark.parametrize("text", blocks("sh", "bash"))
def test_shell(text: str, parses: Callable[[Callable[[], object]], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(text):
        for program, words in ours(command):
            monkeypatch.setattr(sys, "argv", ["program", *words])
            assert parses(program), command
