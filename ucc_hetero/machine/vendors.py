"""Vendors: a table of names, numbers and settings for each, and the devices of a host from the kernel's files.

A row here and an adapter of the runtime in C is all that the package needs for a vendor (docs/extending.md). Ranks, the
launcher and the doctor use this. It imports only the standard library, because the launcher's wrapper of a rank loads
this file by its path: importing the package would load numpy and libucp into every wrapper.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable that ranks of a vendor need. ``when``: the condition of the host that requires it."""

    name: str
    value: str
    #: "always", "one device" (that the process sees), "no MPS" (multi-process service), "small BAR" or "kernel 6".
    when: str
    why: str
    #: When the vendor's own libraries read it, if they do: at the "load" or "start" of the runtime, and later changes
    #: have no effect; or at "calls".
    read: str = ""


@dataclass(frozen=True, slots=True)
class Trap:
    """Values of a vendor's variable that hang, slow down or end ranks: the doctor's finding, and the cure."""

    name: str
    bad: Callable[[str], bool]
    #: Text of the finding. ``{given}`` becomes the variable with its value, ``{devices}`` the number of devices.
    text: str
    cure: str = "unset it"
    #: "always", "several devices" (that the process sees) or "no links" between several devices.
    when: str = "always"


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library: its name, its major versions (best first), and folders where it may be (best first).

    A folder is a path, a path below a variable (``$NAME/…``), or one inside an installed package (``package:…``, in
    which ``*`` matches any name).
    """

    name: str
    majors: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A run-time compiler with NVRTC's interface, under other names."""

    library: Library
    #: Prefix of its functions, and its word for machine code in their names.
    prefix: str
    code: str
    #: Option for the target, to which the target's name is appended.
    option: str
    #: Option that disables fused multiply-add: with it a product of complex numbers would depend on the order of the
    #: factors, and so on the rank.
    unfused: str
    #: Prefix of variables that make the runtime treat a device as another model.
    override: str = "\0"


