"""Vendors as a host shows them: one table of names, numbers and settings, and the devices found in the kernel's files.

Used by a rank that looks after itself, by the launcher, and by the doctor. It needs the standard library and nothing of
this package, because the launcher's rank wrapper loads it by its path: importing the package would load numpy and
libucp into every wrapper.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ROOT",
    "VENDORS",
    "Device",
    "Setting",
    "Vendor",
    "apply",
    "devices",
    "gfx",
    "native_vendor",
    "seen",
    "settings",
]

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable that ranks of a vendor need; ``when`` is what about the host makes it necessary."""

    name: str
    value: str
    #: "always", "one device" (that the process sees), "small BAR" or "kernel 6".
    when: str
    why: str
    #: When the vendor's own libraries read it, if they do: at the runtime's "load" or "start", after which it is too
    #: late, or at "calls".
    read: str = ""


@dataclass(frozen=True, slots=True)
class Vendor:
    """What there is to know about a vendor without its libraries."""

    name: str
    #: PCI vendor number as sysfs spells it; empty for plain host memory.
    pci: str
    #: Variable that chooses the devices a process sees.
    visible: str
    #: Kubernetes' name of one device.
    resource: str
    #: UCX's names of the vendor's memory, and of its way from one process's device memory to another's.
    memory: str
    ipc: str
    settings: tuple[Setting, ...] = ()
    #: Variable that the runtime below reads first: ``visible`` then counts within its list.
    below: str = ""
    #: Variable that is read where ``visible`` is empty.
    instead: str = ""


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

_QUEUES = "all streams of a process would share four queues, where one that waits keeps others waiting"

_FINE = "without xGMI, devices would not see what others write to their memory before these end"

_CONNECT = "RCCL would connect at an algorithm's first call, which waits for streams that wait for a collective"

VENDORS: Mapping[str, Vendor] = {
    vendor.name: vendor
    for vendor in (
        Vendor("host", "", "", "", "host", ""),
        Vendor(
            "nvidia",
            "0x10de",
            "CUDA_VISIBLE_DEVICES",
            "nvidia.com/gpu",
            "cuda",
            "cuda_ipc",
            (
                Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "always", "device numbers mean the same to every library"),
                Setting("CUDA_MODULE_LOADING", "EAGER", "always", _EAGER),
                Setting("UCC_MC_CUDA_MPOOL_ELEM_SIZE", "256M", "always", _SCRATCH),
                Setting("UCC_MC_CUDA_MPOOL_MAX_ELEMS", "64", "always", _SCRATCH),
            ),
        ),
        Vendor(
            "amd",
            "0x1002",
            "HIP_VISIBLE_DEVICES",
            "amd.com/gpu",
            "rocm",
            "rocm_ipc",
            (
                Setting(
                    "UCX_ROCM_COPY_DMABUF",
                    "try",
                    "kernel 6",
                    "peer memory is unusable on these kernels, and UCX does not try dmabuf by itself; told that it "
                    "must, it gives up where the kernel's configuration is out of sight, as in containers",
                ),
                Setting("HIP_ENABLE_DEFERRED_LOADING", "0", "one device", _EAGER, "load"),
                Setting("GPU_MAX_HW_QUEUES", "16", "always", _QUEUES, "start"),
                Setting("HSA_FORCE_FINE_GRAIN_PCIE", "1", "always", _FINE, "start"),
                Setting("NCCL_RUNTIME_CONNECT", "0", "always", _CONNECT, "calls"),
                Setting("UCC_MC_ROCM_MPOOL_ELEM_SIZE", "256M", "always", _SCRATCH),
                Setting("UCC_MC_ROCM_MPOOL_MAX_ELEMS", "64", "always", _SCRATCH),
                *_SMALL_BAR,
            ),
            below="ROCR_VISIBLE_DEVICES",
            instead="CUDA_VISIBLE_DEVICES",
        ),
    )
}


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
    #: What its code is compiled for, such as ``gfx942``; empty where the kernel does not say.
    arch: str = ""
    #: The devices with the same number are linked by xGMI; 0 for none.
    hive: int = 0

    @property
    def small_bar(self) -> bool:
        """True when the processor can reach only a part of the memory."""
        return 0 < self.window < self.memory


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str, otherwise: int = 0) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return otherwise


