"""Facts about machines, from recorded and from composed trees of the kernel's files; which rank uses which port."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machines
import pytest

from ucc_hetero.machine import nics, nvlink
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
from ucc_hetero.machine.nics import Port, assign, flow_limit, joining, near, ports, rails, shared, use

DATA = Path(__file__).parents[1] / "data"


def speed(found: Machine) -> int:
    return sum(nic.speed for nic in found.nics)


def test_recorded_virtual_machine_with_four_h200(tmp_path: Path) -> None:
    files = json.loads((DATA / "h200x4.json").read_text())["files"]
    found = machine(replay(files, tmp_path))
    assert [a.pci for a in found.accelerators] == ["0000:00:06.0", "0000:00:07.0", "0000:00:08.0", "0000:00:09.0"]
    assert {(a.vendor, a.name) for a in found.accelerators} == {("nvidia", "NVIDIA H200")}
    assert found.numa == ((0, "0-63"),)
    assert found.nics == (Nic("eth0", "ethernet", 0),) and speed(found) == 0  # virtual, and the kernel knows no speed


def test_switches_bridges_and_nodes(tmp_path: Path) -> None:
    """A server as vendors build them: a GPU and a NIC below each PCIe switch, a board's own NIC elsewhere."""
    switch = "pci0000:15/0000:15:01.0/0000:16:00.0"
    files = machines.nvidia("0000:1b:00.0", switch, 0, "NVIDIA H200", []) | machines.processors("0-55", "56-111")
    files |= machines.infiniband("mlx5_0", "0000:18:00.0", switch, 0, "400 Gb/sec (4X NDR)")
    files |= machines.infiniband("mlx5_1", "0000:9a:00.0", "pci0000:97/0000:97:01.0", 1, "400 Gb/sec (4X NDR)")
    found = machine(replay(files, tmp_path))
    assert found.accelerators == (Accelerator("nvidia", "0000:1b:00.0", "NVIDIA H200", numa=0),)
    assert found.nics[0] == Nic("mlx5_0", "infiniband", 400_000, "0000:18:00.0", 0)
    assert {n: d for _, n, d in found.distances} == {"0000:18:00.0": "switch", "0000:9a:00.0": "system"}
    assert speed(found) == link_speed(tmp_path) == 800_000 and not found.container


def test_ports_of_one_card_count_once_and_virtual_ones_only_alone(tmp_path: Path) -> None:
    card = "0000:18:00.0", "pci0000:15/0000:15:01.0"
    files = machines.ethernet("eth2", 100_000, *card) | machines.virtual("veth1", 10_000)
    files |= machines.infiniband("mlx5_0", *card, 0, "100 Gb/sec (4X EDR)")
    assert link_speed(replay(files, tmp_path / "card")) == 100_000
    two = machines.virtual("eth0", 10_000) | machines.virtual("eth1", 10_000) | machines.virtual("br0", 10_000)
    two |= {"sys/class/net/br0/bridge/bridge_id": "8000"}
    assert link_speed(replay(two, tmp_path / "virtual")) == 20_000


def test_nothing_is_required(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert (found.nics, found.accelerators, found.numa, speed(found)) == ((), (), (), 0)
    assert cores() >= 1 and host_identity().hostname


@pytest.mark.skipif(not Path("/sys/class/net").is_dir(), reason="no sysfs")
def test_a_record_says_what_the_machine_says(tmp_path: Path) -> None:
    files = record()
    assert json.loads(json.dumps(files)) == files
    assert machine(replay(files, tmp_path)) == machine()


@pytest.mark.parametrize(
    "files, model, arch", [(machines.dgx_h200(), "NVIDIA H200", ""), (machines.mi300x(), "ip discovery", "gfx942")]
)
def test_eight_devices_on_a_fabric_with_a_card_each(
    files: dict[str, str], model: str, arch: str, tmp_path: Path
) -> None:
    found = machine(replay(files, tmp_path))
    assert len(found.accelerators) == len(found.nics) == 8 and speed(found) == 3_200_000
    assert {(a.name, a.arch) for a in found.accelerators} == {(model, arch)}
    everybody = {a.pci for a in found.accelerators}
    assert all(set(one.fabric) == everybody - {one.pci} for one in found.accelerators)
    near = {a: n for a, n, distance in found.distances if distance == "switch"}
    numa = {nic.pci: nic.numa for nic in found.nics}
    assert set(near) == everybody and set(near.values()) == set(numa) and len(found.numa) == 2
    assert all(numa[near[one.pci]] == one.numa for one in found.accelerators)


@pytest.mark.parametrize("bits", [3, 0x30000000])
def test_details_of_partitions_are_those_of_their_device(tmp_path: Path, bits: int) -> None:
    """The partition is in the last bits of an address, or in the first; both are linked to other devices."""
    files = machines.mi300x()
    nodes = "sys/class/kfd/kfd/topology/nodes"
    whole = files[f"{nodes}/2/properties"]
    where = int(whole.split("location_id ")[1].split()[0])
    for number in (10, 11):
        part = bits & -bits if number == 10 else bits
        files |= {
            f"{nodes}/{number}/properties": whole.replace(f"location_id {where}", f"location_id {where | part}"),
            f"{nodes}/{number}/name": "ip discovery",
            f"{nodes}/{number}/io_links/0/properties": f"type 11\nnode_from {number}\nnode_to {number - 7}",
            f"{nodes}/{number}/io_links/1/properties": f"type 11\nnode_from {number}\nnode_to {21 - number}",
        }
    for name in [name for name in files if name.startswith(f"{nodes}/2/")]:
        del files[name]  # the device is in partitions alone
    found = machine(replay(files, tmp_path)).accelerators
    parted = next(one for one in found if one.pci == f"0000:{where >> 8:02x}:00.0")
    assert (parted.name, parted.arch) == ("ip discovery", "gfx942")
    others = [one.pci for one in found if one is not parted]
    linked = ["0000:26:00.0", "0000:46:00.0"]
    assert sorted(parted.fabric) == sorted(linked)
    assert len(others) == 7


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
    assert nvlink.answers(Path("/"), devices) == {f"nvml/nvlink/{one}": other for one, (other,) in found.items()}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(working=False))
    assert nvlink.peers(devices) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvlink.peers(devices) == {}