@dataclass(frozen=True, slots=True)
class Network:
    """How a collective library reaches other hosts: name stems of its plugins, name of its configuration file."""

    plugins: tuple[str, ...]
    configuration: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of this host that this process may use. Sizes are in bytes, 0 if the kernel does not tell."""

    vendor: str
    pci: str
    node: str
    memory: int
    #: Bytes of the memory that the CPU can address; 0 if unknown.
    window: int
    numa: int
    cpus: str
    #: Compiler target, such as ``gfx942``; empty if the driver does not tell.
    arch: str = ""

    @property
    def small_bar(self) -> bool:
        """True if the CPU can address only a part of the memory."""
        return 0 < self.window < self.memory


class Known(NamedTuple):
    """Details of a device from its vendor's files and libraries: model, architecture, peers on the vendor's links."""

    name: str = ""
    arch: str = ""
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """What the package knows of a vendor without its libraries. Defaults mean that the vendor has no such thing."""

    name: str

    # --- the runtime
    #: Name of the adapter for its runtime (``cffi_build/gpu``).
    adapter: str = ""
    library: Library = Library("")
    #: Variable, without UCCH_, that names another library file.
    setting: str = ""
    compiler: Compiler | None = None
    settings: tuple[Setting, ...] = ()
    traps: tuple[Trap, ...] = ()
    #: Variable with the number of queues that run a device's streams, and the number without it.
    queues: tuple[str, int] = ("", 1 << 20)

    # --- the kernel's driver
    #: File that exists if the driver is loaded; (file, pattern) pairs that give its version, best first.
    module: str = ""
    version: tuple[tuple[str, str], ...] = ()
    #: Kernel modules that give network cards access to device memory ("open": the open driver itself); first kernel in
    #: which the driver does so by dmabuf; UCX's setting for dmabuf.
    peer_modules: tuple[str, ...] = ()
    peer_kernel: int = 0
    dmabuf: str = ""

    # --- the devices
    #: PCI vendor id as in sysfs.
    pci: str = ""
    #: Finds its devices below a root, in the order of the vendor's runtime.
    find: Callable[[Path], list[Device]] = field(default=lambda root: [], repr=False)
    #: Module in this folder with more details: ``FILES``, ``details(root, addresses)``.
    details: str = ""
    #: Variable that selects the devices that a process sees.
    visible: str = ""
    #: Variable that a lower layer of the runtime applies first: ``visible`` then counts within its list.
    below: str = ""
    #: Variable that is used if ``visible`` is empty.
    instead: str = ""

    # --- the memory
    #: Name of its memory in UCX, and its number in UCC (``ucc_memory_type_t``); the next number is managed memory.
    memory: str = "host"
    memory_type: int = 0
    #: UCX transports within a host, and the one between device memory of two processes.
    transports: tuple[str, ...] = ()
    ipc: str = ""
    #: DLPack device types of its devices, and of pinned host memory.
    dlpack: tuple[int, ...] = ()
    dlpack_host: tuple[int, ...] = ()
    #: Attributes of arrays with the address of device memory, in the form of ``__cuda_array_interface__``.
    interfaces: tuple[str, ...] = ()
    #: Attributes of streams with the runtime's handle, or, as ``__cuda_stream__``, with (version, handle).
    streams: tuple[str, ...] = ()
    #: Devices with this variant of float8_e4m3, as named in messages; empty if the vendor has none of its own.
    fp8: str = ""
    #: torch's device types, and the attribute of ``torch.version`` that is set in builds for the vendor.
    torch: tuple[str, ...] = ()
    torch_build: str = ""
    #: torch's backend over the vendor's collective library.
    torch_backend: str = ""

    # --- its collectives
    #: libucc's component for the vendor's collective library, and that library.
    collectives: tuple[str, ...] = ()
    #: How that library reaches other hosts; None if it cannot.
    network: Network | None = None
    #: Bytes of device memory that must be free if libucc sets the library up in a team's first call
    #: (``UCC_TL_NCCL_LAZY_INIT``), which waits for the other ranks; 0 if it does so when the team is made. If one rank
    #: has less, the library fails on that rank, and the other ranks wait for ever.
    set_up_bytes: int = 0
    #: Library that libucc's components need but cannot find by themselves; file that exists if the driver is loaded.
    preload: Library = Library("")
    driver: str = ""

    # --- launchers
    #: Container engine -> options that give a container all devices. A variable selects those of a rank.
    containers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


#: If the CPU can address only a part of a GPU's memory, UCX's and UCC's short paths, which write through that window,
#: crash. They are disabled only there, as short messages are slower without them.
_SMALL_BAR = tuple(
    Setting(
        name, "0", "small BAR", "the processor cannot reach all of the GPU's memory, where UCX and UCC assume it can"
    )
    for name in (
        "UCX_ROCM_COPY_D2H_THRESH",
        "UCX_ROCM_COPY_H2D_THRESH",
        "UCC_EC_ROCM_REDUCE_HOST_LIMIT",
        "UCC_EC_ROCM_COPY_HOST_LIMIT",
    )
)

#: Elements of the memory pool are allocated at first use, one at a time, and kept.
_SCRATCH = "libucc would allocate and free scratch of more than 1 MiB in every call, which waits for the whole device"

_EAGER = "a kernel's first launch would wait for streams that wait for a collective, so that none could be let wait"

_QUEUES = "all streams of a process would share {} queues, where one that waits keeps others waiting"

_FINE = "without xGMI, devices would not see what others write to their memory before these end"

_CONNECT = "{} would connect at an algorithm's first call, which waits for streams that wait for a collective"


def _hip_number(text: str) -> int:
    """A number as HIP parses it; 0 if it is not one."""
    found = re.match(r"\s*[+-]?\d+", text)
    return int(found[0]) if found else 0


_HOST_WAITS = (
    "{given}: HIP itself then waits on the host for what a stream waits for, and with it the thread that gave the "
    "stream its work"
)
#: With fewer hardware queues the waiting streams of messages would block all other streams.
_QUEUES_LEAST = 10

_HIP_TRAPS = (
    Trap("AMD_DIRECT_DISPATCH", lambda value: not _hip_number(value), _HOST_WAITS),
    Trap("ROC_CPU_WAIT_FOR_SIGNAL", lambda value: bool(_hip_number(value)), _HOST_WAITS),
    Trap(
        "HIP_ENABLE_DEFERRED_LOADING", lambda value: not _hip_number(value),
        "{given} with {devices} devices: a library without code for one of them ends the process while it is loaded "
        "(abort)", "unset it, or give each rank one device (ucch-run does)", "several devices",
    ),
    Trap(
        "GPU_MAX_HW_QUEUES", lambda value: 0 < _hip_number(value) < _QUEUES_LEAST,
        "{given}: a stream that waits keeps others of its queue waiting", "unset it (ucc_hetero sets 16)",
    ),
    Trap(
        "HSA_FORCE_FINE_GRAIN_PCIE", lambda value: value != "1",
        "{given} and the GPUs have no xGMI: they do not see what others write while these still run, so that RCCL "
        "goes by way of the host", "unset it (ucc_hetero sets 1)", "no links",
    ),
    Trap(
        "HSA_ENABLE_IPC_MODE_LEGACY", lambda value: value == "0",
        "{given}: processes share device memory by dmabuf, which was never tried with AMD",
        "unset it",
    ),
)  # fmt: skip


def text(path: Path) -> str:
    """Content of one of the kernel's files without surrounding blanks; empty if it does not exist."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(word: str, otherwise: int = 0) -> int:
    """A number from the kernel's files, decimal or with 0x; ``otherwise`` if it is not one."""
    try:
        return int(word, 0)
    except ValueError:
        return otherwise


