"""The folders of docs/design.md are layers: imports go downwards only, and what belongs to one stays there."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ucc_hetero"

#: The folders and modules of ucc_hetero, lowest first. A module imports from its own folder and from lower rows only.
ROWS = (
    {"_version", "env", "errors", "installed", "log", "stdio", "types", "machine", "_native"},
    {"planner", "buffers", "native"},
    {"trace", "device", "bindings"},
    {"transport"},
    {"rma"},
    {"vllm"},
    {"bootstrap"},
    {"engine"},
    {"calls"},
    {"api"},
    {""},  # ucc_hetero/__init__.py
    {"torch", "cli", "ucc", "ucx"},
    {"__main__", "bench", "launch"},
)
LAYERS = {name: height for height, row in enumerate(ROWS) for name in row}
#: Modules that may be imported from anywhere, and import from each other.
VOCABULARY = ROWS[0]

#: The planner computes; it neither communicates nor touches devices. Of the machine it has the vendors' rows.
PURE = {"_version", "env", "errors", "installed", "log", "machine", "types", "planner"}
IMPURE = {"cffi", "ctypes", "cupy", "mpi4py", "torch"}

#: Where a vendor's words may appear (outside comments and docstrings), and why.
VENDOR_WORDS_IN = {
    "machine.vendors": "the rows",
    "machine.nvlink": "NVIDIA's driver and NVML",
    "bindings.ucc_enums": "names of UCC's memory types",
    "bootstrap.agreement": "names of UCC's components in its settings",
    "native.libraries": "the wheel that libucc comes in",
}
VENDOR_WORDS = re.compile(r"(?i:cuda|rocm|nvml|amdsmi)|(?<![A-Za-z])(?:hip|HIP)(?![a-z])|^['\"](?:amd|nvidia)['\"]$")


#: Folders of the repository, and the packages that they are.
TREES = {"ucc_hetero": "ucc_hetero", "benchmarks": "ucc_hetero.bench", "mpi_launch": "ucc_hetero.launch"}
#: (file, what it names in annotations although that imports it): the circles that are left. None is to be added.
FOR_TYPES = {
    ("ucc_hetero.calls.program_cache", "ucc_hetero.calls.prepare"),
    ("ucc_hetero.calls.shutdown", "ucc_hetero.calls.dispatch"),
    ("ucc_hetero.calls.verification", "ucc_hetero.calls.dispatch"),
    ("ucc_hetero.rma.endpoint", "ucc_hetero.rma.worker"),
    ("ucc_hetero.torch.futures", "ucc_hetero.torch.work"),
    ("ucc_hetero.torch.ranges", "ucc_hetero.torch.dispatch"),
    ("ucc_hetero.torch.sparse", "ucc_hetero.torch.collectives"),
    ("ucc_hetero.torch.streams", "ucc_hetero.torch.futures"),
    ("ucc_hetero.torch.work", "ucc_hetero.torch.dispatch"),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below ucc_hetero; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """The entry of ROWS that a dotted name below ucc_hetero belongs to."""
    return name.partition(".")[0]


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, also those inside functions."""
    package, found = ["ucc_hetero", *path.relative_to(PACKAGE).parts[:-1]], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


def internal(path: Path) -> Iterator[tuple[int, str]]:
    """(line, entry of ROWS) of every import of a part of ucc_hetero."""
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        if top == "ucc_hetero":
            # "from ucc_hetero import Communicator" names no module: it imports the package itself.
            known = part_of(rest)
            yield line, known if known in LAYERS or (PACKAGE / f"{known}.py").exists() else ""


def test_every_module_has_a_layer() -> None:
    without = [name_of(path) for path in sources() if part_of(name_of(path)) not in LAYERS]
    assert not without, "say in ROWS, and in docs/design.md, where these modules belong"


def test_imports_go_downwards() -> None:
    upwards = [
        f"{path.relative_to(ROOT)}:{line}: {name or 'ucc_hetero'}"
        for path in sources()
        for own in [part_of(name_of(path))]
        for line, name in internal(path)
        if name != own and LAYERS[name] >= LAYERS[own] and not {name, own} <= VOCABULARY
    ]
    assert not upwards, "imports from above or beside"


def test_only_native_imports_the_extension() -> None:
    found = [path for path in sources() if "_native" in {name for _, name in internal(path)}]
    assert {part_of(name_of(path)) for path in found} == {"native"}


def test_core_is_pure() -> None:
    core = [path for path in sources() if part_of(name_of(path)) in PURE]
    assert not [path for path in core if {name.partition(".")[0] for _, name in imports(path)} & IMPURE]
    assert not [path for path in core if {name for _, name in internal(path)} - PURE]


def test_only_the_backend_imports_torch() -> None:
    found = [path for path in sources() if "torch" in {name.partition(".")[0] for _, name in imports(path)}]
    assert {part_of(name_of(path)) for path in found} == {"torch"}


def code_words(text: str) -> Iterator[tuple[int, str]]:
    """(line, token) of everything but comments and docstrings."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and token.start[0] not in prose:
            yield token.start[0], token.string


def test_vendor_words_stay_in_the_rows() -> None:
    found = {
        name_of(path): words
        for path in sources()
        if (words := [word for word in code_words(path.read_text()) if VENDOR_WORDS.search(word[1])])
    }
    assert found.keys() == VENDOR_WORDS_IN.keys(), f"vendor words belong in machine/vendors.py: {found}"


def modules() -> dict[str, tuple[Path, list[str]]]:
    """Every module of the three trees: its file, and the package that its relative imports begin in."""
    found = {}
    for folder, package in TREES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path, parts[:-1]
    return found


def imported(nodes: Iterator[ast.AST], package: list[str], known: set[str]) -> set[str]:
    """The known modules that these nodes import; a name from a package stands for the package's module of that name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= names & known or {source}
    return found & known


def under_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                yield from ast.walk(each)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle of imports; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circles_between_files() -> None:
    found = modules()
    known = set(found) - {"ucc_hetero"}  # the package itself, in whose place users name it
    trees = {name: ast.parse(found[name][0].read_text()) for name in known}
    edges = {name: imported(ast.walk(tree), found[name][1], known) - {name} for name, tree in trees.items()}
    for name, other in FOR_TYPES:
        assert other in imported(under_type_checking(trees[name]), found[name][1], known), f"{name}: strike it out"
        edges[name].discard(other)
    assert not circle(edges)