def _device(root: Path, vendor: str, pci: str, node: str, arch: str = "", hive: int = 0) -> Device:
    folder = root / "sys/bus/pci/devices" / pci
    memory, window = (_number(_text(folder / f"mem_info_{name}_total")) for name in ("vram", "vis_vram"))
    numa = _number(_text(folder / "numa_node"), -1)
    return Device(vendor, pci, node, memory, window, numa, _text(folder / "local_cpulist"), arch, hive)


def _with_minor_numbers(root: Path) -> list[Device]:
    """NVIDIA's devices in order of their PCI address; in a container only those whose device file it was given."""
    found = []
    base = root / "proc/driver/nvidia/gpus"
    for folder in sorted(base.iterdir()) if base.is_dir() else []:
        minor = re.search(r"^Device Minor:\s*(\d+)", _text(folder / "information"), re.M)
        node = f"dev/nvidia{minor[1]}" if minor else ""
        if node and (root / node).exists():
            found.append(_device(root, "nvidia", folder.name.lower(), f"/{node}"))
    return found


def _with_kfd_nodes(root: Path) -> list[Device]:
    """AMD's devices in the order of their runtime, which is that of the kernel's topology nodes."""
    found = []
    base = root / "sys/class/kfd/kfd/topology/nodes"
    nodes = sorted(base.iterdir(), key=lambda node: _number(node.name)) if base.is_dir() else []
    for folder in nodes:
        words = dict(line.split(None, 1) for line in _text(folder / "properties").splitlines() if " " in line)
        where, minor = _number(words.get("location_id", "")), _number(words.get("drm_render_minor", ""))
        if not _number(words.get("simd_count", "")) or not minor:
            continue  # a processor
        place = f"{_number(words.get('domain', '')):04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 31:02x}"
        pci = f"{place}.{where & 7}"
        if not (root / "sys/bus/pci/devices" / pci).exists():
            pci = f"{place}.0"  # the last bits, or the first, are a partition of the device
        node = f"dev/dri/renderD{minor}"
        if (root / node).exists():
            target, hive = (_number(words.get(name, "")) for name in ("gfx_target_version", "hive_id"))
            found.append(_device(root, "amd", pci, f"/{node}", gfx(target), hive))
    return found


def gfx(version: int) -> str:
    """A target's name from KFD's number: 90402 is ``gfx942``, 110001 ``gfx1101``, 90010 ``gfx90a``."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def devices(root: Path = ROOT) -> list[Device]:
    """The GPUs of this host that this process may use, each vendor's in the order of that vendor's runtime."""
    return [*_with_minor_numbers(root), *_with_kfd_nodes(root)]


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
    """What ranks of ``vendor`` need on a host with these devices; ``kernel`` is its release, by default this one's.

    ``environ`` chooses which of the devices a rank sees; by default it sees them all.
    """
    major = _number((kernel or os.uname().release).partition(".")[0])
    mine = [device for device in found if device.vendor == vendor]
    alone = len(seen(vendor, mine, environ or {})) == 1
    small = any(device.small_bar for device in mine)
    holds = {"always": True, "one device": alone, "small BAR": small, "kernel 6": major >= 6}
    return [setting for setting in VENDORS[vendor].settings if holds[setting.when]]


def apply(environ: dict[str, str] | os._Environ[str], root: Path = ROOT, late: Container[str] = ()) -> None:
    """Set what this host's devices need and nobody has set; for a rank that was started without the launcher.

    ``late``: what a runtime reads then (``load``, ``start``) is left alone, as it would say what is not so.
    """
    found = devices(root)
    for vendor in dict.fromkeys(device.vendor for device in found):
        for setting in settings(vendor, found, environ=environ):
            if setting.read not in late:
                environ.setdefault(setting.name, setting.value)


def prepare(vendor: str, environ: dict[str, str] | os._Environ[str], late: Container[str] = ()) -> None:
    """Likewise what the vendor's own libraries read, whether devices of it are found or not."""
    for setting in settings(vendor, devices(), environ=environ):
        if setting.read and setting.read not in late:
            environ.setdefault(setting.name, setting.value)
