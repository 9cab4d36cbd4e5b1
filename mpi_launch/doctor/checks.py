"""One host judged by its facts. Each check says at least one thing; what it says depends on nothing but the facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from ... import env as variables
from ...machine.vendors import VENDORS, seen
from .facts import Facts
from .findings import Finding, finding, ok

__all__ = ["CHECKS", "examine"]

_SHARED_MEMORY = {"sysv", "posix", "cma", "xpmem", "knem"}
#: Transports that can begin a conversation; UCX's lists of one reliable transport alone cannot.
_WIRE_UP = {"all", "tcp", "ud", "ud_v", "ud_x", "dc", "dc_x", "ib", "rc", "rc_v", "rc_x"}
_RELIABLE_ONLY = {"rc_v", "rc_x", "rc_verbs", "rc_mlx5"}

MIN_SHM = 1 << 30
MIN_NOFILE = 4096
#: Mbit/s from which the usual 1500 bytes per packet cost throughput.
FAST = 10_000
JUMBO = 4200
#: Hardware queues with which the streams of messages that wait leave others free.
MIN_QUEUES = 10
#: Variables that make HIP wait on the host -> whether they do so when they are set, or when they are 0.
_HOST_WAITS = {"AMD_DIRECT_DISPATCH": False, "ROC_CPU_WAIT_FOR_SIGNAL": True}


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB"


def mpi(facts: Facts) -> Iterator[Finding]:
    """The program that starts ranks and the library inside them are one MPI."""
    libs = facts.libraries
    if not libs.mpirun or not libs.mpi:
        what = libs.mpi_text if not libs.mpi else "no mpirun or srun was found"
        yield finding(
            "mpi-missing",
            what,
            "pip install 'ucc-hetero[mpi]', or load the site's MPI module and name its mpirun in MPIRUN",
        )
    elif libs.mpirun != libs.mpi and libs.mpirun != "srun" and libs.mpi != "other":
        yield finding(
            "mpi-mismatch",
            f"mpirun is {libs.mpirun_text}, but mpi4py uses {libs.mpi_text}: every rank would think it is alone",
            "use the mpirun of that MPI (MPIRUN=/path/to/mpirun), or reinstall mpi4py against the other",
        )
    else:
        yield ok("mpi", f"{libs.mpi_text}; started by {libs.mpirun_text}")


def libraries(facts: Facts) -> Iterator[Finding]:
    """UCC and UCX load, are the intended files, and know the memory of this host's GPUs."""
    libs = facts.libraries
    if libs.error:
        yield finding(
            "libraries-missing",
            libs.error,
            "pip install 'ucc-hetero[ucc]', or name yours in UCCH_UCC_LIB and UCCH_UCX_DIR",
        )
        return
    yield ok(
        "ucx",
        f"UCX {libs.ucx} from {libs.ucx_path}; transports {', '.join(libs.transports)}; "
        f"memory {', '.join(libs.memory_types)}",
    )
    yield ok("ucc", f"UCC {libs.ucc} from {libs.ucc_path}; components {', '.join(libs.components) or 'built in'}")
    for note in libs.notes:
        if "was in the process first" in note:
            yield finding(
                "ucx-foreign", note, "import ucc_hetero before mpi4py.MPI, or keep MPI off UCX (OMPI_MCA_pml=ob1)"
            )
    if not _SHARED_MEMORY & set(libs.transports):
        yield finding(
            "ucx-lacks-shm",
            "UCX has no shared-memory transport: ranks of one host use the network",
            "install a UCX with sysv, posix or cma",
        )
    for vendor in sorted({device.vendor for device in facts.usable}):
        yield from _knows(facts, vendor)


def _knows(facts: Facts, vendor: str) -> Iterator[Finding]:
    libs = facts.libraries
    row = VENDORS[vendor]
    kind, collectives = (
        row.memory,
        row.collectives[0].removeprefix("libucc_").replace("_", "/") if row.collectives else "",
    )
    if kind not in libs.memory_types:
        yield finding(
            "ucx-lacks-vendor",
            f"UCX {libs.ucx} from {libs.ucx_path} cannot move {kind} memory, and this host has {vendor} GPUs",
            f"install a UCX built with {kind} (docs/containers.md) and name its folder in UCCH_UCX_DIR",
        )
    missing = [name for name in (f"mc/{kind}", f"ec/{kind}") if name not in libs.components]
    if libs.components and missing:
        yield finding(
            "ucc-lacks-vendor",
            f"UCC {libs.ucc} has no {' and '.join(missing)}: it cannot reduce in this host's GPUs",
            f"install a UCC built for {vendor} (docs/containers.md) and name it in UCCH_UCC_LIB",
        )
    elif libs.components and collectives and collectives not in libs.components:
        yield finding(
            "ucc-lacks-library",
            f"UCC {libs.ucc} has no {collectives}: collectives inside an island do without the vendor's library",
            f"install a UCC with {collectives}, if speed inside a host matters",
        )


