"""Vendors: a row of names, numbers and settings for each, and the devices that a host shows in the kernel's files.

A row, and an adapter of the runtime in C, is all that the package knows of a vendor (docs/extending.md).
Used by a rank that looks after itself, by the launcher, and by the doctor. It needs the standard library and nothing of
this package, because the launcher's rank wrapper loads it by its path: importing the package would load numpy and
libucp into every wrapper.
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
    """An environment variable that ranks of a vendor need; ``when`` is what about the host makes it necessary."""

    name: str
    value: str
    #: "always", "one device" (that the process sees), "no MPS" (multi-process service), "small BAR" or "kernel 6".
    when: str
    why: str
    #: When the vendor's own libraries read it, if they do: at the runtime's "load" or "start", after which it is too
    #: late, or at "calls".
    read: str = ""


@dataclass(frozen=True, slots=True)
class Trap:
    """Values of a vendor's variable that stop, slow or end ranks: what the doctor says of them, and the cure."""

    name: str
    bad: Callable[[str], bool]
    #: The finding, ``{given}`` where the variable with its value is to be named, ``{devices}`` the number of devices.
    text: str
    cure: str = "unset it"
    #: "always", "several devices" (that the process sees) or "no links" between several devices.
    when: str = "always"


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library: its name, its major versions from the best on, and the folders that it may be in, best first.

    A folder is a path, ``$NAME/…`` below what a variable names, or ``package:…`` inside an installed package, where
    ``*`` stands for any name.
    """

    name: str
    majors: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A run-time compiler with NVRTC's interface, under names of its own."""

    library: Library
    #: Prefix of its functions, and the word for machine code in their names.
    prefix: str
    code: str
    #: Its option for the target, up to the target's name.
    option: str
    #: Its option against fused multiply-add, by which a product of complex numbers depends on the order of its factors,
    #: and so on the rank.
    unfused: str
    #: Variables that begin so make the runtime take a device for another one.
    override: str = "\0"


