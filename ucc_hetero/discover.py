"""Facts about the machine that this process runs on, from the kernel's own files. Nothing is required to exist."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostIdentity", "cores", "host_identity"]


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """What tells hosts, and containers of one host, apart."""

    hostname: str
    boot_id: str
    #: Namespaces that must be equal for two processes to share memory and to see each other's process ids.
    ipc: str
    pid: str
    #: Device number of /dev/shm: containers with a mount of their own differ.
    shm: int

    @property
    def node(self) -> tuple[str, ...]:
        """Equal for ranks that are on one node as MPI and the fabric libraries see it."""
        return (self.hostname, self.boot_id)

    @property
    def memory(self) -> tuple[object, ...]:
        """Equal for ranks that can map the same file of /dev/shm and signal each other."""
        return (self.boot_id, self.ipc, self.pid, self.shm)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def host_identity() -> HostIdentity:
    """The identity of this process's host."""
    try:
        shm = os.stat("/dev/shm").st_dev
    except OSError:
        shm = -1
    return HostIdentity(
        hostname=socket.gethostname(),
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        ipc=_namespace("ipc"),
        pid=_namespace("pid"),
        shm=shm,
    )


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