def gpus(facts: Facts) -> Iterator[Finding]:
    """Every GPU of the machine can be used, and reached whole."""
    usable = {device.pci for device in facts.usable}
    drivers = dict(facts.drivers)
    for vendor in sorted({vendor for vendor, _ in facts.gpus}):
        all_of_them = [pci for v, pci in facts.gpus if v == vendor]
        mine = [pci for pci in all_of_them if pci in usable]
        if mine:
            yield ok(
                "gpu", f"{len(mine)} of {len(all_of_them)} {vendor} GPUs, driver {drivers.get(vendor) or 'unknown'}"
            )
        else:
            why = "its driver is not loaded" if vendor not in drivers else "this container was given none"
            yield finding(
                "gpu-unusable", f"the machine has {len(all_of_them)} {vendor} GPUs, but {why}",
                "load the driver (modprobe nvidia or amdgpu), or give the container its devices (docs/containers.md)",
            )  # fmt: skip
    if not facts.gpus:
        yield ok("gpu", "none: ranks use host memory")
    if facts.denied:
        yield finding(
            "gpu-denied",
            f"no permission for {', '.join(facts.denied)}",
            "sudo usermod --append --groups video,render $USER, and log in again",
        )
    small = [device for device in facts.usable if device.small_bar]
    if small:
        worst = small[0]
        yield finding(
            "bar-small",
            f"the processor reaches {_gib(worst.window)} of {_gib(worst.memory)} of {len(small)} GPUs' memory; "
            "the short paths of UCX and UCC are off there, and small messages are slower",
            "enable Above 4G Decoding and Resizable BAR in the firmware's settings",
        )
    if facts.no_peers:
        pairs = ", ".join(f"{a}-{b}" for a, b in facts.no_peers[:6])
        yield finding(
            "peer-access",
            f"GPUs {pairs} cannot read each other's memory",
            "in a virtual machine pass NVLink or PCIe peers through; on bare metal switch ACS off for their switch",
        )
    if facts.usable and facts.iommu_translates:
        yield finding("iommu", "the IOMMU translates what GPUs and network cards send each other", "boot with iommu=pt")


def network(facts: Facts) -> Iterator[Finding]:
    """There is a network, it is the one that was asked for, and large packets fit."""
    chosen = dict(facts.env).get("UCX_NET_DEVICES", "")
    known = {
        *facts.all_interfaces,
        *(port.name for port in facts.ports),
        *(p.name.partition(":")[0] for p in facts.ports),
    }
    unknown = [name for name in chosen.split(",") if name and name != "all" and name not in known]
    if unknown:
        yield finding(
            "net-unknown",
            f"UCX_NET_DEVICES names {', '.join(unknown)}, which this host does not have",
            f"choose among {', '.join(sorted(known - {'lo'}))} (interfaces: in the cluster file)",
        )
    outside = [interface for interface in facts.interfaces if interface[0] != "lo"]
    if not outside and not facts.ports:
        yield finding(
            "net-missing",
            "no network interface is up: ranks of other hosts cannot be reached",
            "ip link set dev NAME up",
        )
    else:
        words = [f"{name} ({speed or '?'} Mbit/s, MTU {mtu})" for name, speed, mtu in outside]
        words += [f"{port.name} ({port.layer}, {port.state})" for port in facts.ports]
        yield ok("network", ", ".join(words))
    slow = [name for name, speed, mtu in outside if speed >= FAST and 0 < mtu < JUMBO]
    if slow:
        yield finding(
            "mtu-small",
            f"{', '.join(slow)} is fast, but its packets are small",
            f"ip link set dev {slow[0]} mtu 9000, on every host and switch of that network",
        )


