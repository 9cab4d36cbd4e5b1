"""Emulated hosts as seen by the process that owns the cluster: their files, namespaces and commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..machine.launchers import INSIDE_A_JOB
from . import emulated_net
from .emulated_net import HostLayout

#: Command that enters new namespaces, with process 1 in them; they end with the command.
UNSHARE = [
    "unshare",
    *(f"--{kind}" for kind in ("net", "ipc", "uts", "mount", "pid", "fork", "kill-child", "mount-proc")),
]

_PYTHON = [sys.executable, "-I", "-S", str(Path(__file__).with_name("emulated_node.py"))]

#: What process 1 of a host does first: name, /dev/shm, and a /sys with the interfaces of its network namespace and the
#: machine's cgroups. $0: the host's name; $1: a folder of its own.
_BECOME_HOST = """set -e
echo "$0" >/proc/sys/kernel/hostname
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs /dev/shm
if mountpoint -q /sys/fs/cgroup; then mkdir "$1/cgroup"; mount --rbind /sys/fs/cgroup "$1/cgroup"; fi
umount -l /sys 2>/dev/null || true
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
if [ -e "$1/cgroup" ]; then mount --move "$1/cgroup" /sys/fs/cgroup; fi
"""

#: Kernel settings of every emulated host, so that speed does not depend on the machine's settings. Reno is the only
#: congestion control that every kernel allows in every namespace.
_SYSCTL = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/tcp_no_metrics_save": "1",
}

#: Variables that a login sets, directly or by the user's profile.
_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")

#: Folder of Open MPI's job files, named by process ids, which repeat on emulated hosts; so each host uses its own
#: TMPDIR. mpirun would pass this variable to the daemons of all hosts, and two of them could share a folder.
_OPEN_MPIS_FOLDER = "PRTE_MCA_prte_tmpdir_base"

#: Seconds to wait for a host to come up or go down.
_PATIENCE = 20.0

#: Maximum length of a Unix socket's path, less room for the host's name.
_LONGEST_DIRECTORY = 80


def new_directory(hosts: Sequence[HostLayout]) -> Path:
    """Make the cluster's directory: hostfiles, ``/etc/hosts``, launch agent, sockets, temporary files."""
    base = None if len(tempfile.gettempdir()) < _LONGEST_DIRECTORY - 24 else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="ucch-emulate-", dir=base))
    (directory / "hostfile").write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
    (directory / "machinefile").write_text("".join(f"{host.name}:{host.slots}\n" for host in hosts))
    (directory / "hosts").write_text(emulated_net.hosts_file(hosts))
    agent = directory / "bin" / "ssh"
    agent.parent.mkdir()
    agent.write_text(f'#!/bin/sh\nexec {shlex.join([*_PYTHON, "ssh", str(directory)])} "$@"\n')
    agent.chmod(0o755)
    return directory


def _mpi_env(layout: HostLayout, directory: Path) -> dict[str, str]:
    """Return the settings that a site's administrator would make: hosts, how to reach them, network interfaces.

    All MPI libraries read them from the environment, so command lines are the same as on a real cluster. Emulated hosts
    share the machine's cores: ranks are not bound, and yield while they wait.
    """
    nics = ",".join(link.name for link in layout.links)
    first, agent = layout.links[0].name, str(directory / "bin" / "ssh")
    return {
        "UCX_NET_DEVICES": nics,
        "UCX_MEM_MMAP_HOOK_MODE": "none",  # these links register no memory, and patching costs each rank 0.1 s and more
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": nics,
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_prte_default_hostfile": str(directory / "hostfile"),
        "PRTE_MCA_prte_if_include": first,
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_orte_default_hostfile": str(directory / "hostfile"),
        "OMPI_MCA_oob_tcp_if_include": first,
        "OMPI_MCA_plm_rsh_agent": agent,
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "HYDRA_HOST_FILE": str(directory / "machinefile"),
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "HYDRA_IFACE": first,
    }