@dataclass(frozen=True, slots=True)
class Network:
    """Files by which a library of collectives reaches other hosts: stems of its plugins, its configuration's name."""

    plugins: tuple[str, ...]
    configuration: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of this host that this process may use. Sizes in bytes, 0 where the kernel does not say."""

    vendor: str
    pci: str
    node: str
    memory: int
    #: How much of the memory the processor can reach; 0 where unknown.
    window: int
    numa: int
    cpus: str
    #: Target of its compiler, such as ``gfx942``; empty where the driver does not say.
    arch: str = ""

    @property
    def small_bar(self) -> bool:
        """True when the processor can reach only a part of the memory."""
        return 0 < self.window < self.memory


class Known(NamedTuple):
    """Details of a device by its vendor's files and libraries: model, architecture, peers on the vendor's links."""

    name: str = ""
    arch: str = ""
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """Facts about a vendor, known without its libraries; what is not said, it does not have."""

    name: str

    # --- the runtime
    #: Name of the adapter that knows its functions (``cffi_build/gpu``).
    adapter: str = ""
    library: Library = Library("")
    #: Setting of ours, without UCCH_, that names another file, or none.
    setting: str = ""
    compiler: Compiler | None = None
    settings: tuple[Setting, ...] = ()
    traps: tuple[Trap, ...] = ()

    # --- the kernel's driver
    #: The file that is there with it; files and patterns that tell its version, the best first.
    module: str = ""
    version: tuple[tuple[str, str], ...] = ()
    #: Modules that hand device memory to network cards ("open": the driver itself, where it is an open one), or the
    #: kernel from which the driver does so; UCX's setting that tells it of the latter.
    peer_modules: tuple[str, ...] = ()
    peer_kernel: int = 0
    dmabuf: str = ""

    # --- the devices
    #: PCI vendor number as sysfs spells it.
    pci: str = ""
    #: Finds its devices below a root, in the order of their runtime.
    find: Callable[[Path], list[Device]] = field(default=lambda root: [], repr=False)
    #: Module beside this one that knows more of them: ``FILES``, ``details(root, addresses)``.
    details: str = ""
    #: Variable that chooses the devices a process sees.
    visible: str = ""
    #: Variable that the runtime below reads first: ``visible`` then counts within its list.
    below: str = ""
    #: Variable that is read where ``visible`` is empty.
    instead: str = ""

    # --- the memory
    #: UCX's name of its memory, and UCC's number (``ucc_memory_type_t``), behind which managed memory comes.
    memory: str = "host"
    memory_type: int = 0
    #: UCX's transports within a node, and the one between two processes' device memory.
    transports: tuple[str, ...] = ()
    ipc: str = ""
    #: DLPack's types of its devices, and of host memory that is theirs.
    dlpack: tuple[int, ...] = ()
    dlpack_host: tuple[int, ...] = ()
    #: Attributes of arrays that describe memory of its devices, in the form of ``__cuda_array_interface__``.
    interfaces: tuple[str, ...] = ()
    #: Attributes of streams that hold the runtime's handle, or in the form of ``__cuda_stream__`` a version and it.
    streams: tuple[str, ...] = ()
    #: Devices with this form of float8_e4m3, as messages call them; empty without a form of their own.
    fp8: str = ""
    #: torch's types of its devices, and the attribute of ``torch.version`` that a torch built for them has.
    torch: tuple[str, ...] = ()
    torch_build: str = ""
    #: torch's own backend over the vendor's library of collectives.
    torch_backend: str = ""

    # --- its collectives
    #: The component of libucc that hands collectives to the vendor's library, and that one.
    collectives: tuple[str, ...] = ()
    #: That library's way to other hosts; None where it has none.
    network: Network | None = None
    #: Bytes of device memory that must be free where libucc sets up the vendor's library for a team in its first call
    #: (``UCC_TL_NCCL_LAZY_INIT``), in which it waits for the other ranks; 0 where it does so when it makes the team.
    #: Where one rank has less the library fails there, and the others wait for that rank without end.
    set_up_bytes: int = 0
    #: Library that libucc's components need and no search path leads to, and a file that is there if the driver is.
    preload: Library = Library("")
    driver: str = ""

    # --- launchers
    #: Container engine -> options that give a container all devices; a variable chooses which of them a rank uses.
    containers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


#: Where the processor can only reach a part of a GPU's memory, UCX's and UCC's short paths, which write through that
#: window, crash. They are only avoided there: without them small messages are slower.
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

#: Elements are allocated one by one, at first use, and kept.
_SCRATCH = "libucc would allocate and free scratch of more than 1 MiB in every call, which waits for the whole device"

_EAGER = "a kernel's first launch would wait for streams that wait for a collective, so that none could be let wait"

_QUEUES = "all streams of a process would share {} queues, where one that waits keeps others waiting"

_FINE = "without xGMI, devices would not see what others write to their memory before these end"

_CONNECT = "{} would connect at an algorithm's first call, which waits for streams that wait for a collective"


def _hip_number(text: str) -> int:
    """As HIP reads numbers: of what is none, 0."""
    found = re.match(r"\s*[+-]?\d+", text)
    return int(found[0]) if found else 0


_HOST_WAITS = (
    "{given}: HIP itself then waits on the host for what a stream waits for, and with it the thread that gave the "
    "stream its work"
)
#: Hardware queues below which the streams of messages that wait leave none for others.
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
    """The contents of one of the kernel's files, without the blanks around them; empty without one."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(word: str, otherwise: int = 0) -> int:
    """A number as the kernel's files have it, decimal or with 0x; ``otherwise`` for what is none."""
    try:
        return int(word, 0)
    except ValueError:
        return otherwise


def cpus_of(text: str) -> set[int]:
    """Processors from the kernel's list, such as ``0-3,8``."""
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
    """NVIDIA's devices in order of their PCI address; in a container only those whose device file it was given."""
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
    """AMD's devices in the order of their runtime, which is that of the kernel's topology nodes."""
    found = []
    for _, words in kfd_nodes(root):
        minor = number(words.get("drm_render_minor", ""))
        if not number(words.get("simd_count", "")) or not minor:
            continue  # a processor
        pci, node = kfd_address(root, words), f"dev/dri/renderD{minor}"
        if (root / node).exists():
            target = number(words.get("gfx_target_version", ""))
            found.append(_device(root, "amd", pci, f"/{node}", gfx(target)))
    return found


def kfd_nodes(root: Path) -> list[tuple[Path, dict[str, str]]]:
    """Nodes of KFD's topology, by number: the folder of each, and its properties."""
    folders = sorted(root.glob(f"{KFD_NODES}/*"), key=lambda node: number(node.name))
    return [(folder, kfd_properties(folder / "properties")) for folder in folders]


