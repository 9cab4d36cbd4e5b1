"""Facts that the doctor checks, collected once: plain data that ranks can send to each other."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...cli.info import components
from ...errors import UCCHError
from ...machine import discover, nics, rdma
from ...machine.fabric import WORDS, Fabric, fabric_of
from ...machine.vendors import VENDORS, Device, devices, number, text
from ...native import libraries
from ...transport import wires
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
    #: What UCX uses between hosts and within this one, as text; active RDMA ports that UCX does not support; folder of
    #: a UCX that may.
    transport: tuple[tuple[str, str], ...] = ()
    idle: tuple[str, ...] = ()
    site_ucx: str = ""
    #: Library of mpi4py and program that starts ranks: "openmpi" or "hydra", and their version texts.
    mpi: str = ""
    mpi_text: str = ""
    mpirun: str = ""
    mpirun_text: str = ""
    #: torch's version, empty without torch; its build: "cuda 12.6", "rocm 6.4" or "host".
    torch: str = ""
    torch_for: str = ""
    #: Major version of the CUDA runtime that libucc's components load; empty if none.
    ucc_cuda: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """An RDMA port. ``roce_v2``: it has a RoCE v2 address."""

    name: str
    state: str
    layer: str
    roce_v2: bool


_ENV = re.compile(r"^(UCCH_|UCCHB_|UCX_|UCC_|CUDA_|HIP_|HSA_|GPU_|AMD_|ROC|NCCL_|OMPI_MCA_pml|WORLD_SIZE$)")
_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "amdgpu", "xpmem", "knem")
_ETHERNET_TYPE = "1"
_SYSCTL = (
    "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "kernel.yama.ptrace_scope", "kernel.numa_balancing",
    "kernel.sched_autogroup_enabled",
)  # fmt: skip


def _mpi(environ: Mapping[str, str]) -> dict[str, Any]:
    """The MPI library of mpi4py, without initialising it, and the mpirun that would be used."""
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
        one = launcher.find(environ)
        found.update(mpirun=one.kind, mpirun_text=f"{one.kind} {one.version} at {one.path}")
    return found


def torch_build(folders: Sequence[Path]) -> dict[str, str]:
    """Version and build of the installed torch, from its version.py, as importing it takes seconds."""
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
        memory, transports = wires.survey()
        idle = wires.idle_ports(transports)
    except UCCHError as error:
        # MPI after UCX, as everywhere: a process uses the first UCX that is loaded.
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
        transport=tuple(wires.describe(transports).items()),
        idle=tuple(map(str, idle)),
        site_ucx=rdma.site_ucx({port.kind for port in idle}, environ) if idle else "",
        ucc_cuda=_ucc_cuda(loaded.ucc_path),
        **torch_build(libraries.package_dirs("torch")),
        **_mpi(environ),
    )


def _ports(here: _Here) -> Iterator[Port]:
    for at in sorted((here.root / "sys/class/infiniband").glob("*/ports/*")):
        kinds = [text(path) for path in (at / "gid_attrs/types").glob("*")]
        state, layer = text(at / "state").partition(":")[2].strip(), text(at / "link_layer")
        yield Port(f"{at.parent.parent.name}:{at.name}", state, layer, any("v2" in kind for kind in kinds))


def _interfaces(here: _Here) -> Iterator[tuple[str, int, int]]:
    for at in sorted((here.root / "sys/class/net").glob("*")):
        up = text(at / "operstate") in ("up", "unknown") and text(at / "type") == _ETHERNET_TYPE
        if up and not (at / "bridge").exists():
            yield at.name, max(number(text(at / "speed"), 0), 0), number(text(at / "mtu"), -1)


def _drivers(here: _Here) -> Iterator[tuple[str, str]]:
    for row in VENDORS.values():
        if row.module and (here.root / row.module).exists():
            texts = (re.search(pattern, here.text(path)) for path, pattern in row.version)
            yield row.name, next((each[each.lastindex or 0] for each in texts if each), "")


def _denied(here: _Here) -> list[str]:
    nodes = [device.node for device in here.usable] + ["/dev/kfd"] * (here.root / "dev/kfd").exists()
    return [node for node in nodes if not os.access(here.root / node.lstrip("/"), os.R_OK | os.W_OK)]


def _processor(here: _Here) -> str:
    """Vendor, family and model of the CPU, by which libucc selects settings."""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", here.text("proc/cpuinfo"), re.M))
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(fields[name] for name in names if name in fields)


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _shm() -> int:
    """Free bytes in /dev/shm; -1 if it is not writable."""
    if not os.access("/dev/shm", os.W_OK):
        return -1
    found = os.statvfs("/dev/shm")
    return found.f_frsize * found.f_bavail


def _fabrics(here: _Here) -> list[tuple[str, Fabric]]:
    wanted = here.environ.get("UCCH_FABRIC", "").strip().lower()
    wanted = wanted if wanted in WORDS else "auto"  # an invalid value has a finding of its own
    names = sorted({device.vendor for device in here.usable})
    return [(name, fabric_of(name, wanted, here.environ, here.root)) for name in names]


class _Here:
    """Sources of facts: files below ``root``, and environment variables."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root, self.environ = root, environ
        self.usable, self.machine, self.identity = devices(root), discover.machine(root), discover.host_identity()

    def text(self, name: str) -> str:
        return text(self.root / name)


