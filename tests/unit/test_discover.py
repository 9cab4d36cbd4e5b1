"""Facts about machines, from recorded and constructed trees of the kernel's files; which rank uses which port."""

import json
import os
from pathlib import Path

import hosts
import pytest

from ucc_hetero.machine import discover, nics
from ucc_hetero.machine.discover import Accelerator, Nic, link_speed, machine, record, replay
from ucc_hetero.machine.nics import Port, flow_limit, near, ports, use

DATA = Path(__file__).parents[1] / "data"


def speed(found):
    return sum(nic.speed for nic in found.nics)


def test_recorded_virtual_machine_with_four_h200(tmp_path):
    files = json.loads((DATA / "h200x4.json").read_text())["files"]
    found = machine(replay(files, tmp_path))
    assert [a.pci for a in found.accelerators] == ["0000:00:06.0", "0000:00:07.0", "0000:00:08.0", "0000:00:09.0"]
    assert {(a.vendor, a.name) for a in found.accelerators} == {("nvidia", "NVIDIA H200")}
    assert found.numa == ((0, "0-63"),)
    assert found.nics == (Nic("eth0", "ethernet", 0),) and speed(found) == 0  # virtual: unknown speed


def test_switches_bridges_and_nodes(tmp_path):
    """A typical server: a GPU and a NIC below each PCIe switch, the board's own NIC elsewhere."""
    switch = "pci0000:15/0000:15:01.0/0000:16:00.0"
    files = hosts.nvidia("0000:1b:00.0", 0, switch) | hosts.processors("0-55", "56-111")
    files |= hosts.infiniband("mlx5_0", "0000:18:00.0", 0, switch)
    files |= hosts.infiniband("mlx5_1", "0000:9a:00.0", 1, "pci0000:97/0000:97:01.0")
    found = machine(replay(files, tmp_path))
    assert found.accelerators == (Accelerator("nvidia", "0000:1b:00.0", "NVIDIA H200", numa=0),)
    assert found.nics[0] == Nic("mlx5_0", "infiniband", 400_000, "0000:18:00.0", 0)
    assert {n: d for _, n, d in found.distances} == {"0000:18:00.0": "switch", "0000:9a:00.0": "system"}
    assert speed(found) == link_speed(tmp_path) == 800_000 and not found.container


def test_ports_of_one_card_count_once_and_virtual_ones_only_alone(tmp_path):
    card = "0000:18:00.0", "pci0000:15/0000:15:01.0"
    files = hosts.ethernet("eth2", 100_000, *card) | hosts.virtual("veth1", 10_000)
    files |= hosts.infiniband("mlx5_0", card[0], 0, card[1], "100 Gb/sec (4X EDR)")
    assert link_speed(replay(files, tmp_path / "card")) == 100_000
    two = hosts.virtual("eth0", 10_000) | hosts.virtual("eth1", 10_000) | hosts.virtual("br0", 10_000)
    two |= {"sys/class/net/br0/bridge/bridge_id": "8000"}
    assert link_speed(replay(two, tmp_path / "virtual")) == 20_000


def test_nothing_is_required(tmp_path):
    found = machine(tmp_path)
    assert (found.nics, found.accelerators, found.numa, speed(found)) == ((), (), (), 0)
    assert discover.cores() >= 1 and discover.host_identity().hostname


@pytest.mark.skipif(not Path("/sys/class/net").is_dir(), reason="needs /sys/class/net")
def test_a_record_says_what_the_machine_says(tmp_path):
    files = record()
    assert json.loads(json.dumps(files)) == files
    assert machine(replay(files, tmp_path)) == machine()


@pytest.mark.parametrize("make, model, arch", [
    (hosts.dgx_h200, "NVIDIA H200", ""), (hosts.mi300x, "ip discovery", "gfx942"),
])  # fmt: skip
def test_eight_devices_with_a_card_each(make, model, arch, tmp_path):
    found = machine(replay(make(), tmp_path))
    assert len(found.accelerators) == len(found.nics) == 8 and speed(found) == 3_200_000
    assert {(a.name, a.arch) for a in found.accelerators} == {(model, arch)}
    everybody = {a.pci for a in found.accelerators}
    # The kernel does not report NVLink.
    assert all(set(one.fabric) == (everybody - {one.pci} if arch else set()) for one in found.accelerators)
    near = {a: n for a, n, distance in found.distances if distance == "switch"}
    numa = {nic.pci: nic.numa for nic in found.nics}
    assert set(near) == everybody and set(near.values()) == set(numa) and len(found.numa) == 2
    assert all(numa[near[one.pci]] == one.numa for one in found.accelerators)


