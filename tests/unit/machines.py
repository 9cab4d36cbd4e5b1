"""Machines composed from what their vendors publish of them, as ``topo --record`` would find them.

Nobody recorded these: PCI addresses and wiring follow the published block diagrams, the kernel's files are spelled as
on machines that were recorded (``tests/data/h200x4.json``).
"""

Files = dict[str, str]


def device(pci: str, way: str, vendor: str, kind: str, numa: int) -> Files:
    """One PCI device below the bridges ``way``."""
    at = f"sys/bus/pci/devices/{pci}"
    facts = {"vendor": vendor, "class": kind, "device": "0x1234", "numa_node": str(numa)}
    return {at: f"-> ../../../devices/{way}/{pci}"} | {f"{at}/{name}": text for name, text in facts.items()}


def nvidia(pci: str, way: str, numa: int, model: str, peers: list[str]) -> Files:
    """One of NVIDIA's GPUs and who it reaches over NVLink."""
    files = device(pci, way, "0x10de", "0x030200", numa)
    files[f"proc/driver/nvidia/gpus/{pci}/information"] = f"Model: \t\t {model}\nBus Type: \t PCIe"
    others = [peer for peer in peers if peer != pci]
    return files | ({f"nvml/nvlink/{pci}": "\n".join(others)} if others else {})


def amd(node: int, pci: str, way: str, numa: int, target: int, peers: list[int]) -> Files:
    """One of AMD's GPUs, number ``node`` of the kernel's topology, and who it reaches over xGMI."""
    bus, slot = int(pci[5:7], 16), int(pci[8:10], 16)
    at = f"sys/class/kfd/kfd/topology/nodes/{node}"
    properties = f"simd_count 1216\nlocation_id {bus << 8 | slot << 3}\ndomain 0\ngfx_target_version {target}"
    files = device(pci, way, "0x1002", "0x120000", numa) | {
        f"{at}/properties": properties,
        f"{at}/name": "ip discovery",
    }
    for i, peer in enumerate(p for p in peers if p != node):
        files[f"{at}/io_links/{i}/properties"] = f"type 11\nnode_from {node}\nnode_to {peer}"
    return files


def infiniband(name: str, pci: str, way: str, numa: int, rate: str) -> Files:
    """A network card with one active port."""
    at, port = f"sys/class/infiniband/{name}", f"sys/class/infiniband/{name}/ports/1"
    files = device(pci, way, "0x15b3", "0x020700", numa)
    files |= {f"{at}/device": f"-> ../../../devices/{way}/{pci}", f"{at}/device/numa_node": str(numa)}
    return files | {f"{port}/rate": rate, f"{port}/state": "4: ACTIVE", f"{port}/link_layer": "InfiniBand"}


def virtual(name: str, speed: int, state: str = "up") -> Files:
    """A network interface without a card."""
    at = f"sys/class/net/{name}"
    return {f"{at}/type": "1", f"{at}/speed": str(speed), f"{at}/operstate": state}


def ethernet(name: str, speed: int, pci: str, way: str) -> Files:
    """A network card of a desktop."""
    link = {f"sys/class/net/{name}/device": f"-> ../../../devices/{way}/{pci}"}
    return device(pci, way, "0x8086", "0x020000", -1) | link | virtual(name, speed)


def processors(*lists: str) -> Files:
    return {f"sys/devices/system/node/node{i}/cpulist": text for i, text in enumerate(lists)}


#: Buses of the GPU and the network card below each PCIe switch, and the processor that they hang on.
_DGX = (("1b", "18", 0), ("43", "40", 0), ("52", "4f", 0), ("61", "5e", 0),
        ("9d", "9a", 1), ("c3", "c0", 1), ("d1", "ce", 1), ("df", "dc", 1))  # fmt: skip


def dgx_h200() -> Files:
    """Eight H200 behind NVSwitch, a 400 Gbit/s card beside each GPU."""
    gpus = [f"0000:{bus}:00.0" for bus, _, _ in _DGX]
    files = processors("0-55,112-167", "56-111,168-223")
    for i, (_, nic, numa) in enumerate(_DGX):
        way = f"pci0000:{nic[0]}0/0000:{nic[0]}0:01.{i}/0000:{nic[0]}{'1' if numa else '2'}:00.{i}"
        files |= nvidia(gpus[i], way, numa, "NVIDIA H200", gpus)
        files |= infiniband(f"mlx5_{i}", f"0000:{nic}:00.0", way, numa, "400 Gb/sec (4X NDR)")
    return files


_MI300X = (("05", 0), ("26", 0), ("46", 0), ("65", 0), ("85", 1), ("a6", 1), ("c6", 1), ("e5", 1))


def mi300x() -> Files:
    """Eight MI300X, every one joined to every other by xGMI, a 400 Gbit/s card beside each."""
    files = processors("0-95", "96-191")
    nodes = list(range(2, 10))  # 0 and 1 are the processors
    for number in (0, 1):
        files[f"sys/class/kfd/kfd/topology/nodes/{number}/properties"] = "cpu_cores_count 96\ngfx_target_version 0"
    for i, (bus, numa) in enumerate(_MI300X):
        way = f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.1/0000:{bus[0]}1:00.0"
        files |= amd(nodes[i], f"0000:{bus}:00.0", way, numa, 90402, nodes)
        files |= infiniband(f"mlx5_{i}", f"0000:{bus[0]}9:00.0", way, numa, "400 Gb/sec (4X NDR)")
    return files
