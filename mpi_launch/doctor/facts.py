"""Facts that the doctor looks at, collected once: plain data that can be sent between ranks and judged elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...cli.info import components
from ...errors import UCCHError
from ...machine import discover, nics, rdma
from ...machine.fabric import WORDS, Fabric, fabric_of
from ...machine.vendors import VENDORS, Device, devices, number, text
from ...native import libraries
from ...planner.rules import NO_TABLE, Table, read_table
from ...transport import carriers
from .. import launcher


@dataclass(frozen=True, slots=True)
class Libraries:
    """UCC and UCX as loaded, or why not; and MPI."""

    error: str = ""
    ucc: str = ""
    ucc_path: str = ""
    components: tuple[str, ...] = ()
    ucx: str = ""
    ucx_path: str = ""
    memory_types: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: Carriers of bytes between hosts, as text; active RDMA ports that UCX does not reach; folder of a UCX that may.
    carriers: tuple[tuple[str, str], ...] = ()
    idle: tuple[str, ...] = ()
    site_ucx: str = ""
    #: The library that mpi4py uses, and the program that starts ranks: "openmpi" or "hydra", and words about it.
    mpi: str = ""
    mpi_text: str = ""
    mpirun: str = ""
    mpirun_text: str = ""
    #: torch's version, empty without one; what it is built for: "cuda 12.6", "rocm 6.4" or "host".
    torch: str = ""
    torch_for: str = ""
    #: Major version of the CUDA runtime that libucc's components load; empty where they load none.
    ucc_cuda: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """An RDMA port. ``roce_v2`` is true if it has an address of that kind."""

    name: str
    state: str
    layer: str
    roce_v2: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """One host as one process sees it. Sizes in bytes, -1 where unlimited or unknown."""

    host: str
    boot_id: str
    memory_domain: tuple[str, ...]
    kernel: str
    #: Maker, family and model of the processors, empty where the kernel does not say.
    processor: str
    package: str
    libraries: Libraries
    #: (vendor, PCI address) of every GPU in the machine, and those that this process may use.
    gpus: tuple[tuple[str, str], ...]
    usable: tuple[Device, ...]
    denied: tuple[str, ...]
    #: (vendor, version of its kernel driver).
    drivers: tuple[tuple[str, str], ...]
    #: Pairs of this host's GPUs that cannot read each other's memory.
    no_peers: tuple[tuple[int, int], ...]
    modules: tuple[str, ...]
    #: True if /boot has the configuration of the kernel that runs, by which UCX looks for dmabuf.
    kernel_config: bool
    #: Vendors some of whose GPUs here are joined by the vendor's own links.
    linked: tuple[str, ...]
    open_driver: bool
    iommu_translates: bool
    ports: tuple[Port, ...]
    #: (name, Mbit/s, MTU) of network interfaces that are up.
    interfaces: tuple[tuple[str, int, int], ...]
    all_interfaces: tuple[str, ...]
    #: Cloud that limits what a connection of these carries, and to how many Mbit/s; 0 where none is known to.
    flow_limit: tuple[str, int]
    #: Fabric that joins this host to others for the library of each vendor of these GPUs.
    fabrics: tuple[tuple[str, Fabric], ...]
    #: Table of measured choices (UCCH_TUNE_FILE), or why there is none although one is named. Rank 0's is the job's.
    table: Table
    no_table: str
    #: Settings of the kernel for TCP, as far as they can be read.
    sysctl: tuple[tuple[str, str], ...]
    memlock: int
    nofile: int
    shm: int
    ptrace_scope: int
    cores: int
    #: Cores of the host, whatever this process is bound to.
    host_cores: int
    ranks_here: int
    numa_balancing: bool
    #: True if the scheduler shares cores among sessions first.
    session_groups: bool
    clock_synchronised: bool
    #: Variables of ours, of UCX, UCC and of devices.
    env: tuple[tuple[str, str], ...]

    @property
    def vendors(self) -> list[str]:
        """Vendors of the GPUs that this process may use."""
        return sorted({device.vendor for device in self.usable})


_ENV = re.compile(r"^(UCCH_|UCCHB_|UCX_|UCC_|CUDA_|HIP_|HSA_|GPU_|AMD_|ROC|NCCL_|OMPI_MCA_pml|WORLD_SIZE$)")
_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "amdgpu", "xpmem", "knem")
_ETHERNET_TYPE = "1"
_SYSCTL = (
    "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.core.rmem_max", "net.core.wmem_max",
    "net.ipv4.tcp_congestion_control",
)  # fmt: skip


def _mpi(environ: Mapping[str, str]) -> dict[str, Any]:
    """The MPI library of mpi4py, which is not initialised here, and the mpirun that would be used."""
    found = {"mpi": "", "mpi_text": "mpi4py finds no MPI library", "mpirun": "", "mpirun_text": "no mpirun"}
    with contextlib.suppress(ImportError, RuntimeError):
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
        from mpi4py import MPI

        text = MPI.Get_library_version().strip("\0 \n")
        kind = "openmpi" if "Open MPI" in text else "hydra" if "MPICH" in text or "Intel" in text else "other"
        found.update(mpi=kind, mpi_text=re.split(r"[,\n]", text)[0].strip())
    with contextlib.suppress(launcher.LauncherError):
        one = launcher.find("auto", environ)
        found.update(mpirun=one.kind, mpirun_text=f"{one.kind} {one.version} at {one.path}")
    return found


def torch_build(folders: Sequence[Path]) -> dict[str, str]:
    """Version and purpose of the installed torch, by its version.py: importing it takes seconds."""
    for folder in folders:
        said = dict(re.findall(r"^(\w+)(?:: [^=]*)? = '([^']+)'", text(folder / "version.py"), re.M))
        if "__version__" in said:
            kinds = [f"{kind} {said[name]}" for kind, name in (("cuda", "cuda"), ("rocm", "hip")) if name in said]
            return {"torch": said["__version__"], "torch_for": kinds[0] if kinds else "host"}
    return {}


def _ucc_cuda(ucc_path: str) -> str:
    try:
        component = (Path(ucc_path).resolve().parent / "ucc/libucc_mc_cuda.so").read_bytes()
    except OSError:
        return ""
    found = re.search(rb"libcudart\.so\.(\d+)", component)
    return found[1].decode() if found else ""


def _libraries(environ: Mapping[str, str]) -> Libraries:
    try:
        loaded = libraries.load()
        memory, transports = carriers.survey()
        idle = carriers.idle_ports(transports)
    except UCCHError as error:
        # MPI after UCX, as everywhere: the first UCX in a process serves both.
        return Libraries(error=str(error), **_mpi(environ))
    return Libraries(
        ucc=loaded.ucc_version,
        ucc_path=loaded.ucc_path,
        components=tuple(components(loaded.ucc_path)),
        ucx=loaded.ucx_version,
        ucx_path=loaded.ucx_path,
        memory_types=tuple(memory),
        transports=tuple(transports),
        notes=loaded.notes,
        carriers=tuple(carriers.describe(transports).items()),
        idle=tuple(map(str, idle)),
        site_ucx=rdma.site_ucx({port.kind for port in idle}, environ) if idle else "",
        ucc_cuda=_ucc_cuda(loaded.ucc_path),
        **torch_build(libraries.package_dirs("torch")),
        **_mpi(environ),
    )


def _ports(root: Path) -> list[Port]:
    found = []
    for at in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        kinds = [text(path) for path in (at / "gid_attrs/types").glob("*")]
        state, layer = text(at / "state").partition(":")[2].strip(), text(at / "link_layer")
        found.append(Port(f"{at.parent.parent.name}:{at.name}", state, layer, any("v2" in kind for kind in kinds)))
    return found


def _interfaces(root: Path) -> list[tuple[str, int, int]]:
    found = []
    for at in sorted((root / "sys/class/net").glob("*")):
        up = text(at / "operstate") in ("up", "unknown") and text(at / "type") == _ETHERNET_TYPE
        if up and not (at / "bridge").exists():
            found.append((at.name, max(number(text(at / "speed"), 0), 0), number(text(at / "mtu"), -1)))
    return found


def _drivers(root: Path) -> list[tuple[str, str]]:
    found = []
    for row in VENDORS.values():
        if row.module and (root / row.module).exists():
            texts = (re.search(pattern, text(root / path)) for path, pattern in row.version)
            found.append((row.name, next((each[each.lastindex or 0] for each in texts if each), "")))
    return found


def _no_peers(count: int) -> list[tuple[int, int]]:
    """Pairs of NVIDIA GPUs that cannot read each other, by their management library; none where that is not there."""
    found: list[tuple[int, int]] = []
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(min(count, pynvml.nvmlDeviceGetCount()))]
        for i, one in enumerate(handles):
            for j in range(i):
                peer = pynvml.nvmlDeviceGetP2PStatus(one, handles[j], pynvml.NVML_P2P_CAPS_INDEX_READ)
                if peer != pynvml.NVML_P2P_STATUS_OK:
                    found.append((j, i))
    except Exception:  # its own class of error, of a library that need not be there
        return []
    return found


def _processor(root: Path) -> str:
    """The facts that libucc tells processors apart by: their maker, family and model."""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text(root / "proc/cpuinfo"), re.M))
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(fields[name] for name in names if name in fields)


def _file_of(root: Path, sysctl: str) -> Path:
    return root / "proc/sys" / sysctl.replace(".", "/")


def _iommu_translates(root: Path) -> bool:
    """An IOMMU that translates what devices send to each other; in pass-through mode it does not."""
    types = [text(path) for path in (root / "sys/kernel/iommu_groups").glob("*/type")]
    return any(kind.startswith("DMA") for kind in types)


def _clock_synchronised() -> bool:
    """True unless the kernel says that nothing keeps its clock right."""

    class Timex(ctypes.Structure):
        _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_char * 512))

    return bool(ctypes.CDLL(None).adjtimex(ctypes.byref(Timex())) != 5)


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _shm() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def hardware(root: Path) -> dict[str, Any]:
    """The part of the facts that is read from files below ``root``."""
    usable = devices(root)
    machine = discover.machine(root)
    nodes = [device.node for device in usable] + [f"/dev/{name}" for name in ("kfd",) if (root / "dev/kfd").exists()]
    return {
        "gpus": tuple((each.vendor, each.pci) for each in machine.accelerators),
        "usable": tuple(usable),
        "denied": tuple(node for node in nodes if not os.access(root / node.lstrip("/"), os.R_OK | os.W_OK)),
        "drivers": tuple(_drivers(root)),
        "processor": _processor(root),
        "modules": tuple(name for name in _MODULES if (root / "sys/module" / name).exists()),
        "kernel_config": (root / f"boot/config-{os.uname().release}").exists(),
        "linked": tuple(sorted({each.vendor for each in machine.accelerators if each.fabric})),
        "open_driver": "Open Kernel Module" in text(root / "proc/driver/nvidia/version"),
        "iommu_translates": _iommu_translates(root),
        "ports": tuple(_ports(root)),
        "interfaces": tuple(_interfaces(root)),
        "all_interfaces": tuple(sorted(path.name for path in (root / "sys/class/net").glob("*"))),
        "sysctl": tuple((name, set_to) for name in _SYSCTL if (set_to := text(_file_of(root, name)))),
        "ptrace_scope": number(text(root / "proc/sys/kernel/yama/ptrace_scope"), 0),
        "numa_balancing": number(text(root / "proc/sys/kernel/numa_balancing"), 0) > 0,
        "session_groups": number(text(root / "proc/sys/kernel/sched_autogroup_enabled"), 0) > 0,
    }


def _fabric(vendor: str, environ: Mapping[str, str], root: Path) -> Fabric:
    wanted = environ.get("UCCH_FABRIC", "").strip().lower()  # of a bad value something else is said
    return fabric_of(vendor, wanted if wanted in WORDS else "auto", environ, root)


def _table(path: str) -> tuple[Table, str]:
    try:
        return read_table(path), ""
    except ValueError as error:
        return NO_TABLE, str(error)


def collect(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None, libraries: Libraries | None = None, ranks: int = 1
) -> Facts:
    """This host's facts. ``root`` is where its files lie; ``libraries`` stands in for loading UCC and UCX."""
    environ = os.environ if environ is None else environ
    found = hardware(root)
    identity = discover.host_identity()
    nvidia = sum(device.vendor == "nvidia" for device in found["usable"])
    table, no_table = _table(environ.get("UCCH_TUNE_FILE", ""))
    return Facts(
        host=identity.hostname, boot_id=identity.boot_id, memory_domain=tuple(map(str, identity.memory)),
        kernel=os.uname().release, package=__version__,
        libraries=_libraries(environ) if libraries is None else libraries,
        no_peers=tuple(_no_peers(nvidia) if root == Path("/") and nvidia > 1 else []),
        memlock=_limit(resource.RLIMIT_MEMLOCK), nofile=_limit(resource.RLIMIT_NOFILE), shm=_shm(),
        cores=discover.cores(), host_cores=len(discover.host_cores()), ranks_here=ranks,
        fabrics=tuple((name, _fabric(name, environ, root)) for name in sorted({d.vendor for d in found["usable"]})),
        table=table, no_table=no_table,
        flow_limit=nics.flow_limit(environ.get("UCX_NET_DEVICES", ""), root), clock_synchronised=_clock_synchronised(),
        env=tuple(sorted((name, value) for name, value in environ.items() if _ENV.match(name))), **found,
    )  # fmt: skip
