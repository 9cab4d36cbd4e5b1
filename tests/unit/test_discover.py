"""Facts about machines, from recorded and from composed trees of the kernel's files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import machines
import pytest

from ucc_hetero.machine import nvlink
from ucc_hetero.machine.discover import (
    Accelerator,
    Machine,
    Nic,
    cores,
    host_identity,
    link_speed,
    machine,
    record,
    replay,
)

DATA = Path(__file__).parents[1] / "data"


def gpu(pci: str, way: str, vendor: str, numa: int, kind: str = "0x030200") -> dict[str, str]:
    at = f"sys/bus/pci/devices/{pci}"
    facts = {at: f"-> ../../../devices/{way}/{pci}"}
    return facts | {f"{at}/vendor": vendor, f"{at}/class": kind, f"{at}/device": "0x1234", f"{at}/numa_node": str(numa)}


def mlx(name: str, pci: str, way: str, numa: int, rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    at, port = f"sys/class/infiniband/{name}", f"sys/class/infiniband/{name}/ports/1"
    facts = {
        at + "/device": f"-> ../../../devices/{way}/{pci}",
        f"sys/bus/pci/devices/{pci}": f"-> ../../../devices/{way}/{pci}",
    }
    facts |= {f"sys/bus/pci/devices/{pci}/{n}": v for n, v in (("vendor", "0x15b3"), ("class", "0x020700"))}
    facts |= {f"{port}/rate": rate, f"{port}/state": "4: ACTIVE", f"{port}/link_layer": "InfiniBand"}
    return facts | {at + "/device/numa_node": str(numa)}


def ethernet(name: str, speed: str, pci: str = "", state: str = "up") -> dict[str, str]:
    at = f"sys/class/net/{name}"
    facts = {f"{at}/type": "1", f"{at}/speed": speed, f"{at}/operstate": state}
    return facts | ({f"{at}/device": f"-> ../../../{pci}"} if pci else {})


def kfd(node: int, location: int, target: int, peers: tuple[int, ...] = ()) -> dict[str, str]:
    at = f"sys/class/kfd/kfd/topology/nodes/{node}"
    text = f"simd_count 1216\nlocation_id {location}\ndomain 0\ngfx_target_version {target}\nvendor_id 4098"
    facts = {f"{at}/properties": text, f"{at}/name": "ip discovery"}
    for i, peer in enumerate(peers):
        facts[f"{at}/io_links/{i}/properties"] = f"type 11\nnode_from {node}\nnode_to {peer}"
    return facts


def test_recorded_virtual_machine_with_four_h200(tmp_path: Path) -> None:
    files = json.loads((DATA / "h200x4.json").read_text())["files"]
    found = machine(replay(files, tmp_path))
    assert [a.pci for a in found.accelerators] == ["0000:00:06.0", "0000:00:07.0", "0000:00:08.0", "0000:00:09.0"]
    assert {(a.vendor, a.name) for a in found.accelerators} == {("nvidia", "NVIDIA H200")}
    assert found.numa == ((0, "0-63"),)
    assert found.nics == (Nic("eth0", "ethernet", 0),) and found.speed == 0  # virtual, and the kernel knows no speed


def test_switches_bridges_and_nodes(tmp_path: Path) -> None:
    """A server as vendors build them: a GPU and a NIC below each PCIe switch, a board's own NIC elsewhere."""
    files = gpu("0000:1b:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0", "0x10de", 0)
    files |= mlx("mlx5_0", "0000:18:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0", 0)
    files |= mlx("mlx5_1", "0000:9a:00.0", "pci0000:97/0000:97:01.0", 1)
    files |= {"proc/driver/nvidia/gpus/0000:1b:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 17"}
    files |= {"sys/devices/system/node/node0/cpulist": "0-55", "sys/devices/system/node/node1/cpulist": "56-111"}
    found = machine(replay(files, tmp_path))
    assert found.accelerators == (Accelerator("nvidia", "0000:1b:00.0", "NVIDIA H200", numa=0),)
    assert found.nics[0] == Nic("mlx5_0", "infiniband", 400_000, "0000:18:00.0", 0)
    assert {n: d for _, n, d in found.distances} == {"0000:18:00.0": "switch", "0000:9a:00.0": "system"}
    assert found.speed == link_speed(tmp_path) == 800_000 and not found.container


def test_amd_peers_over_xgmi(tmp_path: Path) -> None:
    files = gpu("0000:05:00.0", "pci0000:00/0000:00:01.1", "0x1002", 0, "0x120000")
    files |= gpu("0000:26:00.0", "pci0000:20/0000:20:01.1", "0x1002", 0, "0x120000")
    files |= kfd(0, 0, 0) | kfd(1, 0x0500, 90402, (2,)) | kfd(2, 0x2600, 90402, (1,))
    one, two = machine(replay(files, tmp_path)).accelerators
    assert (one.vendor, one.arch, one.name) == ("amd", "gfx942", "ip discovery")
    assert one.fabric == (two.pci,) and two.fabric == (one.pci,)


