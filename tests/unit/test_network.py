"""RDMA ports of a host and warnings about idle ones; network threads, and their transports."""

import os
from dataclasses import replace
from pathlib import Path

import hosts
import pytest
from processes import python
from test_bootstrap import FACTS, HERE, THERE

from ucc_hetero import log
from ucc_hetero.bindings.ucx import Context
from ucc_hetero.errors import LibraryError, LibraryNotFound
from ucc_hetero.machine import nics, rdma
from ucc_hetero.machine.discover import replay
from ucc_hetero.machine.rdma import RdmaPort
from ucc_hetero.machine.ucx_transports import memory_hooks, without_devices
from ucc_hetero.machine.vendors import VENDORS
from ucc_hetero.native.libraries import lib, load
from ucc_hetero.transport import wires
from ucc_hetero.transport.channels import SLOT, usual_slot

IB, ROCE, EFA = RdmaPort("mlx5_0:1", "InfiniBand"), RdmaPort("mlx5_1:1", "RoCE"), RdmaPort("rdmap0:1", "EFA")


@pytest.fixture
def ucx():
    """The folder of libucc's UCX."""
    try:
        return Path(load().ucx_path).resolve().parent
    except LibraryNotFound as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("there, chosen, off", [
    ("sys/class/net/eth0", {}, True), ("sys/class/infiniband/mlx5_0", {}, False), ("dev/xpmem", {}, False),
    *((row.module, {}, False) for row in VENDORS.values() if row.module),
    ("sys/class/infiniband", {"UCX_MEM_MMAP_HOOK_MODE": "bistro"}, False), ("dev/null", {"UCX_MEM_EVENTS": "y"}, False),
])  # fmt: skip
def test_memory_hooks_are_off_where_nothing_registers_memory(tmp_path, there, chosen, off):
    (tmp_path / there).mkdir(parents=True)
    assert memory_hooks(chosen, tmp_path) == ({"UCX_MEM_MMAP_HOOK_MODE": "none"} if off else {})


def test_active_ports_that_ucx_can_use(tmp_path):
    ports = ("mlx5_0", "InfiniBand"), ("mlx5_1", "Ethernet"), ("mlx5_2", "InfiniBand", "1: DOWN"), ("rdmap0", "EFA")
    files = hosts.rdma("irdma0", "Ethernet", node_type="4: RNIC") | hosts.rdma(
        "usnic_0", "Unspecified", node_type="1: CA"
    )
    for port in ports:
        files |= hosts.rdma(*port, node_type="1: CA")
    assert rdma.active(replay(files, tmp_path)) == (IB, ROCE, EFA)


@pytest.mark.parametrize("settings, left", [
    ({}, (IB, ROCE)), ({"UCX_TLS": "all"}, (IB, ROCE)), ({"UCX_TLS": "^sysv"}, (IB, ROCE)),
    ({"UCX_TLS": "tcp,sm,self"}, ()), ({"UCX_TLS": "rc_x,cuda"}, (IB, ROCE)), ({"UCX_NET_DEVICES": "eth0"}, ()),
    ({"UCX_NET_DEVICES": "mlx5_1:1,eth0"}, (ROCE,)), ({"UCX_NET_DEVICES": "mlx5_0"}, (IB,)),
])  # fmt: skip
def test_ports_that_users_leave(settings, left):
    assert rdma.meant((IB, ROCE), settings) == left


def test_ports_that_ucx_does_not_reach(monkeypatch, ucx):
    monkeypatch.setattr(wires, "active", lambda: (IB, ROCE))
    monkeypatch.delenv("UCX_TLS", raising=False)
    found = {"tcp": ["eth0"], "rc_mlx5": ["mlx5_0:1"], "self": ["memory"], "sysv": ["memory"]}
    assert wires.idle_ports(found) == (ROCE,)
    text = wires.describe(found)
    assert "rc_mlx5 (mlx5_0:1)" in text["between hosts"] and str(ucx) in text["between hosts"]
    assert text["this host"] == "sysv" and text["why"].endswith("UCX does not reach mlx5_1:1 (RoCE)")
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert not wires.idle_ports(found) and "does not reach" not in wires.describe(found)["why"]


def test_a_ucx_of_the_site_with_modules_for_the_ports(tmp_path):
    assert not rdma.site_ucx({"RoCE"}, {}, tmp_path)
    replay({"usr/lib64/libucp.so.0": "", "usr/lib64/ucx/libuct_ib.so.0": "", "opt/a/ucx/libuct_ib.so.0": ""}, tmp_path)
    assert rdma.site_ucx({"RoCE", "InfiniBand"}, {"LD_LIBRARY_PATH": "/opt/a:"}, tmp_path) == "/usr/lib64"
    assert not rdma.site_ucx({"EFA"}, {}, tmp_path)
    replay({"opt/a/libucp.so.0": "", "opt/h/lib/libucp.so.0": "", "opt/h/lib/ucx/libuct_ib.so.0.0.0": ""}, tmp_path)
    assert rdma.site_ucx({"RoCE"}, {"LD_LIBRARY_PATH": "/opt/a:"}, tmp_path) == "/opt/a"
    assert rdma.site_ucx({"RoCE"}, {"HPCX_UCX_DIR": "/opt/h", "LD_LIBRARY_PATH": "/opt/a"}, tmp_path) == "/opt/h/lib"


NEAR, FAR = (replace(FACTS, host=host, idle_ports=(IB,)) for host in (HERE, THERE))