def kfd_properties(path: Path) -> dict[str, str]:
    return dict(line.split(None, 1) for line in text(path).splitlines() if len(line.split()) == 2)


def kfd_address(root: Path, properties: Mapping[str, str]) -> str:
    """PCI address of the device that a node of KFD's topology is, or is a partition of."""
    where, domain = (number(properties.get(name, "")) for name in ("location_id", "domain"))
    place = f"{domain:04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 31:02x}"
    pci = f"{place}.{where & 7}"
    # The last bits, or the first, are a partition of the device.
    return pci if (root / "sys/bus/pci/devices" / pci).exists() else f"{place}.0"


def gfx(version: int) -> str:
    """A target's name from KFD's number: 90402 is ``gfx942``, 110001 ``gfx1101``, 90010 ``gfx90a``."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


#: Every vendor by its name.
VENDORS: dict[str, Vendor] = {}
#: DLPack's types of device, and whose they are; and what is known of all vendors together: their ``interfaces``,
#: ``streams`` and ``torch``.
DLPACK: dict[int, str] = {}
INTERFACES: list[str] = []
STREAMS: list[str] = []
TORCH: list[str] = []


def register(row: Vendor) -> None:
    """Add a vendor. ``ValueError`` where another one has its name, or a number that tells its memory."""
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


#: Both vendors' libraries have NVIDIA's names. torch's streams first: the protocol takes many times as long.
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
            # CUDA can be asked what it has read: where it runs already, no harm is done.
            Setting("CUDA_MODULE_LOADING", "EAGER", "always", _EAGER, "calls"),
            # Clients of the multi-process service share what connections there are: four with 32 each got no context.
            Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32", "no MPS", _QUEUES.format("eight"), "start"),
            Setting("NCCL_RUNTIME_CONNECT", "0", "always", _CONNECT.format("NCCL"), "calls"),
            Setting("UCC_MC_CUDA_MPOOL_ELEM_SIZE", "256M", "always", _SCRATCH),
            Setting("UCC_MC_CUDA_MPOOL_MAX_ELEMS", "64", "always", _SCRATCH),
        ),
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

#: torch's wheel comes first: once it is imported, no other HIP should be in the process.
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
            # HIP cannot be asked what it has read: where it is here already, and was not told, streams are not held,
            # and device memory is shared over xGMI alone (docs/gpu-inside.md).
            Setting("HIP_ENABLE_DEFERRED_LOADING", "0", "one device", _EAGER, "load"),
            Setting("GPU_MAX_HW_QUEUES", "16", "always", _QUEUES.format("four"), "start"),
            Setting("HSA_FORCE_FINE_GRAIN_PCIE", "1", "always", _FINE, "start"),
            Setting("NCCL_RUNTIME_CONNECT", "0", "always", _CONNECT.format("RCCL"), "calls"),
            Setting("UCC_MC_ROCM_MPOOL_ELEM_SIZE", "256M", "always", _SCRATCH),
            Setting("UCC_MC_ROCM_MPOOL_MAX_ELEMS", "64", "always", _SCRATCH),
            *_SMALL_BAR,
        ),
        traps=_HIP_TRAPS,
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
    """Vendor whose devices have memory of this type (``ucc_memory_type_t``); ``host`` for none's."""
    return next((row for row in VENDORS.values() if row.memory_type == kind), VENDORS["host"])


def memory_name(kind: int) -> str:
    """UCX's name of memory of this type (``ucc_memory_type_t``)."""
    managed = of_memory(kind - 1)
    return f"{managed.memory}-managed" if managed.memory_type else of_memory(kind).memory


def devices(root: Path = ROOT) -> list[Device]:
    """The GPUs of this host that this process may use, each vendor's in the order of that vendor's runtime."""
    return [device for row in VENDORS.values() for device in row.find(root)]


def seen(vendor: str, found: list[Device], environ: Mapping[str, str]) -> list[tuple[str, Device | None]]:
    """The devices that a process of ``vendor`` sees, in its runtime's order, and the word that chooses each of them.

    As the runtimes have it, the first number that is none ends a list. Of a device that is not chosen by its number the
    word alone is known.
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
    """The vendor of the devices, or ``host`` where there are none. ``ValueError`` where there are several vendors'."""
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

    ``late``: what a vendor's runtime reads then (``load``, ``start``) is left alone, as it would say what is not so.
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
