"""The folders of the native engine are layers: calls go downwards only."""

import itertools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "cffi_build"
#: Lowest first. Headers of declarations alone may be used anywhere: the functions that Python calls, which each folder
#: defines its part of, and the structs shared with kernels.
FOLDERS = ("abi", "base", "net", "gpu", "shm", "p2p", "rma", "coll", "python")
HEADERS_FOR_ALL = ("api", "kernels")

#: Functions that glibc has only since 2.29: Enterprise Linux 8 has 2.28, which libucx's wheels need.
NEWER = {
    "gettid", "tgkill", "pthread_cond_clockwait", "pthread_mutex_clocklock", "pidfd_open", "close_range", "closefrom",
    "epoll_pwait2", "getdents64", "strlcpy", "strlcat", "process_madvise",
}  # fmt: skip
PROSE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)


def files(suffix):
    """Files of the engine by their names below ``cffi_build``, without the suffix."""
    return {str(path.relative_to(ENGINE).with_suffix("")): path for path in sorted(ENGINE.rglob(f"*{suffix}"))}


def above(user, owner):
    """True if the folder of the owner is higher than the user's."""
    return FOLDERS.index(user.partition("/")[0]) < FOLDERS.index(owner.partition("/")[0])


@pytest.fixture(scope="module")
def uses():
    """Return (user, owner) -> the owner's functions that the user names, outside comments and strings."""
    texts = {name: PROSE.sub(" ", path.read_text()) for name, path in files(".c").items()}
    defined = re.compile(r"^(?!static\b)[a-z_][\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)
    owners = {function: name for name, text in texts.items() for function in defined.findall(text)}
    found = {}
    for name, text in texts.items():
        for word in set(re.findall(r"\w+", text)) & owners.keys():
            if owners[word] != name:
                found.setdefault((name, owners[word]), set()).add(word)
    assert len(found) > 100, "functions are found"
    return found


def test_no_file_uses_what_is_above_it(uses):
    assert not {pair: names for pair, names in uses.items() if above(*pair)}


def test_no_files_use_each_other_in_a_circle(uses):
    graph = {}
    for user, owner in uses:
        graph.setdefault(user, set()).add(owner)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError([(a, b, uses[a, b]) for a, b in itertools.pairwise(error.args[1][::-1])]) from None


def test_no_header_of_a_higher_folder_is_included():
    for name, path in [*files(".c").items(), *files(".h").items()]:
        for included, folder in re.findall(r'^#include "((\w+)/[^"]+)"', path.read_text(), re.M):
            if {name.partition("/")[0], folder}.isdisjoint(HEADERS_FOR_ALL):
                assert not above(name, included), f"{path} includes {included}"


def test_the_engine_needs_no_newer_libc():
    for path in files(".c").values():
        words = set(re.findall(r"\w+(?=\()", PROSE.sub(" ", path.read_text())))
        assert not words & NEWER, path
