"""Hosts as their kernel shows them, written as files below a folder: what launcher and doctor read."""

from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files by their path below ``root``; returns it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def numa(root: Path) -> Path:
    """Two NUMA nodes of eight processors."""
    return write(root, {f"sys/devices/system/node/node{i}/cpulist": f"{8 * i}-{8 * i + 7}" for i in (0, 1)})


NVIDIA_PCI = ("0000:18:00.0", "0000:2a:00.0", "0000:9a:00.0", "0000:ba:00.0")
AMD_PCI = ("0000:03:00.0", "0000:26:00.0")


def pci_device(pci: str, vendor: str, kind: str, node: int, **more: str) -> dict[str, str]:
    """A device on a NUMA node."""
    facts = {"vendor": vendor, "class": kind, "numa_node": str(node), "local_cpulist": f"{8 * node}-{8 * node + 7}"}
    return {f"sys/bus/pci/devices/{pci}/{name}": text for name, text in (facts | more).items()}


def nvidia_host(root: Path, gpus: int = 2) -> Path:
    """A host of up to four H200 under the open driver, half of them on each NUMA node."""
    for i, pci in enumerate(NVIDIA_PCI[:gpus]):
        regions = "0x0000 0x0fff 0x40200\n0x4000000000 0x7fffffffff 0x14220c"
        write(root, pci_device(pci, "0x10de", "0x030200", i * 2 // max(gpus, 1), resource=regions))
        about = f"Model: \t\t NVIDIA H200\nDevice Minor: \t {i}"
        write(root, {f"proc/driver/nvidia/gpus/{pci}/information": about, f"dev/nvidia{i}": ""})
    if gpus:
        version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
        write(root, {"proc/driver/nvidia/version": version, "sys/module/nvidia/version": "570.86.15"})
    return numa(root)


def amd_host(root: Path, gpus: int = 2, memory: int = 192 << 30, window: int = 0) -> Path:
    """A host of up to two MI300X; ``window`` is how much of the memory the processor reaches, by default all."""
    write(root, {"sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 96\nsimd_count 0"})
    for i, pci in enumerate(AMD_PCI[:gpus]):
        bus = int(pci[5:7], 16)
        properties = (
            f"simd_count 1216\nlocation_id {bus << 8}\ndomain 0\ndrm_render_minor {128 + i}\ngfx_target_version 90402"
        )
        at = f"sys/class/kfd/kfd/topology/nodes/{i + 1}/properties"
        write(root, {at: properties, f"dev/dri/renderD{128 + i}": "", "dev/kfd": ""})
        sizes = {"mem_info_vram_total": str(memory), "mem_info_vis_vram_total": str(window or memory)}
        write(root, pci_device(pci, "0x1002", "0x120000", i, **sizes))
    write(root, {"sys/module/amdgpu/version": "6.10.5"})
    return numa(root)
