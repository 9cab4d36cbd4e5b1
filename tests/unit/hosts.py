"""Hosts as the kernel shows them, as files by their paths: input of ``topo``, the launcher and the doctor.

These hosts were not recorded: PCI addresses and wiring follow the vendors' block diagrams, the format of files follows
recorded machines (``tests/data/h200x4.json``). ``-> path`` is a link.
"""

from ucc_hetero.machine.discover import replay

NODES = "sys/class/kfd/kfd/topology/nodes"


def device(pci, vendor, kind, numa, way="", **more):
    """A PCI device, below the bridges ``way``."""
    at = f"sys/bus/pci/devices/{pci}"
    facts = {"vendor": vendor, "class": kind, "device": "0x1234", "numa_node": str(numa), **more}
    link = {at: f"-> ../../../devices/{way}/{pci}"} if way else {}
    return link | {f"{at}/{name}": text for name, text in facts.items()}


def nvidia(pci, numa, way="", minor=0, **more):
    about = f"Model: \t\t NVIDIA H200\nBus Type: \t PCIe\nDevice Minor: \t {minor}"
    files = device(pci, "0x10de", "0x030200", numa, way, **more)
    files[f"proc/driver/nvidia/gpus/{pci}/information"] = about
    return files


def amd(node, pci, numa, way="", peers=(), **more):
    """An MI300X, number ``node`` of the kernel's topology, and the devices that it reaches over xGMI."""
    bus, slot, at = int(pci[5:7], 16), int(pci[8:10], 16), f"{NODES}/{node}"
    about = f"simd_count 1216\nlocation_id {bus << 8 | slot << 3}\ndomain 0\ndrm_render_minor {127 + node}"
    files = device(pci, "0x1002", "0x120000", numa, way, **more)
    files |= {f"{at}/properties": f"{about}\ngfx_target_version 90402", f"{at}/name": "ip discovery"}
    for i, peer in enumerate(p for p in peers if p != node):
        files[f"{at}/io_links/{i}/properties"] = f"type 11\nnode_from {node}\nnode_to {peer}"
    return files


def infiniband(name, pci, numa, way, rate="400 Gb/sec (4X NDR)"):
    """A network card with one active port."""
    at = f"sys/class/infiniband/{name}"
    files = device(pci, "0x15b3", "0x020700", numa, way) | rdma(name, "InfiniBand")
    files |= {f"{at}/device": f"-> ../../../devices/{way}/{pci}", f"{at}/device/numa_node": str(numa)}
    return files | {f"{at}/ports/1/rate": rate}


def rdma(name, layer, state="4: ACTIVE", **more):
    """A card's port as its driver shows it: ``layer`` is InfiniBand, Ethernet or EFA; ``more`` are files of the
    card."""
    at = f"sys/class/infiniband/{name}"
    files = {f"{at}/ports/1/state": state, f"{at}/ports/1/link_layer": layer.replace("EFA", "Unspecified")}
    driver = {f"{at}/device/driver": "-> ../../../../bus/pci/drivers/efa"} if layer == "EFA" else {}
    return files | driver | {f"{at}/{name}": text for name, text in more.items()}


def virtual(name, speed):
    at = f"sys/class/net/{name}"
    return {f"{at}/type": "1", f"{at}/speed": str(speed), f"{at}/operstate": "up"}


def ethernet(name, speed, pci, way):
    link = {f"sys/class/net/{name}/device": f"-> ../../../devices/{way}/{pci}"}
    return device(pci, "0x8086", "0x020000", -1, way) | link | virtual(name, speed)


def processors(*lists):
    return {f"sys/devices/system/node/node{i}/cpulist": text for i, text in enumerate(lists)}


def dgx_h200():
    """Eight H200 behind NVSwitch; each shares a PCIe switch with a 400 Gbit/s card."""
    buses = {"1b": "18", "43": "40", "52": "4f", "61": "5e", "9d": "9a", "c3": "c0", "d1": "ce", "df": "dc"}
    gpus = [f"0000:{bus}:00.0" for bus in buses]
    files = processors("0-55,112-167", "56-111,168-223")
    for i, nic in enumerate(buses.values()):
        way = f"pci0000:{nic[0]}0/0000:{nic[0]}0:01.{i}/0000:{nic[0]}{1 + (i < 4)}:00.{i}"
        files |= nvidia(gpus[i], i // 4, way)
        files |= infiniband(f"mlx5_{i}", f"0000:{nic}:00.0", i // 4, way)
    return files


def mi300x():
    """Eight MI300X with xGMI between all pairs; each has a 400 Gbit/s card next to it."""
    files, nodes = processors("0-95", "96-191"), range(2, 10)  # 0 and 1 are the processors
    for number in (0, 1):
        files[f"{NODES}/{number}/properties"] = "cpu_cores_count 96\ngfx_target_version 0"
    for i, bus in enumerate(("05", "26", "46", "65", "85", "a6", "c6", "e5")):
        way = f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.1/0000:{bus[0]}1:00.0"
        files |= amd(nodes[i], f"0000:{bus}:00.0", i // 4, way, nodes)
        files |= infiniband(f"mlx5_{i}", f"0000:{bus[0]}9:00.0", i // 4, way)
    return files


CPUS = "0-7", "8-15"


def nvidia_host(root, gpus=2):
    """A host of up to four H200 under the open driver, half of them on each of two NUMA nodes of eight processors."""
    files, regions = processors(*CPUS), "0x0000 0x0fff 0x40200\n0x4000000000 0x7fffffffff 0x14220c"
    for i, pci in enumerate(("0000:18:00.0", "0000:2a:00.0", "0000:9a:00.0", "0000:ba:00.0")[:gpus]):
        numa = i * 2 // gpus
        files |= nvidia(pci, numa, minor=i, local_cpulist=CPUS[numa], resource=regions) | {f"dev/nvidia{i}": ""}
    if gpus:
        version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
        files |= {"proc/driver/nvidia/version": version, "sys/module/nvidia/version": "570.86.15"}
    return replay(files, root)


def amd_host(root, gpus=2, memory=192 << 30, window=0):
    """A host of up to two MI300X; ``window`` is how much memory the processor can access, by default all."""
    files = processors(*CPUS) | {f"{NODES}/0/properties": "cpu_cores_count 96\nsimd_count 0", "dev/kfd": ""}
    sizes = {"mem_info_vram_total": str(memory), "mem_info_vis_vram_total": str(window or memory)}
    for i, pci in enumerate(("0000:03:00.0", "0000:26:00.0")[:gpus]):
        files |= amd(i + 1, pci, i, local_cpulist=CPUS[i], **sizes) | {f"dev/dri/renderD{128 + i}": ""}
    return replay(files | {"sys/module/amdgpu/version": "6.10.5"}, root)
