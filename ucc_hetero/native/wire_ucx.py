"""The libucp of the network threads: it needs no device's transports, so it may be another than libucc's.

The wheels' UCX has no InfiniBand. Where the host's ports need it, one that has is opened beside libucc's: yours
(``UCCH_WIRE_UCX_DIR``), the site's, or that of the wheel ``nixl-cu12``, whose files have names of their own.

A second file with the soname of one that is in the process gets mixed up with it: its dependencies are looked up by
soname. So a family of the usual names is copied, with other names of the same length in its sonames, and opened there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from .. import env
from ..machine.rdma import MODULES
from .libraries import ffi, lib, mapped, package_dirs

#: Files with the usual names, each after those that it needs; of the modules, those for RDMA alone.
_FAMILY = ("libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0")
_NAMES = re.compile(rb"(?<=\0)libuc(?=[mpst]\w*\.so\.0)")
#: Settings that libucs reads when it is loaded, and only then: two libraries must not both watch the process's memory
#: (slots are registered once) or its signals, and modules of devices are not for threads that call no driver.
_QUIET = {"UCX_MEM_EVENTS": "n", "UCX_ERROR_SIGNALS": "", "UCX_MODULES": "ib,mlx5,efa"}
_letters = iter(b"abdefghijkmnopqrstvwxyz")


class WireUCX(NamedTuple):
    """A libucp of the network threads' own: its file, its version, and where it was found."""

    path: str
    version: str
    origin: str


def folders() -> list[tuple[str, Path]]:
    """(where from, folder of the libraries), best first."""
    if explicit := env.get("WIRE_UCX_DIR"):
        base = Path(explicit)
        return [("UCCH_WIRE_UCX_DIR", base / "lib" if _libucp(base) is None else base)]
    usual = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/local/lib")
    paths = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    hpcx = os.environ.get("HPCX_UCX_DIR", "")
    return [
        *([("HPC-X", Path(hpcx) / "lib")] if hpcx else []),
        *(("the site", Path(path)) for path in (*paths, *usual)),
        *(("the nixl-cu12 wheel", d.parent / "nixl_cu12.libs") for d in package_dirs("nixl_cu12")),
    ]


def _libucp(folder: Path) -> Path | None:
    return next(iter([*folder.glob("libucp.so.0"), *sorted(folder.glob("libucp-*.so.*"))]), None)


def _lacks(folder: Path, kinds: Collection[str]) -> str:
    """The reason why this folder's UCX is nothing for ports of these kinds, empty where it may be."""
    file = _libucp(folder)
    if file is None:
        return f"{folder} has no libucp"
    if (first := mapped("libucp.so")) and os.path.samefile(first, file):
        return f"{file} is libucc's"
    needed = {MODULES[kind] for kind in kinds}
    missing = sorted(name for name in needed if not any((folder / "ucx").glob(f"libuct_{name}.so*")))
    return f"{folder}/ucx has no libuct_{missing[0]}" if missing else ""


def _renamed(folder: Path, into: Path) -> Path:
    """Copies of a family under sonames that no other in the process has; its folder."""
    prefix = b"lib%cc" % next(_letters)
    (into / "ucx").mkdir()
    for file in (*(folder / name for name in _FAMILY), *(folder / "ucx").glob("libuct_ib*.so.0")):
        (into / file.relative_to(folder)).write_bytes(_NAMES.sub(prefix, file.read_bytes()))
    return into


def _load(folder: Path) -> str:
    """Load a folder's family beside libucc's; the reason where it cannot be."""
    file = _libucp(folder)
    needed = [folder / name for name in _FAMILY[:-1]] if file and file.name == _FAMILY[-1] else []
    with env.meanwhile(_QUIET | {"UCX_MODULE_DIR": str(folder / "ucx")}):
        failed = any(lib.ucch_preload_lazily(str(path).encode()) for path in needed)
        failed = failed or bool(lib.ucch_load_wire_ucp(str(file).encode()))
    return str(ffi.string(lib.ucch_load_error()).decode(errors="replace")) if failed else ""


def _try(folder: Path, kinds: Collection[str], probe: Callable[[], str]) -> str:
    """Load and probe a folder's family; the reason where it is not to be used."""
    if why := _lacks(folder, kinds):
        return why
    if hasattr(ctypes.CDLL(None), "ucp_init_version"):
        return "UCX's functions are visible to all libraries of this process, and a second UCX would call them"
    with tempfile.TemporaryDirectory(prefix="ucch-ucx-") as copies:
        usual = (folder / _FAMILY[-1]).exists()
        try:
            why = _load(_renamed(folder, Path(copies)) if usual else folder)
        except OSError as error:
            return f"{folder} could not be copied: {error}"
        return why or probe()  # which loads the modules


def find(kinds: Collection[str], probe: Callable[[], str]) -> tuple[WireUCX | None, list[str]]:
    """A libucp for ports of these kinds, loaded, and why others were passed over.

    ``probe`` says why one that was loaded is not to be used, if so. Meanwhile wires use it.
    """
    notes: list[str] = []
    for origin, folder in folders():
        lib.ucch_wire_use(1)
        try:
            why = _try(folder, kinds, probe)
            version = "" if why else str(ffi.string(lib.ucch_ucp_version(1)).decode())
        finally:
            lib.ucch_wire_use(0)
        if not why:
            return WireUCX(str(_libucp(folder)), version, origin), notes
        if _libucp(folder) or origin == "UCCH_WIRE_UCX_DIR":
            notes.append(f"{origin}: {why}")
    return None, notes