def _read(how: Callable[[_Here], object]) -> Any:
    """A dataclass field with the function that reads it, whose lists become tuples."""
    return field(metadata={"how": how})


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one host, as one process sees it. Sizes are in bytes; -1 is unlimited or unknown."""

    libraries: Libraries
    ranks_here: int
    host: str = _read(lambda here: here.identity.hostname)
    boot_id: str = _read(lambda here: here.identity.boot_id)
    memory_domain: tuple[str, ...] = _read(lambda here: map(str, here.identity.memory))
    kernel: str = _read(lambda here: os.uname().release)
    #: Vendor, family and model of the CPU; empty if unknown.
    processor: str = _read(_processor)
    #: (vendor, PCI address) of every GPU in the machine; and the GPUs that this process may use.
    gpus: tuple[tuple[str, str], ...] = _read(lambda here: [(g.vendor, g.pci) for g in here.machine.accelerators])
    usable: tuple[Device, ...] = _read(lambda here: here.usable)
    denied: tuple[str, ...] = _read(_denied)
    #: (vendor, version of its kernel driver).
    drivers: tuple[tuple[str, str], ...] = _read(_drivers)
    modules: tuple[str, ...] = _read(lambda here: [n for n in _MODULES if (here.root / "sys/module" / n).exists()])
    #: True if /boot has the running kernel's configuration, in which UCX looks for dmabuf.
    kernel_config: bool = _read(lambda here: (here.root / f"boot/config-{os.uname().release}").exists())
    #: Vendors with GPUs here that the vendor's own links join.
    linked: tuple[str, ...] = _read(lambda here: sorted({g.vendor for g in here.machine.accelerators if g.fabric}))
    open_driver: bool = _read(lambda here: "Open Kernel Module" in here.text("proc/driver/nvidia/version"))
    #: True if an IOMMU translates transfers between devices, which it does not in pass-through mode.
    iommu_translates: bool = _read(
        lambda here: any(text(at).startswith("DMA") for at in (here.root / "sys/kernel/iommu_groups").glob("*/type"))
    )
    ports: tuple[Port, ...] = _read(_ports)
    #: (name, Mbit/s, MTU) of interfaces that are up.
    interfaces: tuple[tuple[str, int, int], ...] = _read(_interfaces)
    all_interfaces: tuple[str, ...] = _read(lambda here: sorted(at.name for at in here.root.glob("sys/class/net/*")))
    #: Cloud that limits a connection on these interfaces, and the limit in Mbit/s; 0 if none is known.
    flow_limit: tuple[str, int] = _read(
        lambda here: nics.flow_limit(here.environ.get("UCX_NET_DEVICES", ""), here.root)
    )
    #: (vendor, fabric that joins this host to others) for the GPUs' vendors.
    fabrics: tuple[tuple[str, Fabric], ...] = _read(_fabrics)
    #: Kernel settings that can be read.
    sysctl: tuple[tuple[str, str], ...] = _read(
        lambda here: [(n, now) for n in _SYSCTL if (now := here.text("proc/sys/" + n.replace(".", "/")))]
    )
    memlock: int = _read(lambda here: _limit(resource.RLIMIT_MEMLOCK))
    nofile: int = _read(lambda here: _limit(resource.RLIMIT_NOFILE))
    shm: int = _read(lambda here: _shm())
    cores: int = _read(lambda here: discover.cores())
    #: Variables of this package, UCX, UCC and devices.
    env: tuple[tuple[str, str], ...] = _read(
        lambda here: sorted((name, value) for name, value in here.environ.items() if _ENV.match(name))
    )

    def kernel_number(self, name: str) -> int:
        """A numeric kernel setting; 0 if it cannot be read."""
        return number(dict(self.sysctl).get(name, ""), 0)

    @property
    def vendors(self) -> list[str]:
        """Vendors of the GPUs that this process may use."""
        return sorted({device.vendor for device in self.usable})


def collect(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None, libraries: Libraries | None = None, ranks: int = 1
) -> Facts:
    """Collect this host's facts. ``root``: where its files are; ``libraries``: replaces loading UCC and UCX."""
    here = _Here(root, os.environ if environ is None else environ)
    read = {each.name: each.metadata["how"](here) for each in fields(Facts) if each.metadata}
    read = {name: tuple(each) if isinstance(each, (list, Iterator)) else each for name, each in read.items()}
    return Facts(_libraries(here.environ) if libraries is None else libraries, ranks, **read)
