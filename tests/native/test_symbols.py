"""The folders of the native engine are layers: calls go downwards only."""

import itertools
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "cffi_build"
#: Lowest first. Declarations alone are for all: what Python sees, which each folder defines its part of, and what
#: kernels share.
FOLDERS = ("abi", "base", "net", "gpu", "shm", "p2p", "rma", "coll", "python")
HEADERS_FOR_ALL = ("api", "kernels")

#: (user, owner) -> the functions of the owner's that the user calls
Uses = Mapping[tuple[str, str], set[str]]


def folder_of(name: str) -> str:
    return name.partition("/")[0]


def files(suffix: str) -> dict[str, Path]:
    """Files of the engine by their names below ``cffi_build``, without the suffix."""
    return {str(path.relative_to(ENGINE).with_suffix("")): path for path in sorted(ENGINE.rglob(f"*{suffix}"))}


def code(path: Path) -> str:
    """A file without comments and texts."""
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", path.read_text(), flags=re.S)


def uses_of(sources: Mapping[str, Path]) -> Uses:
    """Which file names functions of which other one, and which of them."""
    texts = {name: code(path) for name, path in sources.items()}
    owners = {
        function: name
        for name, text in texts.items()
        for function in re.findall(r"^(?!static\b)[a-z_][\w *]*?\b(\w+)\([^;{}]*\)\s*\{", text, re.M)
    }
    uses: dict[tuple[str, str], set[str]] = {}
    for name, text in texts.items():
        for word in set(re.findall(r"\w+", text)) & owners.keys():
            if owners[word] != name:
                uses.setdefault((name, owners[word]), set()).add(word)
    return uses


def upwards(uses: Uses) -> list[str]:
    """A line for every use of a higher folder's."""
    return [
        f"{user}.c uses {', '.join(sorted(names))} of {owner}.c, which is above it"
        for (user, owner), names in sorted(uses.items())
        if FOLDERS.index(folder_of(user)) < FOLDERS.index(folder_of(owner))
    ]


def circle(uses: Uses) -> list[str]:
    """A line for every step of a circle among files, if there is one."""
    graph: dict[str, set[str]] = {}
    for user, owner in uses:
        graph.setdefault(user, set()).add(owner)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        path = error.args[1][::-1]
        return [f"{a}.c uses {', '.join(sorted(uses[a, b]))} of {b}.c" for a, b in itertools.pairwise(path)]
    return []


def raised_headers() -> Iterator[str]:
    """A line for every header that a lower folder includes."""
    for path in [*files(".c").values(), *files(".h").values()]:
        folder = folder_of(str(path.relative_to(ENGINE)))
        for included in re.findall(r'^#include "((\w+)/[^"]+)"', path.read_text(), re.M):
            if {folder, included[1]}.isdisjoint(HEADERS_FOR_ALL) and FOLDERS.index(folder) < FOLDERS.index(included[1]):
                yield f"{path.relative_to(ENGINE)} includes {included[0]}, which is above it"


@pytest.fixture(scope="module")
def uses() -> Uses:
    return uses_of(files(".c"))


def test_no_file_uses_what_is_above_it(uses: Uses) -> None:
    assert len(uses) > 150, "functions are found"
    assert not upwards(uses), "\n".join(upwards(uses))


def test_no_files_use_each_other_in_a_circle(uses: Uses) -> None:
    assert not circle(uses), "\n".join(circle(uses))


def test_no_header_of_a_higher_folder_is_included() -> None:
    assert not list(raised_headers()), "\n".join(raised_headers())