def rdma(facts: Facts) -> Iterator[Finding]:
    """RDMA ports are up, have addresses, may pin memory, and reach the GPUs' memory."""
    if not facts.ports:
        yield ok("rdma", "no RDMA ports: between hosts UCX uses TCP")
        return
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    down = [port.name for port in facts.ports if port.state != "ACTIVE"]
    if down:
        yield finding(
            "rdma-down",
            f"{', '.join(down)} is not active",
            "check the cable and switch port (ibstat); leave it out by interfaces: in the cluster file",
        )
    for port in active:
        if port.layer == "Ethernet" and not port.roce_v2:
            yield finding(
                "roce-gid",
                f"{port.name} has no RoCE v2 address",
                f"give the network interface of {port.name} an IP address",
            )
    if facts.memlock >= 0:
        yield finding(
            "memlock",
            f"only {facts.memlock >> 10} KiB of memory may be pinned, and RDMA pins all that it sends from",
            "ulimit -l unlimited; for ever: * - memlock unlimited in /etc/security/limits.conf; in a container: "
            "docker run --ulimit memlock=-1",
        )
    elif active:
        yield ok("rdma", f"{len(active)} active ports, unlimited pinned memory")
    if active and facts.usable and not _gpudirect(facts):
        yield finding(
            "gpudirect",
            "network cards cannot reach the GPUs' memory: everything between hosts goes through host memory",
            "NVIDIA: the open kernel driver (dmabuf) or modprobe nvidia_peermem; AMD: a kernel from 6.0 on",
        )


def _gpudirect(facts: Facts) -> bool:
    kernel = int(facts.kernel.partition(".")[0])
    vendors = {device.vendor for device in facts.usable}
    peermem = {"nvidia_peermem", "nv_peer_mem"} & set(facts.modules)
    nvidia = bool(peermem) or facts.open_driver
    return ("nvidia" not in vendors or nvidia) and ("amd" not in vendors or kernel >= 6)


def host(facts: Facts) -> Iterator[Finding]:
    """Limits and settings of the system that slow a job down or stop it."""
    if facts.shm < MIN_SHM:
        yield finding(
            "shm-small",
            f"/dev/shm has {facts.shm >> 20} MiB",
            "mount -o remount,size=8G /dev/shm; docker run --ipc=host or --shm-size=8g",
        )
    else:
        yield ok("shm", f"/dev/shm has {_gib(facts.shm)}")
    if 0 <= facts.nofile < MIN_NOFILE:
        yield finding("nofile", f"only {facts.nofile} files and sockets may be open", f"ulimit -n {MIN_NOFILE * 16}")
    if facts.ptrace_scope > 0:
        yield finding(
            "ptrace",
            f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: ranks cannot copy from each other's memory (cma)",
            "sysctl kernel.yama.ptrace_scope=0; docker run --cap-add=SYS_PTRACE",
        )
    if facts.ranks_here > facts.cores:
        yield finding(
            "cores-few",
            f"{facts.ranks_here} ranks share {facts.cores} cores: UCC and UCX wait by polling",
            "start no more ranks than cores, or expect latencies of milliseconds",
        )
    else:
        yield ok("cores", f"{facts.cores} cores for {facts.ranks_here} rank{'s' * (facts.ranks_here > 1)}")
    if facts.numa_balancing and facts.usable:
        yield finding(
            "numa-balancing",
            "the kernel moves pages between NUMA nodes under running transfers",
            "sysctl kernel.numa_balancing=0",
        )
    if facts.clock_synchronised:
        yield ok("clock", "kept right by the system")
    else:
        yield finding(
            "clock",
            "nothing keeps this host's clock right: logs and traces of several hosts will not fit",
            "start chronyd or systemd-timesyncd (in a container: on its host)",
        )


def settings(facts: Facts) -> Iterator[Finding]:
    """Environment variables mean something, and do not shut out what this host needs."""
    env = dict(facts.env)
    for name in variables.unknown(env):
        yield finding("env-unknown", f"{name} is set but means nothing", "python -m ucc_hetero env lists all that do")
    for name in variables.TABLE:
        try:
            variables.get(name, env)
        except ValueError as error:
            yield finding("env-bad", str(error), f"correct {variables.PREFIX}{name}, or unset it")
    words = {word.strip() for word in env.get("UCX_TLS", "all").split(",")}
    if not any(word.startswith("^") for word in words):
        yield from _transports(facts, words)
    forced = [name for name in env if name.startswith("UCCHB_UCC_")]
    steering = [name for name in ("UCC_TLS", "UCC_CLS", "UCC_CL_BASIC_TLS", "UCC_TL_UCP_TUNE") if name in env]
    if forced:
        yield finding(
            "ucc-bridge",
            f"{', '.join(forced)} has no effect: bridges have forced settings (docs/bridge.md)",
            "unset it",
        )
    if facts.usable and env.get("CUDA_MODULE_LOADING") == "LAZY":
        yield finding(
            "cuda-lazy",
            "CUDA_MODULE_LOADING=LAZY: while a stream waits for a collective, a kernel's first launch waits with it",
            "unset it (ucc_hetero sets EAGER)",
        )
    if steering:
        yield finding(
            "ucc-bridge",
            f"{', '.join(steering)} has an effect inside islands only: bridges have forced settings",
            "unset it, or use UCCH_TUNE to choose algorithms of ucc_hetero",
        )
    yield ok("settings", f"{len(env)} variables looked at")