def cpus_of(text: str) -> set[int]:
    """Processors of a kernel list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def numa_nodes(root: Path) -> list[set[int]]:
    base = root / "sys/devices/system/node"
    folders = sorted(base.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    found = [cpus_of(text(folder / "cpulist")) for folder in folders]
    return [cpus for cpus in found if cpus]


def _device(root: Path, vendor: str, pci: str, node: str, arch: str = "") -> Device:
    folder = root / "sys/bus/pci/devices" / pci
    memory, window = (number(text(folder / f"mem_info_{name}_total")) for name in ("vram", "vis_vram"))
    numa = number(text(folder / "numa_node"), -1)
    return Device(vendor, pci, node, memory, window, numa, text(folder / "local_cpulist"), arch)


def _with_minor_numbers(root: Path) -> list[Device]:
    """NVIDIA's devices, ordered by PCI address; in a container only those whose device file exists there."""
    found = []
    base = root / "proc/driver/nvidia/gpus"
    for folder in sorted(base.iterdir()) if base.is_dir() else []:
        minor = re.search(r"^Device Minor:\s*(\d+)", text(folder / "information"), re.M)
        node = f"dev/nvidia{minor[1]}" if minor else ""
        if node and (root / node).exists():
            found.append(_device(root, "nvidia", folder.name.lower(), f"/{node}"))
    return found


KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


def _with_kfd_nodes(root: Path) -> list[Device]:
    """AMD's devices in the order of the runtime, which is that of the kernel's topology nodes."""
    found = []
    for _, words in kfd_nodes(root):
        minor = number(words.get("drm_render_minor", ""))
        if not number(words.get("simd_count", "")) or not minor:
            continue  # a CPU node
        pci, node = kfd_address(root, words), f"dev/dri/renderD{minor}"
        if (root / node).exists():
            target = number(words.get("gfx_target_version", ""))
            found.append(_device(root, "amd", pci, f"/{node}", gfx(target)))
    return found


def kfd_nodes(root: Path) -> list[tuple[Path, dict[str, str]]]:
    """(folder, properties) of KFD's topology nodes, in numeric order."""
    folders = sorted(root.glob(f"{KFD_NODES}/*"), key=lambda node: number(node.name))
    return [(folder, kfd_properties(folder / "properties")) for folder in folders]


def kfd_properties(path: Path) -> dict[str, str]:
    return dict(line.split(None, 1) for line in text(path).splitlines() if len(line.split()) == 2)


def kfd_address(root: Path, properties: Mapping[str, str]) -> str:
    """PCI address of the device of a KFD topology node, which may be a partition of the device."""
    where, domain = (number(properties.get(name, "")) for name in ("location_id", "domain"))
    place = f"{domain:04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 31:02x}"
    pci = f"{place}.{where & 7}"
    # The function number, or the domain, may number the partitions of a device.
    return pci if (root / "sys/bus/pci/devices" / pci).exists() else f"{place}.0"


