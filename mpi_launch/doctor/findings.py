"""Findings: what was checked, the result, and the cure; and the table of all problems that can be found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from ...errors import counted
from ...installed import extra
from ...machine.rdma import CURE
from ...planner.topology import ranges

LEVELS = ("ok", "warning", "error")

_RUN = (
    "run again with UCCH_LOG_LEVEL=info; unset UCC_* and UCX_* settings; use one build of UCC and UCX on all hosts; "
    "with GPUs of one host try UCX_TLS=^cuda_ipc"
)

#: Code of a problem -> (severity, cure if it is always the same). A test provokes each.
CODES = {
    # MPI
    "mpi-missing": ("error", f"{extra('mpi')}, or load the site's MPI module and name its mpirun in "
                    "MPIRUN"),
    "mpi-mismatch": ("error", "use the mpirun of that MPI (MPIRUN=/path/to/mpirun), or reinstall mpi4py against the "
                     "other"),
    # UCC and UCX
    "libraries-missing": ("error", f"{extra('ucc')}, or name yours in UCCH_UCC_LIB and UCCH_UCX_DIR"),
    "ucx-foreign": ("warning", "import ucc_hetero before mpi4py.MPI, or keep MPI off UCX (OMPI_MCA_pml=ob1)"),
    "ucx-lacks-vendor": ("error", "install a UCX built with {} (docs/containers.md) and name its folder in "
                         "UCCH_UCX_DIR"),
    "ucx-lacks-shm": ("warning", "install a UCX with sysv, posix or cma"),
    "ucc-lacks-vendor": ("error", "install a UCC built for {} (docs/containers.md) and name it in UCCH_UCC_LIB"),
    "ucc-lacks-library": ("warning", "install a UCC with {}, if speed inside a host matters"),
    "torch-lacks-vendor": ("warning", "install the torch for {} (docs/install.md has the table), if the job uses "
                           "torch"),
    "torch-cuda": ("warning", "install a torch for CUDA {} (docs/install.md has the table), or name a UCC for torch's "
                   "CUDA in UCCH_UCC_LIB"),
    # GPUs
    "gpu-unusable": ("error", "load the driver (modprobe nvidia or amdgpu), or give the container its devices "
                     "(docs/containers.md)"),
    "gpu-denied": ("error", "sudo usermod --append --groups video,render $USER, and log in again"),
    "bar-small": ("warning", "enable Above 4G Decoding and Resizable BAR in the firmware's settings"),
    "iommu": ("warning", "boot with iommu=pt"),
    # Networks
    "net-missing": ("warning", "ip link set dev NAME up"),
    "net-unknown": ("error", "choose among {} (interfaces: in the cluster file)"),
    "rdma-down": ("warning", "check the cable and switch port (ibstat); leave it out by interfaces: in the cluster "
                  "file"),
    "rdma-idle": ("warning", CURE),
    "fabric-idle": ("warning", "give the container /dev/infiniband and rdma-core, EFA its plugin (aws-ofi-nccl), and "
                    "unset the settings that disable them; if it is intended, set UCCH_FABRIC=host"),
    "roce-gid": ("error", "give the network interface of {} an IP address"),
    "mtu-small": ("warning", "ip link set dev {} mtu 9000, on every host and switch of that network"),
    "flow-limit": ("warning", "one placement group for all hosts (10 Gbit/s), ENA Express (25) or EFA; two cores a "
                   "network thread (UCCH_WIRES=auto)"),
    "tcp-window": ("warning", "sysctl net.ipv4.tcp_rmem='4096 131072 16777216' "
                   "net.ipv4.tcp_wmem='4096 65536 16777216'"),
    "gpudirect": ("warning", "NVIDIA: the open kernel driver (dmabuf) or modprobe nvidia_peermem; AMD: a kernel "
                  "from 6.0 on"),
    "memlock": ("error", "ulimit -l unlimited; for ever: * - memlock unlimited in /etc/security/limits.conf; in a "
                "container: docker run --ulimit memlock=-1"),
    # The host
    "nofile": ("warning", "ulimit -n 65536"),
    "shm-denied": ("error", "mount -o remount,rw,mode=1777 /dev/shm"),
    "shm-small": ("warning", "mount -o remount,size=8G /dev/shm; docker run --ipc=host or --shm-size=8g; or delete "
                  "files of dead jobs there"),
    "ptrace": ("warning", "sysctl kernel.yama.ptrace_scope=0; docker run --cap-add=SYS_PTRACE"),
    "cores-few": ("warning", "start no more ranks than cores; otherwise ranks wait for each other's turn on a core"),
    "sched-groups": ("warning", "sysctl kernel.sched_autogroup_enabled=0"),
    "numa-balancing": ("warning", "sysctl kernel.numa_balancing=0"),
    # Settings
    "env-unknown": ("warning", ""),
    "env-bad": ("error", "correct {}, or unset it"),
    "tls-no-gpu": ("error", "add {} to UCX_TLS, or unset it"),
    "tls-no-wireup": ("warning", "add tcp or ud to UCX_TLS, or unset it"),
    "ucc-bridge": ("warning", "unset it"),
    "env-vendor": ("warning", ""),
    "dmabuf": ("warning", "docker run --volume /boot:/boot:ro, and leave {} as ucc_hetero sets it (try)"),
    # Between ranks
    "job-size": ("error", "mpirun and mpi4py's MPI do not match: see mpi-mismatch"),
    "job-disagrees": ("error", ""),
    "job-namespaces": ("error", "docker run --ipc=host --pid=host (ucch-run does), or one container per host"),
    "job-device-shared": ("warning", "start no more ranks than devices on a host (slots: in the cluster file)"),
    "job-drivers": ("warning", "install the same driver on all hosts of a vendor"),
    "job-processors": ("warning", "ucch-run -x UCC_CONFIG_FILE= (no settings by model of processor), or UCC 1.9"),
    "job-mtu": ("warning", "ip link set dev {} mtu N, with one N on every host"),
    "job-memory": ("warning", "use one build of UCX on all hosts, or UCCH_STAGING=staged"),
    "job-fp8": ("warning", "do not send fp8 between them; bfloat16 means the same on both"),
    # Measured
    "run-failed": ("error", _RUN),
    "run-wrong": ("error", _RUN),
    # A job that hangs (hang.py), in the order in which one causes another
    "hang-file": ("warning", "run this on a host of the job while that runs, or name the folder with the files of all "
                  "ranks (UCCH_FLIGHT)"),
    "hang-dead": ("error", "see its output: it may have ended too early; of killed processes the kernel's log (dmesg) "
                  "and core files tell more"),
    "hang-differs": ("error", "make the same calls in the same order on every rank: look for branches and loops that "
                     "depend on the rank or on its data"),
    "hang-message": ("error", "send and receive with the same tag, and in an order in which no rank waits for itself"),
    "hang-transfer": ("error", "check that process, and the link to its host; its Python is not needed"),
    "hang-missing": ("error", "its stack above shows what it does; UCCH_TIMEOUT is how long other ranks wait"),
    "hang-stuck": ("error", "ucch-run … --check tries links and libraries; UCCH_TRACE shows the step that hangs"),
    "hang-circle": ("error", "begin with Isend or Irecv where two ranks send to each other (Sendrecv does)"),
    "hang-failed": ("warning", ""),
    "pair-slow": ("warning", "check link, slot and binding of these hosts: ethtool NAME, ibstat, lspci -vv (LnkSta)"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report. ``where``: hosts or ranks; empty on a single host."""

    code: str
    level: str
    text: str
    cure: str = ""
    where: str = ""