def _transports(facts: Facts, words: set[str]) -> Iterator[Finding]:
    for vendor in sorted({device.vendor for device in facts.usable}):
        memory = VENDORS[vendor].memory
        if not words & {"all", memory, f"{memory}_copy"}:
            yield finding(
                "tls-no-gpu",
                f"UCX_TLS={','.join(sorted(words))} shuts out {memory}: GPU memory cannot be sent",
                f"add {memory} to UCX_TLS, or unset it",
            )
    if not words & (_WIRE_UP - _RELIABLE_ONLY):
        yield finding(
            "tls-no-wireup",
            f"UCX_TLS={','.join(sorted(words))} has nothing to begin a connection between hosts with",
            "add tcp or ud to UCX_TLS, or unset it",
        )


def _number(env: Mapping[str, str], name: str, otherwise: int) -> int:
    """As HIP reads numbers: of what is none, 0."""
    found = re.match(r"\s*[+-]?\d+", env.get(name, str(otherwise)))
    return int(found[0]) if found else 0


def amd(facts: Facts) -> Iterator[Finding]:
    """HIP and its driver are not told what lets streams or copies wait for each other, or ends ranks."""
    mine = [device for device in facts.usable if device.vendor == "amd"]
    if not mine:
        return
    env = dict(facts.env)
    waits = [name for name, bad in _HOST_WAITS.items() if name in env and (_number(env, name, 0) != 0) == bad]
    if waits:
        yield finding(
            "amd-host-waits",
            f"{' and '.join(f'{name}={env[name]}' for name in waits)}: HIP itself then waits on the host for what a "
            "stream waits for, and with it the thread that gave the stream its work",
            "unset it",
        )
    if len(seen("amd", mine, env)) > 1 and not _number(env, "HIP_ENABLE_DEFERRED_LOADING", 1):
        yield finding(
            "amd-early-kernels",
            f"HIP_ENABLE_DEFERRED_LOADING={env['HIP_ENABLE_DEFERRED_LOADING']} with {len(seen('amd', mine, env))} "
            "devices: a library without code for one of them ends the process while it is loaded (abort)",
            "unset it, or give each rank one device (ucch-run does)",
        )
    if 0 < _number(env, "GPU_MAX_HW_QUEUES", 16) < MIN_QUEUES:
        yield finding(
            "amd-queues",
            f"GPU_MAX_HW_QUEUES={env['GPU_MAX_HW_QUEUES']}: a stream that waits keeps others of its queue waiting",
            "unset it (ucc_hetero sets 16)",
        )
    if len(mine) > 1 and not facts.xgmi and env.get("HSA_FORCE_FINE_GRAIN_PCIE", "1") != "1":
        yield finding(
            "amd-fine-grain",
            "HSA_FORCE_FINE_GRAIN_PCIE is not 1 and the GPUs have no xGMI: they do not see what others write while "
            "these still run, so that messages between them go by way of the host",
            "unset it (ucc_hetero sets 1)",
        )
    yield from _dmabuf(facts, env)
    if env.get("HSA_ENABLE_IPC_MODE_LEGACY") == "0":
        yield finding(
            "amd-ipc",
            "HSA_ENABLE_IPC_MODE_LEGACY=0: processes share device memory by dmabuf, which was never tried with AMD",
            "unset it, or see what ucch-doctor amd --only devices,ipc-dmabuf says",
        )


def _dmabuf(facts: Facts, env: Mapping[str, str]) -> Iterator[Finding]:
    """UCX before 1.23 looks for the kernel's configuration in /boot alone, which containers do not have."""
    version = tuple(int(part) for part in re.findall(r"\d+", facts.libraries.ucx)[:2])
    if facts.kernel_config or version >= (1, 23) or int(facts.kernel.partition(".")[0]) < 6:
        return
    if env.get("UCX_ROCM_COPY_DMABUF", "try").lower() in ("y", "yes", "on", "1"):
        text = "UCX_ROCM_COPY_DMABUF=y: UCX then does not know GPU memory at all"
    else:
        text = "network cards get GPU memory by way of the host"
    yield finding(
        "amd-dmabuf",
        f"UCX {facts.libraries.ucx} does not find /boot/config-{facts.kernel}, by which it tells that the kernel has "
        f"dmabuf; {text}",
        "docker run --volume /boot:/boot:ro, and leave UCX_ROCM_COPY_DMABUF as ucc_hetero sets it (try)",
    )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (mpi, libraries, gpus, network, rdma, host, settings, amd)


def examine(facts: Facts) -> list[Finding]:
    """Everything there is to say about one host."""
    return [each for check in CHECKS for each in check(facts)]
