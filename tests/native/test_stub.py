"""The stub by which mypy checks calls of the native engine says what is in the library that was built."""

import ast
from typing import Any

from ucc_hetero.native import libraries
from ucc_hetero.native.libraries import ffi, lib

STUB = ast.parse((libraries.package_dirs("ucc_hetero")[0] / "_native.pyi").read_text())
LIB = next(node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == "Lib")


def python_type(ctype: Any, pointer: str) -> str:
    kinds = {"primitive": "float" if ctype.cname == "double" else "int", "void": "None"}
    return kinds.get(ctype.kind, pointer)


def test_names_are_those_of_the_library() -> None:
    functions = {node.name for node in LIB.body if isinstance(node, ast.FunctionDef)}
    values = {
        ast.unparse(node.target): ast.unparse(node.annotation) for node in LIB.body if isinstance(node, ast.AnnAssign)
    }
    assert functions | values.keys() == set(dir(lib))
    assert not functions & values.keys() and len(LIB.body) == len(dir(lib)), "each once"
    assert {name for name, kind in values.items() if kind == "int"} == {
        name for name in dir(lib) if isinstance(getattr(lib, name), int)
    }


def test_arguments_are_those_of_the_library() -> None:
    for node in LIB.body:
        if isinstance(node, ast.FunctionDef):
            ctype = ffi.typeof(getattr(lib, node.name))
            said = [ast.unparse(arg.annotation) for arg in node.args.posonlyargs[1:] if arg.annotation]
            assert said == [python_type(arg, "Pointer") for arg in ctype.args], node.name
            assert node.returns and ast.unparse(node.returns) == python_type(ctype.result, "CData"), node.name
