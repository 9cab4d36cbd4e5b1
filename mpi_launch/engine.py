"""The words that run a program in a container: docker, podman or apptainer, with a vendor's devices."""

from __future__ import annotations

import shlex

from ..machine.vendors import VENDORS
from .cluster import VendorPart

__all__ = ["command"]


def command(part: VendorPart, vendor: str, cwd: str, user: tuple[int, int]) -> str:
    """The engine's command up to the image; ``{env}`` stands where the rank's variables are to be named.

    The container shares network, processes and System V memory with the host, so that ranks in several containers of
    one host are one node to UCX; it may read its neighbours' memory (CMA) and pin as much as it likes.
    """
    devices = VENDORS[vendor].containers.get(part.runtime, ())
    if part.runtime == "apptainer":
        words = ["apptainer", "exec", *devices, "--bind", cwd, "--pwd", cwd, *part.runtime_args, part.image]
        return shlex.join(words)
    words = [part.runtime, "run", "--rm", "--network=host", "--ipc=host", "--pid=host"]
    words += ["--ulimit=memlock=-1:-1", "--cap-add=SYS_PTRACE", *devices]
    if part.runtime == "podman":
        words += ["--userns=keep-id", "--group-add=keep-groups"]
    else:
        words += [f"--user={user[0]}:{user[1]}"]
    # MPI's sockets are below /tmp.
    words += ["--volume=/tmp:/tmp", f"--volume={cwd}:{cwd}", f"--workdir={cwd}"]
    return shlex.join([*words, "{env}", *part.runtime_args, part.image]).replace("'{env}'", "{env}")
