"""Origin of a result file: machine and versions in one line, and the command that makes such a file again."""

from __future__ import annotations

import shlex
from typing import Any

__all__ = ["origin", "reproduce"]

Data = dict[str, Any]


def _about(data: Data) -> Data:
    """The facts of a file, wherever its kind keeps them."""
    for name in ("runs", "backends"):
        for each in (data.get(name) or {}).values():
            if isinstance(each, dict) and "about" in each:
                return {**each["about"], **data}
    for name in ("small", "ddp"):
        if isinstance(data.get(name), dict) and "about" in data[name]:
            return {**data[name]["about"], **data}
    return data


def origin(data: Data) -> str:
    """Machine, versions, date and commit in one line; what is not known is left out."""
    data = _about(data)
    machine, commit, versions = data.get("machine") or {}, data.get("source") or {}, data.get("versions") or {}
    parts = []
    if machine:
        parts.append(f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores")
    if data.get("gpu"):
        parts.append(f"{data.get('ranks', '?')} × {data['gpu']}")
    known = {name: versions.get(key) for name, key in (("Python", "python"), ("UCX", "libucx-cu12"), ("MPI", "mpi"))}
    known |= {"UCC": data.get("ucc"), "UCX": known["UCX"] or data.get("ucx"), "NCCL": data.get("nccl")}
    known |= {"torch": data.get("torch") or versions.get("torch")}
    if known["MPI"]:
        known["MPI"] = known["MPI"].partition(",")[0]
    parts += [f"{name} {value}".replace("MPI Open MPI", "Open MPI") for name, value in known.items() if value]
    if data.get("date"):
        parts.append(str(data["date"])[:10])
    if commit.get("commit"):
        parts.append(f"commit {commit['commit'][:10]}" + (", changed" if commit.get("changed") else ""))
    return "; ".join(parts)


#: Programs that have another name than when they wrote a file.
_RENAMED = {"gpu_allreduce.py": "gpu_collectives.py"}
#: Settings that the package makes itself, and paths, which say where and not what.
_OWN = ("UCCHB_", "UCCHN_", "UCC_MC_CUDA_MPOOL_", "UCX_MODULE_DIR", "CUDA_MODULE_LOADING")


def reproduce(data: Data) -> str:
    """The command that makes such a file: settings, mpirun where the ranks are its own, and the words of then."""
    facts = _about(data)
    command = [str(word) for word in facts.get("command") or []]
    if not command:
        return ""
    settings = facts.get("settings") or facts.get("environment") or {}
    shown = [f"{k}={shlex.quote(v)}" for k, v in settings.items() if v and "/" not in v and not k.startswith(_OWN)]
    ranks = (facts.get("job") or {}).get("ranks")
    script = command[0].rpartition("/")[2]
    script = _RENAMED.get(script, script)
    if script.endswith(".py"):
        command = ["python", f"tools/{script}", *command[1:]]
        ranks = facts.get("ranks") if script.startswith("gpu") else None
    launcher = ["mpirun", "-np", str(ranks)] if ranks else []
    return " ".join([*shown, *launcher, *map(shlex.quote, command)])
