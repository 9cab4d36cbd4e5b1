"""Compiles a job to one command line of Open MPI 4 or 5, Hydra or Slurm, with a part for each vendor."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import counted
from ..machine.vendors import VENDORS
from .cluster import LOCAL_NAMES, Cluster, ClusterError, VendorPart
from .launcher import Launcher
from .sources import Host

RANK_WRAPPER = Path(__file__).with_name("rank.py")

#: Variables (prefixes of names) that are passed on to ranks on other hosts.
FORWARDED = ("UCCH_", "UCX_", "UCC_", "NCCL_", "RCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "PYTHONPATH")


def is_here(name: str) -> bool:
    """True if a host name is one of this machine, as far as names can tell."""
    return name in LOCAL_NAMES or name.partition(".")[0] == socket.gethostname().partition(".")[0]


@dataclass(frozen=True, slots=True)
class Job:
    """The program to run, and where."""

    cluster: Cluster
    program: tuple[str, ...]
    master_port: int
    #: Variables given on the command line.
    env: Mapping[str, str] = field(default_factory=dict)
    #: Devices that a rank sees: "one", "all", or "auto", which depends on the program.
    devices: str = "auto"
    numa: bool = True
    #: Pretend the hosts' vendors (UCCH_EMULATE) instead of using devices.
    emulate: bool = False
    report: bool = False
    #: Options for the launcher, before all others.
    mpi_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring hosts whose ranks get the same options: one application context of ``mpirun``."""

    hosts: tuple[Host, ...]
    vendor: str
    #: Number of ranks of earlier parts on the same hosts, which use other devices.
    first_local: int

    @property
    def size(self) -> int:
        return sum(host.slots for host in self.hosts)


def parts(cluster: Cluster) -> list[Part]:
    """Divide the hosts into parts: at a change of vendor, of position on the host, or of Slurm component."""
    taken: dict[str, int] = {}
    keyed = []
    for host in cluster.hosts:
        first = taken.get(host.name, 0)
        taken[host.name] = first + host.slots
        keyed.append(((host.vendor, first, host.component), host))
    groups = itertools.groupby(keyed, key=lambda pair: pair[0])
    return [Part(tuple(host for _, host in group), vendor, first) for (vendor, first, _), group in groups]


def _emulated(job: Job) -> str:
    runs = itertools.groupby(job.cluster.hosts, key=lambda host: "host" if host.vendor == "auto" else host.vendor)
    return ",".join(f"{vendor}:{sum(host.slots for host in hosts)}" for vendor, hosts in runs)


def _interfaces(names: Sequence[str]) -> dict[str, str]:
    """Settings for the interfaces: UCX uses all of them; sockets only those with kernel names."""
    sockets = ",".join(name for name in names if ":" not in name)
    found = {"UCX_NET_DEVICES": ",".join(names)}
    if sockets:
        found |= {"NCCL_SOCKET_IFNAME": sockets, "GLOO_SOCKET_IFNAME": sockets.partition(",")[0]}
    return found if names else {}


def _env(job: Job, part: Part, environ: Mapping[str, str]) -> dict[str, str]:
    """A part's variables: of this machine, the file, the file's vendor and the command line; the last one wins."""
    special = job.cluster.part(part.vendor)
    elsewhere = not job.cluster.only_here or bool(special.image)
    inherited = {name: value for name, value in environ.items() if elsewhere and name.startswith(FORWARDED)}
    emulate = {"UCCH_EMULATE": _emulated(job)} if job.emulate else {}
    nics = _interfaces(special.interfaces or job.cluster.interfaces)
    return {**inherited, **nics, **job.cluster.env, **special.env, **emulate, **job.env}


def _wrapped(job: Job, part: Part, environ: Mapping[str, str]) -> list[str]:
    """The program behind its wrapper, whose options tell `rank.py` what to do."""
    first = job.cluster.hosts[0].name
    words = [job.cluster.python or sys.executable, "-I", "-S", str(RANK_WRAPPER)]
    words += ["--vendor", "host" if job.emulate else part.vendor, "--size", str(job.cluster.size)]
    words += ["--master", f"{'127.0.0.1' if job.cluster.only_here else first}:{job.master_port}"]
    words += [] if job.devices == "auto" else ["--devices", job.devices]
    words += [] if job.numa else ["--numa", "off"]
    words += ["--first-local", str(part.first_local)] if part.first_local else []
    words += ["--report"] if job.report else []
    for name, value in sorted(_env(job, part, environ).items()):
        words += ["--set", f"{name}={value}"]
    special = job.cluster.part(part.vendor)
    if special.image:
        words += ["--container", container(special, part.vendor, os.getcwd(), (os.getuid(), os.getgid()))]
    return [*words, "--", *job.program]