def gfx(version: int) -> str:
    """Target name for KFD's version number: 90402 is ``gfx942``, 110001 ``gfx1101``, 90010 ``gfx90a``."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


#: Vendors by name.
VENDORS: dict[str, Vendor] = {}
#: DLPack device type -> vendor; and the ``interfaces``, ``streams`` and ``torch`` of all vendors together.
DLPACK: dict[int, str] = {}
INTERFACES: list[str] = []
STREAMS: list[str] = []
TORCH: list[str] = []


def register(row: Vendor) -> None:
    """Add a vendor. ``ValueError`` if another one has its name, or one of its numbers."""
    for other in VENDORS.values():
        for column in ("name", "adapter", "setting", "pci", "memory_type"):
            if getattr(row, column) and getattr(row, column) == getattr(other, column):
                raise ValueError(f"vendor {row.name!r}: vendor {other.name!r} has this {column} already")
    for kind in (*row.dlpack, *row.dlpack_host):
        if DLPACK.setdefault(kind, row.name if kind in row.dlpack else "host") != row.name and kind in row.dlpack:
            raise ValueError(f"vendor {row.name!r}: DLPack's type {kind} is that of vendor {DLPACK[kind]!r} already")
    VENDORS[row.name] = row
    for known, names in ((INTERFACES, row.interfaces), (STREAMS, row.streams), (TORCH, row.torch)):
        known += [name for name in names if name not in known]


#: Both vendors' libraries use NVIDIA's names. torch's attribute first: the protocol takes many times as long.
_INTERFACES = ("__cuda_array_interface__",)
_STREAMS = ("cuda_stream", "__cuda_stream__")

register(Vendor(name="host", dlpack=(1,)))

register(
    Vendor(
        name="nvidia",
        adapter="cuda",
        library=Library("libcuda.so", (1,)),
        setting="CUDA_LIB",
        compiler=Compiler(
            Library("libnvrtc.so", (13, 12), ("nvidia:*/lib",)), "nvrtc", "CUBIN", "-arch=", "-fmad=false"
        ),
        settings=(
            Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "always", "device numbers mean the same to every library"),
            # CUDA reports the value that it uses, so setting it late does no harm.
            Setting("CUDA_MODULE_LOADING", "EAGER", "always", _EAGER, "calls"),
            # Clients of the multi-process service share the connections: four clients with 32 each got no context.
            Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32", "no MPS", _QUEUES.format("eight"), "start"),
            Setting("NCCL_RUNTIME_CONNECT", "0", "always", _CONNECT.format("NCCL"), "calls"),
            Setting("UCC_MC_CUDA_MPOOL_ELEM_SIZE", "256M", "always", _SCRATCH),
            Setting("UCC_MC_CUDA_MPOOL_MAX_ELEMS", "64", "always", _SCRATCH),
        ),
        queues=("CUDA_DEVICE_MAX_CONNECTIONS", 8),
        traps=(
            Trap(
                "CUDA_MODULE_LOADING",
                lambda value: value == "LAZY",
                "{given}: while a stream waits for a collective, a kernel's first launch waits with it",
                "unset it (ucc_hetero sets EAGER)",
            ),
        ),
        module="proc/driver/nvidia",
        version=(("proc/driver/nvidia/version", r"Kernel Module.*?(\d+\.[\d.]+)"),),
        peer_modules=("nvidia_peermem", "nv_peer_mem", "open"),
        pci="0x10de",
        find=_with_minor_numbers,
        details="nvidia_driver",
        visible="CUDA_VISIBLE_DEVICES",
        memory="cuda",
        memory_type=1,
        transports=("cuda_copy", "cuda_ipc", "gdr_copy"),
        ipc="cuda_ipc",
        dlpack=(2, 13),
        dlpack_host=(3,),
        interfaces=_INTERFACES,
        streams=_STREAMS,
        fp8="NVIDIA's GPUs (FN)",
        torch=("cuda",),
        torch_build="cuda",
        torch_backend="nccl",
        collectives=("libucc_tl_nccl", "libnccl"),
        network=Network(("libnccl-net",), "nccl.conf"),
        set_up_bytes=1056 << 20,  # NCCL 2.28.9 took 1028 MiB on each of two H200s
        preload=Library("libcudart.so.12", folders=("nvidia:cuda_runtime/lib",)),
        driver="/dev/nvidiactl",
        containers={"docker": ("--gpus", "all"), "podman": ("--device", "nvidia.com/gpu=all"), "apptainer": ("--nv",)},
    )
)

#: torch's wheel comes first: if it is imported, no other HIP may be in the process.
_ROCM = ("torch:lib", "$ROCM_PATH/lib", "_rocm_sdk_core:lib", "/opt/rocm/lib")

register(
    Vendor(
        name="amd",
        adapter="hip",
        library=Library("libamdhip64.so", (7, 6, 5), _ROCM),
        setting="HIP_LIB",
        compiler=Compiler(
            Library("libhiprtc.so", (7, 6, 5), _ROCM),
            "hiprtc",
            "Code",
            "--offload-arch=",
            "-ffp-contract=off",
            "HSA_OVERRIDE_GFX_VERSION",
        ),
        settings=(
            Setting(
                "UCX_ROCM_COPY_DMABUF",
                "try",
                "kernel 6",
                "peer memory is unusable on these kernels, and UCX does not try dmabuf by itself; told that it "
                "must, it gives up where the kernel's configuration is out of sight, as in containers",
            ),
            # HIP does not report the value that it uses. If it is already loaded and the variable was not set, streams
            # are not held, and device memory is shared over xGMI alone (docs/gpu-inside.md).
            Setting("HIP_ENABLE_DEFERRED_LOADING", "0", "one device", _EAGER, "load"),
            Setting("GPU_MAX_HW_QUEUES", "16", "always", _QUEUES.format("four"), "start"),
            Setting("HSA_FORCE_FINE_GRAIN_PCIE", "1", "always", _FINE, "start"),
            Setting("NCCL_RUNTIME_CONNECT", "0", "always", _CONNECT.format("RCCL"), "calls"),
            Setting("UCC_MC_ROCM_MPOOL_ELEM_SIZE", "256M", "always", _SCRATCH),
            Setting("UCC_MC_ROCM_MPOOL_MAX_ELEMS", "64", "always", _SCRATCH),
            *_SMALL_BAR,
        ),
        traps=_HIP_TRAPS,
        queues=("GPU_MAX_HW_QUEUES", 4),
        module="sys/module/amdgpu",
        version=(("sys/module/amdgpu/version", r"\S+"), ("proc/sys/kernel/osrelease", r"\S+")),
        peer_kernel=6,
        dmabuf="UCX_ROCM_COPY_DMABUF",
        pci="0x1002",
        find=_with_kfd_nodes,
        details="kfd",
        visible="HIP_VISIBLE_DEVICES",
        below="ROCR_VISIBLE_DEVICES",
        instead="CUDA_VISIBLE_DEVICES",
        memory="rocm",
        memory_type=3,
        transports=("rocm_copy", "rocm_ipc"),
        ipc="rocm_ipc",
        dlpack=(10,),
        dlpack_host=(11,),
        interfaces=_INTERFACES,
        streams=_STREAMS,
        fp8="MI300 (FNUZ)",
        torch=("cuda",),  # under NVIDIA's name
        torch_build="hip",
        torch_backend="nccl",  # RCCL's, under that name
        collectives=("libucc_tl_rccl", "librccl"),
        network=Network(("librccl-net", "libnccl-net"), "rccl.conf"),
        containers={
            "docker": ("--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video", "--group-add", "render"),
            "podman": ("--device", "/dev/kfd", "--device", "/dev/dri"),
            "apptainer": ("--rocm",),
        },
    )
)


def of_memory(kind: int) -> Vendor:
    """The vendor with this memory type (``ucc_memory_type_t``); ``host`` for other types."""
    return next((row for row in VENDORS.values() if row.memory_type == kind), VENDORS["host"])


def memory_name(kind: int) -> str:
    """UCX's name of a memory type (``ucc_memory_type_t``)."""
    managed = of_memory(kind - 1)
    return f"{managed.memory}-managed" if managed.memory_type else of_memory(kind).memory