def test_both_vendors_on_one_workstation(tmp_path: Path) -> None:
    files = gpu("0000:01:00.0", "pci0000:00/0000:00:01.0", "0x10de", -1, "0x030000")
    files |= gpu("0000:03:00.0", "pci0000:00/0000:00:03.0", "0x1002", -1, "0x030000")
    files |= gpu("0000:00:02.0", "pci0000:00", "0x8086", -1, "0x030000")  # a processor's own graphics
    nic = "devices/pci0000:00/0000:00:1c.0/0000:05:00.0"
    files["sys/bus/pci/devices/0000:05:00.0"] = f"-> ../../../{nic}"
    files |= ethernet("enp5s0", "2500", nic) | ethernet("docker0", "10000", state="down")
    found = machine(replay(files, tmp_path))
    assert [a.vendor for a in found.accelerators] == ["nvidia", "amd"]
    assert found.nics == (Nic("enp5s0", "ethernet", 2500, "0000:05:00.0"),)
    assert {d for _, _, d in found.distances} == {"bridge"}


def test_ports_of_one_card_count_once_and_virtual_ones_only_alone(tmp_path: Path) -> None:
    way = "pci0000:15/0000:15:01.0"
    files = mlx("mlx5_0", "0000:18:00.0", way, 0, "100 Gb/sec (4X EDR)")
    files |= ethernet("eth2", "100000", f"devices/{way}/0000:18:00.0") | ethernet("veth1", "10000")
    assert link_speed(replay(files, tmp_path / "card")) == 100_000
    two = ethernet("eth0", "10000") | ethernet("eth1", "10000") | ethernet("br0", "10000")
    two |= {"sys/class/net/br0/bridge/bridge_id": "8000"}
    assert link_speed(replay(two, tmp_path / "virtual")) == 20_000


def test_nothing_is_required(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert (found.nics, found.accelerators, found.numa, found.speed) == ((), (), (), 0)
    assert cores() >= 1 and host_identity().hostname


@pytest.mark.skipif(not Path("/sys/class/net").is_dir(), reason="no sysfs")
def test_a_record_says_what_the_machine_says(tmp_path: Path) -> None:
    files = record()
    assert json.loads(json.dumps(files)) == files
    assert machine(replay(files, tmp_path)) == machine()


@pytest.mark.parametrize("name", machines.MACHINES)
def test_composed_machines_are_those_of_the_data_files(name: str) -> None:
    assert (DATA / f"{name}.json").read_text() == machines.text(name)


def composed(name: str, folder: Path) -> Machine:
    return machine(replay(json.loads((DATA / f"{name}.json").read_text())["files"], folder))


@pytest.mark.parametrize("name, model", [("dgx_h200", "NVIDIA H200"), ("mi300x", "ip discovery")])
def test_eight_devices_on_a_fabric_with_a_card_each(name: str, model: str, tmp_path: Path) -> None:
    found = composed(name, tmp_path)
    assert len(found.accelerators) == len(found.nics) == 8 and found.speed == 3_200_000
    assert {a.name for a in found.accelerators} == {model}
    everybody = {a.pci for a in found.accelerators}
    for one in found.accelerators:
        assert set(one.fabric) == everybody - {one.pci}
    near = {a: n for a, n, distance in found.distances if distance == "switch"}
    numa = {nic.pci: nic.numa for nic in found.nics}
    assert set(near) == everybody and set(near.values()) == set(numa) and len(found.numa) == 2
    assert all(numa[near[one.pci]] == one.numa for one in found.accelerators)


def test_two_hosts_of_different_vendors(tmp_path: Path) -> None:
    one, other = (composed(f"cluster_{vendor}", tmp_path / vendor) for vendor in ("nvidia", "amd"))
    assert [a.vendor for a in one.accelerators + other.accelerators] == ["nvidia"] * 2 + ["amd"] * 2
    assert {a.arch for a in other.accelerators} == {"gfx90a"}
    assert one.speed == other.speed == 100_000 and not any(a.fabric for a in one.accelerators + other.accelerators)
    assert {d for _, _, d in one.distances} == {"bridge", "system"}


def test_a_workstation_with_both_vendors(tmp_path: Path) -> None:
    found = composed("workstation", tmp_path)
    assert [(a.vendor, a.name) for a in found.accelerators] == [
        ("nvidia", "NVIDIA GeForce RTX 4090"),
        ("amd", "ip discovery"),
    ]
    assert found.speed == 2500 and {d for _, _, d in found.distances} == {"bridge"}


class FakeNVML:
    """As much of pynvml as is used: three devices, two of them joined."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, working: bool = True) -> None:
        self.working, self.open = working, 0

    def nvmlInit(self) -> None:
        if not self.working:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 3:
            raise self.NVMLError
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=(b"00000000:1B:00.0", "00000000:43:00.0", b"00010000:52:00.0")[handle])

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, what: int) -> int:
        if 2 in (one, other):
            raise self.NVMLError
        assert what == 2
        return 0


def test_nvlink_as_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = ["0000:1b:00.0", "0000:43:00.0", "10000:52:00.0", "0000:99:00.0"]
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = nvlink.peers(devices)
    assert found == {devices[0]: (devices[1],), devices[1]: (devices[0],)} and nvml.open == 0
    assert nvlink.recorded(found) == {
        "nvml/nvlink/0000:1b:00.0": "0000:43:00.0",
        "nvml/nvlink/0000:43:00.0": "0000:1b:00.0",
    }
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(working=False))
    assert nvlink.peers(devices) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvlink.peers(devices) == {}