@pytest.mark.parametrize("bits", [3, 0x30000000])
def test_details_of_partitions_are_those_of_their_device(tmp_path, bits):
    """The partition is in the last or the first bits of an address; both partitions have links to other devices."""
    files = hosts.mi300x()
    whole = files[f"{hosts.NODES}/2/properties"]
    where = int(whole.split("location_id ")[1].split()[0])
    for number in (10, 11):
        part = bits & -bits if number == 10 else bits
        files |= {
            f"{hosts.NODES}/{number}/properties": whole.replace(f"location_id {where}", f"location_id {where | part}"),
            f"{hosts.NODES}/{number}/name": "ip discovery",
            f"{hosts.NODES}/{number}/io_links/0/properties": f"type 11\nnode_from {number}\nnode_to {number - 7}",
            f"{hosts.NODES}/{number}/io_links/1/properties": f"type 11\nnode_from {number}\nnode_to {21 - number}",
        }
    for name in [name for name in files if name.startswith(f"{hosts.NODES}/2/")]:
        del files[name]  # the device has only partitions
    found = machine(replay(files, tmp_path)).accelerators
    parted = next(one for one in found if one.pci == f"0000:{where >> 8:02x}:00.0")
    assert (parted.name, parted.arch) == ("ip discovery", "gfx942")
    others = [one.pci for one in found if one is not parted]
    linked = ["0000:26:00.0", "0000:46:00.0"]
    assert sorted(parted.fabric) == sorted(linked)
    assert len(others) == 7


A, B = Port("eth0", 10 << 32, 1000), Port("eth1", 11 << 32, 1000)
ELSEWHERE, BESIDE = B._replace(network=12 << 32), B._replace(network=A.network)
SLOWER, SLOW, FASTER = B._replace(speed=250), B._replace(speed=249), A._replace(speed=2000)
OTHERS = A._replace(name="ens1", speed=10), B._replace(name="ens2", speed=10)
BOTH, TEN, UNEVEN = ((("eth0", one), ("eth1", other)) for one, other in ((1000, 1000), (10, 10), (1000, 250)))


@pytest.mark.parametrize("ranks, offers, spread, joined, wires", [
    ("xxyy", [(A, B)] * 2, 2, (), BOTH), ("xyxyxy", [(A, B)] * 2, 2, (), BOTH),
    ("xxyy", [(A, B), OTHERS], 2, (), TEN),  # other names, and another speed for the whole host
    ("xxxx", [(A, B)], 1, (), ()),  # no traffic leaves the host
    ("xyy", [(A, B)] * 2, 2, (), BOTH),  # a rank needs both
    ("xyy", [(B, A), (A, B)], 2, (), BOTH),  # in the order of the networks
    ("xxyy", [(A, B), ()], 1, (), ()),  # RDMA on the other host
    ("xxyy", [(A, B), (A,)], 1, ("eth0",), ()),
    ("xxyy", [(A, B), (A, ELSEWHERE)], 1, ("eth0",), ()),  # separate networks
    ("xxyy", [(A, B), (A, SLOW)], 1, ("eth0",), ()), ("xxyy", [(A, SLOW)] * 2, 1, ("eth0",), ()),
    ("xxyy", [(A, SLOWER)] * 2, 1, ("eth0",), UNEVEN),
    ("xxyy", [(A, B), (A, SLOWER)], 1, ("eth0",), UNEVEN),  # a link is as fast as its slower end
    ("xxyy", [(SLOW._replace(network=9 << 32), B)] * 2, 1, ("eth1",), ()),
    ("xxyy", [(FASTER, B)] * 2, 1, ("eth0",), (("eth0", 2000), ("eth1", 1000))),
    ("xxyy", [(A, FASTER._replace(network=B.network))] * 2, 1, ("eth0",), (("eth0", 2000), ("eth0", 1000))),
    ("xxyy", [(A._replace(speed=0), B._replace(speed=0))] * 2, 2, (), (("eth0", 0), ("eth1", 0))),  # unknown speeds
    ("xxyy", [(A, B._replace(speed=0))] * 2, 1, ("eth0",), ()),
    ("xxyy", [(A, BESIDE)] * 2, 2, (), ()),  # both in the same network
    ("xxyy", [(A, SLOW._replace(network=A.network))] * 2, 1, ("eth0",), ()),
    ("xy", [(A, B), (A._replace(network=13 << 32), ELSEWHERE)], 1, (), ()),  # routed, or not connected
    ("xyz", [(A, B), (A, B), (A, B, ELSEWHERE._replace(name="eth2"))], 2, (), BOTH),
])  # fmt: skip
def test_who_uses_which_port(ranks, offers, spread, joined, wires):
    """The number of ports over which a transfer is spread, libucp's ports, and the wires of each."""
    found = [offers["xyz".index(host)] for host in ranks]
    assert nics.spread(ranks, found, 0) == (spread, joined, wires)