def container(part: VendorPart, vendor: str, cwd: str, user: tuple[int, int]) -> str:
    """The engine's command up to the image. ``{env}`` is replaced by options for the rank's variables.

    The container shares network, process ids and System V memory with the host, so that UCX treats ranks in several
    containers of a host as one node. It may read other processes' memory (CMA), and pin memory without limit.
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
    # MPI's sockets are in /tmp.
    words += ["--volume=/tmp:/tmp", f"--volume={cwd}:{cwd}", f"--workdir={cwd}"]
    return shlex.join([*words, "{env}", *part.runtime_args, part.image]).replace("'{env}'", "{env}")


def _joined(head: Sequence[str], contexts: Sequence[Sequence[str]]) -> list[str]:
    words = list(head)
    for i, context in enumerate(contexts):
        words += [":"] * bool(i) + list(context)
    return words


def _has(job: Job, environ: Mapping[str, str], parameter: str) -> bool:
    """True if the user has set this MPI parameter."""
    return f"OMPI_MCA_{parameter}" in environ or parameter in job.mpi_args


def _openmpi(job: Job, launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """Command line of Open MPI. Its own messages only control the job, so it is kept off UCX: it may bring another
    UCX."""
    if " " in launcher.path and not all(is_here(host.name) for host in job.cluster.hosts):
        raise ClusterError(
            f"{launcher.path}: Open MPI starts its helper on other hosts by this path, which cannot have a space: "
            "install it in another folder, or name another mpirun by MPIRUN"
        )
    five = launcher.major >= 5
    head = [launcher.path, "--bind-to", "none", "--map-by", "slot"]
    if not _has(job, environ, "pml"):
        head += ["--mca", "pml", "ob1"]
    if not _has(job, environ, "btl"):
        head += ["--mca", "btl", "self,sm,tcp" if five else "self,vader,tcp"]
    if job.cluster.only_here and job.cluster.size > (os.cpu_count() or 1):
        head += ["--mca", "mpi_yield_when_idle", "1"]
    sockets = [name for name in job.cluster.interfaces if ":" not in name]
    if sockets:
        own = ("--prtemca", "prte_if_include") if five else ("--mca", "oob_tcp_if_include")
        head += ["--mca", "btl_tcp_if_include", ",".join(sockets), *own, ",".join(sockets)]
    if job.cluster.ssh:
        head += ["--prtemca", "plm_ssh_agent"] if five else ["--mca", "plm_rsh_agent"]
        head += [job.cluster.ssh]
    contexts = []
    for part, hosts in _placed(job.cluster):
        where = ",".join(f"{name}:{slots}" for name, slots in hosts)
        contexts.append(["-np", str(part.size), "--host", where, *_wrapped(job, part, environ)])
    return _joined([*head, *job.mpi_args], contexts)


def _placed(cluster: Cluster) -> Iterator[tuple[Part, list[tuple[str, int]]]]:
    """The parts, with their hosts and slots, as Open MPI takes them.

    If a host is in several parts, Open MPI 4 must be told all its slots each time, and would fill them with ranks of
    one part before it goes to the next host. Such parts are divided by hosts.
    """
    slots: dict[str, int] = {}
    for host in cluster.hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    for part in parts(cluster):
        if all(slots[host.name] == host.slots for host in part.hosts):
            yield part, [(host.name, host.slots) for host in part.hosts]
        else:
            for host in part.hosts:
                yield Part((host,), part.vendor, part.first_local), [(host.name, slots[host.name])]


def _hydra(job: Job, launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """Command line of Hydra: one list of hosts, whose slots the parts fill in turn."""
    head = [launcher.path]
    if not job.cluster.only_here:
        where = ",".join(f"{host.name}:{host.slots}" for host in job.cluster.hosts)
        head += ["-hosts", where, "-launcher", "ssh"]
    if job.cluster.ssh:
        if len(job.cluster.ssh.split()) > 1:
            raise ClusterError(f"ssh: {job.cluster.ssh!r}: Hydra takes one program without options: write a script")
        head += ["-launcher-exec", job.cluster.ssh]
    sockets = [name for name in job.cluster.interfaces if ":" not in name]
    head += ["-iface", sockets[0]] if sockets else []
    return _joined(
        [*head, *job.mpi_args],
        [["-n", str(part.size), *_wrapped(job, part, environ)] for part in parts(job.cluster)],
    )


def _srun(job: Job, launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """Command line of Slurm inside an allocation: each part is a component of the heterogeneous job."""
    found = parts(job.cluster)
    components = int(environ.get("SLURM_HET_SIZE", "1"))
    if len(found) != components:
        raise ClusterError(
            f"the job has {len(found)} parts and this allocation {counted(components, 'component')}: srun "
            "starts one part in each; get a heterogeneous allocation that fits (docs/slurm.md)"
        )
    head = [launcher.path, "--mpi=pmix", "--cpu-bind=none", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    contexts = []
    for i, part in enumerate(found):
        het = [f"--het-group={i}"] if components > 1 else []
        counts = [f"--ntasks={part.size}", f"--nodes={len(part.hosts)}", "--distribution=block"]
        contexts.append([*het, *counts, *_wrapped(job, part, environ)])
    # Options before the first colon apply to the first part only, so common options are repeated.
    return _joined([*head, *job.mpi_args], [contexts[0], *([*head[1:], *context] for context in contexts[1:])])


_DIALECTS = {"openmpi": _openmpi, "hydra": _hydra, "srun": _srun}


def compile_job(job: Job, launcher: Launcher, environ: Mapping[str, str] | None = None) -> list[str]:
    """The words of the command that starts the job. ``ClusterError`` if the launcher cannot express it."""
    if not job.program:
        raise ClusterError("no program: give it at the end, as in: ucch-run -np 4 python train.py")
    return _DIALECTS[launcher.kind](job, launcher, os.environ if environ is None else environ)
