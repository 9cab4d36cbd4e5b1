"""The layers of docs/design.md: imports go downwards only, and what belongs to one layer stays there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ucc_hetero"

#: Layer of each module or subpackage of ucc_hetero. A module imports from its own layer and from lower ones.
LAYERS = {
    # The vocabulary: part of the pure core, and below everything, because all layers speak it.
    "_version": -1,
    "types": -1,
    "errors": -1,
    "env": -1,
    "log": -1,
    "stdio": -1,
    "_native": 0,
    "native": 0,
    "device": 1,
    "discover": 1,
    "nvlink": 1,
    "ports": 1,
    "vendors": 1,
    "buffers": 2,
    "topology": 3,
    "plan": 3,
    "cost": 3,
    "symbolic": 3,
    "validate": 3,
    "collectives": 3,
    "algorithms": 3,
    "tune": 3,
    "select": 3,
    "traces": 3,
    "engine": 4,
    "timeline": 4,
    "staging": 4,
    "windows": 4,
    "channels": 4,
    "instream": 4,
    "residence": 4,
    "membership": 5,
    "ucc_enums": 4,
    "placement": 4,
    "job": 4,
    "teams": 4,
    "turns": 4,
    "oob": 4,
    "ucc": 4,
    "ucx": 4,
    "agreement": 4,
    "liveness": 4,
    "ops": 5,
    "binding": 5,
    "closing": 5,
    "transfer": 5,
    "pairing": 5,
    "delegate": 5,
    "detours": 5,
    "exchange": 5,
    "failure": 5,
    "streamed": 5,
    "bounce": 5,
    "contents": 5,
    "persistent": 5,
    "prepare": 5,
    "repeated": 5,
    "runner": 5,
    "p2p": 5,
    "probe": 5,
    "status": 5,
    "comm_groups": 5,
    "comm_messages": 5,
    "lifecycle": 5,
    "comm": 5,
    "request": 5,
    "rma": 5,
    "torch": 5,
    "": 5,  # ucc_hetero/__init__.py
    # Programs on top of the API.
    "__main__": 6,
    "info": 6,
    "links": 6,
    "show": 6,
    "show_plan": 6,
    "show_topo": 6,
    "trial": 6,
    "tuner": 6,
    "tuner_pairs": 6,
    "bench": 6,
    "launch": 6,
}

#: The core computes; it neither communicates nor touches devices. Both the layer and the vocabulary.
PURE = {name for name, layer in LAYERS.items() if layer in (-1, 3)}
IMPURE = {"cffi", "ctypes", "cupy", "mpi4py", "torch"}

#: Where a vendor's words may appear (outside comments and docstrings). ucc and ucx spell those of the two libraries,
#: env the variables that name a vendor's library.
VENDOR_MODULES = {
    "nvlink",
    "agreement",
    "env",
    "_native",
    "native",
    "device",
    "discover",
    "types",
    "vendors",
    "ucc",
    "ucc_enums",
    "ucx",
    "torch",
}
VENDOR_WORDS = re.compile(r"(?i:cuda|rocm|nvml|amdsmi)|(?<![A-Za-z])(?:hip|HIP)(?![a-z])")
#: Names of protocols, which several vendors implement.
PROTOCOLS = re.compile(r"__cuda_(array_interface|stream)__")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below ucc_hetero; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """The entry of LAYERS that a dotted name below ucc_hetero belongs to."""
    return name.partition(".")[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a file, also those inside functions."""
    package = ["ucc_hetero", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def internal(path: Path) -> Iterator[tuple[int, str]]:
    """(line, entry of LAYERS) of every import of a part of ucc_hetero."""
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        if top == "ucc_hetero":
            # "from ucc_hetero import Communicator" names no module: it imports the package itself.
            known = part_of(rest)
            yield line, known if known in LAYERS or (PACKAGE / f"{known}.py").exists() else ""


@pytest.fixture(params=sources(), ids=lambda path: str(path.relative_to(ROOT)))
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_module_has_a_layer(source: Path) -> None:
    assert part_of(name_of(source)) in LAYERS, "say in LAYERS, and in docs/design.md, where this module belongs"


def test_imports_go_downwards(source: Path) -> None:
    own = LAYERS[part_of(name_of(source))]
    upwards = [f"line {line}: {name or 'ucc_hetero'}" for line, name in internal(source) if LAYERS.get(name, own) > own]
    assert not upwards, f"layer {own} imports from above"


def test_only_native_imports_the_extension(source: Path) -> None:
    if name_of(source) != "native":
        assert not [line for line, name in internal(source) if name == "_native"]


def test_core_is_pure(source: Path) -> None:
    if part_of(name_of(source)) in PURE:
        assert not {name.partition(".")[0] for _, name in imports(source)} & IMPURE
        assert not [name for _, name in internal(source) if name not in PURE]


def test_only_the_backend_imports_torch(source: Path) -> None:
    if part_of(name_of(source)) != "torch":
        assert "torch" not in {name.partition(".")[0] for _, name in imports(source)}


def code_words(text: str) -> Iterator[tuple[int, str]]:
    """(line, token) of everything but comments and docstrings."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and token.start[0] not in prose:
            yield token.start[0], token.string


def test_vendor_words_stay_in_the_device_layers(source: Path) -> None:
    if part_of(name_of(source)) in VENDOR_MODULES:
        return
    words = [
        (line, word) for line, word in code_words(source.read_text()) if VENDOR_WORDS.search(PROTOCOLS.sub("", word))
    ]
    assert not words, "vendor words belong in ucc_hetero/device and ucc_hetero/types.py"


def test_vendor_words_are_recognised() -> None:
    assert all(map(VENDOR_WORDS.search, ("kDLCUDA", "hipMalloc", "libamdhip64 hip", "nvmlInit", "ROCM_PATH", "is_hip")))
    assert not any(map(VENDOR_WORDS.search, ("relationship", "chip", "membership", "hippo", "ownership_of")))


def test_relative_and_late_imports_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "algorithms" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "def f():\n    from ..engine import run\n    from . import y\n    from ucc_hetero import Communicator\n"
    )
    assert list(internal(path)) == [(2, "engine"), (3, "algorithms"), (4, "")]
