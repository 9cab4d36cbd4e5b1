"""Loads the sanitized build of the native engine in every Python that tests/sanitize/run.py starts, even indirectly.

That program puts this folder first in PYTHONPATH; the interpreter imports a module of this name automatically. A Python
without the sanitizer's library restarts itself with it. Other programs run without it: shells crash with libtsan, and
MPI's launcher is not under test.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

NATIVE = "ucc_hetero._native"
NUMPY = "numpy._core._multiarray_umath"

#: Index of PyDataMem_GetHandler in numpy's C interface, and the offset of the allocator's functions in
#: PyDataMem_Handler: after a name of 127 bytes, a version byte and the context.
GET_HANDLER, FUNCTIONS = 305, 127 + 1 + ctypes.sizeof(ctypes.c_void_p)


def address_in(capsule, name):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


def keep_no_blocks(numpy_core):
    """Make numpy's default memory handler call blocks.c, in all threads."""
    table = address_in(numpy_core._ARRAY_API, None)
    get_handler = ctypes.PYFUNCTYPE(ctypes.py_object)(ctypes.c_void_p.from_address(table + 8 * GET_HANDLER).value)
    functions = address_in(get_handler(), b"mem_handler") + FUNCTIONS
    blocks = ctypes.CDLL(os.environ["SANITIZED_BLOCKS"])
    for i, name in enumerate(("malloc", "calloc", "realloc", "free")):
        place = ctypes.c_void_p.from_address(functions + 8 * i)
        place.value = ctypes.cast(getattr(blocks, f"blocks_{name}"), ctypes.c_void_p).value


class Sanitized(importlib.abc.MetaPathFinder):
    """Finds the extension at $SANITIZED_EXTENSION, and notices the import of numpy."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == NATIVE:
            return importlib.util.spec_from_file_location(NATIVE, os.environ["SANITIZED_EXTENSION"])
        if fullname != NUMPY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def then_keep_no_blocks(module):
            execute(module)
            keep_no_blocks(module)

        spec.loader.exec_module = then_keep_no_blocks
        return spec


SANITIZER, PRELOADED = os.environ["SANITIZER"], os.environ.get("LD_PRELOAD", "").split(":")
if SANITIZER not in PRELOADED and SANITIZER not in Path("/proc/self/maps").read_text():
    os.environ["LD_PRELOAD"] = ":".join([SANITIZER, *filter(None, PRELOADED)])
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
os.environ.pop("LD_PRELOAD", None)
if others := [name for name in PRELOADED if name not in ("", SANITIZER)]:
    os.environ["LD_PRELOAD"] = ":".join(others)
sys.meta_path.insert(0, Sanitized())