def test_addresses_inside_each_host():
    mine, theirs, loopback, inside = 0x0A000001, 0x0A000002, 0x7F000001, 0xAC110001
    first, second = {mine, loopback, inside}, {theirs, loopback, inside}
    assert nics.repeated("xxy", [first, first, second]) == {inside}
    assert nics.repeated("xxy", [first - {inside}, first, second]) == {inside}  # it came up between two queries
    assert not nics.repeated("xx", [first, first])
    assert not nics.repeated("xy", [first, first]), "containers that share a host's network"
    assert not nics.repeated("xy", [first, {theirs, loopback}])


@pytest.mark.parametrize("allowed, expected", [
    ("", "mlx5_0:1,lo,eth0"), ("all", "mlx5_0:1,lo,eth0"), ("eth0,inside0", "eth0"), ("eth0", ""), ("mlx5_0:1", ""),
    ("inside0", ""),  # the only one that the user named
])  # fmt: skip
def test_a_list_of_devices_without_some(monkeypatch, allowed, expected):
    monkeypatch.setattr(nics, "interfaces", lambda root: {"lo": 0x7F000001, "eth0": 0x0A000001, "inside0": 0xAC110001})
    monkeypatch.setattr(nics.rdma, "active", lambda root: (nics.rdma.RdmaPort("mlx5_0:1", "InfiniBand"),))
    assert nics.without({0xAC110001}, allowed) == expected
    assert nics.without(set(), allowed) == ""


def test_what_is_beside_a_port(tmp_path):
    """Cores, if known; a cloud that limits flows."""
    ports_of = {"eth2": ("0000:18:00.0", "pci0000:15"), "eth3": ("0000:9a:00.0", "pci0000:97")}
    cards = {file: text for name, where in ports_of.items() for file, text in hosts.ethernet(name, 10, *where).items()}
    cards["sys/bus/pci/devices/0000:18:00.0/local_cpulist"] = "0-3,8-11"
    root = replay(cards, tmp_path)
    assert near("eth2", root) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert near("", root) == near("eth3", root) == near("mlx5_0:1", root) == set()  # one unknown port, or all ports
    other = "sys/bus/pci/devices/0000:9a:00.0"
    replay({f"{other}/local_cpulist": "4-7", f"{other}/vendor": "0x1d0f"}, tmp_path)
    assert near("all", root) == set(range(12))
    assert flow_limit("", root) == flow_limit("eth3,eth2", root) == ("Amazon EC2", 5000)
    assert flow_limit("eth2", root) == ("", 0)


@pytest.mark.parametrize("own, threads, ranks, expected", [
    (range(16), 4, 2, range(8)),  # the rank is not bound
    (range(16), 4, 3, range(16)),  # too few for all ranks
    (range(4, 12), 2, 8, range(4, 8)),
    (range(6, 12), 2, 4, range(8)),  # too few cores of the rank's own
    ([15], 4, 2, range(8)), ([15], 8, 2, range(16)),
])  # fmt: skip
def test_cores_for_network_threads(monkeypatch, own, threads, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(own))
    monkeypatch.setattr(nics, "host_cores", lambda: set(range(16)))
    assert nics.cores_for(threads, ranks, set(range(8))) == set(expected)
    assert nics.cores_for(threads, ranks, set()) == set(range(16))


def test_what_libucx_is_told(monkeypatch):
    for name in ("UCX_NET_DEVICES", "UCX_MAX_EAGER_RAILS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use("", 1)
    assert "UCX_MAX_EAGER_RAILS" not in os.environ
    use("eth1", 1)
    assert os.environ["UCX_NET_DEVICES"] == "eth1" and "UCX_MAX_EAGER_RAILS" not in os.environ
    use("", 2)
    use("", 3)  # set by the user, or set before
    assert os.environ["UCX_MAX_EAGER_RAILS"] == "2"


def test_ports_of_this_machine():
    found = ports("")
    assert all(port.network and port.address for port in found)
    assert list(found) == sorted(found, key=lambda port: port.network)
    assert ports("no-such-port") == ()


def test_infiniband_is_left_to_ucx(tmp_path):
    assert ports("", replay(hosts.rdma("mlx5_0", "InfiniBand") | hosts.rdma("mlx5_1", "InfiniBand"), tmp_path)) == ()
