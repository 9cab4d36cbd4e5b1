"""Rules of the source: folders are layers, private parts stay in their folder, and addresses refer to live memory."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: The folders and modules of ucc_hetero, lowest first. A module imports from its own folder and from lower rows only.
ROWS = (
    {"_version", "docstrings", "env", "errors", "installed", "log", "closed_pipe", "types", "machine", "_native"},
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

#: The planner only computes: it neither communicates nor touches devices. Of the machine it uses the vendors' rows.
PURE = {"_version", "docstrings", "env", "errors", "installed", "log", "machine", "types", "planner"}
IMPURE = {"cffi", "ctypes", "cupy", "mpi4py", "torch"}

#: Where a vendor's names may appear (outside comments and docstrings), and why.
VENDOR_WORDS_IN = {
    "ucc_hetero.machine.vendors": "the rows",
    "ucc_hetero.bindings.ucc": "names of UCC's memory types",
    "ucc_hetero.bootstrap.agreement": "names of UCC's components in its settings",
    "ucc_hetero.native.libraries": "the wheel that libucc comes in",
}
VENDOR_WORDS = re.compile(r"(?i:cuda|rocm|nvml|amdsmi)|(?<![A-Za-z])(?:hip|HIP)(?![a-z])|^['\"](?:amd|nvidia)['\"]$")

#: Folders of the repository, and their packages.
TREES = {"ucc_hetero": "ucc_hetero", "benchmarks": "ucc_hetero.bench", "mpi_launch": "ucc_hetero.launch"}


def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


def _modules():
    """Every module of the three trees: its syntax tree, and the package of its relative imports."""
    found = {}
    for folder, package in TREES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = nodes_of(path), parts[:-1]
    return found


MODULES = _modules()


def imported(name):
    found, (nodes, package) = set(), MODULES[name]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= names & (MODULES.keys() | {"ucc_hetero._native"}) or {source}
    return found


IMPORTS = {name: imported(name) for name in MODULES}


def part_of(name):
    """The entry of ROWS that a module belongs to; "" for the package itself."""
    return name.partition(".")[2].partition(".")[0]


PARTS = {name: {part_of(each) for each in IMPORTS[name] if each.split(".")[0] == "ucc_hetero"} for name in MODULES}
TOPS = {name: {each.partition(".")[0] for each in IMPORTS[name]} for name in MODULES}


def test_imports_go_downwards():
    without = {name for name in MODULES if part_of(name) not in LAYERS}
    assert not without, "say in ROWS, and in docs/design.md, where these modules belong"
    upwards = [
        f"{name} imports {part or 'ucc_hetero'}"
        for name, own in [(name, part_of(name)) for name in MODULES]
        for part in PARTS[name] - {own}
        if LAYERS[part] >= LAYERS[own] and not {part, own} <= VOCABULARY
    ]
    assert not upwards, "imports from above or beside"


def test_what_only_some_import():
    """The extension, torch, and modules that communicate or touch devices, which the planner must not import."""
    assert {part_of(name) for name in MODULES if "_native" in PARTS[name]} == {"native"}
    assert {part_of(name) for name in MODULES if "torch" in TOPS[name]} <= {"torch", "bench"}
    core = [name for name in MODULES if part_of(name) in PURE]
    assert not [name for name in core if TOPS[name] & IMPURE or PARTS[name] - PURE]


def test_no_circles_between_files():
    known = MODULES.keys() - {"ucc_hetero"}  # users import the package itself
    try:
        TopologicalSorter({name: IMPORTS[name] & known - {name} for name in known}).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {error.args[1]}") from None


def words(nodes):
    """Return names and texts of everything except docstrings."""
    prose = {id(n.value) for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in nodes:
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and id(node) not in prose and field != "type_comment":
                yield repr(value) if isinstance(node, ast.Constant) else value


def test_vendor_words_stay_in_the_rows():
    own = [name for name in MODULES if part_of(name) not in ("bench", "launch")]
    found = {name: said for name in own if (said := list(filter(VENDOR_WORDS.search, words(MODULES[name][0]))))}
    assert found.keys() == VENDOR_WORDS_IN.keys(), f"vendor words belong in machine/vendors.py: {found}"


def private_uses(nodes):
    """Private names of objects other than ``self`` that a module uses: (name, whole expression)."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of = ast.unparse(node.value)
            if of not in ("self", "cls", "super()") and of.partition(".")[0] not in ("torch", "c10d", "os", "sys"):
                yield node.attr, f"{of}.{node.attr}"


def defined(nodes):
    """Names that a module defines: functions, classes, attributes and variables."""
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    found |= {node.attr for node in stored if isinstance(node, ast.Attribute)}
    return found | {node.id for node in stored if isinstance(node, ast.Name)}


def test_private_names_stay_in_their_files():
    own = {name: defined(nodes) for name, (nodes, _) in MODULES.items()}
    ours = set().union(*own.values()) - {"_device_types"}  # other names are of libraries; this one is torch's
    found = {
        name: taken
        for name, (nodes, _) in MODULES.items()
        if (taken := {said for attr, said in private_uses(nodes) if attr in ours - own[name]})
    }
    assert not found, "give these a public name in the module that owns them"


# --- addresses --------------------------------------------------------------------------------------------------------
# ``pack(x).ptr`` is the address of memory that is freed before it is read; glibc has then overwritten it. numpy keeps
# freed short blocks unchanged, so tests with short arrays do not notice.

#: Attributes that are addresses, or hold one, and keep nothing alive.
ADDRESSES = {"ptr", "ctypes", "data_ptr", "__array_interface__", "__cuda_array_interface__"}
NAMES = re.compile(r"[\w.]+")
#: Functions that turn memory into an address that keeps nothing alive, and their argument that is the memory.
ADDRESSING = {"addressof": 0, "cast": 1, "memmove": 0}
#: Calls that allocate memory. A cast of their result is an address of freed memory.
OWNERS = {"new", "from_buffer", "gc", "empty", "zeros", "array", "ascontiguousarray", "frombuffer", "pack", "copy"}
#: Modules that must make memory from an address without its owner: DLPack's structures, and HIP memory of the
#: doctor's probes.
UNOWNED_IN = {
    "ucc_hetero.buffers.dlpack", "ucc_hetero.launch.doctor.amd_hip", "ucc_hetero.launch.doctor.amd_probes",
}  # fmt: skip


def last_name(node):
    """Return the last part of a dotted name, without leading underscores."""
    return ast.unparse(node).rpartition(".")[2].lstrip("_")


def lost_addresses(name, nodes):
    """Expressions that are addresses of temporaries, or memory without an owner."""
    for node in nodes:
        lost = isinstance(node, ast.Attribute) and node.attr in ADDRESSES and not NAMES.fullmatch(ast.unparse(node))
        if isinstance(node, ast.Call):
            function = last_name(node.func)
            memory = node.args[ADDRESSING[function] :][:1] if function in ADDRESSING else []
            lost = any(isinstance(each, ast.Call) and last_name(each.func) in OWNERS for each in memory)
            lost |= function == "from_address" and name not in UNOWNED_IN
        if lost:
            yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def test_no_address_of_a_temporary():
    examples = {str(path): nodes_of(path) for path in (ROOT / "examples").rglob("*.py")}
    every = {name: nodes for name, (nodes, _) in MODULES.items()} | examples
    assert len(every) > 150
    lost = [text for name, nodes in every.items() for text in lost_addresses(name, nodes)]
    assert not lost, "give the memory a name first, or pass the Buffer"
