"""The folders of docs/design.md are layers: imports go downwards only, and what belongs to one stays there."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: The folders and modules of ucc_hetero, lowest first. A module imports from its own folder and from lower rows only.
ROWS = (
    {"_version", "docstrings", "env", "errors", "installed", "log", "stdio", "types", "machine", "_native"},
    {"planner", "buffers", "native"},
    {"trace", "device", "bindings"},
    {"transport"},
    {"rma"},
    {"vllm"},
    {"bootstrap"},
    {"engine"},
    {"calls"},
    {"p2p"},
    {"api"},
    {""},  # ucc_hetero/__init__.py
    {"torch", "cli", "ucc", "ucx"},
    {"__main__", "bench", "launch"},
)
LAYERS = {name: height for height, row in enumerate(ROWS) for name in row}
#: Modules that may be imported from anywhere, and import from each other.
VOCABULARY = ROWS[0]

#: The planner computes; it neither communicates nor touches devices. Of the machine it has the vendors' rows.
PURE = {"_version", "docstrings", "env", "errors", "installed", "log", "machine", "types", "planner"}
IMPURE = {"cffi", "ctypes", "cupy", "mpi4py", "torch"}

#: Where a vendor's words may appear (outside comments and docstrings), and why.
VENDOR_WORDS_IN = {
    "ucc_hetero.machine.vendors": "the rows",
    "ucc_hetero.machine.nvlink": "NVIDIA's driver and NVML",
    "ucc_hetero.bindings.ucc_enums": "names of UCC's memory types",
    "ucc_hetero.bootstrap.agreement": "names of UCC's components in its settings",
    "ucc_hetero.native.libraries": "the wheel that libucc comes in",
}
VENDOR_WORDS = re.compile(r"(?i:cuda|rocm|nvml|amdsmi)|(?<![A-Za-z])(?:hip|HIP)(?![a-z])|^['\"](?:amd|nvidia)['\"]$")


#: Folders of the repository, and the packages that they are.
TREES = {"ucc_hetero": "ucc_hetero", "benchmarks": "ucc_hetero.bench", "mpi_launch": "ucc_hetero.launch"}


def _modules() -> dict[str, tuple[ast.Module, list[str]]]:
    """Every module of the three trees: what is in its file, and the package that its relative imports begin in."""
    found = {}
    for folder, package in TREES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text()), parts[:-1]
    return found


MODULES = _modules()


def imported(name: str, tree: ast.AST) -> set[str]:
    """What a module imports within this part of it; a name from a package stands for its module of that name."""
    found, package = set(), MODULES[name][1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= names & (MODULES.keys() | {"ucc_hetero._native"}) or {source}
    return found


IMPORTS = {name: imported(name, tree) for name, (tree, _) in MODULES.items()}


def part_of(name: str) -> str:
    """The entry of ROWS that a module belongs to; "" for the package itself."""
    return name.partition(".")[2].partition(".")[0]


def parts(name: str) -> set[str]:
    """The entries of ROWS of all that a module imports."""
    return {part_of(each) for each in IMPORTS[name] if each.partition(".")[0] == "ucc_hetero"}


def tops(name: str) -> set[str]:
    """The packages that a module imports from."""
    return {each.partition(".")[0] for each in IMPORTS[name]}


def test_every_module_has_a_layer() -> None:
    without = {name for name in MODULES if part_of(name) not in LAYERS}
    assert not without, "say in ROWS, and in docs/design.md, where these modules belong"


def test_imports_go_downwards() -> None:
    upwards = [
        f"{name} imports {part or 'ucc_hetero'}"
        for name, own in [(name, part_of(name)) for name in MODULES]
        for part in parts(name) - {own}
        if LAYERS[part] >= LAYERS[own] and not {part, own} <= VOCABULARY
    ]
    assert not upwards, "imports from above or beside"


def test_what_only_some_import() -> None:
    """The extension, torch, and for the planner nothing that communicates or touches devices."""
    assert {part_of(name) for name in MODULES if "_native" in parts(name)} == {"native"}
    assert {part_of(name) for name in MODULES if "torch" in tops(name)} <= {"torch", "bench"}
    core = [name for name in MODULES if part_of(name) in PURE]
    assert not [name for name in core if tops(name) & IMPURE or parts(name) - PURE]


def words(tree: ast.AST) -> Iterator[str]:
    """Names and texts of everything but docstrings."""
    prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and id(node) not in prose and field != "type_comment":
                yield repr(value) if isinstance(node, ast.Constant) else value


def test_vendor_words_stay_in_the_rows() -> None:
    own = [name for name in MODULES if part_of(name) not in ("bench", "launch")]
    found = {name: said for name in own if (said := list(filter(VENDOR_WORDS.search, words(MODULES[name][0]))))}
    assert found.keys() == VENDOR_WORDS_IN.keys(), f"vendor words belong in machine/vendors.py: {found}"


def private_uses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Private names that a module takes from objects other than its own ``self``: (name, the whole expression)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of = ast.unparse(node.value)
            if of not in ("self", "cls", "super()") and of.partition(".")[0] not in ("torch", "c10d", "os", "sys"):
                yield node.attr, f"{of}.{node.attr}"


def test_private_names_stay_in_their_files() -> None:
    own = {
        name: {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for name, (tree, _) in MODULES.items()
    }
    anywhere = set().union(*own.values())  # others are those of libraries; so is torch's _device_types
    found = {
        name: taken
        for name, (tree, _) in MODULES.items()
        if (taken := {said for attr, said in private_uses(tree) if attr in anywhere - own[name] - {"_device_types"}})
    }
    assert not found, "give these a public name in the module that owns them"


def test_no_circles_between_files() -> None:
    known = MODULES.keys() - {"ucc_hetero"}  # the package itself, in whose place users name it
    edges = {name: IMPORTS[name] & known - {name} for name in known}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {error.args[1]}") from None
