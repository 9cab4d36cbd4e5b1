"""The folders of the native engine are layers: by the symbols of its objects, calls go downwards only."""

import itertools
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "cffi_build"
KERNELS = ROOT / "ucc_hetero" / "device" / "kernels"
INCLUDES = (f"-I{ENGINE}", f"-I{KERNELS.parent}", f"-I{sysconfig.get_path('include')}")
#: Lowest first. Declarations alone are for all: what Python sees, which each folder defines its part of, and what
#: kernels share.
FOLDERS = ("abi", "base", "net", "gpu", "shm", "p2p", "rma", "coll", "python")
HEADERS_FOR_ALL = ("api", "kernels")

#: (user, owner) -> the symbols of the owner's that the user's object needs
Uses = Mapping[tuple[str, str], set[str]]


def folder_of(name: str) -> str:
    return name.partition("/")[0]


def files(suffix: str) -> dict[str, Path]:
    """Files of the engine by their names below ``cffi_build``, without the suffix."""
    return {str(path.relative_to(ENGINE).with_suffix("")): path for path in sorted(ENGINE.rglob(f"*{suffix}"))}


def objects(into: Path) -> dict[str, Path]:
    """An object of every source: those of the last build, and compiled here where that is older or lacks one."""
    sources = files(".c")
    newest = max(path.stat().st_mtime for path in [*files(".h").values(), *KERNELS.glob("*.h")])
    built = sorted(ROOT.glob("build/temp*/cffi_build"), key=lambda folder: folder.stat().st_mtime)
    found, missing = {}, []
    for name, source in sources.items():
        path = built[-1] / f"{name}.o" if built else None
        if path and path.exists() and path.stat().st_mtime > max(newest, source.stat().st_mtime):
            found[name] = path
        else:
            found[name] = into / f"{name.replace('/', '.')}.o"
            missing.append((source, found[name]))
    for source, path in missing:
        subprocess.run(["gcc", "-std=gnu11", "-O0", *INCLUDES, "-c", source, "-o", path], check=True)
    return found


def symbols(objects: Mapping[str, Path]) -> Iterator[tuple[str, str, bool]]:
    """(file, symbol, whether it is defined there) of all symbols that objects share."""
    names = {str(path): name for name, path in objects.items()}
    listing = subprocess.run(["nm", "-A", "-P", "-g", *names], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        path, symbol, kind = line.rsplit(": ", 1)[0], *line.rsplit(": ", 1)[1].split()[:2]
        yield names[path], symbol, kind != "U"


def uses_of(objects: Mapping[str, Path]) -> Uses:
    """Which file uses which other one of the engine's, and what of it."""
    table = list(symbols(objects))
    owners = {symbol: name for name, symbol, is_defined in table if is_defined}
    uses: dict[tuple[str, str], set[str]] = {}
    for name, symbol, is_defined in table:
        if not is_defined and symbol in owners:
            uses.setdefault((name, owners[symbol]), set()).add(symbol)
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
def uses(tmp_path_factory: pytest.TempPathFactory) -> Uses:
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    return uses_of(objects(tmp_path_factory.mktemp("objects")))


def test_no_file_uses_what_is_above_it(uses: Uses) -> None:
    assert len(uses) > 50, "the objects share symbols"
    assert not upwards(uses), "\n".join(upwards(uses))


def test_no_files_use_each_other_in_a_circle(uses: Uses) -> None:
    assert not circle(uses), "\n".join(circle(uses))


def test_no_header_of_a_higher_folder_is_included() -> None:
    assert not list(raised_headers()), "\n".join(raised_headers())
