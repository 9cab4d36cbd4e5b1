"""Finds the program that starts ranks: ``mpirun`` of Open MPI or Hydra, or Slurm's ``srun``."""

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


class LauncherError(RuntimeError):
    """No launcher was found. The message lists what was tried."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher: ``openmpi``, ``hydra`` or ``srun``, with its path; ``major``: its major version."""

    kind: str
    major: int
    path: str
    version: str = ""


#: Kind of launcher -> what it prints for --version, with the version and its first number.
_BANNERS = {
    "openmpi": re.compile(r"\((?:Open MPI|OpenRTE)\) ((\d+)[\w.]*)"),
    "hydra": re.compile(r"HYDRA.*?Version:\s+((\d+)[\w.]*)", re.S),
    "srun": re.compile(r"\Aslurm(?:-wlm)? ((\d+)[\w.]*)"),
}


def identify(path: str, banner: str) -> Launcher | None:
    """Kind of a launcher, from the output of --version; None if it is unknown."""
    found = ((kind, pattern.search(banner)) for kind, pattern in _BANNERS.items())
    return next((Launcher(kind, int(each[2]), path, each[1]) for kind, each in found if each), None)


def _ask(path: str) -> Launcher | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return identify(path, done.stdout + done.stderr)


def _candidates(environ: Mapping[str, str]) -> list[str]:
    """``$MPIRUN``, srun in an allocation, programs beside this interpreter, programs on the PATH."""
    explicit = environ.get("MPIRUN")
    if explicit:
        return [shutil.which(explicit) or explicit]
    inside = [shutil.which("srun")] if environ.get("SLURM_JOB_ID") else []
    beside = Path(sys.executable).parent / "mpirun"
    found = [*inside, str(beside) if beside.exists() else None, *(shutil.which(n) for n in ("mpirun", "mpiexec"))]
    return list(dict.fromkeys(path for path in found if path))


def find(environ: Mapping[str, str] | None = None) -> Launcher:
    """The first usable launcher. ``LauncherError`` lists what was tried, and how to get one."""
    environ = os.environ if environ is None else environ
    seen = []
    for path in _candidates(environ):
        found = _ask(path)
        if found is not None:
            return found
        seen.append(f"{path} is {'not a launcher that ucch-run knows' if shutil.which(path) else 'not a program'}")
    if environ.get("MPIRUN"):
        raise LauncherError(f"MPIRUN={environ['MPIRUN']}: {seen[0]}: name another mpirun or srun, or unset it")
    raise LauncherError(
        f"no mpirun found ({'; '.join(seen) or 'none on the PATH'}): install one ({extra('mpi')}), or name it in MPIRUN"
    )