def devices(root: Path = ROOT) -> list[Device]:
    """The GPUs of this host that this process may use, each vendor's in the order of its runtime."""
    return [device for row in VENDORS.values() for device in row.find(root)]


def seen(vendor: str, found: list[Device], environ: Mapping[str, str]) -> list[tuple[str, Device | None]]:
    """(word that selects it, device) for the devices that a process of ``vendor`` sees, in its runtime's order.

    As in the runtimes, the first invalid number ends a list. The device is None if it is not selected by number.
    """
    row = VENDORS[vendor]
    there: list[tuple[str, Device | None]] = [(str(i), d) for i, d in enumerate(d for d in found if d.vendor == vendor)]
    if row.below and row.below in environ:
        there = [(str(i), device) for i, (_, device) in enumerate(_listed(environ[row.below], there))]
    chosen = environ.get(row.visible, "") or environ.get(row.instead, "")
    return _listed(chosen, there) if chosen else there


def _listed(text: str, there: list[tuple[str, Device | None]]) -> list[tuple[str, Device | None]]:
    out: dict[str, Device | None] = {}
    for word in text.split(","):
        if word[:1].isalpha():
            out[word] = None  # GPU-…
        elif word.isdecimal() and int(word) < len(there):
            out[word] = there[int(word)][1]
        else:
            break
    return list(out.items())