A, B = Port("eth0", 10 << 32, 1000), Port("eth1", 11 << 32, 1000)


def test_ranks_of_a_host_take_turns() -> None:
    assert assign("xxyy", [(A, B)] * 4) == ["eth0", "eth1"] * 2
    assert assign("xyxyxy", [(A, B)] * 6) == ["eth0", "eth0", "eth1", "eth1", "eth0", "eth0"]
    # Other names of the same networks, and another speed of the whole host.
    other = (A._replace(name="ens1", speed=10), B._replace(name="ens2", speed=10))
    assert assign("xxyy", [(A, B)] * 2 + [other] * 2) == ["eth0", "eth1", "ens1", "ens2"]


@pytest.mark.parametrize("hosts, offers", [
    ("xxxx", [(A, B)] * 4),  # nothing leaves the host
    ("xyy", [(A, B)] * 3),  # a rank needs both
    ("xxyy", [(A, B)] * 2 + [()] * 2),  # ports in the same networks on every host, or not at all
    ("xxyy", [(A, B)] * 2 + [(A, B._replace(network=12 << 32))] * 2),
    ("xxyy", [(A, B._replace(speed=10))] * 4),
    ("xxyy", [(A, B._replace(network=A.network))] * 4),
])  # fmt: skip
def test_ucx_decides_where_turns_would_not_do(hosts: str, offers: list[tuple[Port, ...]]) -> None:
    assert assign(hosts, offers) == [""] * len(hosts)


@pytest.mark.parametrize("hosts, offers, expected", [
    ("xxyy", [(A, B)] * 4, 2),
    ("xy", [(A, B)] * 2, 2),  # a rank can use both
    ("xxxx", [(A, B)] * 4, 1),  # nothing leaves the host
    ("xxyy", [(A, B)] * 2 + [()] * 2, 1),
    ("xy", [(A, B), (A, B._replace(speed=10))], 1),
    ("xy", [(A, B), (A, B._replace(network=12 << 32))], 1),  # each has a network of its own
    ("xy", [(A, A._replace(name="eth1"))] * 2, 2),  # both in one network
])  # fmt: skip
def test_transfers_are_spread_over_equal_ports(hosts: str, offers: list[tuple[Port, ...]], expected: int) -> None:
    assert rails(hosts, offers) == expected


@pytest.mark.parametrize("hosts, offers, expected", [
    ("xy", [(A, B)] * 2, ()),  # all of them
    ("xx", [(A, B)] * 2, ()),  # nothing leaves the host
    ("xy", [(A, B), (A,)], ("eth0",)),
    ("xy", [(A, B), (A, B._replace(network=12 << 32))], ("eth0",)),
    ("xy", [(A, B), (A, B._replace(speed=10))], ("eth0",)),
    ("xy", [(A, B._replace(speed=10))] * 2, ("eth0",)),
    ("xy", [(A, B), (A._replace(network=13 << 32), B._replace(network=12 << 32))], ()),  # routed, or none of them
    ("xy", [(A, B), ()], ()),  # RDMA
])  # fmt: skip
def test_libucp_is_kept_to_networks_that_join_all_hosts(
    hosts: str, offers: list[tuple[Port, ...]], expected: tuple[str, ...]
) -> None:
    assert joining(hosts, offers, 0) == expected