def _login_env(layout: HostLayout, directory: Path) -> dict[str, str]:
    """Return the environment that a remote command starts with; it does not inherit the sender's."""
    kept = {name: os.environ[name] for name in _LOGIN if name in os.environ}
    path = [str(directory / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return {
        "HOME": "/",
        **kept,
        "PATH": os.pathsep.join(path),
        "TMPDIR": str(directory / layout.name),
        **_mpi_env(layout, directory),
    }


class EmulatedHost:
    """One emulated host, made by `ucc_hetero.launch.emulate.Cluster`."""

    def __init__(self, layout: HostLayout, directory: Path, extra_env: Mapping[str, str]) -> None:
        self.layout = layout
        self.name = layout.name
        #: Boot id that software on this host reads; UCX and UCC distinguish hosts by it.
        self.boot_id = str(uuid.uuid4())
        #: Variables of every process on this host; those of a command override them.
        self.env = {**_login_env(layout, directory), **extra_env}
        self._directory = directory
        (directory / layout.name).mkdir()
        self._log = directory / f"{layout.name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*UNSHARE, "sh", "-c", self._script(), self.name, str(directory / layout.name)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _script(self) -> str:
        """The commands that make process 1 of the host, with its login environment."""
        stem = self._directory / self.name
        files = {"/etc/hosts": self._directory / "hosts"}
        for target, text in (
            ("/proc/sys/kernel/random/boot_id", self.boot_id),
            ("/etc/machine-id", self.boot_id.replace("-", "")),
            ("/etc/hostname", self.name),
        ):
            files[target] = stem.with_suffix("." + Path(target).name)
            files[target].write_text(text + "\n")
        lines = [
            shlex.join(["mount", "--bind", str(files[target]), target]) for target in files if os.path.exists(target)
        ]
        lines += [f"[ ! -e /proc/sys/{name} ] || echo {value} >/proc/sys/{name}" for name, value in _SYSCTL.items()]
        login = ["env", "-i", *(f"{name}={value}" for name, value in self.env.items())]
        return "\n".join([_BECOME_HOST, *lines, shlex.join(["exec", *login, *_PYTHON, "init", f"{stem}.sock"])])

    @property
    def address(self) -> str:
        """IPv4 address of the first link."""
        return self.layout.links[0].address

    @property
    def pid(self) -> int:
        """Process id, on the machine, of a process in the host's namespaces (except the pid namespace), for
        ``nsenter``."""
        return self._process.pid

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start ``argv`` on this host; ``options`` are those of `subprocess.Popen`.

        The environment is this process's, updated by the host's and by ``env``. The returned object is a stand-in on
        this machine that forwards signals and the exit status; if it is killed, the program ends too.
        """
        # A job must not inherit variables of another job.
        gone = (*INSIDE_A_JOB, _OPEN_MPIS_FOLDER)
        mine = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
        full = {**mine, **self.env, **(env or {})}
        return subprocess.Popen([*_PYTHON, "exec", str(self._directory), self.name, *argv], env=full, **options)

    def wait_until_up(self) -> None:
        """Wait until the host accepts commands. Raises ``RuntimeError`` with its output if it does not."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"up\n":
            said = self._log.read_text(errors="replace").strip()
            raise RuntimeError(f"emulated host {self.name} did not come up: {said}")

    def kill_all(self) -> None:
        """Kill all processes on this host; the host stays up."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.write(b"k")
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """End the host by closing its pipe. Returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait_until_down(self) -> None:
        """Wait until the kernel has ended all processes of the host."""
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def configure_all(batches: Mapping[int, tuple[str, str]]) -> None:
    """Run an ``ip`` and a ``tc`` batch in the network namespace of each process, concurrently.

    Raises ``RuntimeError`` with the tool's message if one fails.
    """
    running = []
    for pid, batch in batches.items():
        steps = [
            f"{tool} -batch - <<'END'\n{text}END\n" for tool, text in zip(("ip", "tc"), batch, strict=True) if text
        ]
        words = ["nsenter", "--target", str(pid), "--net", "sh", "-c", "set -e\n" + "".join(steps)]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running.append(subprocess.Popen(words, text=True, **streams))
    outputs = [process.communicate()[0] for process in running]
    failed = [output.strip() for process, output in zip(running, outputs, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(f"cannot configure the emulated network: {'; '.join(failed)}")


def configure(pid: int, ip: str, tc: str) -> None:
    """Run an ``ip`` and a ``tc`` batch in the network namespace of one process; see `configure_all`."""
    configure_all({pid: (ip, tc)})
