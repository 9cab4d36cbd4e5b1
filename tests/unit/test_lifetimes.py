"""Addresses are taken of what lives on: a name or an attribute, never a temporary that is gone when they are used.

``pack(x).ptr`` is the address of memory that was given back before anybody reads it; glibc has written into it then.
Numpy keeps short blocks as they were, so tests of short arrays do not see it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for folder in ("ucc_hetero", "benchmarks", "mpi_launch", "examples") for path in (ROOT / folder).rglob("*.py")
)

#: Attributes that are addresses, or lead to one, and keep nothing alive.
ADDRESSES = {"ptr", "ctypes", "data_ptr", "__array_interface__", "__cuda_array_interface__"}
#: Functions that turn memory into an address that keeps nothing alive, and which of their arguments is the memory.
ADDRESSING = {"addressof": 0, "cast": 1, "memmove": 0}
#: Calls that make memory. A cast of their result is an address whose memory is gone at once.
OWNERS = {"new", "from_buffer", "gc", "empty", "zeros", "array", "ascontiguousarray", "frombuffer", "pack", "copy"}
#: Makes memory of an address, without its owner; DLPack's structures, and memory that HIP gave the doctor's probes,
#: have no other way in.
UNOWNED = "from_address"
MAY_READ_ADDRESSES = {"ucc_hetero/buffers/dlpack.py", "mpi_launch/doctor/amd_hip.py", "mpi_launch/doctor/amd_probes.py"}


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def lives_on(node: ast.expr) -> bool:
    """True if an expression is a name, or an attribute of one: the caller holds its object."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def makes_memory(node: ast.expr) -> bool:
    """True if an expression is memory that only it holds."""
    return isinstance(node, ast.Call) and last_name(node.func).lstrip("_") in OWNERS


def addresses_of_temporaries(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ADDRESSES and not lives_on(node.value):
            yield node.lineno, f"{ast.unparse(node)}: an address of a temporary; give it a name first"
        if isinstance(node, ast.Call):
            name = last_name(node.func).lstrip("_")
            at = ADDRESSING.get(name)
            if at is not None and at < len(node.args) and makes_memory(node.args[at]):
                yield node.lineno, f"{ast.unparse(node)}: the memory is gone after the call; give it a name first"
            if name == UNOWNED:
                yield node.lineno, f"{ast.unparse(node)}: memory without an owner; pass the Buffer"


def test_no_address_of_a_temporary() -> None:
    assert len(FILES) > 150
    found = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for line, what in addresses_of_temporaries(ast.parse(path.read_text())):
            if UNOWNED not in what or name not in MAY_READ_ADDRESSES:
                found.append(f"{name}:{line}: {what}")
    assert not found, "\n".join(found)
