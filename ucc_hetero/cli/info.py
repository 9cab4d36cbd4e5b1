"""``python -m ucc_hetero info``: installed versions, loaded libraries, and their paths."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path
from typing import Any

from .. import env
from .._version import __version__
from ..bindings import ucc
from ..errors import counted
from ..machine.discover import cores, host_identity
from ..machine.fabric import fabric_of
from ..machine.vendors import VENDORS
from ..native.libraries import load
from ..transport.wires import describe, survey


def components(ucc_path: str) -> list[str]:
    """Components beside libucc: ``tl/ucp``, ``mc/cuda``, ... (libucc loads them from that folder only)."""
    files = Path(ucc_path).resolve().parent.glob("ucc/libucc_*.so")
    names = (re.fullmatch(r"libucc_(cl|tl|mc|ec)_(\w+)", f.stem) for f in files)
    return sorted(f"{n[1]}/{n[2]}" for n in names if n)


def _mpi() -> dict[str, Any]:
    import mpi4py
    from mpi4py import MPI

    return {
        "mpi4py": mpi4py.__version__,
        "library": MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 "),
        "threads": {
            MPI.THREAD_SINGLE: "single",
            MPI.THREAD_FUNNELED: "funneled",
            MPI.THREAD_SERIALIZED: "serialized",
            MPI.THREAD_MULTIPLE: "multiple",
        }.get(MPI.Query_thread(), "unknown"),
    }


def fabrics() -> dict[str, str]:
    return {name: fabric_of(name, env.get("FABRIC")).describe() for name, row in VENDORS.items() if row.network}


def collect() -> dict[str, Any]:
    """Collect everything as plain data. Raises :class:`LibraryNotFound` if UCC or UCX cannot be loaded."""
    libraries = load()
    memory, transports = survey()
    with ucc.Lib("UCC") as library:
        attributes = library.attributes()
    return {
        "ucc_hetero": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "host": f"{host_identity().hostname}, {counted(cores(), 'core')}, {platform.machine()}",
        "ucc": {
            "version": libraries.ucc_version,
            "path": libraries.ucc_path,
            "components": components(libraries.ucc_path),
            "collectives": [c.lower() for c in attributes["collectives"]],
        },
        "ucx": {
            "version": libraries.ucx_version,
            "path": libraries.ucx_path,
            "memory types": memory,
            "transports": [f"{name} ({', '.join(devices)})" for name, devices in transports.items()],
        },
        "transport": describe(transports),
        "fabric": fabrics(),
        "mpi": _mpi(),
        "notes": list(libraries.notes),
    }


def render(facts: dict[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines.append(name)
            lines += [f"  {k + ':':<16} {_text(v)}" for k, v in value.items()]
        elif isinstance(value, list):
            lines += [f"note: {v}" for v in value] if name == "notes" else [f"{name}: {_text(value)}"]
        else:
            lines.append(f"{name + ':':<16} {value}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