def finding(code: str, text: str, about: str = "", cure: str = "") -> Finding:
    """Make a problem of the table. ``about`` is inserted into its cure; ``cure`` replaces the cure."""
    level, usual = CODES[code]
    return Finding(code, level, text, cure or usual.format(about))


def ok(code: str, text: str) -> Finding:
    """Make a finding for a check that passed."""
    return Finding(code, "ok", text)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Merge the findings of all ranks: each is listed once, with its ranks and hosts."""
    who: dict[Finding, list[int]] = {}
    for rank, found in enumerate(by_rank):
        for each in found:
            who.setdefault(each, []).append(rank)
    result = []
    for each, ranks in who.items():
        names = list(dict.fromkeys(hosts[rank] for rank in ranks))
        on = ", ".join(names[:3]) + (f" and {counted(len(names) - 3, 'more host')}" if len(names) > 3 else "")
        everyone = len(ranks) == len(by_rank)
        result.append(replace(each, where="" if everyone else f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} on {on}"))
    return result


def status(findings: Iterable[Finding]) -> int:
    """0 if the job can run, else 1."""
    return int(any(each.level == "error" for each in findings))


def as_text(findings: Iterable[Finding]) -> str:
    """A line per finding and one for its cure. The worst comes last, where a terminal shows it."""
    lines = []
    listed = sorted(findings, key=lambda each: LEVELS.index(each.level))
    for each in listed:
        first, *rest = each.text.splitlines()
        where = f" [{each.where}]" if each.where else ""
        lines.append(f"{each.level:<8} {each.code:<18} {first}{where}")
        lines += [f"{'':<28}{line}" for line in rest]
        lines += [f"{'':<28}cure: {each.cure}"] if each.cure else []
    counts = {level: sum(each.level == level for each in listed) for level in LEVELS}
    lines.append(f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counted(counts['error'], 'error')}")
    return "\n".join(lines)


def as_json(findings: Iterable[Finding]) -> str:
    """The findings as a JSON object with the list ``findings``."""
    return json.dumps({"findings": [asdict(each) for each in findings]}, indent=2)