def native_vendor(found: list[Device]) -> str:
    """The vendor of the devices; ``host`` if there are none. ``ValueError`` if there are several vendors."""
    names = sorted({device.vendor for device in found})
    if len(names) > 1:
        raise ValueError(
            f"this host has GPUs of {' and '.join(names)}: say which ranks use which (vendor: in the file)"
        )
    return names[0] if names else "host"


def settings(
    vendor: str, found: list[Device], kernel: str = "", environ: Mapping[str, str] | None = None
) -> list[Setting]:
    """Settings for ranks of ``vendor`` on a host with these devices; ``kernel`` is its release, by default this one's.

    ``environ`` chooses which of the devices a rank sees; by default it sees them all.
    """
    major = number((kernel or os.uname().release).partition(".")[0])
    mine = [device for device in found if device.vendor == vendor]
    alone = len(seen(vendor, mine, environ or {})) == 1
    small = any(device.small_bar for device in mine)
    here = os.environ if environ is None else environ
    mps = Path(here.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"
    holds = {
        "always": True, "one device": alone, "no MPS": not mps.exists(), "small BAR": small, "kernel 6": major >= 6
    }  # fmt: skip
    return [setting for setting in VENDORS[vendor].settings if holds[setting.when]]


def apply(
    environ: dict[str, str] | os._Environ[str],
    root: Path = ROOT,
    late: Callable[[str], Container[str]] = lambda vendor: (),
) -> None:
    """Set what this host's devices need and is not set; for a rank that was started without the launcher.

    ``late``: a loaded or started runtime (``load``, ``start``) no longer reads its variables; they are not set, as they
    would not show the values in use.
    """
    found = devices(root)
    for vendor in dict.fromkeys(device.vendor for device in found):
        for setting in settings(vendor, found, environ=environ):
            if setting.read not in late(vendor):
                environ.setdefault(setting.name, setting.value)


#: Names of settings that :func:`prepare` has made.
_prepared: set[str] = set()


def prepare(vendor: str, environ: dict[str, str] | os._Environ[str], late: Container[str] = ()) -> None:
    """Set what the vendor's own libraries read, with devices of it or without."""
    for setting in settings(vendor, devices(), environ=environ):
        if setting.read and setting.read not in late and setting.name not in environ:
            environ[setting.name] = setting.value
            _prepared.add(setting.name)


def leave_alone(vendor: str, environ: dict[str, str] | os._Environ[str]) -> None:
    """Take back what :func:`prepare` has set and the vendor's libraries read at calls: they run by themselves."""
    for setting in VENDORS[vendor].settings:
        if setting.read == "calls" and setting.name in _prepared:
            environ.pop(setting.name, None)
            _prepared.discard(setting.name)