def test_idle_ports_are_told_once(monkeypatch, caplog, ucx):
    said = [False]
    monkeypatch.setattr(wires, "_warned", said)
    monkeypatch.setattr(log.log("net").parent, "propagate", True)
    none = [replace(facts, idle_ports=()) for facts in (NEAR, FAR)]
    for rank, everyone in ((0, [NEAR, NEAR]), (1, [NEAR, FAR]), (0, none)):
        wires.warn_idle(rank, everyone)
    assert not caplog.records and said == [False]
    for _ in range(2):
        wires.warn_idle(0, [none[0], FAR])
    (record,) = caplog.records
    text = record.getMessage()
    assert "two: mlx5_0:1 (InfiniBand)" in text and "one:" not in text and "UCCH_UCX_DIR" in text


DEVICES = {name for row in VENDORS.values() for name in row.transports}


@pytest.mark.parametrize("users", ["", "all", "^", "^ib", "^sysv,tcp"])
def test_transports_of_devices_are_shut_out(users):
    made = without_devices(users)
    assert made.startswith("^") and set(made[1:].split(",")) >= DEVICES
    assert set(users.removeprefix("^").split(",")) - {"", "all"} <= set(made[1:].split(","))


@pytest.mark.parametrize("users, expected", [
    ("tcp,self,cuda_copy", "tcp,self"), ("rc,cuda,sm", "rc"), ("sm,self,rocm", "tcp,self"), ("self", "tcp,self"),
    ("rc_mlx5,tcp,posix,cma", "rc_mlx5,tcp"),
])  # fmt: skip
def test_a_list_of_the_users_keeps_its_networks(users, expected):
    assert without_devices(users) == expected


@pytest.mark.parametrize("transport, cores, ranks, expected", [
    ("tcp", 64, 8, 4), ("tcp", 64, 16, 2), ("tcp", 64, 1000, 1), ("tcp", 2, 1, 1), ("tcp", 192, 8, 4),
    ("tcp", 32, 1, 8), ("tcp", 96, 1, 12), ("tcp", 20, 1, 5), ("tcp", 12, 1, 4), ("tcp", 64, 2, 4),
    ("limited", 192, 8, 8), ("limited", 64, 8, 4), ("rdma", 192, 8, 2), ("rdma", 2, 2, 1),
])  # fmt: skip
def test_as_many_as_there_are_cores_for(transport, cores, ranks, expected):
    assert wires.count(transport, cores, ranks) == expected


@pytest.mark.parametrize("speeds, expected", [
    ([10, 10], [0, 1, 0, 1, 0, 1]),
    ([0, 0, 0], [0, 1, 2, 0, 1, 2]),  # unknown
    ([25, 10], [0, 0, 1, 0, 0, 0]),
    ([100, 25], [0, 0, 0, 0, 1, 0]),
    ([100, 100, 50], [0, 1, 0, 1, 2, 0]),
])  # fmt: skip
def test_faster_ports_have_more_wires(speeds, expected):
    assert [wires.port_of(number, speeds) for number in range(len(expected))] == expected


def test_ranks_share_the_cores_of_a_host_in_every_communicator(monkeypatch):
    counted = []
    monkeypatch.setattr(wires, "count", lambda _transport, _cores, ranks: counted.append(ranks) or 1)
    monkeypatch.setattr(wires, "_sharing", 1)
    for ranks in (1, 8, 2):
        wires.share(ranks)
        wires.wanted()
    assert counted == [1, 8, 8]


@pytest.mark.parametrize("number", range(1, 17))
def test_all_wires_carry_as_much_of_a_slot(number):
    slot = usual_slot(number)
    ranges = [min(lib.UCCH_WIRE_RANGE, slot - at) for at in range(0, slot, lib.UCCH_WIRE_RANGE)]
    assert len({sum(ranges[wire::number]) for wire in range(number)}) == 1
    assert usual_slot(0) == SLOT <= slot <= 16 << 20


def threads_run_where_they_should():
    cores = os.sched_getaffinity(0)
    beside = set() if len(cores) < 2 else set(sorted(cores)[1:])
    nics.cores_for = lambda threads, ranks, near: beside or cores
    assert len(wires.addresses(2)) == 2
    tasks = []
    while len(tasks) < 4:  # they give themselves their name, once they run where they should
        tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "ucch-wire\n"]
    for task in tasks:
        assert os.sched_getaffinity(int(task.name)) == (beside or cores)
    assert os.sched_getaffinity(0) == cores
    wires.stop()


@pytest.mark.usefixtures("ucx")
def test_threads_run_where_they_should():
    python("test_network:threads_run_where_they_should")


def test_a_wire_that_could_not_be_made_is_not_tried_again(monkeypatch):
    """Wire numbers are paired: a sending wire would be paired with a receiving one."""
    contexts = []

    def opened(devices, slower, cores):
        if len(contexts) == 3 and not failed:
            failed.append(devices)
            raise LibraryError("ucp_worker_create", -4, "UCS_ERR_NO_MEMORY")
        contexts.append(devices)
        return len(contexts) - 1

    failed = []
    for name, value in (("_contexts", contexts), ("_addresses", []), ("_pid", os.getpid()), ("_open", opened)):
        monkeypatch.setattr(wires, name, value)
    monkeypatch.setattr(wires, "_address", lambda wire: b"%d" % wire)
    assert [wires.addresses(count) for count in (3, 3)] == [((b"0", b"1"),)] * 2 and len(contexts) == 3


def test_transports_that_this_host_lacks_are_an_error_that_names_the_settings(monkeypatch):
    load()
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    with pytest.raises(LibraryError, match="do UCX_TLS and UCX_NET_DEVICES name transports and interfaces that this"):
        Context({"TLS": "nope"})