@pytest.mark.parametrize("hosts, offers, expected", [
    ("xy", [(A, B)] * 2, ("eth0", "eth1")),
    ("xy", [(B, A), (A, B)], ("eth0", "eth1")),  # in the order of the networks
    ("xx", [(A, B)] * 2, ()),  # nothing leaves the host
    ("xy", [(A, B), (A,)], ()), ("xy", [(A, B), ()], ()),
    ("xy", [(A, B), (A, B._replace(speed=10))], ()),  # where one is slower than the other
    ("xyz", [(A, B)] * 2 + [(A, B, B._replace(name="eth2", network=12 << 32))], ("eth0", "eth1")),
])  # fmt: skip
def test_wires_share_ports_in_common_networks(
    hosts: str, offers: list[tuple[Port, ...]], expected: tuple[str, ...]
) -> None:
    assert shared(hosts, offers, 0) == expected


def test_addresses_inside_each_host() -> None:
    mine, theirs, loopback, inside = 0x0A000001, 0x0A000002, 0x7F000001, 0xAC110001
    first, second = {mine, loopback, inside}, {theirs, loopback, inside}
    assert nics.repeated("xxy", [first, first, second]) == {inside}
    assert nics.repeated("xxy", [first - {inside}, first, second]) == {inside}  # it came up between two looks
    assert not nics.repeated("xx", [first, first])
    assert not nics.repeated("xy", [first, first]), "containers that share a host's network"
    assert not nics.repeated("xy", [first, {theirs, loopback}])


@pytest.mark.parametrize("allowed, expected", [
    ("", "mlx5_0:1,lo,eth0"), ("all", "mlx5_0:1,lo,eth0"), ("eth0,inside0", "eth0"), ("eth0", ""), ("mlx5_0:1", ""),
    ("inside0", ""),  # the user's only one
])  # fmt: skip
def test_a_list_of_devices_without_some(monkeypatch: pytest.MonkeyPatch, allowed: str, expected: str) -> None:
    monkeypatch.setattr(nics, "interfaces", lambda root: {"lo": 0x7F000001, "eth0": 0x0A000001, "inside0": 0xAC110001})
    monkeypatch.setattr(nics.rdma, "active", lambda root: (nics.rdma.RdmaPort("mlx5_0:1", "InfiniBand"),))
    assert nics.without({0xAC110001}, allowed) == expected
    assert nics.without(set(), allowed) == ""


CARDS = machines.ethernet("eth2", 100_000, "0000:18:00.0", "pci0000:15") | machines.ethernet(
    "eth3", 100_000, "0000:9a:00.0", "pci0000:97"
)
CORES = {"sys/bus/pci/devices/0000:18:00.0/local_cpulist": "0-3,8-11"}


def test_cores_beside_a_port(tmp_path: Path) -> None:
    root = replay(CARDS | CORES, tmp_path / "one")
    assert near("eth2", root) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert near("", root) == near("eth3", root) == near("mlx5_0:1", root) == set()  # one is unknown, or all
    more = {"sys/bus/pci/devices/0000:9a:00.0/local_cpulist": "4-7"}
    assert near("all", replay(CARDS | CORES | more, tmp_path / "two")) == set(range(12))


def test_a_cloud_that_limits_flows(tmp_path: Path) -> None:
    root = replay(CARDS | {"sys/bus/pci/devices/0000:9a:00.0/vendor": "0x1d0f"}, tmp_path)
    assert flow_limit("", root) == flow_limit("eth3,eth2", root) == ("Amazon EC2", 5000)
    assert flow_limit("eth2", root) == ("", 0)


@pytest.mark.parametrize("own, threads, ranks, expected", [
    (range(16), 4, 2, range(8)),  # nobody has bound this rank
    (range(16), 4, 3, range(16)),  # too few for all ranks
    (range(4, 12), 2, 8, range(4, 8)),
    (range(6, 12), 2, 4, range(8)),  # too few of the rank's own
    ([15], 4, 2, range(8)), ([15], 8, 2, range(16)),
])  # fmt: skip
def test_cores_for_network_threads(
    monkeypatch: pytest.MonkeyPatch, own: Any, threads: int, ranks: int, expected: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(own))
    monkeypatch.setattr(nics, "host_cores", lambda: set(range(16)))
    assert nics.cores_for(threads, ranks, set(range(8))) == set(expected)
    assert nics.cores_for(threads, ranks, set()) == set(range(16))


def test_what_libucx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_NET_DEVICES", "UCX_MAX_EAGER_RAILS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use("", 1)
    assert "UCX_MAX_EAGER_RAILS" not in os.environ
    use("eth1", 1)
    assert os.environ["UCX_NET_DEVICES"] == "eth1" and "UCX_MAX_EAGER_RAILS" not in os.environ
    use("", 2)
    use("", 3)  # the user's own, or what was set before
    assert os.environ["UCX_MAX_EAGER_RAILS"] == "2"


def test_ports_of_this_machine() -> None:
    found = ports("")
    assert all(port.network and port.address for port in found)
    assert list(found) == sorted(found, key=lambda port: port.network)
    assert ports("no-such-port") == ()


def test_infiniband_is_left_to_ucx(tmp_path: Path) -> None:
    card = {f"sys/class/infiniband/mlx5_{i}/ports/1/state": "4: ACTIVE" for i in range(2)}
    assert ports("", replay(card, tmp_path)) == ()
